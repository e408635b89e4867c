"""What systems other than Linux lack, replaced by the nearest that they have."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import IO, Any

__all__ = ["after_fork", "cpus_of_process", "lock_file"]

# Where Windows locks a file: beyond its end, since nobody else can read what is locked.
_FAR = 2**30


def after_fork(call: Callable[[], None]) -> None:
    """Have every child that this process forks call a function first; Windows has no forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def cpus_of_process() -> int:
    """Return how many CPUs this process may run on; where none can be forbidden (macOS), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lock_file(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file against other processes; the lock goes when it is closed, or with the process.

    Parameters
    ----------
    file
        Open for writing.
    wait
        Whether to wait for another process that holds the lock.

    Raises
    ------
    BlockingIOError
        If another process holds the lock, and `wait` is False.
    """
    try:
        import fcntl
    except ImportError:
        _lock_on_windows(file.fileno(), wait=wait)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _lock_on_windows(number: int, *, wait: bool) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    before = os.lseek(number, 0, os.SEEK_CUR)
    os.lseek(number, _FAR, os.SEEK_SET)
    try:
        while True:
            try:
                msvcrt.locking(number, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from error
                continue  # it gives up after ten seconds
            return
    finally:
        os.lseek(number, before, os.SEEK_SET)
