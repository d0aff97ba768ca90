"""The one scratch buffer that ops with counters take.

A workspace is bytes that are zero before a call and zero again after it: a kernel resets what it
counted. So a caller never sees it change, and the schemas do not declare it mutable. One workspace
serves any number of ops in stream order; two streams, or two captured graphs that may run at once,
must not share one. Partial sums that need no zeros are allocated by the op itself.
"""

from __future__ import annotations

import torch

from flint_kernels.ops._check import Checker

# A counter of four bytes for each request and KV head of decode attention,
# cuda::kMostAttentionPairs. Prefill attention takes the first of them. The CPU bodies need none,
# but have the same checks.
_BYTES = 4 * 4096


def workspace_bytes(device: torch.device | str) -> int:
    """Bytes a workspace must have to serve every op of the namespace on `device`."""
    del device  # the same everywhere
    return _BYTES


def make_workspace(device: torch.device | str) -> torch.Tensor:
    """A fresh workspace: [workspace_bytes(device)] uint8, zeroed."""
    return torch.zeros(workspace_bytes(device), dtype=torch.uint8, device=device)


def check_workspace(check: Checker, workspace: torch.Tensor | None) -> None:
    if workspace is None:
        return
    check.tensor("workspace", workspace, (torch.uint8,), [None], "make_workspace gives one.")
    wanted = workspace_bytes(check.device)
    if workspace.shape[0] < wanted or not workspace.is_contiguous():
        check.fail(
            "workspace",
            f"{workspace.shape[0]} bytes",
            f"at least {wanted} contiguous bytes",
            "make_workspace(device) gives one.",
        )
