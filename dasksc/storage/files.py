"""Reading of byte ranges of local files of any format, from a memory map or with ``pread``.

Neither way uses a shared file position, so a file opened before a fork can be read in both parent and child.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, StorageError
from dasksc.kernels.files import advise_ranges, read_ranges
from dasksc.storage import buffers
from dasksc.storage.arrays import merge

UseMmap: TypeAlias = bool | Literal["auto"]
"""Use of memory maps: always (True), never (False), or as set by `mapping` in the reading thread (``"auto"``)."""

# Ranges closer than this are requested from the disk as one, since reading the gap takes less time than a request.
_ADVICE_GAP_BYTES = 32 * 2**10
# Linux limits a read-ahead request to the largest transfer of the device, 1.25 MiB or more.
_ADVICE_BYTES = 2**20
# Adjacent ranges are read together up to this size, so that the bytes stay in the cache of a core until they are
# decoded.
_READ_BYTES = 2**18
# A request for a range that is already in the page cache costs a microsecond. Such requests would account for half the
# time of a fetch of single rows. A sample of about this many evenly spaced ranges is therefore tested first. If the
# whole sample is cached, no range is requested. Any ranges outside the sample that are not cached are then read when
# they are accessed.
_SAMPLED = 32
_REMEDY = "Copy or download it again."

_PAGE_BYTES = 2**12
# Ranges whose mean size is smaller than this are not read with O_DIRECT: a page holds several of them, and the page
# cache may keep them for the next fetch.
_SHORT_BYTES = _PAGE_BYTES
# Maximum number of open files; the oldest are closed first. Most systems allow 1,024 per process.
_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MOST_OPEN = 128 if _limit == resource.RLIM_INFINITY else min(128, _limit // 4)
# Maximum number of maps that files keep; Linux allows 65,530 per process by default.
_MOST_MAPPED = 2**14
# Limits of a thread's work before it returns to Python: number of ranges, and approximate number of bytes.
_PART_RANGES, _PART_BYTES = 16, 2**21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# Addresses for the compiled functions `read_ranges` and `advise_ranges`.
_pread = np.uint64(ctypes.cast(_libc.pread, ctypes.c_void_p).value or 0)
_madvise = np.uint64(ctypes.cast(_libc.madvise, ctypes.c_void_p).value or 0)

# Network file systems. A page fault on them waits for the network, and a vanished file kills the process.
_REMOTE_KINDS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse", "virtiofs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of a file when it was opened: path, size in bytes, and modification time in nanoseconds."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, descriptor: int | None = None) -> FileIdentity:
        """Return the current identity of the file at `path`, or of an open file, even if another is at `path` now."""
        status = os.stat(path if descriptor is None else descriptor)
        return cls(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Check that the file has not been replaced, changed or removed."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CorruptDataError(f"{self.path} was removed since it was opened ({error})") from error
        # A fetch may read dozens of files, so an identity is made only for the error.
        if status.st_mtime_ns != self.mtime_ns or status.st_size != self.size:
            self.compare(FileIdentity.of(self.path))

    def compare(self, now: FileIdentity) -> None:
        """Raise `CorruptDataError` if `now` differs from this identity."""
        if now != self:
            raise CorruptDataError(
                f"{self.path} was replaced or changed since it was opened ({now.size} bytes now, {self.size} bytes "
                "then). Open it again, and do not write to it while it is being read."
            )


class LocalFile:
    """Local file, opened at the first read. Instances pickle without open descriptors and maps."""

    def __init__(self, identity: FileIdentity, use_mmap: UseMmap = False) -> None:
        self.identity = identity
        self.use_mmap = use_mmap
        self._descriptors: dict[str, _Descriptor] = {}
        self._mapped: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, path: str, use_mmap: UseMmap = False) -> LocalFile:
        """Return the file that is at a path now; files on network file systems are never memory-mapped."""
        is_local = use_mmap and can_map(os.path.dirname(os.path.realpath(path)))
        return cls(FileIdentity.of(path), use_mmap if is_local else False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptors": {}, "_mapped": None}

    # The buffer of `ranges` is small enough to be ignored.
    working_bytes = 0
    _can_read_direct = hasattr(os, "O_DIRECT")

    @property
    def path(self) -> str:
        return self.identity.path

    @property
    def is_mapped(self) -> bool:
        """True if the file is memory-mapped at this time; see `mapping`."""
        return should_map(self.use_mmap)

    def require_unchanged(self) -> None:
        """Raise `CorruptDataError` if the file has changed since it was opened."""
        self.identity.require_unchanged()

    def close(self) -> None:
        """Close the file until the next read; existing maps stay valid."""
        self._descriptors.clear()

    def mapped(self) -> NDArray[np.uint8]:
        """Return the memory-mapped bytes of the file, shape (size,), uint8."""
        # A race between threads maps the file twice, which is harmless.
        if (memory := self._mapped) is None:
            memory = self._mapped = np.asarray(Map(self._descriptor(), self.identity))
            _mapped.append(weakref.ref(self))
            while len(_mapped) > _MOST_MAPPED:
                if (oldest := _mapped.popleft()()) is not None:
                    oldest._mapped = None
        return memory

    def advise(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Ask the kernel to read ascending byte ranges into the page cache, without waiting for it."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        descriptor = self._descriptor()
        number = descriptor.number
        starts, stops = merge(offsets, offsets + sizes, gap=_ADVICE_GAP_BYTES)
        if _seem_cached(number, starts):
            return
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            for at in range(start, stop, _ADVICE_BYTES):
                os.posix_fadvise(number, at, min(stop - at, _ADVICE_BYTES), os.POSIX_FADV_WILLNEED)

    def mapped_ranges(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the address of each range (0 for an offset of -1), and the map that contains the ranges."""
        written = offsets >= 0
        if (offsets + sizes)[written].max(initial=0) > self.identity.size:
            raise CorruptDataError(
                f"{self.path} is truncated: it ends before byte {(offsets + sizes).max()}. {_REMEDY}"
            )
        order = np.argsort(offsets[written], kind="stable")
        self.advise(offsets[written][order], sizes[written][order])
        memory = self.mapped()
        return np.where(written, offsets + memory.ctypes.data, 0).astype(np.uint64), memory

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on."""
        descriptor = self._descriptor()
        n = read_at(descriptor.number, offset, into)
        if n < len(into):
            raise CorruptDataError(
                f"{self.path} ends at byte {offset + n}, but {len(into) - n} more are expected. {_REMEDY}"
            )

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), read into new memory; see `read`."""
        data = memoryview(bytearray(stop - start))
        self.read(start, data)
        return data

    def read_into(self, offsets: Sequence[int], views: Sequence[memoryview]) -> Iterator[None]:
        """Fill each view with the bytes from its offset on, in order; yield after each."""
        for offset, view in zip(offsets, views, strict=True):
            self.read(offset, view)
            yield

    def read_direct(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """Read ascending, disjoint byte ranges from the disk directly into memory of this process."""
        # Direct reads leave the page cache unchanged and avoid a copy.
        if not self._can_read_direct or sizes.mean() < _SHORT_BYTES:
            return None
        if _seem_cached(self._descriptor().number, offsets):
            return None
        starts, stops = merge(offsets, offsets + sizes, gap=_PAGE_BYTES)
        starts, stops = starts // _PAGE_BYTES * _PAGE_BYTES, -(-stops // _PAGE_BYTES) * _PAGE_BYTES
        ends = np.cumsum(stops - starts)
        block = buffers.empty(int(ends[-1]) + _PAGE_BYTES, np.uint8)
        block = block[-block.ctypes.data % _PAGE_BYTES :][: int(ends[-1])]
        begins = ends - (stops - starts)
        # The last range, rounded up to a page, may extend beyond the end of the file. A read that stops at the end must
        # not be resumed, since direct reads need aligned offsets.
        enough = np.minimum(stops, self.identity.size) - starts
        addresses = (block.ctypes.data + begins).astype(np.uint64)
        n_together = int(np.clip(_PART_BYTES // sizes.mean(), 1, _PART_RANGES))

        def fill(first: int) -> None:
            part = slice(first, first + n_together)
            number = descriptor.number
            failed = read_ranges(
                _pread, number, starts[part], stops[part] - starts[part], enough[part], addresses[part]
            )
            for i in range(first + failed, min(first + n_together, len(starts))) if failed >= 0 else ():
                # Read again in Python, which reports the error, or succeeds if a signal interrupted the first read.
                into = block.data[begins[i] : ends[i]]
                n = read_at(number, int(starts[i]), into, enough=int(enough[i]))
                if n < enough[i]:
                    raise CorruptDataError(
                        f"{self.path} ends at byte {starts[i] + n}, but more are expected. {_REMEDY}"
                    )

        try:
            descriptor = self._descriptor(direct=True)
            for _ in _direct_readers(os.getpid()).map(fill, range(0, len(starts), n_together)):
                pass
        except StorageError:
            raise
        except OSError as error:
            # EINVAL means that direct reads are not supported. After any other error, the buffered reads that follow
            # fail too and report the affected rows.
            if error.errno == errno.EINVAL:
                self._can_read_direct = False
            return None
        which = np.searchsorted(starts, offsets, side="right") - 1
        return block, begins[which] + offsets - starts[which]

    def ranges(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[Any]:
        """Yield the bytes of each range, mapped or read; they are valid until the next item is requested."""
        # Adjacent ranges are read together.
        order = np.argsort(offsets, kind="stable")
        self.advise(offsets[order], sizes[order])
        places = list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))
        if self.is_mapped and places:
            memory = self.mapped().data
            for begin, stop in places:
                yield memory[begin:stop]
            return
        buffer = memoryview(bytearray(max(int(sizes.max(initial=0)), _READ_BYTES)))
        first = 0
        while first < len(places):
            start, end = places[first]
            after = first + 1
            while after < len(places) and places[after][0] == end and places[after][1] - start <= len(buffer):
                end = places[after][1]
                after += 1
            self.read(start, buffer[: end - start])
            for begin, stop in places[first:after]:
                yield buffer[begin - start : stop - start]
            first = after

    def _descriptor(self, *, direct: bool = False) -> _Descriptor:
        """Return the open descriptor."""
        # Callers must keep a reference while they use its number: the file may be closed to limit the number of open
        # files.
        mode = "direct" if direct else "r"
        descriptor = self._descriptors.get(mode)
        if descriptor is None:
            try:
                descriptor = _Descriptor(self.path, os.O_DIRECT if direct else 0)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    raise
                raise StorageError(f"{self.path} cannot be opened: {error}") from error
            self.identity.compare(FileIdentity.of(self.path, descriptor.number))
            # If threads race, the first descriptor is kept: replacing it would close it while another thread uses its
            # number. There is no lock, since a forked process could inherit it in the locked state.
            descriptor = self._descriptors.setdefault(mode, descriptor)
            _opened.append(weakref.ref(self))
            while len(_opened) > _MOST_OPEN:
                oldest = _opened.popleft()()
                if oldest is not None:
                    oldest.close()
        return descriptor


def advise_mapped(addresses: NDArray[np.uint64], sizes: NDArray[np.int64]) -> None:
    """Ask the kernel to read ranges of memory maps into the page cache, without waiting for it."""
    # Unlike `LocalFile.advise`, this needs no open file, and one call serves many files.
    limits = _ADVICE_GAP_BYTES, _ADVICE_BYTES, mmap.PAGESIZE
    advise_ranges(_madvise, addresses.view(np.int64), sizes, *limits)


class _Mapping(threading.local):
    is_allowed = True
    is_strict = False
    unmapped: Collection[str] = ()


_mapping = _Mapping()


@contextmanager
def mapping(is_allowed: bool, *, is_strict: bool = False, unmapped: Collection[str] = ()) -> Iterator[None]:
    """Set whether arrays with ``use_mmap="auto"`` map their files in this thread."""
    # With `is_strict`, the setting also applies to arrays with ``use_mmap=True``; this serves to compute what a fetch
    # from them would cost without a memory map. Matrices with a label in `unmapped` are not mapped if they are fetched
    # inside `mapping_of`.
    before = _mapping.is_allowed, _mapping.is_strict, _mapping.unmapped
    _mapping.is_allowed, _mapping.is_strict, _mapping.unmapped = is_allowed, is_strict, unmapped
    try:
        yield
    finally:
        _mapping.is_allowed, _mapping.is_strict, _mapping.unmapped = before


def mapping_of(label: str) -> AbstractContextManager[None]:
    """Return the context in which to fetch from the matrix `label`; see `mapping`."""
    return mapping(False) if label in _mapping.unmapped else nullcontext()


def should_map(use_mmap: UseMmap) -> bool:
    """Return True if an array that was opened with `use_mmap` maps its file at this time."""
    return _mapping.is_allowed if use_mmap == "auto" or (use_mmap and _mapping.is_strict) else use_mmap


is_hashing: ContextVar[bool] = ContextVar("is_hashing", default=False)


@contextmanager
def hashing() -> Iterator[None]:
    """Leave out of pickles what differs between equal arrays, since Dask derives tokens from pickles."""
    reset = is_hashing.set(True)
    try:
        yield
    finally:
        is_hashing.reset(reset)


def advise_ends(path: str) -> None:
    """Ask the kernel to read both ends of a file, where most metadata of HDF5 are, without waiting for it."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with suppress(OSError):  # opening the file reports it
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for its writer
        try:
            for at in (0, max(0, os.fstat(number).st_size - _ADVICE_BYTES)):
                os.posix_fadvise(number, at, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(number)


def read_at(number: int, offset: int, into: memoryview, *, enough: int | None = None) -> int:
    """Read at least `enough` bytes of an open file into `into`, from `offset` on; return the number of bytes read."""
    # Fewer bytes are read at the end of the file. Default of `enough`: the length of `into`.
    done = 0
    while done < (len(into) if enough is None else enough):
        n = os.preadv(number, [into[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


def _seem_cached(number: int, offsets: NDArray[np.int64]) -> bool:
    """Return True if a sample of the bytes at `offsets` is in the page cache; takes a microsecond per sampled byte."""
    no_wait = getattr(os, "RWF_NOWAIT", None)
    if no_wait is None:
        return False
    byte = bytearray(1)
    for offset in offsets[:: max(1, len(offsets) // _SAMPLED)].tolist():
        try:
            if not os.preadv(number, [byte], offset, no_wait):
                return False  # beyond the end of the file
        except OSError:  # the read would block, or the file system does not support RWF_NOWAIT
            return False
    return True


class _Descriptor:
    """Open file descriptor that is closed when the object is garbage-collected."""

    def __init__(self, path: str, flags: int = 0) -> None:
        self.number = os.open(path, os.O_RDONLY | flags)
        weakref.finalize(self, os.close, self.number)


# Open and mapped files, each in the order of opening. A deque has atomic operations, so it needs no lock. A forked
# process could inherit a lock in the locked state.
_opened: deque[weakref.ref[LocalFile]] = deque()
_mapped: deque[weakref.ref[LocalFile]] = deque()


class Map:
    """Memory map of a file; the map exists as long as this object is referenced."""

    # Python's own maps also keep the file open.

    def __init__(self, descriptor: _Descriptor, identity: FileIdentity) -> None:
        self.identity = identity
        size = identity.size
        if os.fstat(descriptor.number).st_size < size:
            raise CorruptDataError(
                f"{identity.path} was truncated after it was opened, when it had {size} bytes. {_REMEDY}"
            )
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor.number, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise StorageError(
                f"{identity.path} cannot be mapped into memory: {os.strerror(code)}; read it with mmap=False"
            )
        # Maps are not removed at exit, since threads may still be reading.
        weakref.finalize(self, _libc.munmap, address, size).atexit = False
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


@lru_cache(maxsize=2**10)
def can_map(path: str) -> bool:
    """Return True if `path` is on a local file system."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            fields = [line.split(" ") for line in mounts]
    except OSError:  # not Linux
        return True
    real = os.path.realpath(path)
    best, kind = "", ""
    for _, point, mount_kind, *_ in fields:
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, mount_kind
    return not kind.startswith(_REMOTE_KINDS)


@lru_cache(maxsize=1)
def _direct_readers(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process, since a fork does not copy threads."""
    # A disk reaches its full rate only with several concurrent requests, and the shorter the requests, the more of them
    # it needs. If threads race, each creates a pool, which is harmless: a pool starts threads only when it gets work.
    return ThreadPoolExecutor(32, thread_name_prefix="dasksc-direct-read")
