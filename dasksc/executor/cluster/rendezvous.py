"""Connection of a rank to the cluster started by rank 0, through the store of the process group."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from typing import Any

from distributed.security import Security

from dasksc.errors import StartError
from dasksc.executor.cluster.security import refuse_untrusted
from dasksc.executor.cluster.started_cluster import POLL_S, StartedCluster
from dasksc.executor.schedulers import connected, remember_security

__all__ = ["attempt", "join_cluster", "publish_result"]

# Timeout of the first attempt to connect to a scheduler, which may no longer run. It doubles with each attempt.
_FIRST_TRY_S = 2.0


def attempt() -> str:
    """Return the number of times that torchrun has restarted the ranks of this machine, as a string."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def publish_result(store: Any, answer: dict[str, Any]) -> None:
    """Publish the address of the cluster, or the startup error, to the other ranks, if there are any."""
    if store is not None:
        store.set("address", json.dumps(answer))


def join_cluster(store: Any, *, security: Security | None, timeout_s: float) -> StartedCluster:
    """Connect to the cluster of rank 0.

    The store of torchrun's agent outlives the ranks that the agent restarts, so the first address read may be that of a
    scheduler that no longer runs. The restart count cannot identify such an address, because each machine counts its
    own restarts. If the scheduler does not answer, its address is therefore read again.
    """
    deadline = time.monotonic() + timeout_s
    try_s = _FIRST_TRY_S
    while True:
        answer = _wait_for_result(store, deadline, timeout_s=timeout_s)
        try:
            refuse_untrusted(answer["address"], security)
            left_s = max(POLL_S, deadline - time.monotonic())
            client = connected(answer["address"], security=security, timeout=min(try_s, left_s))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _no_connection(answer["address"], error, timeout_s=timeout_s) from error
        except (TypeError, ValueError) as error:  # Only one side has certificates.
            raise _no_connection(answer["address"], error, timeout_s=timeout_s) from error
        try_s *= 2
        time.sleep(POLL_S)
    remember_security(answer["address"], security)
    return StartedCluster(
        client,
        cluster=None,
        dashboard_link=answer["dashboard"],
        store=store,
        token=answer["token"],
        n_others=0,
        timeout_s=timeout_s,
    )


def _wait_for_result(store: Any, deadline: float, *, timeout_s: float) -> dict[str, Any]:
    """Wait for the answer of rank 0 and return it; raise an error if rank 0 failed."""
    try:
        store.wait(["address"], dt.timedelta(seconds=max(POLL_S, deadline - time.monotonic())))
    except RuntimeError as error:  # Includes torch.distributed.DistStoreError.
        raise StartError(
            f"rank 0 has not started a Dask cluster within {timeout_s:g} s. Every rank must call start_cluster "
            "the same number of times; raise timeout_s if starting takes longer"
        ) from error
    while True:
        answer: dict[str, Any] = json.loads(store.get("address"))
        if "error" not in answer:
            return answer
        # An error published before the ranks were restarted is obsolete once rank 0 publishes another answer.
        if answer["attempt"] == attempt() or time.monotonic() >= deadline:
            raise StartError(f"rank 0 could not start the Dask cluster: {answer['error']}")
        time.sleep(POLL_S)


def _no_connection(address: str, error: Exception, *, timeout_s: float) -> StartError:
    return StartError(
        f"rank 0 has started a Dask cluster at {address}, but this rank cannot connect to it within {timeout_s:g} s: "
        f"{type(error).__name__}: {error}. Give rank 0 a host= that this machine can reach, and give every rank the "
        "same security="
    )
