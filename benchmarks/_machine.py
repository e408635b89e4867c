"""What the machine allows, and what a process takes of it."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
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
