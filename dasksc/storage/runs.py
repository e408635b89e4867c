"""Arithmetic of runs, which are half-open intervals [start, stop) along the first axis of an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def merge(
    starts: NDArray[np.int64], stops: NDArray[np.int64], *, gap: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge runs at most `gap` apart into disjoint runs that cover them."""
    filled = stops > starts
    starts = starts[filled]
    stops = np.maximum.accumulate(stops[filled])
    if len(starts) == 0:
        return starts, stops
    apart = starts[1:] - stops[:-1] > gap
    first = np.concatenate(([True], apart))
    last = np.concatenate((apart, [True]))
    return starts[first], stops[last]


def locate(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    run_starts: NDArray[np.int64],
    run_stops: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the offset of each run in the concatenation of the covering runs."""
    lengths = run_stops - run_starts
    before = np.cumsum(lengths) - lengths
    filled = stops > starts
    offsets = np.zeros(len(starts), dtype=np.int64)
    covering = np.searchsorted(run_starts, starts[filled], side="right") - 1
    offsets[filled] = before[covering] + starts[filled] - run_starts[covering]
    return offsets


def cut(
    starts: NDArray[np.int64], stops: NDArray[np.int64], *, chunk: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut runs at chunk boundaries."""
    first = starts // chunk
    n_pieces = (stops - 1) // chunk - first + 1
    run = np.repeat(np.arange(len(starts)), n_pieces)
    before = np.cumsum(n_pieces) - n_pieces
    chunks = first[run] + np.arange(len(run)) - before[run]
    return chunks, np.maximum(starts[run], chunks * chunk), np.minimum(stops[run], (chunks + 1) * chunk)
