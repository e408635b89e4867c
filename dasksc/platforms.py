"""Substitutes for Linux functions on other operating systems."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import IO, Any

__all__ = ["after_fork", "lock_file"]

# Offset of the lock on Windows. It is beyond the end of the file, because other processes cannot read a locked range.
_LOCK_OFFSET = 2**30


def after_fork(call: Callable[[], None]) -> None:
    """Register a function that each forked child of this process calls first; do nothing on Windows."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def lock_file(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file against other processes, until the file is closed or this process exits."""
    try:
        import fcntl
    except ImportError:
        _lock_on_windows(file.fileno(), wait=wait)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _lock_on_windows(number: int, *, wait: bool) -> None:
    msvcrt: Any = importlib.import_module("msvcrt")
    before = os.lseek(number, 0, os.SEEK_CUR)
    os.lseek(number, _LOCK_OFFSET, os.SEEK_SET)
    try:
        while True:
            try:
                msvcrt.locking(number, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(*error.args) from error
                continue  # `locking` gives up after ten seconds.
            return
    finally:
        os.lseek(number, before, os.SEEK_SET)
