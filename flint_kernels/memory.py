"""Memory for large things: an error that says what was needed, before or when it runs out.

On Linux a large allocation of host memory succeeds and the process is killed when it is used, so
what is free is asked first. What cannot be known beforehand (a limit of the process, a GPU's
fragmentation, another process) is caught.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_REMEDY = "Free some, use another device, or make it smaller."


@contextmanager
def room_for(n_bytes: int, what: str, device: torch.device | str | None) -> Iterator[None]:
    """Within, `what` is allocated: `n_bytes` on `device` (None: the default device).

    Raises:
        MemoryError: there is not so much to be had, or an allocation within failed. What was
            allocated is free again once the error has been dealt with.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    need = f"{what}: {size(n_bytes)} are needed on {device}"
    free = free_bytes(device)
    if free is not None and n_bytes > free:
        raise MemoryError(f"{need}, and {size(free)} are free. {_REMEDY}")
    with needing(need):
        yield


@contextmanager
def needing(need: str) -> Iterator[None]:
    """An allocation within that fails is a MemoryError which begins with `need`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise MemoryError(f"{need}, and {reason}. {_REMEDY}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on the CPU torch has no type for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated on a device; None where that is not known."""
    if device.type == "cuda":
        # What torch has taken from the driver and does not use is to be had as well.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return _free_host_bytes() if device.type == "cpu" else None


def _free_host_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the machine has left and what the process's control group allows."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    fields = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    if "MemAvailable" not in fields:
        return None
    free = fields["MemAvailable"] + fields.get("SwapFree", 0)
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max": ValueError
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cached = re.search(
            r"^inactive_file (\d+)$", (group / "memory.stat").read_text(encoding="ascii"), re.M
        )
    except (OSError, ValueError):
        return free
    return min(free, limit - used + int(cached[1] if cached else 0))


def size(n_bytes: int) -> str:
    """In the largest unit of which there is one."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes} bytes"
