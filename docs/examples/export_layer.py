"""Exports one Mixture-of-Experts layer's decode step and packages it with AOTInductor.

    python docs/examples/export_layer.py layer.pt2

The package holds the layer's weights. `load_layer.py` and `load_layer.cpp` run it; this script runs
the layer itself on the same inputs, and all three print the same line.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from load_layer import inputs, report
from torch import Tensor, nn
from torch.export import Dim

from flint_kernels.loading import load
from flint_kernels.model import DecodeBatch, Flint, Launch, LayerCache


class DecodeStep(nn.Module):
    """A layer's decode step of tensors alone, which is what torch.export takes."""

    def __init__(self, model: Flint, layer: int) -> None:
        super().__init__()
        self.layer = model.layers[layer]
        self.index = layer
        self.register_buffer("cos_sin", model.cos_sin)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        kv_cache: Tensor,
        workspace: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """[B, H] and [B, H]: the layer's output and the residual; writes into the cache."""
        batch = DecodeBatch(positions, slots, slots, block_table, block_table, seq_lens)
        # One argument: torch.export takes no two that share memory where one is written.
        cache = SimpleNamespace(layers={self.index: LayerCache(*kv_cache.unbind(1))})
        result: tuple[Tensor, Tensor] = self.layer.decode(
            x, residual, self.cos_sin, batch, cache, Launch(workspace)
        )
        return result


def export(model: Flint, layer: int) -> torch.export.ExportedProgram:
    """For any number of requests from 1 to 64, any cache and any width of its table."""
    requests, width, pages = Dim("requests", min=1, max=64), Dim("width"), Dim("pages")
    rows: dict[int, Any] = {0: requests}
    sizes = (rows, rows, rows, rows, {0: requests, 1: width}, rows, {0: pages}, None)
    with torch.no_grad():
        return torch.export.export(DecodeStep(model, layer), inputs(2), dynamic_shapes=sizes)


def main(path: str) -> None:
    model = load("flint-tiny")
    exported = export(model, layer=3)
    torch._inductor.aoti_compile_and_package(exported, package_path=path)
    with torch.no_grad():
        print(report(DecodeStep(model, layer=3)))


if __name__ == "__main__":
    main(sys.argv[1])
