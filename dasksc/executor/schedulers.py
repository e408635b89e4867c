"""Which Dask scheduler runs the fetches of this process, and on how many threads."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import re
import sys
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dask
from dask.system import cpu_count as _dask_cpu_count

from dasksc._compat.distributed import address_once_given, clients_of_process, n_threads_heard_of, n_threads_of
from dasksc._compat.unsupported import UnsupportedVersionError
from dasksc.errors import InputError
from dasksc.platforms import after_fork

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "Scheduler",
    "address_of",
    "cpu_count",
    "default_threads",
    "portable_scheduler",
    "remember_security",
    "securities_for_child",
    "resolve_scheduler",
]

logger = logging.getLogger("dasksc.window.schedulers")

_SYNCHRONOUS = ("synchronous", "sync", "single-threaded")
_THREADS = ("threads", "threading")
_ADDRESS = re.compile(r"^[a-z+]+://\S+$|^[\w.\-]+:\d+$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduler:
    """Where fetches run.

    Parameters
    ----------
    kind
        ``"threads"``: the threads of this process; ``"synchronous"``: the thread that asks for the
        result; ``"client"``: the workers of a distributed cluster.
    client
        The Client, for ``"client"`` only.
    """

    kind: Literal["threads", "synchronous", "client"]
    client: Client | None = None

    def __post_init__(self) -> None:
        if (self.kind == "client") != (self.client is not None):
            raise InputError(
                f"Scheduler(kind={self.kind!r}, client={self.client!r}): kind='client' goes with a client."
            )

    @property
    def in_process(self) -> bool:
        """Whether results arrive as the very objects the fetches made, without being serialised."""
        return self.client is None or _is_inproc(address_of(self.client))

    @property
    def n_threads(self) -> int | None:
        """Threads of all workers of the cluster, as far as this process knows; None without one.

        Asks nobody, so it may be read often: a scheduler in this process knows for now, of any other the Client
        hears every two seconds (``distributed.client.scheduler-info-interval``).
        """
        if self.client is None:
            return None
        scheduler = getattr(self.client.cluster, "scheduler", None)
        distributed = sys.modules["distributed"]
        if isinstance(scheduler, distributed.Scheduler):
            return n_threads_of(scheduler)
        return n_threads_heard_of(self.client)

    def __str__(self) -> str:
        return self.kind if self.client is None else f"Dask scheduler at {address_of(self.client)}"


def resolve_scheduler(scheduler: Scheduler | Client | str | None = None) -> Scheduler:
    """Settle which scheduler to use, in the process that will use it.

    Call it again in every process: a Client that was made before a fork is replaced by a new one
    to the same address.

    Parameters
    ----------
    scheduler
        None: what ``dask.config`` says under ``scheduler``, else the active Client, else the scheduler that
        ``DASK_SCHEDULER_ADDRESS`` or ``DASK_SCHEDULER_FILE`` names (``scheduler-address`` and
        ``scheduler-file`` in ``dask.config``), else threads. Inside a task of a Dask worker it is threads,
        since a task that waits for other tasks of its own pool can wait for ever. Or ``"threads"``,
        ``"synchronous"``, a Client, the address of a scheduler (``"tcp://host:8786"``) or the file that it
        wrote (``"scheduler.json"``), to which this process connects once.

    Raises
    ------
    InputError
        If `scheduler` is none of these, an asynchronous or closed Client, an address without answer, or a file
        that is not there or names no address.
    """
    if isinstance(scheduler, Scheduler):
        return scheduler if scheduler.client is None else _with_client(scheduler.client)
    if scheduler is None:
        return _active_scheduler()
    if isinstance(scheduler, str):
        if scheduler in _THREADS:
            return Scheduler(kind="threads")
        if scheduler in _SYNCHRONOUS:
            return Scheduler(kind="synchronous")
        if _ADDRESS.match(scheduler):
            return Scheduler(kind="client", client=_connect(scheduler))
        if scheduler.endswith(".json"):
            return Scheduler(kind="client", client=_connect(_address_in(scheduler)))
    elif _is_client(scheduler):
        return _with_client(scheduler)
    raise InputError(
        f"scheduler={scheduler!r} is not a scheduler. Give None, 'threads', 'synchronous', a "
        "distributed.Client, the address of a Dask scheduler such as 'tcp://host:8786', or its scheduler file, "
        "whose name ends in '.json'."
    )


def portable_scheduler(scheduler: Scheduler | Client | str | None) -> str | None:
    """Return what stands for `scheduler` in another process: a Client becomes its address.

    A Client whose cluster lives in this very process cannot be reached from another one: None.
    """
    client: Any = scheduler.client if isinstance(scheduler, Scheduler) else scheduler
    if client is not None and _is_client(client):
        address = address_of(client)
        remember_security(address, client.security)
        return None if _is_inproc(address) else address
    if isinstance(scheduler, Scheduler):
        return scheduler.kind
    return scheduler if isinstance(scheduler, str) else None


def _active_scheduler() -> Scheduler:
    configured = dask.config.get("scheduler", None)
    if configured in _SYNCHRONOUS:
        return Scheduler(kind="synchronous")
    if configured in _THREADS:
        return Scheduler(kind="threads")
    # Nobody can have made a Client without importing distributed, which takes half a second.
    distributed = sys.modules.get("distributed")
    if distributed is None or not hasattr(distributed, "Client"):
        return _configured_scheduler()
    try:
        distributed.get_worker()
    except ValueError:
        pass
    else:
        return Scheduler(kind="threads")
    try:
        client = distributed.Client.current()
    except ValueError:
        return _configured_scheduler()
    if client.asynchronous:
        if client not in _said_asynchronous:
            _said_asynchronous.add(client)
            logger.warning("The active Dask Client is asynchronous; fetches run on threads instead.")
        return Scheduler(kind="threads")
    if client in _before_fork and _is_inproc(address_of(client)):
        if client not in _said_of_parent:
            _said_of_parent.add(client)
            logger.warning("The active Dask Client is of the parent process; fetches run on threads instead.")
        return Scheduler(kind="threads")
    return _with_client(client)


def _configured_scheduler() -> Scheduler:
    """Return the scheduler that Dask's configuration or environment names, else threads."""
    address = dask.config.get("scheduler-address", None)
    file = dask.config.get("scheduler-file", None)
    if address:
        return Scheduler(kind="client", client=_connect(str(address)))
    if file:
        return Scheduler(kind="client", client=_connect(_address_in(str(file))))
    return Scheduler(kind="threads")


def _address_in(file: str) -> str:
    """Return the address that a scheduler wrote into its scheduler file."""
    try:
        return str(json.loads(Path(file).read_text())["address"])
    except OSError as error:
        raise InputError(
            f"the scheduler file {file!r} cannot be read: {error}. Start the scheduler first, as dask scheduler "
            f"--scheduler-file {file}, in a folder that all machines see."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file!r} is no scheduler file: it names no address ({error!r})") from error


def _with_client(client: Any) -> Scheduler:
    if _which_is_unknown is not None:
        raise _which_is_unknown
    address = address_of(client)
    if client in _before_fork:
        if _is_inproc(address):
            raise InputError(
                f"The Client at {address} and its cluster live in the parent of this process and cannot be "
                "used after a fork. Use scheduler=None or 'threads' in worker processes."
            )
        remember_security(address, client.security)
        return Scheduler(kind="client", client=_connect(address))
    if client.asynchronous:
        raise InputError("The Client is asynchronous. Give a Client made with asynchronous=False.")
    if client.status == "closed":
        raise InputError(f"The Client at {address} is closed. Give an open one, or its address.")
    return Scheduler(kind="client", client=client)


def _is_client(scheduler: object) -> bool:
    distributed = sys.modules.get("distributed")
    return distributed is not None and isinstance(scheduler, distributed.Client)


def address_of(client: Any) -> str:
    """Return the address of a Client's scheduler, also once the Client is closed."""
    # `scheduler` is None once the client is closed; what it was started with, or started, remains.
    scheduler = client.scheduler
    if scheduler is not None:
        return str(scheduler.address)
    start: Any = address_once_given(client)
    if start is None:
        start = client.cluster
    return str(getattr(start, "scheduler_address", start))


def _is_inproc(address: str) -> bool:
    return address.startswith("inproc://")


# One Client per process and address. `_before_fork` holds the Clients that a forked child inherits
# but cannot use, because the threads that ran their event loops stayed in the parent; it keeps them
# alive, because a Client that is collected closes itself, and would wait for its loop for ever.
_lock = threading.Lock()
_clients: dict[str, Any] = {}
_before_fork: set[Client] = set()
# Why it is not known, in a forked child, which Clients are of the parent.
_which_is_unknown: UnsupportedVersionError | None = None
# Active Clients of which it has been said: an epoch settles its scheduler many times.
_said_asynchronous: weakref.WeakSet[Client] = weakref.WeakSet()
_said_of_parent: weakref.WeakSet[Client] = weakref.WeakSet()
# How to connect to a scheduler that asks for certificates, by address; a forked child needs it again.
_securities: dict[str, Any] = {}


def remember_security(address: str, security: Any) -> None:
    """Use `security`, a `distributed.Security`, for connections to `address` that this process makes."""
    if security is not None:
        _securities[address] = security


def securities_for_child() -> dict[str, Any]:
    """Return how to connect to schedulers that ask for certificates, if a child process is being spawned.

    Private keys go through the pipe to a child of one's own; into any other pickle, which may end in a file, they
    do not.
    """
    return _securities if get_spawning_popen() is not None else {}


def connected(address: Any, **options: Any) -> Client:
    """Return a new Client of an address or a cluster, or close the one that could not connect and raise why.

    One left to the garbage collector would close itself wherever that runs: if that is in the thread that another
    Client has just started, which holds a lock until then, both wait for ever.
    """
    import distributed

    client: Client = distributed.Client.__new__(distributed.Client)
    try:
        client.__init__(address, **options)
    except BaseException:
        with contextlib.suppress(Exception):
            client.close(timeout=1)
        raise
    return client


def _connect(address: str) -> Client:
    with _lock:
        client = _clients.get(address)
        if client is None or client.status == "closed":
            try:
                client = connected(address, security=_securities.get(address), set_as_default=False)
            except (OSError, ValueError) as error:
                raise InputError(
                    f"scheduler={address!r} does not answer: {error}. Check the address, or use scheduler='threads'."
                ) from error
            _clients[address] = client
        return client


@atexit.register
def _close_clients() -> None:
    for client in _clients.values():
        client.close(timeout=5)
    _clients.clear()


def _after_fork() -> None:
    global _lock, _which_is_unknown
    _lock = threading.Lock()
    _before_fork.update(_clients.values())
    distributed = sys.modules.get("distributed")
    if distributed is not None and hasattr(distributed, "Client"):
        try:
            _before_fork.update(clients_of_process(distributed))
        except UnsupportedVersionError as error:  # nobody hears of what is raised here
            _which_is_unknown = error
    _clients.clear()


after_fork(_after_fork)


def cpu_count() -> int:
    """Return how many CPUs this process may keep busy: its affinity and its cgroups' quotas, rounded up."""
    count: int = _dask_cpu_count()
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """Return the least CPU quota of the process's cgroup (version 2) and those around it.

    Dask looks at the innermost group only, but a quota usually sits on a group further out: the
    pod's, or the batch job's.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        number, _, group = line.partition("::")
        if number != "0":
            continue
        directory = root / group.lstrip("/")
        while True:
            try:
                quota, period = (directory / "cpu.max").read_text().split()
                if quota != "max":
                    quotas.append(int(quota) / int(period))
            except (OSError, ValueError):
                pass
            if directory in (root, directory.parent):
                break
            directory = directory.parent
    return min(quotas, default=None)


def default_threads(*, local_world_size: int = 1, n_workers: int = 1) -> int:
    """Return one rank's share of the CPUs, or the share of one of its `n_workers` DataLoader workers."""
    return max(1, cpu_count() // (max(1, local_world_size) * max(1, n_workers)))
