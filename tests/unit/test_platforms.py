"""Systems without certain calls of Linux: the replacements, and the import of every module."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from dasksc import platforms
from dasksc.train.config import Training
from dasksc.train.launch import processes_to_start
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, run

pytestmark = pytest.mark.programs


@pytest.mark.parametrize("system", ["macos", "windows"])
def test_every_module_is_imported_and_reads_the_same_where_calls_of_linux_are_missing(
    tmp_path: Path, system: str
) -> None:
    atlases = [write_store(make_adata(), tmp_path, format) for format in ("h5ad", "zarr3")]
    printed = run([sys.executable, PROGRAMS / "other_system.py", system, tmp_path, *atlases])
    assert int(printed.split()[0]) > 100


def test_nproc_auto_counts_the_cores_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with_affinity = processes_to_start(Training(), nproc="auto", nnodes=None, environment={})
    assert with_affinity == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert processes_to_start(Training(), nproc="auto", nnodes=None, environment={}) == 7


def _hold(path: Path, holds: object, ends: object) -> None:
    with path.open("r+b") as file:
        platforms.lock_file(file, wait=True)
        holds.set()
        ends.wait(60)


def test_a_file_is_locked_against_other_processes_until_it_is_closed(tmp_path: Path) -> None:
    path, context = tmp_path / "file", multiprocessing.get_context("fork")
    path.write_bytes(b"content")
    holds, ends = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(path, holds, ends))
    other.start()
    assert holds.wait(60)
    with path.open("r+b") as file:
        with pytest.raises(BlockingIOError):
            platforms.lock_file(file, wait=False)
        ends.set()
        platforms.lock_file(file, wait=True)
        assert file.read() == b"content"
    other.join()
