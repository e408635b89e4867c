"""Uncompressed arrays in one file, memory-mapped or read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import BrokenRunError, RowPointers, StoredArray, merge, reading, row_bytes
from dasksc.storage.files import LocalFile
from dasksc.storage.remote.remote_file import RemoteFile


class PlainArray(StoredArray):
    """Uncompressed array in one file."""

    # `firsts` holds the first row of each extent, ascending from 0; an extent ends where the next one begins. `offsets`
    # holds its byte offset in the file, or -1 for an extent that was never written. If the file is memory-mapped, only
    # runs that cross extents are copied. Otherwise the requested rows are read.

    def __init__(
        self,
        *,
        label: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        file: LocalFile | RemoteFile,
        firsts: NDArray[np.int64],
        offsets: NDArray[np.int64],
        fill: np.generic,
    ) -> None:
        self.label = label
        self.shape = shape
        self.dtype = dtype
        self.file = file
        self._fill = np.frombuffer(fill.tobytes(), dtype=np.uint8)
        self._row_bytes = row_bytes(self)
        written = offsets >= 0
        ends = offsets + (np.append(firsts[1:], shape[0]) - firsts) * self._row_bytes
        if len(ends) and ends[written].max(initial=0) > file.identity.size:
            raise CorruptDataError(
                f"{label} ends at byte {ends.max()}, but the file has {file.identity.size} bytes: it is truncated. "
                "Copy or download it again."
            )
        if len(firsts) > 1:
            # Extents that are contiguous in the file are joined.
            follows = (offsets[1:] == ends[:-1]) & written[:-1]
            follows |= ~written[1:] & ~written[:-1]
            keep = np.concatenate(([True], ~follows))
            firsts, offsets = firsts[keep], offsets[keep]
        self._firsts, self._offsets = firsts, offsets

    @property
    def extents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First row and byte offset of each extent."""
        return self._firsts, self._offsets

    @property
    def place(self) -> tuple[LocalFile, int] | None:
        """Local file and byte offset of an array that lies in one piece; None for any other."""
        is_whole = len(self._firsts) == 1 and self._offsets[0] >= 0
        return (self.file, int(self._offsets[0])) if is_whole and isinstance(self.file, LocalFile) else None

    @property
    def working_bytes(self) -> int:
        """Memory for reading ahead, in bytes; 0 if the file is mapped."""
        return 0 if self.file.is_mapped else self.file.working_bytes

    def held_share(self, run: float) -> float:
        """Return 1 if the file is read; if it is mapped, the share of runs that cross extents and are copied."""
        n_ends = max(len(self._firsts) - 1, 0)
        return min(1.0, run * n_ends / max(1, self.shape[0])) if self.file.is_mapped else 1.0

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        # If the file is memory-mapped, the pages of the runs are requested ahead. Otherwise, the runs are read.
        with reading():
            self.file.require_unchanged()
            if isinstance(self.file, LocalFile) and self.file.is_mapped:
                source = self.file.mapped() if (stops > starts).any() else np.empty(0, dtype=np.uint8)
                extents = self._firsts, np.append(self._firsts[1:], self.shape[0]), self._offsets
                return self._inside(source, extents, starts, stops, held_bytes=0)
            runs = merge(starts, stops)
            begins, ends, offsets = self._pieces(*runs)
            sizes = (ends - begins) * self._row_bytes
            written = np.flatnonzero(offsets >= 0)
            order = written[np.argsort(offsets[written], kind="stable")]
            found = None
            if isinstance(self.file, LocalFile) and self.file.use_mmap == "auto" and len(order):
                found = self.file.read_direct(offsets[order], sizes[order])
            source, ats = found or self._read_buffered(begins[order], offsets[order], sizes[order], runs)
            offsets[order] = ats
            return self._inside(source, (begins, ends, offsets), starts, stops, held_bytes=source.nbytes)

    def _read_buffered(
        self,
        begins: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        runs: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read pieces of runs in the order of their bytes; return the bytes and the position of each piece in them."""
        self.file.advise(offsets, sizes)
        source = buffers.empty(int(sizes.sum()), np.uint8)
        ats = np.cumsum(sizes) - sizes
        views = [source.data[at : at + size] for at, size in zip(ats.tolist(), sizes.tolist(), strict=True)]
        filling = self.file.read_into(offsets.tolist(), views)
        for begin in begins.tolist():
            try:
                next(filling)
            except OSError as error:
                run = np.searchsorted(runs[0], begin, side="right") - 1
                raise BrokenRunError(self.label, int(runs[0][run]), int(runs[1][run]), str(error)) from error
        return source, ats

    def _inside(
        self,
        source: NDArray[np.uint8],
        extents: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        *,
        held_bytes: int,
    ) -> RowPointers:
        """Return the addresses of runs in `source`; runs that cross from one extent to the next are copied."""
        # `extents`: first row, end, and byte offset in `source` of each extent, ascending; the offset is -1 for an
        # extent that was never written.
        firsts, ends, at = extents
        sizes = (stops - starts) * self._row_bytes
        filled = sizes > 0
        which = np.searchsorted(firsts, starts, side="right") - 1
        offsets = np.zeros(len(starts), dtype=np.int64)
        inside = filled.copy()
        inside[filled] = (stops[filled] <= ends[which[filled]]) & (at[which[filled]] >= 0)
        within = which[inside]
        offsets[inside] = at[within] + (starts[inside] - firsts[within]) * self._row_bytes
        crossing = np.flatnonzero(filled & ~inside)
        copies = np.empty(int(sizes[crossing].sum()), dtype=np.uint8)
        if self.file.is_mapped and inside.any():
            order = np.argsort(offsets[inside], kind="stable")
            self.file.advise(offsets[inside][order], sizes[inside][order])
        if len(crossing):
            offsets[crossing] = np.cumsum(sizes[crossing]) - sizes[crossing]
            runs = starts[crossing], stops[crossing], which[crossing]
            kernels.stitch(*runs, *extents, self._row_bytes, source, self._fill, copies)
        return RowPointers.inside(
            (source, copies),
            dtype=self.dtype,
            which=(filled & ~inside).astype(np.int64),
            offsets=offsets,
            sizes=sizes,
            held_bytes=held_bytes + copies.nbytes,
        )

    def _pieces(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Cut runs at extents; return first row, end and byte offset (-1 if never written) of each piece."""
        firsts, offsets = self._firsts, self._offsets
        begins = np.union1d(starts, firsts)
        run = np.searchsorted(starts, begins, side="right") - 1
        begins, run = begins[run >= 0], run[run >= 0]
        wanted = begins < stops[run]
        begins, run = begins[wanted], run[wanted]
        extent = np.searchsorted(firsts, begins, side="right") - 1
        ends = np.minimum(np.append(firsts[1:], self.shape[0])[extent], stops[run])
        at = np.where(offsets[extent] < 0, -1, offsets[extent] + (begins - firsts[extent]) * self._row_bytes)
        return begins, ends, at
