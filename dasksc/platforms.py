"""Functions of the operating system, which Linux and macOS share, and of the interpreter."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

__all__ = ["after_fork", "lock_file", "without_collection"]


def after_fork(call: Callable[[], None]) -> None:
    """Register a function that each forked child of this process calls first."""
    os.register_at_fork(after_in_child=call)


def lock_file(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file against other processes, until the file is closed or this process exits."""
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspend automatic garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
