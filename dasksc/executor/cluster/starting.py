"""One Dask cluster for all ranks of a run, started by rank 0."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import itertools
import json
import logging
import os
import time
import uuid
from numbers import Integral
from types import TracebackType
from typing import Any, Self, TypeGuard

import distributed
from distributed.security import Security
from distributed.utils import ensure_ip

from dasksc.errors import InputError, StartError, WrongTypeError
from dasksc.executor.cluster.links import listening_at, with_host
from dasksc.executor.schedulers import connected, cpu_count, remember_security
from dasksc.planning.agreement import shared_store
from dasksc.planning.ranks import World
from dasksc.storage.safety.private import exposure

__all__ = ["StartedCluster", "start_cluster"]

logger = logging.getLogger("dasksc.window.start")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_S = 0.05
_FIRST_TRY_S = 2.0  # to connect to what may be gone; each further try takes twice as long
# Modules that the scheduler loads when it starts, by name.
PRELOAD = ["dasksc.dashboard"]

_ROLES = ("client", "scheduler", "worker")
# How to make what `security` takes.
_HOW = (
    "the path of a file that only you can read and every rank finds, made by "
    "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=dasksc -keyout ranks.pem -out ranks.pem"
)

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
    security: Security | str | os.PathLike[str] | None = None,
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
        Where scheduler and workers listen: an address of this machine, or a name that leads to one. Anything but this
        machine's loopback is encrypted, and both ends must show a certificate: several ranks that of `security`, a
        single rank one that is made for this run and kept in memory.
    port
        Of the scheduler; 0 takes a free one.
    dashboard_address
        Where the dashboard listens, unencrypted; None for none.
    memory_limit
        Of each worker; as for `distributed.LocalCluster`. ``"auto"`` is no limit for workers that are threads, to which
        all that the program holds would be counted.
    security
        The secret that ranks know each other by: the path of a file in PEM format with a private key and its
        certificate, the same on every rank and readable by its user alone, or a `distributed.Security`. Loopback is
        encrypted, too, if it is given. It does not go through the store. ::

            openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=dasksc -keyout ranks.pem -out ranks.pem
    timeout_s
        How long the ranks wait for rank 0 to start, and rank 0 for the others to leave.

    Returns
    -------
    StartedCluster
        With the attributes ``client`` and ``address``; close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        If an argument cannot work, there are several ranks and no process group, several ranks have no `security` and
        `host` is not loopback, other users can read the file of `security`, or ranks run on several machines and
        `host` is loopback, also by way of a name.
    StartError
        If rank 0 failed, did not answer in time or cannot be reached; says why. Rank 0 raises what it failed with,
        having closed what it had started.

    Notes
    -----
    Whoever can connect to a Dask scheduler can run any program on its workers; without `security` that is every user
    of the machine. A rank without `security` connects to nothing but loopback, wherever the store leads it.
    """
    world = World.detect()
    several = world.world_size > 1
    store = shared_store(f"dasksc/cluster/{next(_ordinals)}") if several else None
    if several and not hasattr(store, "wait"):  # that of JAX cannot be waited for
        raise InputError(
            f"there are {world.world_size} ranks (from {world.source}) and no process group through which they could "
            "find each other. Call torch.distributed.init_process_group first"
        )

    def check() -> None:
        _check(
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
        check()
        return _join(store, security=_secured(security), timeout_s=timeout_s)
    token = uuid.uuid4().hex
    with contextlib.ExitStack() as started:
        try:
            check()
            _check_resolved(host, is_spread=world.local_world_size < world.world_size)
            certificates = _secured(security)
            if certificates is None and host not in _LOOPBACK:
                certificates = _certificates()
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
                link = with_host(str(cluster.dashboard_link), listening_at(cluster.scheduler))
            _tell(store, {"address": cluster.scheduler_address, "dashboard": link, "token": token})
        except BaseException as error:
            # At once, before what was started is closed: the others wait for it.
            with contextlib.suppress(RuntimeError):
                _tell(store, {"error": f"{type(error).__name__}: {error}", "attempt": _attempt()})
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


def _check(
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
    """Refuse arguments that cannot work, whatever the machine."""
    if not isinstance(host, str) or not host:
        raise InputError(f"host={host!r} must be a name or an address of this machine, such as '127.0.0.1'")
    if not _is_count(port, least=0) or port > 65535:
        raise InputError(f"port={port!r} must be a whole number from 0, which takes a free one, to 65535")
    for name, value, least in (("n_workers", n_workers, 0), ("threads_per_worker", threads_per_worker, 1)):
        if value is not None and not _is_count(value, least=least):
            raise InputError(f"{name}={value!r} must be None or a whole number of at least {least}")
    if dashboard_address is not None and not isinstance(dashboard_address, str):
        example = f"{_LOOPBACK[0]}:{dashboard_address if _is_count(dashboard_address, least=0) else 0}"
        raise InputError(f"dashboard_address={dashboard_address!r} must be None or host and port, as {example!r}")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InputError(f"timeout_s={timeout_s!r} must be a positive number of seconds")
    if is_spread and (host == "localhost" or _is_loopback(host)):
        raise InputError(
            f"host={host!r} is out of reach for ranks on other machines. Give the address of rank 0's machine by which "
            "they reach it, e.g. host=os.environ['MASTER_ADDR'], and security=, by which ranks know each other"
        )
    if host not in _LOOPBACK and not is_secret:
        raise InputError(
            f"host={host!r} with several ranks needs security=, a secret by which they know each other: {_HOW}. If all "
            "ranks are on this machine, leave host= out"
        )


def _is_count(value: object, *, least: int) -> TypeGuard[int]:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def _check_resolved(host: str, *, is_spread: bool) -> None:
    """Refuse a name that other machines know and that is loopback here, as the own name in Debian's /etc/hosts is."""
    try:
        address = ensure_ip(host)
    except OSError as error:
        raise InputError(
            f"host={host!r} cannot be resolved on this machine ({error}). Give a name or an address of it"
        ) from error
    if host == "localhost" or _is_loopback(host) or not _is_loopback(address):
        return
    complaint = (
        f"host={host!r} is {address} on this machine, its loopback (see /etc/hosts), to which no other machine can "
        "connect. Give the address of the network interface instead, one of those that hostname -I prints"
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
        dashboard_address=dashboard_address or f"{_LOOPBACK[0]}:0",
        worker_dashboard_address=f"{_LOOPBACK[0]}:0",
        memory_limit=memory_limit,
        scheduler_kwargs={"preload": list(PRELOAD), "dashboard": dashboard_address is not None},
        security=security,
    )


def _sizes(n_workers: int | None, n_threads: int | None, *, processes: bool) -> tuple[int, int]:
    """Settle workers and threads of each, by the cores that this process may use."""
    n_cpus = cpu_count()
    if n_workers is None:
        n_workers = max(1, n_cpus // (n_threads or 1)) if processes else 1
    return n_workers, n_threads or max(1, n_cpus // max(1, n_workers))


def _attempt() -> str:
    """Return how often torchrun, on this machine, has started the ranks anew."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _tell(store: Any, answer: dict[str, Any]) -> None:
    """Tell the other ranks, if there are any, what has become of the start."""
    if store is not None:
        store.set("address", json.dumps(answer))


def _join(store: Any, *, security: Security | None, timeout_s: float) -> StartedCluster:
    """Connect to the cluster of rank 0.

    The store of torchrun's agent outlives ranks that it restarts, so what is read first may be the address of a
    scheduler that is gone. The number of the attempt cannot tell: machines count restarts each by themselves. So an
    address that does not answer is read again.
    """
    deadline = time.monotonic() + timeout_s
    try_s = _FIRST_TRY_S
    while True:
        answer = _answer(store, deadline, timeout_s=timeout_s)
        try:
            _refuse_untrusted(answer["address"], security)
            left_s = max(_POLL_S, deadline - time.monotonic())
            client = connected(answer["address"], security=security, timeout=min(try_s, left_s))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _no_connection(answer["address"], error, timeout_s=timeout_s) from error
        except (TypeError, ValueError) as error:  # certificates that one side has and the other has not
            raise _no_connection(answer["address"], error, timeout_s=timeout_s) from error
        try_s *= 2
        time.sleep(_POLL_S)
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


def _answer(store: Any, deadline: float, *, timeout_s: float) -> dict[str, Any]:
    """Wait for what rank 0 tells; raise what it failed with."""
    try:
        store.wait(["address"], dt.timedelta(seconds=max(_POLL_S, deadline - time.monotonic())))
    except RuntimeError as error:  # torch.distributed.DistStoreError is one
        raise StartError(
            f"rank 0 has not started a Dask cluster within {timeout_s:g} s. Every rank must call start_cluster, "
            "equally often; raise timeout_s if starting takes longer"
        ) from error
    while True:
        answer: dict[str, Any] = json.loads(store.get("address"))
        if "error" not in answer:
            return answer
        # A failure of ranks that were restarted since is not one of these, if another answer follows.
        if answer["attempt"] == _attempt() or time.monotonic() >= deadline:
            raise StartError(f"rank 0 could not start the Dask cluster: {answer['error']}")
        time.sleep(_POLL_S)


def _no_connection(address: str, error: Exception, *, timeout_s: float) -> StartError:
    return StartError(
        f"rank 0 has started a Dask cluster at {address}, to which this rank cannot connect within {timeout_s:g} s: "
        f"{type(error).__name__}: {error}. Give rank 0 a host= that this machine reaches, and every rank the same "
        "security="
    )


def _certificates() -> Security:
    try:
        return Security.temporary()
    except ImportError as error:
        raise InputError(
            "a host other than loopback is encrypted, and making certificates needs the library cryptography: "
            "pip install dasksc[cluster], or give security="
        ) from error


def _secured(given: object) -> Security | None:
    """Return the certificates that a user gave; a file is refused if others than its user can get at it."""
    if given is None:
        return None
    if isinstance(given, Security):
        security, what = given, "security"
    elif isinstance(given, str | os.PathLike):
        path = os.path.abspath(os.path.expanduser(os.fspath(given)))
        what = f"security={path!r}"
        try:
            complaint = exposure(os.stat(path))
        except OSError as error:
            raise InputError(f"{what} cannot be read ({error}). Give {_HOW}") from error
        if complaint is not None:
            raise InputError(f"{what} is no secret: {complaint}. Make it anew, for others may have it: {_HOW}")
        fields = {f"tls_{role}_{part}": path for role in _ROLES for part in ("cert", "key")}
        security = Security(require_encryption=True, tls_ca_file=path, **fields)
    else:
        raise WrongTypeError(f"security={given!r} is neither a distributed.Security nor a path. Give {_HOW}")
    try:
        contexts = [security.get_connection_args(role)["ssl_context"] for role in _ROLES]
    except OSError as error:  # an ssl.SSLError is one
        raise InputError(
            f"{what} has no certificate and private key that fit each other ({error}). Give {_HOW}"
        ) from error
    if None in contexts:
        raise InputError(f"{what} has no certificates (tls_ca_file, tls_scheduler_cert, ...): {given!r}. Give {_HOW}")
    return security


def _refuse_untrusted(address: str, security: Security | None) -> None:
    """Refuse an address from the store, which anybody may have written, unless certificates tell who is there."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    if security is None and not (host in _LOOPBACK or _is_loopback(host)):
        raise ValueError("it is not on loopback, and this rank has no security=")
    if security is not None and not address.startswith("tls://"):
        raise ValueError("it is not encrypted, and this rank has security=")
