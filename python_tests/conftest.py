"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util

import pytest

from flint_kernels.backends import native

if importlib.util.find_spec("hypothesis"):  # most tests, those of a GPU above all, do without
    from hypothesis import HealthCheck, settings

    # Without a word the same few examples each time; `--hypothesis-profile=campaign` searches.
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, database=None)
    settings.register_profile(
        "campaign", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("ci")


@pytest.fixture(params=["installed", "plain"])
def _each_cpu_body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test twice: with the bodies as installed, and with plain PyTorch alone.

    Where the C++ library is not built the two are the same.
    """
    if request.param == "plain":
        monkeypatch.setattr(native, "is_available", lambda: False)
