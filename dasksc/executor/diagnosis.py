"""Diagnosis of an epoch: a sentence that names its bottleneck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The loader counts as a bottleneck if training spends at least this fraction of the time waiting.
_HEALTHY = 0.05

# Name and remedy of the bottleneck, by part of the work.
_BOTTLENECKS = {
    "read": ("reading", "raise block_size or fetch_factor"),
    "decode": ("decoding", "raise block_size, or use more cores"),
    "other": ("chunk lookup and array code", "raise block_size or fetch_factor"),
    "transfer": ("transfers from Dask workers", 'use scheduler="threads", or workers on the machines of the ranks'),
    "gather": ("making batches", 'use layout="csr", select fewer genes=, or raise dasksc.gather-threads'),
    "memory": ("memory", "raise memory_limit or lower fetch_factor"),
}


def diagnosis(figures: Mapping[str, Any]) -> str:
    """Return a sentence that says whether training waits for data, and names the bottleneck and a remedy."""
    wait_share = figures["wait_share"]
    if not figures["n_batches"]:
        return "starting: no batch has been read yet"
    # The dashboard's loader page shows tenths of a percent, so a share that rounds to 0.0% counts as no waiting.
    if not round(1000 * wait_share):
        return "healthy: the trainer never waited"
    if not round(100 * wait_share):
        return "healthy: the trainer waited less than 1% of the time"
    if wait_share < _HEALTHY:
        return f"healthy: the trainer waited {wait_share:.0%} of the time"
    if figures["n_fetched"] <= 1 or figures["n_rank_fetches"] == 1:
        # Nothing is read ahead of the first fetch, so training always waits for it.
        if figures["n_batches_left"] > 0 or figures["n_fetching"] > 0:
            return f"starting: {wait_share:.0%} waiting for the first fetch"
        return f"the epoch is too short to read ahead: {wait_share:.0%} waiting for its only fetch"
    bottleneck, remedy = _BOTTLENECKS[_bottleneck(figures)]
    return f"limited by {bottleneck}: {wait_share:.0%} waiting; {remedy}"


def _bottleneck(figures: Mapping[str, Any]) -> str:
    n_in_flight = figures["n_fetching"] + figures["n_ready"]
    if n_in_flight and not figures["n_fetching"]:
        return "gather"
    limit_bytes, in_flight_bytes = figures["limit_bytes"], figures["in_flight_bytes"]
    if n_in_flight and limit_bytes and in_flight_bytes * (n_in_flight + 1) > limit_bytes * n_in_flight:
        return "memory"
    other_s = max(0.0, figures["fetch_s"] - figures["read_s"] - figures["decode_s"])
    seconds = {step: figures[f"{step}_s"] for step in ("read", "decode", "transfer", "gather")} | {"other": other_s}
    return max(seconds, key=lambda step: seconds[step])
