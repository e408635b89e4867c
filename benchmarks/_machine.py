"""What the machine allows, and what a process takes of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_PIECE_BYTES = 1 << 23


def memcpy_bytes_per_s(n_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Measure one thread copying `n_bytes` in memory; the best of `repeats`."""
    source, target = np.ones(n_bytes, dtype=np.uint8), np.empty(n_bytes, dtype=np.uint8)
    target[:] = 1
    best = min(_seconds(lambda: np.copyto(target, source)) for _ in range(repeats))
    return n_bytes / best


def disk_bytes_per_s(path: Path, n_bytes: int = 1 << 30) -> float | None:
    """Measure reading up to `n_bytes` of the largest file at `path` past the page cache.

    None where the file system has no direct reads.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    n_bytes = min(n_bytes, largest.stat().st_size) // _PIECE_BYTES * _PIECE_BYTES
    try:
        fd = os.open(largest, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None
    try:
        with mmap.mmap(-1, _PIECE_BYTES) as aligned:
            elapsed = _seconds(lambda: [os.preadv(fd, [aligned], offset) for offset in range(0, n_bytes, _PIECE_BYTES)])
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
    """Bytes of a file, or of all files of a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_through(path: Path) -> None:
    """Read everything at `path` once, so that the page cache holds what fits."""
    buffer = bytearray(_PIECE_BYTES)
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def drop_from_cache(path: Path) -> str:
    """Ask the kernel to forget what it holds of the files at `path`; return how."""
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    return "POSIX_FADV_DONTNEED"


def cached_share(path: Path, n_samples: int = 500) -> float:
    """Estimate how much of a file the page cache holds."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    n_cached = 0
    try:
        for offset in np.random.default_rng(0).integers(0, size, n_samples).tolist():
            with contextlib.suppress(BlockingIOError):
                n_cached += os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    finally:
        os.close(fd)
    return n_cached / n_samples


def rate_on_threads(work: Callable[[], int], *, n_threads: int, seconds: float = 1.0) -> float:
    """Call `work` on several threads for a while; return the sum of what it returned, per second."""
    stop = time.perf_counter() + seconds
    start = time.perf_counter()

    def run(_: int) -> int:
        total = 0
        while time.perf_counter() < stop:
            total += work()
        return total

    with ThreadPoolExecutor(n_threads) as threads:
        total = sum(threads.map(run, range(n_threads)))
    return total / (time.perf_counter() - start)


def rss_anon_bytes(pid: int | str = "self") -> int:
    """Anonymous memory of a process, in bytes: mapped files do not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell anonymous from mapped memory")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
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
