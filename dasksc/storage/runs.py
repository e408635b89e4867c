"""Arithmetic of runs: half-open intervals [start, stop) along the first axis of an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["cut", "locate", "merge"]


def merge(
    starts: NDArray[np.int64], stops: NDArray[np.int64], *, gap: int, chunk: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the few disjoint runs that cover the given ones.

    Parameters
    ----------
    starts, stops
        Runs by ascending start, shape (n,), int64. They may touch, overlap, repeat and be empty.
    gap
        Neighbours this many elements apart, or fewer, become one run: reading the gap costs less
        than another request.
    chunk
        Neighbours that meet in the same chunk of this many elements become one run, so that no
        chunk is read twice. 1 where there are no chunks.

    Returns
    -------
    tuple
        ``(starts, stops)`` of the covering runs, ascending, none empty.
    """
    filled = stops > starts
    starts = starts[filled]
    stops = np.maximum.accumulate(stops[filled])
    if len(starts) == 0:
        return starts, stops
    apart = (starts[1:] - stops[:-1] > gap) & (starts[1:] // chunk != (stops[:-1] - 1) // chunk)
    first = np.concatenate(([True], apart))
    last = np.concatenate((apart, [True]))
    return starts[first], stops[last]


def locate(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    run_starts: NDArray[np.int64],
    run_stops: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return where each run begins in the concatenation of the runs that cover it.

    Parameters
    ----------
    starts, stops
        Runs as given to `merge`.
    run_starts, run_stops
        Runs as returned by it.

    Returns
    -------
    numpy.ndarray
        Offsets, shape (n,), int64; 0 for empty runs, which lie nowhere.
    """
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
    """Cut runs where chunks meet.

    Parameters
    ----------
    starts, stops
        Disjoint runs, ascending, none empty.
    chunk
        Length of a chunk.

    Returns
    -------
    tuple
        ``(chunks, starts, stops)`` of the pieces, ascending; `chunks` are the numbers of their chunks.
    """
    first = starts // chunk
    n_pieces = (stops - 1) // chunk - first + 1
    run = np.repeat(np.arange(len(starts)), n_pieces)
    before = np.cumsum(n_pieces) - n_pieces
    chunks = first[run] + np.arange(len(run)) - before[run]
    return chunks, np.maximum(starts[run], chunks * chunk), np.minimum(stops[run], (chunks + 1) * chunk)
