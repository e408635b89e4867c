from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.storage.row_pointers import RowPointers
from dasksc.storage.runs import locate, merge

pytestmark = pytest.mark.core


@st.composite
def runs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw runs like those of matrix rows: ascending, some repeated, some empty."""
    indptr = np.cumsum(draw(st.lists(st.integers(0, 9), min_size=1, max_size=30)))
    rows = sorted(draw(st.lists(st.integers(0, len(indptr) - 2), max_size=40))) if len(indptr) > 1 else []
    rows = np.array(rows, dtype=np.int64)
    return indptr[rows], indptr[rows + 1]


@given(runs=runs(), gap=st.integers(0, 20), chunk=st.integers(1, 20))
def test_merged_runs_cover_the_requested_rows_and_only_gaps_besides(runs, gap: int, chunk: int) -> None:
    starts, stops = runs
    run_starts, run_stops = merge(starts, stops, gap=gap, chunk=chunk)
    assert (run_stops > run_starts).all()
    assert (run_starts[1:] - run_stops[:-1] > gap).all()
    assert (run_starts[1:] // chunk > (run_stops[:-1] - 1) // chunk).all(), "a chunk is read twice"
    wanted = {i for start, stop in zip(starts, stops, strict=True) for i in range(start, stop)}
    read = {i for start, stop in zip(run_starts, run_stops, strict=True) for i in range(start, stop)}
    assert wanted <= read
    assert {*run_starts, *(run_stops - 1)} <= wanted, "nothing is read before the first or after the last"


@given(runs=runs(), gap=st.integers(0, 20), chunk=st.integers(1, 20))
def test_runs_are_located_in_the_concatenation_of_those_that_cover_them(runs, gap: int, chunk: int) -> None:
    starts, stops = runs
    run_starts, run_stops = merge(starts, stops, gap=gap, chunk=chunk)
    block = np.concatenate(
        [np.arange(start, stop) for start, stop in zip(run_starts, run_stops, strict=True)] or [np.empty(0)]
    )
    offsets = locate(starts, stops, run_starts, run_stops)
    for start, stop, offset in zip(starts, stops, offsets, strict=True):
        np.testing.assert_array_equal(block[offset : offset + stop - start], np.arange(start, stop))


@pytest.mark.parametrize(("offset", "size"), [(-4, 4), (40, 4), (0, 44), (36, 8)])
def test_no_address_outside_a_buffer_is_given_out(offset: int, size: int) -> None:
    buffer = np.zeros(10, dtype=np.float32)
    with pytest.raises(ValueError, match="outside its buffer"):
        RowPointers.inside(
            (buffer,),
            dtype=buffer.dtype,
            which=0,
            offsets=np.array([0, offset]),
            sizes=np.array([40, size]),
            held_bytes=0,
        )
