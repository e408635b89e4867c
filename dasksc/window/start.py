"""One Dask cluster for all ranks of a run, started by rank 0."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import distributed
from distributed.security import Security

from dasksc.errors import InputError, StartError
from dasksc.window.schedulers import connected, cpu_count, remember_security
from dasksc.world import World, shared_store

__all__ = ["StartedCluster", "start_cluster"]

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_S = 0.05
# Modules that the scheduler loads when it starts, by name.
PRELOAD = ["dasksc.dashboard"]

_ordinals = itertools.count()


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
        n_others: int,
        timeout_s: float,
    ) -> None:
        self.client = client
        self.cluster = cluster
        self.address = str(client.scheduler.address)
        self.dashboard_link = dashboard_link
        self._store = store
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
                self._store.add("left", 1)
            else:
                self._wait_for_others(self._timeout_s if wait_s is None else wait_s)
        if self.cluster is not None:
            self.cluster.close()

    def _wait_for_others(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while (n_left := self._store.add("left", 0)) < self._n_others:
            if time.monotonic() >= deadline:
                logger.warning(
                    "The Dask cluster at %s closes, although %d of %d other ranks have not closed theirs.",
                    self.address,
                    self._n_others - n_left,
                    self._n_others,
                )
                return
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A rank that has failed waits for nobody: the others may be waiting for it.
        self.close(wait_s=None if exc_type is None else 0.0)

    def __repr__(self) -> str:
        return f"<StartedCluster {self.address}>"


def start_cluster(
    n_workers: int | None = None,
    *,
    threads_per_worker: int | None = None,
    processes: bool | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    dashboard_address: str | None = "127.0.0.1:0",
    memory_limit: str | int | float | None = "auto",
    security: Security | None = None,
    timeout_s: float = 60.0,
) -> StartedCluster:
    """Start a Dask cluster that all ranks of this run share, and connect to it.

    Rank 0 starts a scheduler and workers on its machine. The others learn the address through the key-value
    store of the ``torch.distributed`` process group, which must be initialised if there are several ranks;
    it is no collective, and every rank must call it equally often. The Client is the active one, so data
    sets made without ``scheduler=`` use it. As scheduler and workers are processes of their own kind, the
    program needs the guard ``if __name__ == "__main__":``.

    Parameters
    ----------
    n_workers
        Workers; default: one process a core, or with ``processes=False`` one.
    threads_per_worker
        Threads of each; default: the cores divided by the workers.
    processes
        Whether workers are processes. Default: if there are several ranks. With ``False`` they are threads of
        rank 0, which for a single rank costs no serialisation.
    host
        Where scheduler and workers listen. Anything but this machine's loopback is encrypted: both ends must
        show a certificate, which is made for this run, kept in memory, and handed to the ranks by the store.
    port
        Of the scheduler; 0 takes a free one.
    dashboard_address
        Where the dashboard listens, unencrypted; None for none.
    memory_limit
        Of each worker; as for `distributed.LocalCluster`. ``"auto"`` is no limit for workers that are threads, to which
        all that the program holds would be counted.
    security
        Certificates of your own, the same on every rank, instead of those made for this run.
    timeout_s
        How long the ranks wait for rank 0 to start, and rank 0 for the others to leave.

    Returns
    -------
    StartedCluster
        With the attributes ``client`` and ``address``; close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        If there are several ranks and no process group, or they run on several machines and `host` is loopback.
    StartError
        If rank 0 failed or did not answer in time; says why.

    Notes
    -----
    Whoever can connect to a Dask scheduler can run any program on its workers.
    """
    world = World.detect()
    several = world.world_size > 1
    store = shared_store(f"dasksc/cluster/{next(_ordinals)}") if several else None
    if several and store is None:
        raise InputError(
            f"there are {world.world_size} ranks (from {world.source}) and no process group through which they could "
            "find each other. Call torch.distributed.init_process_group first"
        )
    is_loopback = host in _LOOPBACK
    if is_loopback and world.local_world_size < world.world_size:
        raise InputError(
            f"host={host!r} is out of reach for ranks on other machines. Give the address of rank 0's machine by which "
            "they reach it, e.g. host=os.environ['MASTER_ADDR']; connections are encrypted then"
        )
    if world.rank != 0:
        return _join(store, security=security, timeout_s=timeout_s)
    if processes is None:
        processes = several
    try:
        if security is None and not is_loopback:
            security = _certificates()
        in_process = not (processes or several or port or security)
        n_workers, threads_per_worker = _sizes(n_workers, threads_per_worker, processes=processes)
        if memory_limit == "auto" and not processes:
            memory_limit = None
        cluster = distributed.LocalCluster(
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            processes=processes,
            protocol="inproc" if in_process else "tcp" if security is None else "tls",
            host=None if in_process else host,
            scheduler_port=port,
            dashboard_address=dashboard_address or f"{_LOOPBACK[0]}:0",
            worker_dashboard_address=f"{_LOOPBACK[0]}:0",
            memory_limit=memory_limit,
            scheduler_kwargs={"preload": list(PRELOAD), "dashboard": dashboard_address is not None},
            security=security,
        )
    except Exception as error:
        if store is not None:
            store.set("address", json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    remember_security(cluster.scheduler_address, security)
    client = distributed.Client(cluster)
    link = None if dashboard_address is None else _link(cluster, dashboard_address)
    if store is not None:
        answer = {"address": cluster.scheduler_address, "dashboard": link, "tls": _pem(security)}
        store.set("address", json.dumps(answer))
    return StartedCluster(
        client, cluster=cluster, dashboard_link=link, store=store, n_others=world.world_size - 1, timeout_s=timeout_s
    )


def _sizes(n_workers: int | None, n_threads: int | None, *, processes: bool) -> tuple[int, int]:
    """Settle workers and threads of each, by the cores that this process may use."""
    n_cpus = cpu_count()
    if n_workers is None:
        n_workers = max(1, n_cpus // (n_threads or 1)) if processes else 1
    return n_workers, n_threads or max(1, n_cpus // n_workers)


def _link(cluster: Any, dashboard_address: str) -> str:
    """Return where the dashboard listens; Dask's own link has the scheduler's host in it."""
    host = dashboard_address.removeprefix("http://").rpartition(":")[0]
    link = str(cluster.dashboard_link)
    return link.replace(link.split("/")[2].rpartition(":")[0], host, 1) if host else link


def _join(store: Any, *, security: Security | None, timeout_s: float) -> StartedCluster:
    """Connect to the cluster of rank 0."""
    try:
        store.wait(["address"], dt.timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch.distributed.DistStoreError is one
        raise StartError(
            f"rank 0 has not started a Dask cluster within {timeout_s:g} s. Every rank must call start_cluster, "
            "equally often; raise timeout_s if starting takes longer"
        ) from error
    answer = json.loads(store.get("address"))
    if "error" in answer:
        raise StartError(f"rank 0 could not start the Dask cluster: {answer['error']}")
    if security is None and answer["tls"] is not None:
        security = Security(require_encryption=True, **answer["tls"])
    remember_security(answer["address"], security)
    client = connected(answer["address"], security=security, timeout=timeout_s)
    return StartedCluster(
        client, cluster=None, dashboard_link=answer["dashboard"], store=store, n_others=0, timeout_s=timeout_s
    )


def _certificates() -> Security:
    try:
        return Security.temporary()
    except ImportError as error:
        raise InputError(
            "a host other than loopback is encrypted, and making certificates needs the library cryptography: "
            "pip install dasksc[cluster], or give security="
        ) from error


_TLS_FIELDS: Sequence[str] = (
    "tls_ca_file",
    *(f"tls_{role}_{part}" for role in ("client", "scheduler", "worker") for part in ("cert", "key")),
)


def _pem(security: Security | None) -> dict[str, str] | None:
    """Return what other ranks need of certificates that are held in memory; files they must have themselves."""
    if security is None:
        return None
    fields = {name: getattr(security, name) for name in _TLS_FIELDS}
    return {name: value for name, value in fields.items() if value is not None and "\n" in value} or None
