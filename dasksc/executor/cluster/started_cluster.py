"""Dask cluster shared by the ranks of a run."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Self

import distributed

__all__ = ["POLL_S", "StartedCluster"]

logger = logging.getLogger("dasksc.window.start")

POLL_S = 0.05  # Time between polls of the store of the process group.


class StartedCluster:
    """A Dask cluster shared by the ranks of a run, and this rank's Client.

    Created by `start_cluster`. As a context manager, it closes this rank's Client on exit. Rank 0 then also closes
    the cluster, once the other ranks have closed their Clients.

    Parameters
    ----------
    client
        Client of this process. It is the active Client until it is closed.
    cluster
        The `distributed.LocalCluster` on the rank that started it; None on the others.
    dashboard_link
        Link to the dashboard as seen from the machine of rank 0; None without a dashboard.
    store
        Store of the process group; None for a single rank.
    token
        Identifier, in the store, of this call of `start_cluster`.
    n_others
        Number of ranks that rank 0 waits for.
    timeout_s
        Time in seconds that rank 0 waits for them.

    Attributes
    ----------
    address
        Address of the scheduler.

    Examples
    --------
    >>> cluster = dasksc.start_cluster(n_workers=1, threads_per_worker=2, processes=False)
    >>> sum(cluster.client.nthreads().values())
    2
    >>> cluster.close()
    """

    def __init__(
        self,
        client: distributed.Client,
        *,
        cluster: distributed.LocalCluster | None,
        dashboard_link: str | None,
        store: Any,
        token: str = "",
        n_others: int,
        timeout_s: float,
    ) -> None:
        self.client = client
        self.cluster = cluster
        self.address = str(client.scheduler.address)
        self.dashboard_link = dashboard_link
        self._store = store
        self._left = f"left/{token}"
        self._n_others = n_others
        self._timeout_s = timeout_s
        self._closed = False

    def close(self, *, wait_s: float | None = None) -> None:
        """Close this rank's Client and, on rank 0, the cluster. Idempotent.

        Parameters
        ----------
        wait_s
            Time in seconds that rank 0 waits for the other ranks to close their Clients; default: `timeout_s`. After
            this time, it logs a warning and closes the cluster.
        """
        if self._closed:
            return
        self._closed = True
        self.client.close()
        if self._store is not None:
            if self.cluster is None:
                self._store.add(self._left, 1)
            else:
                self._wait_for_others(self._timeout_s if wait_s is None else wait_s)
        if self.cluster is not None:
            self.cluster.close()

    def _wait_for_others(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while (n_left := self._store.add(self._left, 0)) < self._n_others:
            if time.monotonic() >= deadline:
                logger.warning(
                    "Closing the Dask cluster at %s, although %d of %d other ranks have not closed their Clients.",
                    self.address,
                    self._n_others - n_left,
                    self._n_others,
                )
                return
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A failed rank does not wait, because the other ranks may be waiting for it.
        self.close(wait_s=None if exc_type is None else 0.0)

    def __repr__(self) -> str:
        return f"<StartedCluster {self.address}>"
