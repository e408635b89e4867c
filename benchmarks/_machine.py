"""Limits of the machine, and the memory of a process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_PIECE_BYTES = 1 << 23


def memcpy_bytes_per_s(n_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Return the best rate of `repeats` copies of `n_bytes` in memory by one thread."""
    source, target = np.ones(n_bytes, dtype=np.uint8), np.empty(n_bytes, dtype=np.uint8)
    target[:] = 1
    best = min(_seconds(lambda: np.copyto(target, source)) for _ in range(repeats))
    return n_bytes / best


def disk_bytes_per_s(path: Path, n_bytes: int = 1 << 30, *, n_threads: int = 1) -> float | None:
    """Measure direct reads of up to `n_bytes` of the largest file at `path`, which bypass the page cache.

    Return None where the file system does not support direct reads.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    n_bytes = min(n_bytes, largest.stat().st_size) // _PIECE_BYTES * _PIECE_BYTES
    try:
        fd = os.open(largest, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None

    def read(thread: int) -> None:
        with mmap.mmap(-1, _PIECE_BYTES) as aligned:
            for offset in range(thread * _PIECE_BYTES, n_bytes, n_threads * _PIECE_BYTES):
                os.preadv(fd, [aligned], offset)

    try:
        with ThreadPoolExecutor(n_threads) as threads:
            elapsed = _seconds(lambda: list(threads.map(read, range(n_threads))))
    except OSError:
        return None
    finally:
        os.close(fd)
    return n_bytes / elapsed if n_bytes else None


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a directory, in bytes."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_through(path: Path) -> None:
    """Read all files at `path` once to fill the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def drop_from_cache(path: Path) -> dict[str, Any]:
    """Drop the files at `path` from the page cache, as far as permissions allow.

    Returns
    -------
    dict
        ``dropped``: the method; ``cached_share``: share of the files that remains in the page cache.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    os.sync()  # Dirty pages cannot be dropped.
    how = "posix_fadvise"
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        how += " and drop_caches"
    return {"dropped": how, "cached_share": cached_share(files)}


def cached_share(files: Sequence[Path]) -> float:
    """Return the share of the files in the page cache, without reading them."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    n_pages = n_cached = 0
    for file in files:
        if not file.stat().st_size:
            continue
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            pages = np.frombuffer(mapped, dtype=np.uint8)
            in_cache = np.zeros(-(-len(pages) // mmap.PAGESIZE), dtype=np.uint8)
            answer = mincore(
                ctypes.c_void_p(pages.ctypes.data),
                ctypes.c_size_t(len(pages)),
                in_cache.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte)),
            )
            del pages  # The map cannot be closed while an array refers to it.
        if answer:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        n_pages += len(in_cache)
        n_cached += int((in_cache & 1).sum())
    return n_cached / max(n_pages, 1)


def rate_on_threads(work: Callable[[int], Callable[[], int]], *, n_threads: int, seconds: float = 1.0) -> float:
    """Return the amount of work that several threads do per second.

    Parameters
    ----------
    work
        Function of the thread's index that returns the work of the thread: a function that is called
        repeatedly and returns the amount of work done.
    n_threads
        Number of threads.
    seconds
        Duration of the measurement.
    """
    works = [work(i) for i in range(n_threads)]
    for once in works:
        once()
    start = time.perf_counter()

    def run(once: Callable[[], int]) -> int:
        # A thread may be scheduled only after the time is over, so each thread works at least once.
        total = once()
        while time.perf_counter() - start < seconds:
            total += once()
        return total

    with ThreadPoolExecutor(n_threads) as threads:
        total = sum(threads.map(run, works))
    return total / (time.perf_counter() - start)


def rss_anon_bytes(pid: int | str = "self") -> int:
    """Return the anonymous memory of a process in bytes, without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("RssAnon is missing from /proc/PID/status; anonymous memory is measured on Linux only")


def machine() -> dict[str, Any]:
    """Describe the machine: cores, processor, memory and Python version."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": sys.version.split()[0],
    }
