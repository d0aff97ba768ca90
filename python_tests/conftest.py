"""Fixtures that several test files share."""

from __future__ import annotations

import pytest

from flint_kernels.backends import native


@pytest.fixture(params=["installed", "plain"])
def _each_cpu_body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test twice: with the bodies as installed, and with plain PyTorch alone.

    Where the C++ library is not built the two are the same.
    """
    if request.param == "plain":
        monkeypatch.setattr(native, "is_available", lambda: False)
