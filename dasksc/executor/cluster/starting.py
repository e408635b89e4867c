"""Start of the Dask cluster that all ranks of a run share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import uuid

import distributed
from distributed.security import Security

from dasksc._compat.distributed import ensure_ip, http_address
from dasksc.checks import check_flags, is_whole
from dasksc.errors import InputError
from dasksc.executor.cluster.dashboard_links import with_host
from dasksc.executor.cluster.rendezvous import attempt, join_cluster, publish_result
from dasksc.executor.cluster.security import LOOPBACK, SECRET_FILE, is_loopback, secured, temporary_certificates
from dasksc.executor.cluster.started_cluster import StartedCluster
from dasksc.executor.schedulers import connected, cpu_count, remember_security
from dasksc.planning.agreement import shared_store
from dasksc.planning.ranks import World

__all__ = ["start_cluster"]

logger = logging.getLogger("dasksc.window.start")

# Names of the modules that the scheduler loads at startup.
PRELOAD = ["dasksc.dashboard"]

_ordinals = itertools.count()


def start_cluster(
    n_workers: int | None = None,
    *,
    threads_per_worker: int | None = None,
    processes: bool | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    dashboard_address: str | None = "127.0.0.1:0",
    memory_limit: str | int | float | None = "auto",
    security: Security | str | os.PathLike[str] | None = None,
    timeout_s: float = 60.0,
) -> StartedCluster:
    """Start a Dask cluster that all ranks of this run share, and connect to it.

    Rank 0 starts a scheduler and workers on its machine. The other ranks read the address from the key-value
    store of the ``torch.distributed`` process group, which must be initialized if there are several ranks. The function
    runs no collective operation of the process group, but every rank must call it the same number of times. The Client
    becomes the active one, so data sets created without ``scheduler=`` use it. Workers may be separate processes, so
    the program needs the guard ``if __name__ == "__main__":``.

    Parameters
    ----------
    n_workers
        Number of Dask workers. Default: the number of cores divided by `threads_per_worker` (1 if not given), or one
        worker with ``processes=False``.
    threads_per_worker
        Number of threads per worker. Default: the number of cores divided by the number of workers.
    processes
        If True, each worker is a process; if False, the workers are threads of rank 0, which avoids
        serialization for a single rank. Default: True if there are several ranks.
    host
        Address of this machine on which the scheduler and the workers listen, or a name that resolves to such an
        address. Unless `host` is the loopback of this machine, connections are encrypted and both ends must present a
        certificate. With several ranks, this is the certificate of `security`. With a single rank and no `security`, a
        certificate is created for this run and kept in memory.
    port
        Port of the scheduler; 0 selects a free one.
    dashboard_address
        Address on which the dashboard listens, unencrypted; None disables the dashboard.
    memory_limit
        Memory limit of each worker, as for `distributed.LocalCluster`. For workers that are threads, ``"auto"`` means
        no limit, because a limit would apply to all memory of the program.
    security
        Secret that authenticates the ranks: a `distributed.Security`, or the path of a PEM file with a private key and
        its certificate. The file must be the same on every rank and readable only by its owner. If given, loopback
        connections are encrypted as well. The secret is never written to the store. To create such a file::

            openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=dasksc -keyout ranks.pem -out ranks.pem
    timeout_s
        Time in seconds that the ranks wait for rank 0 to start the cluster, and that rank 0 waits for the others
        to leave it.

    Returns
    -------
    StartedCluster
        Cluster with the attributes ``client`` and ``address``. Close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        If an argument is invalid, or other users can read the file of `security`. With several ranks also: if the
        process group is missing; if `host` is not loopback and `security` is missing; or if the ranks run on several
        machines and `host` is loopback or a name that resolves to it.
    StartError
        If rank 0 failed, did not answer in time or cannot be reached; the message gives the reason. Rank 0 closes
        everything it has started and raises its original error.

    Notes
    -----
    Anyone who can connect to a Dask scheduler can run any program on its workers. If the scheduler listens on loopback
    and there is no `security`, this includes every user of the machine. A rank without `security` connects only to
    loopback, whatever address the store contains.

    Examples
    --------
    >>> with dasksc.start_cluster(n_workers=1, processes=False) as cluster:
    ...     dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, seed=0)  # reads on the cluster
    ...     n_cells = sum(len(batch) for batch in dataset)
    >>> n_cells
    2000
    """
    world = World.detect()
    several = world.world_size > 1
    store = shared_store(f"dasksc/cluster/{next(_ordinals)}") if several else None
    if several and not hasattr(store, "wait"):  # JAX's store has no `wait`.
        raise InputError(
            f"there are {world.world_size} ranks (from {world.source}) but no process group through which they can "
            "find each other. Call torch.distributed.init_process_group first"
        )

    def check_arguments() -> None:
        check_flags(processes=processes or False)
        _validate_arguments(
            host=host,
            port=port,
            n_workers=n_workers,
            threads_per_worker=threads_per_worker,
            dashboard_address=dashboard_address,
            timeout_s=timeout_s,
            is_spread=world.local_world_size < world.world_size,
            is_secret=security is not None or not several,
        )

    if world.rank != 0:
        check_arguments()
        return join_cluster(store, security=secured(security), timeout_s=timeout_s)
    token = uuid.uuid4().hex
    with contextlib.ExitStack() as started:
        try:
            check_arguments()
            _check_resolved(host, is_spread=world.local_world_size < world.world_size)
            certificates = secured(security)
            if certificates is None and host not in LOOPBACK:
                certificates = temporary_certificates()
            cluster = _local_cluster(
                n_workers,
                threads_per_worker,
                processes=several if processes is None else processes,
                several=several,
                host=host,
                port=port,
                dashboard_address=dashboard_address,
                memory_limit=memory_limit,
                security=certificates,
            )
            started.callback(cluster.close)
            remember_security(cluster.scheduler_address, certificates)
            client = connected(cluster)
            started.callback(client.close)
            link = None
            if dashboard_address is not None:
                link = with_host(str(cluster.dashboard_link), http_address(cluster.scheduler))
            publish_result(store, {"address": cluster.scheduler_address, "dashboard": link, "token": token})
        except BaseException as error:
            # Publish the error before closing anything, because the other ranks are waiting.
            with contextlib.suppress(RuntimeError):
                publish_result(store, {"error": f"{type(error).__name__}: {error}", "attempt": attempt()})
            raise
        started.pop_all()
    return StartedCluster(
        client,
        cluster=cluster,
        dashboard_link=link,
        store=store,
        token=token,
        n_others=world.world_size - 1,
        timeout_s=timeout_s,
    )


def _validate_arguments(
    *,
    host: object,
    port: object,
    n_workers: object,
    threads_per_worker: object,
    dashboard_address: object,
    timeout_s: object,
    is_spread: bool,
    is_secret: bool,
) -> None:
    """Raise `InputError` for arguments that are invalid regardless of the machine."""
    if not isinstance(host, str) or not host:
        raise InputError(f"host={host!r} must be a name or an address of this machine, such as '127.0.0.1'")
    if not is_whole(port) or not 0 <= port <= 65535:
        raise InputError(f"port={port!r} must be a whole number from 0 to 65535; 0 selects a free port")
    for name, value, least in (("n_workers", n_workers, 0), ("threads_per_worker", threads_per_worker, 1)):
        if value is not None and (not is_whole(value) or value < least):
            raise InputError(f"{name}={value!r} must be None or a whole number of at least {least}")
    if dashboard_address is not None and not isinstance(dashboard_address, str):
        example = f"{LOOPBACK[0]}:{dashboard_address if is_whole(dashboard_address) and dashboard_address >= 0 else 0}"
        raise InputError(f"dashboard_address={dashboard_address!r} must be None or host:port, such as {example!r}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InputError(f"timeout_s={timeout_s!r} must be a positive number of seconds")
    if is_spread and (host == "localhost" or is_loopback(host)):
        raise InputError(
            f"host={host!r} cannot be reached by ranks on other machines. Give the network address of the machine "
            "of rank 0, e.g. host=os.environ['MASTER_ADDR'], and security=, by which ranks authenticate each other"
        )
    if host not in LOOPBACK and not is_secret:
        raise InputError(
            f"host={host!r} with several ranks needs security=, a secret by which they authenticate each other: "
            f"{SECRET_FILE}. If all ranks are on this machine, omit host="
        )


def _check_resolved(host: str, *, is_spread: bool) -> None:
    """Raise `InputError` for a name other than ``localhost`` that resolves to loopback on this machine.

    If all ranks run on this machine, log a warning instead. Debian's /etc/hosts maps the name of the machine to a
    loopback address.
    """
    try:
        address = ensure_ip(host)
    except OSError as error:
        raise InputError(
            f"host={host!r} cannot be resolved on this machine ({error}). Give its name or address"
        ) from error
    if host == "localhost" or is_loopback(host) or not is_loopback(address):
        return
    complaint = (
        f"host={host!r} is {address} on this machine, a loopback address (see /etc/hosts), to which no other machine "
        "can connect. Give the address of the network interface instead, one of those that hostname -I prints"
    )
    if is_spread:
        raise InputError(complaint)
    logger.warning("%s.", complaint)


def _local_cluster(
    n_workers: int | None,
    threads_per_worker: int | None,
    *,
    processes: bool,
    several: bool,
    host: str,
    port: int,
    dashboard_address: str | None,
    memory_limit: str | int | float | None,
    security: Security | None,
) -> distributed.LocalCluster:
    in_process = not (processes or several or port or security)
    n_workers, threads_per_worker = _sizes(n_workers, threads_per_worker, processes=processes)
    if memory_limit == "auto" and not processes:
        memory_limit = None
    return distributed.LocalCluster(
        n_workers=n_workers,
        threads_per_worker=threads_per_worker,
        processes=processes,
        protocol="inproc" if in_process else "tcp" if security is None else "tls",
        host=None if in_process else host,
        scheduler_port=port,
        dashboard_address=dashboard_address or f"{LOOPBACK[0]}:0",
        worker_dashboard_address=f"{LOOPBACK[0]}:0",
        memory_limit=memory_limit,
        scheduler_kwargs={"preload": list(PRELOAD), "dashboard": dashboard_address is not None},
        security=security,
    )


def _sizes(n_workers: int | None, n_threads: int | None, *, processes: bool) -> tuple[int, int]:
    """Return the numbers of workers and of threads per worker, derived from the cores available to this process."""
    n_cpus = cpu_count()
    if n_workers is None:
        n_workers = max(1, n_cpus // (n_threads or 1)) if processes else 1
    return n_workers, n_threads or max(1, n_cpus // max(1, n_workers))
