"""Uncompressed arrays in one file, memory-mapped or read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import BrokenRunError, row_bytes
from dasksc.storage.files import LocalFile, UseMmap, should_map
from dasksc.storage.read_timing import reading
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.row_pointers import RowPointers
from dasksc.storage.runs import locate, merge

__all__ = ["Extents", "PlainArray"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extents:
    """Locations of the rows of an array, or of the elements of a one-dimensional array, in a file."""

    # First row of each extent, shape (n_extents,), int64, ascending from 0. An extent ends where the next one begins.
    firsts: NDArray[np.int64]
    # Byte offset of each extent, shape (n_extents,), int64; -1 for an extent that was never written.
    offsets: NDArray[np.int64]

    @classmethod
    def joined(cls, *, firsts: NDArray[np.int64], offsets: NDArray[np.int64], row_bytes: int) -> Extents:
        """Return the extents after joining those that are contiguous in the file."""
        written = offsets >= 0
        follows = (offsets[1:] == offsets[:-1] + (firsts[1:] - firsts[:-1]) * row_bytes) & written[:-1]
        follows |= ~written[1:] & ~written[:-1]
        keep = np.concatenate((np.ones(min(len(firsts), 1), dtype=bool), ~follows))
        return cls(firsts=firsts[keep], offsets=offsets[keep])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MemoryExtents:
    """Locations of rows in memory."""

    source: NDArray[np.uint8]  # Bytes of a memory-mapped file, or bytes read from it
    is_mapped: bool  # True if `source` is memory-mapped
    # firsts, ends: Rows ``[firsts[i], ends[i])`` of each extent, ascending.
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    offsets: NDArray[np.int64]  # Byte offset of each extent in `source`; -1 for an extent that was never written


class PlainArray:
    """Uncompressed array in one file."""

    # If the file is memory-mapped, only runs that cross extents are copied. Otherwise the requested rows are read.

    def __init__(
        self,
        *,
        label: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        file: LocalFile | RemoteFile,
        extents: Extents,
        fill: np.generic,
        use_mmap: UseMmap,
    ) -> None:
        self.label = label
        self.shape = shape
        self.dtype = dtype
        self._file = file
        self._extents = extents
        self._fill = np.frombuffer(fill.tobytes(), dtype=np.uint8)
        self._row_bytes = row_bytes(self)
        self._use_mmap = use_mmap
        ends = extents.offsets + np.diff(extents.firsts, append=shape[0]) * self._row_bytes
        if len(ends) and ends[extents.offsets >= 0].max(initial=0) > file.identity.size:
            raise CorruptDataError(
                f"{label} ends at byte {ends.max()}, but the file has {file.identity.size} bytes: it is truncated. "
                "Copy or download it again."
            )

    @property
    def working_bytes(self) -> int:
        """Memory for reading ahead, in bytes; 0 if the file is mapped."""
        return 0 if should_map(self._use_mmap) else self._file.working_bytes

    def held_share(self, run: float) -> float:
        """Return 1 if the file is read; if it is mapped, the share of runs that cross extents and are copied."""
        n_ends = max(len(self._extents.firsts) - 1, 0)
        return min(1.0, run * n_ends / max(1, self.shape[0])) if should_map(self._use_mmap) else 1.0

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Return the memory addresses of runs; see `StoredArray.locate`."""
        # If the file is memory-mapped, the pages of the runs are requested ahead. Otherwise, the runs are read.
        with reading():
            self._file.require_unchanged()
            return (
                self._locate_mapped(starts, stops) if should_map(self._use_mmap) else self._locate_read(starts, stops)
            )

    def _locate_mapped(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        assert isinstance(self._file, LocalFile)
        firsts = self._extents.firsts
        memory = _MemoryExtents(
            source=self._file.mapped() if (stops > starts).any() else np.empty(0, dtype=np.uint8),
            is_mapped=True,
            firsts=firsts,
            ends=np.append(firsts[1:], self.shape[0]),
            offsets=self._extents.offsets,
        )
        return self._locate_in(memory, starts, stops)

    def _locate_in(self, memory: _MemoryExtents, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Return the addresses of runs in memory; runs that cross from one extent to the next are copied."""
        sizes = (stops - starts) * self._row_bytes
        filled = sizes > 0
        which = np.searchsorted(memory.firsts, starts, side="right") - 1
        offsets = np.zeros(len(starts), dtype=np.int64)
        inside = filled.copy()
        inside[filled] = (stops[filled] <= memory.ends[which[filled]]) & (memory.offsets[which[filled]] >= 0)
        within = which[inside]
        offsets[inside] = memory.offsets[within] + (starts[inside] - memory.firsts[within]) * self._row_bytes
        crossing = np.flatnonzero(filled & ~inside)
        copies = np.empty(int(sizes[crossing].sum()), dtype=np.uint8)
        if memory.is_mapped and inside.any():
            assert isinstance(self._file, LocalFile)
            order = np.argsort(offsets[inside], kind="stable")
            self._file.advise(offsets[inside][order], sizes[inside][order])
        if len(crossing):
            offsets[crossing] = np.cumsum(sizes[crossing]) - sizes[crossing]
            kernels.stitch(
                starts[crossing],
                stops[crossing],
                which[crossing],
                memory.firsts,
                memory.ends,
                memory.offsets,
                self._row_bytes,
                memory.source,
                self._fill,
                copies,
            )
        return RowPointers.inside(
            (memory.source, copies),
            dtype=self.dtype,
            which=(filled & ~inside).astype(np.int64),
            offsets=offsets,
            sizes=sizes,
            held_bytes=copies.nbytes + (0 if memory.is_mapped else memory.source.nbytes),
        )

    def _locate_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        run_starts, run_stops = merge(starts, stops, gap=0, chunk=1)
        begins, offsets, sizes = self._pieces(run_starts, run_stops)
        if self._use_mmap == "auto" and len(sizes):
            memory = self._read_direct(begins, offsets, sizes)
            if memory is not None:
                return self._locate_in(memory, starts, stops)
        written = offsets >= 0
        order = np.argsort(offsets[written], kind="stable")
        self._file.advise(offsets[written][order], sizes[written][order])
        block = buffers.empty(int(sizes.sum()), np.uint8)
        ats = (np.cumsum(sizes) - sizes).tolist()
        views = [block.data[at : at + size] for at, size in zip(ats, sizes.tolist(), strict=True)]
        filling = self._file.read_into(
            offsets[written].tolist(), [view for view, is_there in zip(views, written, strict=True) if is_there]
        )
        for view, begin, is_there in zip(views, begins.tolist(), written.tolist(), strict=True):
            if is_there:
                try:
                    next(filling)
                except OSError as error:
                    run = np.searchsorted(run_starts, begin, side="right") - 1
                    raise BrokenRunError(self.label, int(run_starts[run]), int(run_stops[run]), str(error)) from error
            else:
                np.asarray(view)[:] = np.tile(self._fill, len(view) // len(self._fill))
        return RowPointers.inside(
            (block,),
            dtype=self.dtype,
            which=0,
            offsets=locate(starts, stops, run_starts, run_stops) * self._row_bytes,
            sizes=(stops - starts) * self._row_bytes,
            held_bytes=block.nbytes,
        )

    def _read_direct(
        self, begins: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> _MemoryExtents | None:
        """Read the pieces of runs with `LocalFile.read_direct`; return None if buffered reads must be used."""
        assert isinstance(self._file, LocalFile)
        written = np.flatnonzero(offsets >= 0)
        order = written[np.argsort(offsets[written], kind="stable")]
        found = self._file.read_direct(offsets[order], sizes[order]) if len(order) else None
        if found is None:
            return None
        source, ats = found
        in_source = np.full(len(offsets), -1)
        in_source[order] = ats
        return _MemoryExtents(
            source=source, is_mapped=False, firsts=begins, ends=begins + sizes // self._row_bytes, offsets=in_source
        )

    def _pieces(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Cut runs at extents; return first row, byte offset (-1 if never written) and size in bytes of each piece."""
        firsts, offsets = self._extents.firsts, self._extents.offsets
        begins = np.union1d(starts, firsts)
        run = np.searchsorted(starts, begins, side="right") - 1
        begins, run = begins[run >= 0], run[run >= 0]
        wanted = begins < stops[run]
        begins, run = begins[wanted], run[wanted]
        extent = np.searchsorted(firsts, begins, side="right") - 1
        ends = np.minimum(np.append(firsts[1:], self.shape[0])[extent], stops[run])
        at = np.where(offsets[extent] < 0, -1, offsets[extent] + (begins - firsts[extent]) * self._row_bytes)
        return begins, at, (ends - begins) * self._row_bytes
