"""Detection of silent Dask workers, whose process is frozen or whose machine is unreachable."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from dasksc._compat.distributed import heartbeat_interval

__all__ = ["Heartbeats"]

# A worker counts as silent after this time without a heartbeat, or after five heartbeat intervals if that is longer;
# the interval grows with the number of workers.
_SILENT_S = 5.0


class Heartbeats:
    """Times of the workers' last heartbeats by the scheduler's clock, which may differ from that of this machine."""

    def __init__(self) -> None:
        self._latest = 0.0  # Last heartbeat of any worker, by the scheduler's clock.
        self._known_at = 0.0  # Time at which this process learned of it, in seconds of `perf_counter`.

    def silent(self, workers: Mapping[str, Mapping[str, Any]], *, requested_at: float) -> dict[str, float]:
        """Return the silent workers by address, with a lower bound of their silence in seconds.

        `workers` is the scheduler's answer to an identity request sent at `requested_at`, in seconds of `perf_counter`.
        The time between the request and the answer does not count as silence, because a slow scheduler may have
        received heartbeats that it has not yet processed.
        """
        latest = max((float(worker["last_seen"]) for worker in workers.values()), default=0.0)
        if latest > self._latest:
            self._latest, self._known_at = latest, perf_counter()
        now = self._latest + max(0.0, requested_at - self._known_at)
        limit_s = max(_SILENT_S, 5 * heartbeat_interval(len(workers)))
        silences = {address: now - float(worker["last_seen"]) for address, worker in workers.items()}
        return {address: silence_s for address, silence_s in silences.items() if silence_s >= limit_s}
