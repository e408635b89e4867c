"""Common base of arrays that h5py or zarr-python reads by slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.storage import buffers
from dasksc.storage.arrays import BrokenRunError, caused_by_data, memory_dtype, row_bytes
from dasksc.storage.read_timing import reading
from dasksc.storage.row_pointers import RowPointers
from dasksc.storage.runs import locate, merge

# Maximum size of a slice. A slice covers neighboring runs and the gaps between them; the runs are copied from it.
_SLICE_BYTES = 8 * 2**20


ReadSlice: TypeAlias = Callable[[int, int, NDArray[Any]], None]
"""Function of `start`, `stop` and an array, which it fills with the elements ``[start, stop)`` along the first axis."""


class SlicedArray:
    """Array that a library reads by slices."""

    def __init__(self, *, label: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunk: int, gap_bytes: int) -> None:
        self.label = label
        self.shape = shape
        self.dtype = dtype
        self.chunk_length = chunk if chunk > 1 else 0
        self._chunk = chunk
        self._gap_bytes = gap_bytes

    def held_share(self, run: float) -> float:
        return 1.0

    @property
    def working_bytes(self) -> int:
        """Memory for a slice, and for the chunks that the library decodes, in bytes."""
        stride = row_bytes(self)
        # Chunks are decoded in several steps, filters may widen them, and the slice is assembled from them.
        return 2 * min(_SLICE_BYTES + stride * self._chunk, stride * self.shape[0]) + 6 * stride * self._chunk

    def reader(self) -> ReadSlice:
        """Check that the array has not changed since it was opened, and return the function that reads slices."""
        raise NotImplementedError

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Read the runs into one block of memory, with one slice for neighboring runs."""
        read = self.reader()
        stride = row_bytes(self)
        run_starts, run_stops = merge(starts, stops)
        ats = np.append(0, np.cumsum(run_stops - run_starts))
        block = buffers.empty((int(ats[-1]), *self.shape[1:]), memory_dtype(self.dtype))
        for first, after in self._slices(run_starts.tolist(), run_stops.tolist()):
            start, stop = int(run_starts[first]), int(run_stops[after - 1])
            part = block[ats[first] : ats[after]]
            into = part if after == first + 1 else np.empty((stop - start, *self.shape[1:]), part.dtype)
            try:
                with reading():  # includes decoding, which the library does not separate
                    read(start, stop, into)
            # Codecs may raise any exception, such as RuntimeError (Blosc) or zlib.error (gzip).
            except Exception as error:
                if not caused_by_data(error):
                    raise
                raise BrokenRunError(self.label, start, stop, str(error)) from error
            if into is not part:
                runs = zip(run_starts[first:after] - start, run_stops[first:after] - start, strict=True)
                np.concatenate([into[begin:end] for begin, end in runs], out=part)
        return RowPointers.inside(
            (block,),
            dtype=block.dtype,
            which=0,
            offsets=locate(starts, stops, run_starts, run_stops) * stride,
            sizes=(stops - starts) * stride,
            held_bytes=block.nbytes,
        )

    def _slices(self, starts: list[int], stops: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the first run, and the one after the last, of each group of runs read by one slice."""
        stride = max(row_bytes(self), 1)
        gap, longest = self._gap_bytes // stride, max(_SLICE_BYTES // stride, self._chunk)
        first = 0
        for i in range(1, len(starts)):
            start, before = starts[i], stops[i - 1]
            is_near = start - before <= gap or start // self._chunk == (before - 1) // self._chunk
            if not is_near or stops[i] - starts[first] > longest:
                yield first, i
                first = i
        if starts:
            yield first, len(starts)
