"""Which workers of a cluster have fallen silent: their processes are frozen, or their machines are gone."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from dasksc._compat.distributed import heartbeat_interval

__all__ = ["Heartbeats"]

_SILENT_S = 5.0  # and five heartbeats that did not come, which is more where there are many workers


class Heartbeats:
    """When the scheduler has heard from its workers, by its own clock, which may differ from that of this machine."""

    def __init__(self) -> None:
        self._latest = 0.0  # of any worker, by the scheduler's clock
        self._known_at = 0.0  # here

    def silent(self, workers: Mapping[str, Mapping[str, Any]], *, asked_at: float) -> dict[str, float]:
        """Return for how many seconds, at least, those that have fallen silent have not been heard from.

        `workers` is what the scheduler answered when it was asked for its identity at `asked_at`, in seconds of
        `perf_counter`. A scheduler that takes long to answer may itself be what has heard nothing.
        """
        latest = max((float(worker["last_seen"]) for worker in workers.values()), default=0.0)
        if latest > self._latest:
            self._latest, self._known_at = latest, perf_counter()
        now = self._latest + max(0.0, asked_at - self._known_at)
        limit_s = max(_SILENT_S, 5 * heartbeat_interval(len(workers)))
        silences = {address: now - float(worker["last_seen"]) for address, worker in workers.items()}
        return {address: silence_s for address, silence_s in silences.items() if silence_s >= limit_s}
