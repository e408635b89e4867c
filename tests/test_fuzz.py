"""Damaged files end in values or in errors of ours; `make fuzz` tries for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each damaged file is read in a forked process")
def test_damaged_files_neither_crash_nor_lie() -> None:
    pytest.importorskip("hdf5plugin")
    ran = subprocess.run(
        [sys.executable, "tests/programs/fuzz.py", "--seconds", "60", "--cases", "150", "--seed", "1000000"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    # That something was read, and something refused.
    last = ran.stdout.splitlines()[-1]
    assert "150 cases" in last
    assert "refused" in last
    assert "same" in last
