"""Damaged files: reading returns values or raises a `DaskscError`; `make fuzz` runs for longer."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.programs import PROGRAMS, run

pytestmark = pytest.mark.faults


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each damaged file is read in a forked process")
def test_damaged_files_neither_crash_nor_lie() -> None:
    pytest.importorskip("hdf5plugin")
    # The program ends after 150 cases, long before the time limit.
    printed = run([sys.executable, PROGRAMS / "fuzz.py", "--seconds", 220, "--cases", 150, "--seed", 1_000_000])
    # Some files are read, and others raise an error.
    last = printed.splitlines()[-1]
    assert "150 cases" in last
    assert "refused" in last
    assert "same" in last
