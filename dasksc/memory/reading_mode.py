"""How an epoch is being read: decided when it begins, and again when memory becomes short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from dask.utils import format_bytes

from dasksc.memory.limits import memory_limit, to_ask_for
from dasksc.memory.model import Way

__all__ = ["Reading"]

logger = logging.getLogger("dasksc.dataset")

# A look at the limits takes about a millisecond.
_LOOK_S = 0.5


class Reading:
    """The way in which the fetches of an epoch are read, as memory allows at the time.

    Parameters
    ----------
    decide
        Returns the way for what memory is available now; called with ``n_parts=`` once that is settled.
    name
        What is read, for the log.
    needed_bytes
        Returns what the process needs to read at full speed, for a warning where it has less.
    """

    def __init__(self, decide: Callable[..., Way], name: str, needed_bytes: Callable[[], int]) -> None:
        self._decide = decide
        self._name = name
        self._needed_bytes = needed_bytes
        self._lock = threading.Lock()
        self._way = decide()
        self._looked = monotonic()
        if self._way.unmapped:
            self._tell()
        if not self._way.fits:
            self._warn()

    @property
    def n_parts(self) -> int:
        """Tasks of a fetch, the same throughout an epoch."""
        return self._way.n_parts

    @property
    def unmapped(self) -> frozenset[str]:
        """Names of the matrices whose files are read rather than mapped."""
        return self._way.unmapped

    def depth(self) -> int:
        """Return how many parts of fetches may be in flight; looks at the memory from time to time."""
        with self._lock:
            if monotonic() - self._looked > _LOOK_S:
                self._looked = monotonic()
                before, now = self._way, self._decide(n_parts=self._way.n_parts)
                # Back and forth would read what is mapped already; more memory is used in the next epoch.
                if now.depth < before.depth or not now.unmapped <= before.unmapped:
                    self._way = now
                if not self._way.unmapped <= before.unmapped:
                    self._tell()
                if before.fits and not self._way.fits:
                    self._warn()
            return self._way.depth

    def _tell(self) -> None:
        logger.info(
            "%s is read into memory rather than mapped (%s): its files would not stay in the page cache. That takes %s "
            "of memory and %s of page cache",
            self._name,
            ", ".join(sorted(self._way.unmapped)),
            format_bytes(self._way.demand.anonymous),
            format_bytes(self._way.demand.pages),
        )

    def _warn(self) -> None:
        limit = memory_limit()
        logger.warning(
            "%s needs %s of memory for each process that reads it, and %s allows %s for all: reading is slow, and the "
            "kernel may end a process. Ask for %s a rank, or lower fetch_factor",
            self._name,
            format_bytes(self._needed_bytes()),
            limit.source,
            format_bytes(limit.n_bytes),
            format_bytes(to_ask_for(self._needed_bytes())),
        )
