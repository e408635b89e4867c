"""Python work per batch, independent of its numbers of rows and nonzeros."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import dasksc
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.core

N_BATCHES = 16


def n_instructions(function: Callable[[], Any]) -> int:
    """Count the Python instructions of a call in this thread, without finalizers of objects from earlier tests."""
    gc.collect()
    gc.disable()
    try:
        return _n_monitored(function) if sys.version_info >= (3, 12) else _n_traced(function)
    finally:
        gc.enable()


def _n_traced(function: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def _n_monitored(function: Callable[[], Any]) -> int:
    # From Python 3.12 on, tracing misses instructions of code that ran before tracing began.
    count, thread, tool = 0, threading.get_ident(), sys.monitoring.PROFILER_ID

    def note(code: CodeType, offset: int) -> None:
        nonlocal count
        count += threading.get_ident() == thread

    sys.monitoring.use_tool_id(tool, "n_instructions")
    sys.monitoring.register_callback(tool, sys.monitoring.events.INSTRUCTION, note)
    sys.monitoring.set_events(tool, sys.monitoring.events.INSTRUCTION)
    try:
        function()
    finally:
        sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.free_tool_id(tool)
    return count


def test_the_count_grows_with_a_loop_over_rows() -> None:
    assert n_instructions(lambda: [i + 1 for i in range(1000)]) > 2 * n_instructions(
        lambda: [i + 1 for i in range(100)]
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(make_adata(32 * 64 * N_BATCHES, 40), tmp_path_factory.mktemp("atlas"), "h5ad")


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("more", [{}, {"obs": ["cell_type", "int64"], "genes": range(7)}], ids=["X", "columns"])
def test_sixteen_times_the_rows_take_no_more_python(path: Path, layout: str, more: dict[str, Any]) -> None:
    def epoch_of(batch_size: int) -> int:
        dataset = dasksc.scDataset(
            path,
            dasksc.BlockShuffling(16, indices=range(batch_size * N_BATCHES)),
            batch_size,
            fetch_factor=4,
            layout=layout,
            scheduler="synchronous",
            seed=0,
            rank=0,
            world_size=1,
            **more,
        )
        list(dataset)
        return n_instructions(lambda: list(dataset))

    few, many = epoch_of(64), epoch_of(64 * 16)
    assert few > 1000, "nothing was counted"
    assert many < 1.1 * few
