"""Thread pools for waiting on disks and servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class ThreadsOfProcess:
    """Thread pool that each process creates on first use, since a fork does not copy threads."""

    def __init__(self, count: Callable[[], int], name: str) -> None:
        self._count = count
        self._name = name
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __call__(self) -> ThreadPoolExecutor:
        """Return the pool of this process."""
        if self._pool is None or self._pool[0] != os.getpid():
            # If threads race, each creates a pool, which is harmless: a pool starts its threads only when it gets work.
            self._pool = os.getpid(), ThreadPoolExecutor(self._count(), thread_name_prefix=self._name)
        return self._pool[1]
