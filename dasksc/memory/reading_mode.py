"""Reading mode of an epoch, chosen when the epoch begins and again when memory runs short."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic, thread_time

from dask.utils import format_bytes

from dasksc.displays import first_of
from dasksc.memory.limits import memory_limit, recommended_bytes
from dasksc.memory.model import ReadingMode

__all__ = ["AdaptiveReadingMode"]

logger = logging.getLogger("dasksc.dataset")

# Minimum times between checks of the limits, in seconds and in multiples of the CPU time of the last check; the longer
# one applies. A check takes about 1 ms, or 40 ms for a thousand files. Its wall time is not used, because waiting for
# memory would lengthen it and delay the next check.
_CHECK_INTERVAL_S, _CHECK_PAUSE = 0.5, 50


class AdaptiveReadingMode:
    """Reading mode of an epoch, adapted to the available memory.

    Parameters
    ----------
    decide
        Function that returns the reading mode for the memory available now. Later calls pass the number of parts of a
        fetch as ``n_parts=``, since it is fixed by then.
    name
        Name of the data set, for log messages.
    needed_bytes
        Function that returns the memory needed to read at full speed, in bytes. If less is available, a warning states
        the consequences.
    """

    def __init__(self, decide: Callable[..., ReadingMode], name: str, needed_bytes: Callable[[], int]) -> None:
        self._decide = decide
        self._name = name
        self._needed_bytes = needed_bytes
        self._lock = threading.Lock()
        self._mode = decide()
        self._next_check = monotonic() + _CHECK_INTERVAL_S
        if self._mode.unmapped:
            self._log_unmapped()
        if not self._mode.fits:
            self._warn()

    @property
    def n_parts(self) -> int:
        """Number of tasks per fetch, constant throughout an epoch."""
        return self._mode.n_parts

    @property
    def unmapped(self) -> frozenset[str]:
        """Labels of the matrices whose files are read into memory rather than memory-mapped."""
        return self._mode.unmapped

    def depth(self) -> int:
        """Return the number of parts of fetches that may be in flight; memory is checked again at intervals."""
        with self._lock:
            if monotonic() > self._next_check:
                start = thread_time()
                before, now = self._mode, self._decide(n_parts=self._mode.n_parts)
                self._next_check = monotonic() + max(_CHECK_INTERVAL_S, _CHECK_PAUSE * (thread_time() - start))
                # The mode changes only if fewer parts fit or more files must be unmapped, because files that are mapped
                # again may have to be read from disk again. Memory that becomes available is used from the next epoch
                # on.
                if now.depth < before.depth or not now.unmapped <= before.unmapped:
                    self._mode = now
                if not self._mode.unmapped <= before.unmapped:
                    self._log_unmapped()
                if before.fits and not self._mode.fits:
                    self._warn()
            return self._mode.depth

    def _log_unmapped(self) -> None:
        logger.info(
            "%s: files are read into memory rather than mapped, since the page cache cannot hold them: %s. An epoch "
            "takes %s of memory and %s of page cache",
            self._name,
            first_of(sorted(self._mode.unmapped)),
            format_bytes(self._mode.demand.anonymous),
            format_bytes(self._mode.demand.pages),
        )

    def _warn(self) -> None:
        limit = memory_limit()
        logger.warning(
            "%s needs %s of memory for each process that reads it, but %s allows only %s for all processes together: "
            "reading is slow, and the operating system may kill a process. Request %s per rank, or lower fetch_factor",
            self._name,
            format_bytes(self._needed_bytes()),
            limit.source,
            format_bytes(limit.n_bytes),
            format_bytes(recommended_bytes(self._needed_bytes())),
        )
