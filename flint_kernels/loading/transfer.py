"""Copies tensors of a file into the parameters of a module, on whatever device they are.

On the CPU values go straight from the mapped file into the parameter. An accelerator gets them
through one reusable host buffer, slice by slice. So beside the module, loading takes host memory
for that buffer and for nothing that grows with the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flint_kernels.formats.repack import gguf_to_modelopt
from flint_kernels.loading.names import Kind, Target

SLICE_BYTES = 64 << 20
"""How much is on its way at once; a single row or expert that is larger goes whole."""


class Transfer:
    """Writes into the parameters of one module what has been checked to fit them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters: dict[str, Tensor] = {
            name: parameter.detach() for name, parameter in module.named_parameters()
        }
        device = next(iter(self.parameters.values())).device
        self._on_host = device.type == "cpu"
        self._pinned = device.type == "cuda"  # what a GPU can fetch from at full speed
        self._staging = torch.empty(0, dtype=torch.uint8)

    def values(self, target: Target, source: Tensor, name: str) -> None:
        """A plain tensor, of the parameter's shape; rounded where the parameter is narrower.

        Raises ValueError, naming the tensor `name`, for values that are NaN or infinite in the
        parameter's type; a sink alone may be -inf, which takes it out of the softmax.
        """
        sinks = target.kind is Kind.FP32
        self._copy(
            target.weight(self.parameters),
            source,
            lambda written: _check_values(written, name, or_minus_infinity=sinks),
        )

    def gguf_blocks(self, target: Target, blocks: Tensor, name: str) -> None:
        """NVFP4 super-blocks of GGUF, uint8 [..., N, K/64 * 36].

        Raises ValueError for a scale byte of 0xFF, naming the tensor `name`.
        """
        weight = target.weight(self.parameters)
        scale = target.weight_scale(self.parameters)
        for part in _slices(blocks):
            codes, scales = weight[part], scale[part]
            if self._on_host:
                _repack_in_place(blocks[part], codes, scales, name)
                continue
            staged = self._stage((codes.shape, torch.uint8), (scales.shape, torch.float8_e4m3fn))
            gguf_to_modelopt(blocks[part], out=(staged[0], staged[1]), name=name)
            codes.copy_(staged[0])
            _bytes(scales).copy_(_bytes(staged[1]))

    def block_scales(self, target: Target, scale: Tensor) -> None:
        """Block scales of ModelOpt, float8_e4m3fn [N, K/16]."""
        self._copy(_bytes(target.weight_scale(self.parameters)), _bytes(scale))

    def global_scale(self, target: Target, scale: Tensor) -> None:
        """Global scales, float32: one, or one for each expert."""
        view = target.weight_scale_2(self.parameters)
        view.copy_(scale.reshape(view.shape))

    def _copy(
        self, target: Tensor, source: Tensor, check: Callable[[Tensor], None] = lambda _: None
    ) -> None:
        """`check` sees what was written, while it is in host memory."""
        if self._on_host:
            target.copy_(source)
            check(target)
            return
        for part in _slices(source):
            (staged,) = self._stage((source[part].shape, target.dtype))
            staged.copy_(source[part])
            check(staged)
            target[part].copy_(staged)

    def _stage(self, *forms: tuple[torch.Size, torch.dtype]) -> list[Tensor]:
        """Tensors of these shapes and types, side by side in the one host buffer."""
        sizes = [-(-shape.numel() * dtype.itemsize // 16) * 16 for shape, dtype in forms]
        if sum(sizes) > self._staging.numel():
            self._staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned)
        parts = self._staging[: sum(sizes)].split(sizes)
        return [
            part[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(parts, forms, strict=True)
        ]


def _repack_in_place(blocks: Tensor, codes: Tensor, scales: Tensor, name: str) -> None:
    """Of stacked experts only the rows of one expert are side by side in the parameter."""
    if codes.dim() == 2:
        gguf_to_modelopt(blocks, out=(codes, scales), name=name)
        return
    for expert in range(codes.shape[0]):
        _repack_in_place(blocks[expert], codes[expert], scales[expert], f"{name}, expert {expert}")


def check_global_scale(scale: Tensor, name: str) -> None:
    """Raises ValueError for a global scale that is NaN, infinite or not above 0.

    Not 0 either: it would make a matrix of zeros, and a quantiser gives zeros a scale of 1.
    """
    bad = ~(torch.isfinite(scale) & (scale > 0)).reshape(-1)
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"{name}: got the global scale {scale.reshape(-1)[index].item()} at index {index}, "
            "want finite numbers above 0 (not NaN, not infinite): the file is damaged or was "
            "quantised from such weights, so quantise it again"
        )


def _check_values(values: Tensor, name: str, *, or_minus_infinity: bool) -> None:
    """Raises ValueError where a value is NaN or infinite, -inf where it may not be."""
    # One pass without temporaries, several times as fast as the copy: NaN comes through both ends.
    low, high = (end.item() for end in torch.aminmax(values))
    if high < math.inf and (low > -math.inf or or_minus_infinity):
        return
    bad = ~values.isfinite()
    if or_minus_infinity:
        bad &= values != -math.inf
    index = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name}: got {values[tuple(index)].item()} at index {index} of {list(values.shape)}, one "
        f"of {int(bad.sum())} such values in {values.dtype}; want finite numbers: the file is "
        "damaged, so fetch it again or convert the model again"
    )


def _slices(source: Tensor) -> Iterator[slice]:
    """Cuts the first dimension so that a slice of `source` has at most SLICE_BYTES, or one row."""
    if source.dim() == 0 or source.numel() == 0:
        raise ValueError(f"source: got shape {list(source.shape)}, want rows to copy")
    row = source[0].numel() * source.element_size()
    step = max(1, SLICE_BYTES // row)
    for start in range(0, source.shape[0], step):
        yield slice(start, start + step)


def _bytes(tensor: Tensor) -> Tensor:
    """Copying float8 as bytes needs no float8 kernel on the device."""
    return tensor.view(torch.uint8)
