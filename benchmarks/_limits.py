"""Upper bounds set by the machine, in cells per second, for a row of `_targets.ROWS`.

Run as ``python _limits.py KIND SPEC`` in a separate process, after the processes of the contenders have ended.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import _machine
import numpy as np

Spec = dict[str, Any]
Work = Callable[[], int]

# Batches per core: one in use, one ready, and one being filled.
_BUFFERS = 3
_SOURCE_BYTES = 1 << 28
_CHUNKS = 64


def fill(spec: Spec) -> float:
    """Measure writing dense batches into reused buffers."""
    shape = spec["batch"], spec["n_vars"]

    def work(_: int) -> Work:
        return _in_turns([partial(_fill, np.zeros(shape, dtype=np.float32)) for _ in range(_BUFFERS)])

    return _rate(work) / (4 * spec["n_vars"])


def copy(spec: Spec) -> float:
    """Measure copying the stored values and column indices of cells into reused buffers."""
    n_bytes = int(_stored_bytes(spec) * spec["batch"])
    source = np.ones(max(_SOURCE_BYTES, 2 * n_bytes), dtype=np.uint8)

    def work(thread: int) -> Work:
        starts = np.random.default_rng(thread).integers(0, len(source) - n_bytes, 32 * _BUFFERS).tolist()
        targets = [np.zeros(n_bytes, dtype=np.uint8) for _ in range(_BUFFERS)]
        return _in_turns(
            [
                partial(_copy, target, source[start : start + n_bytes])
                for start, target in zip(starts, itertools.cycle(targets), strict=False)
            ]
        )

    return _rate(work) / _stored_bytes(spec)


def disk(spec: Spec) -> float | None:
    """Measure sequential direct reads of the stored bytes; return None where direct reads are not supported."""
    rates = [_machine.disk_bytes_per_s(Path(spec["path"]), n_threads=n_threads) for n_threads in (1, 4)]
    return None if None in rates else max(rates) / _stored_bytes(spec)


def decode(spec: Spec) -> float:
    """Measure decoding whole chunks with the codecs of dasksc, on a repeated sample of chunks."""
    from dasksc.storage import open_matrix

    matrix: Any = open_matrix(spec["path"], "X")
    s_per_cell = 0.0
    for array in matrix.arrays[1:]:
        n_chunks = -(-array.shape[0] // array._chunk_shape[0])
        numbers = np.unique(np.linspace(0, n_chunks - 1, _CHUNKS).astype(np.int64))
        chunks = [(bytes(data), skipped) for data, skipped in array._source.read(numbers) if data is not None]

        def work(thread: int, array: Any = array, chunks: list[Any] = chunks) -> Work:
            order = np.random.default_rng(thread).permutation(len(chunks)).tolist()
            return _in_turns([partial(_decode, array, *chunks[i]) for i in order])

        s_per_cell += spec["nnz"] / spec["n_rows"] * array.dtype.itemsize / _rate(work)
    return 1 / s_per_cell


def decode_fetch(spec: Spec) -> float:
    """Return the rate for decoding every chunk that a fetch touches once."""
    from dasksc.inspection.checking import used_share
    from dasksc.storage import open_matrix

    chunk_rows = open_matrix(spec["path"], "X").cost.decoded_rows
    return decode(spec) * used_share(spec["fetch"], spec["block"], spec["n_rows"], chunk_rows)


LIMITS: dict[str, tuple[str, Callable[[Spec], float | None]]] = {
    "fill": ("filling dense batches", fill),
    "copy": ("copying values and columns", copy),
    "disk": ("reading from the disk", disk),
    "decode": ("decoding whole chunks", decode),
    "decode fetch": ("decoding each chunk of a fetch once", decode_fetch),
}


def _stored_bytes(spec: Spec) -> float:
    """Return the mean number of stored bytes of a cell: float32 values and int32 column indices."""
    return spec["nnz"] / spec["n_rows"] * 8


def _rate(work: Callable[[int], Work]) -> float:
    return _machine.rate_on_threads(work, n_threads=len(os.sched_getaffinity(0)))


def _in_turns(works: Iterable[Work]) -> Work:
    turns = itertools.cycle(works)
    return lambda: next(turns)()


def _fill(buffer: np.ndarray) -> int:
    buffer.fill(0)
    return buffer.nbytes


def _copy(target: np.ndarray, source: np.ndarray) -> int:
    np.copyto(target, source)
    return target.nbytes


def _decode(array: Any, data: bytes, skipped: int) -> int:
    length = array._chunk_shape[0]
    return int(array._chain.decode(data, shape=(length, 1), skipped=skipped, rows=(0, length)).nbytes)


if __name__ == "__main__":
    what, measured = LIMITS[sys.argv[1]]
    print(json.dumps({"is": what, "cells_per_s": measured(json.loads(sys.argv[2]))}))
