"""Compiles what compiles at run time, ahead of the first request and of graph captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flint_kernels.loading.synthetic import synthetic
from flint_kernels.model import Flint, FlintConfig
from flint_kernels.model.config import FULL, SLIDING
from flint_kernels.ops import sample

# Rows of a step, one for each size of tile that Triton's kernels have; with _EXPERTS_A_CHOICE, also
# one for each way in which experts' rows are grouped. The smallest tile is there for one row, and
# for the first number of rows that the library's kernels leave to it.
_ROWS = (1, 9, 32, 128)
_EXPERTS_A_CHOICE = 4


@torch.inference_mode()
def warmup(
    device: torch.device | str,
    config: FlintConfig | None = None,
    *,
    weight_formats: Sequence[str] = ("nvfp4", "bf16"),
    compute_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> None:
    """Runs every op that a model of `config` calls, so that Triton has compiled its kernels.

    It steps through random models of the config's widths, with one layer of each kind, few experts
    and a small vocabulary; their memory is returned to torch's cache. Triton keeps what it compiled
    on disk: the first call on a machine takes minutes, the next ones seconds. Call it before a CUDA
    graph is captured: inside a capture an op that would have to compile raises RuntimeError.

    Args:
        device: a GPU. On a CPU nothing compiles, and the call does nothing.
        config: the shapes to compile for; None: the 39.8B model's.
        weight_formats: "nvfp4", "bf16", or both.
        compute_dtypes: of the activations; add torch.float32 for the arithmetic without rounding.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: a width of the config does not fit a weight format.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    small = _one_layer_of_each_kind(FlintConfig.flint_40b() if config is None else config)
    for weight_format in weight_formats:
        model = synthetic(small, weight_format, device=device)
        for dtype in compute_dtypes:
            model.compute_dtype = dtype
            _step_through(model)
    torch.cuda.synchronize(device)


def _one_layer_of_each_kind(config: FlintConfig) -> FlintConfig:
    kinds: dict[tuple[int, bool, bool], int] = {}
    for layer in range(config.num_hidden_layers):
        kind = config.window(layer), config.has_rope(layer), config.is_dense(layer)
        kinds.setdefault(kind, layer)
    found = list(kinds)
    choices = config.num_experts_per_tok
    # A width that Triton tells apart by being a multiple of 16 stays one.
    experts = -(-_EXPERTS_A_CHOICE * choices // 16) * 16
    return replace(
        config,
        num_hidden_layers=len(found),
        layer_types=tuple(SLIDING if window else FULL for window, _, _ in found),
        no_rope_layer_indices=tuple(i for i, (_, rope, _) in enumerate(found) if not rope),
        mlp_only_layers=tuple(i for i, (_, _, dense) in enumerate(found) if dense),
        num_experts=min(config.num_experts, experts),
        vocab_size=16 if config.vocab_size % 16 == 0 else config.vocab_size,
        max_position_embeddings=2 * max(_ROWS),
        eos_token_ids=(),
    )


def _step_through(model: Flint) -> None:
    """A prefill and a decode step of each number of rows, and a draw."""
    for rows in _ROWS:
        cache = model.make_cache(max_requests=rows, tokens=rows * 2 * 16)
        requests = [cache.add() for _ in range(rows)]
        ids = torch.zeros(rows, dtype=torch.int64, device=model.device)
        # One long request, then the same number of short ones.
        model(ids, cache.plan(requests[:1], [rows]), cache)
        batch = cache.plan_decode(requests)
        logits = model(ids, batch, cache)
        ones = torch.ones(rows, device=model.device)
        counts = torch.ones(rows, dtype=torch.int32, device=model.device)
        sample(logits, ones, counts, ones, ids, ids)
