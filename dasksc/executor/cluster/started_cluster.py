"""The Dask cluster that the ranks of a run share."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Self

import distributed

__all__ = ["POLL_S", "StartedCluster"]

logger = logging.getLogger("dasksc.window.start")

POLL_S = 0.05  # between looks into the store of the process group


class StartedCluster:
    """A Dask cluster that the ranks of a run share, and this rank's Client of it.

    `start_cluster` makes it. A context manager: leaving it closes this rank's Client, and on rank 0, once
    the other ranks have left too, the cluster.

    Parameters
    ----------
    client
        This process's Client, the active one until it is closed.
    cluster
        The `distributed.LocalCluster`, on the rank that started it; else None.
    dashboard_link
        Where the dashboard is, as seen from rank 0's machine; None without one.
    store
        Of the process group; None for a single rank.
    token
        What tells this start from others in the store.
    n_others
        Ranks that rank 0 waits for.
    timeout_s
        How long it does.

    Attributes
    ----------
    address
        Of the scheduler.
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
            How long rank 0 waits for the other ranks to close theirs; default: as long as it waited for the
            start. Then it closes the cluster all the same, with a warning.
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
                    "The Dask cluster at %s closes, although %d of %d other ranks have not closed theirs.",
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
        # A rank that has failed waits for nobody: the others may be waiting for it.
        self.close(wait_s=None if exc_type is None else 0.0)

    def __repr__(self) -> str:
        return f"<StartedCluster {self.address}>"
