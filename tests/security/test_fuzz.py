"""Damaged files: reading returns values or raises a `DaskscError`; `make fuzz` runs for longer."""

from __future__ import annotations

import sys

import pytest

from tests.support.programs import PROGRAMS, run

pytestmark = pytest.mark.faults


def test_damaged_files_neither_crash_nor_lie() -> None:
    pytest.importorskip("hdf5plugin")
    # The program ends after 150 cases, long before the time limit.
    printed = run([sys.executable, PROGRAMS / "fuzz.py", "--seconds", 220, "--cases", 150, "--seed", 1_000_000])
    last = printed.splitlines()[-1]
    for what in ("150 cases", "refused", "same"):  # some files are read, and others raise an error
        assert what in last
