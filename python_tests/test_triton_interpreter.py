"""Runs `interpreted.py`: the Triton kernels against the reference, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("interpreted.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
