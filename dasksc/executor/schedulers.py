"""Choice of the Dask scheduler and of the number of threads for the fetches of this process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import warnings
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import dask
from dask.system import cpu_count

from dasksc.errors import InputError

if TYPE_CHECKING:
    from distributed import Client

_KINDS: dict[Any, Literal["threads", "synchronous"]] = {  # by the names of Dask
    **dict.fromkeys(("threads", "threading"), "threads"),
    **dict.fromkeys(("synchronous", "sync", "single-threaded"), "synchronous"),
}
_ADDRESS = re.compile(r"^[a-z+]+://\S+$|^[\w.\-]+:\d+$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchScheduler:
    """Scheduler that runs the fetches: threads, the thread that requests the result, or a Client (`client`)."""

    kind: Literal["threads", "synchronous", "client"]
    client: Client | None = None

    @property
    def in_process(self) -> bool:
        """True if results arrive as the objects that the fetches created, without serialization."""
        return self.client is None or _is_inproc(address_of(self.client))

    @property
    def n_threads(self) -> int | None:
        """Number of threads of all workers, which the Client updates every two seconds; None without a cluster."""
        # The attribute is private: `scheduler_info` would request the numbers and wait.
        return None if self.client is None else int(self.client._scheduler_identity.get("total_threads", 0))

    @property
    def is_closed(self) -> bool:
        return self.client is not None and self.client.status == "closed"

    def __str__(self) -> str:
        return self.kind if self.client is None else f"Dask scheduler at {address_of(self.client)}"


def resolve_scheduler(scheduler: FetchScheduler | Client | str | None = None) -> FetchScheduler:
    """Return the scheduler to use in the calling process; call this function again in every process."""
    # None selects the first of these that is set: ``scheduler`` in ``dask.config``, the active Client, the scheduler of
    # ``DASK_SCHEDULER_ADDRESS`` or ``DASK_SCHEDULER_FILE``, and otherwise threads; inside a task of a Dask worker,
    # threads, because a task that waits for other tasks of its own pool can deadlock.
    if isinstance(scheduler, FetchScheduler):
        return scheduler if scheduler.client is None else _with_client(scheduler.client)
    if scheduler is None:
        configured = dask.config.get("scheduler", None)
        if not isinstance(configured, str) or configured not in _KINDS:
            return _active_scheduler()
        scheduler = configured
    if isinstance(scheduler, str):
        if scheduler in _KINDS:
            return FetchScheduler(kind=_KINDS[scheduler])
        if _ADDRESS.match(scheduler):
            return _connected(scheduler)
        if scheduler.endswith(".json"):
            return _connected(_address_in(scheduler))
    elif _is_client(scheduler):
        return _with_client(scheduler)
    raise InputError(
        f"scheduler={scheduler!r} is not a scheduler. Give None, 'threads', 'synchronous', a "
        "distributed.Client, the address of a Dask scheduler such as 'tcp://host:8786', or its scheduler file, "
        "whose name ends in '.json'."
    )


class SchedulerChoice:
    """Scheduler given by the user, resolved at each use, because a Client may be created or closed between two uses."""

    def __init__(self, given: FetchScheduler | Client | str | None) -> None:
        self._given = given
        resolve_scheduler(given)  # raises an error if it is invalid

    def __call__(self) -> FetchScheduler:
        """Return the scheduler to use in the calling process."""
        return resolve_scheduler(self._given)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state that is valid in another process, which connects to the address of a Client."""
        given: Any = self._given
        given = getattr(given, "client", None) or getattr(given, "kind", given)
        security = None
        if given is not None and _is_client(given):
            security, given = given.security, address_of(given)
            if _is_inproc(given):  # No other process can reach this cluster.
                security = given = None
        # Other pickles than those for a child process, which travel through a pipe, may be written to a file.
        return {"_given": given, "security": None if get_spawning_popen() is None else security}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given = state["_given"]
        if state["security"] is not None:
            _securities[state["_given"]] = state["security"]


def _active_scheduler() -> FetchScheduler:
    """Return that of the active Client, otherwise the one in Dask's configuration or environment, otherwise threads."""
    threads, client = FetchScheduler(kind="threads"), None
    # A Client exists only if distributed has been imported, and importing it takes half a second.
    distributed = sys.modules.get("distributed")
    if distributed is not None and hasattr(distributed, "Client"):
        with contextlib.suppress(ValueError):
            distributed.get_worker()
            return threads
        with contextlib.suppress(ValueError):
            client = distributed.Client.current()
    if client is None:
        address = dask.config.get("scheduler-address", None)
        if not address and (file := dask.config.get("scheduler-file", None)):
            address = _address_in(str(file))
        return _connected(str(address)) if address else threads
    if client.asynchronous:
        warnings.warn("The active Dask Client is asynchronous, so fetches run on threads.", stacklevel=2)
        return threads
    return threads if client in _before_fork and _is_inproc(address_of(client)) else _with_client(client)


def _address_in(file: str) -> str:
    """Return the address stored in a scheduler file."""
    try:
        return str(json.loads(Path(file).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file!r} is not a scheduler file with an address ({error!r}). Start the scheduler first, with dask "
            f"scheduler --scheduler-file {file}, in a folder that all machines can access."
        ) from error


def _with_client(client: Any) -> FetchScheduler:
    address = address_of(client)
    if client in _before_fork:
        if _is_inproc(address):
            raise InputError(
                f"The Client at {address} and its cluster belong to the parent of this process and cannot be "
                "used after a fork. Use scheduler=None or 'threads' in worker processes."
            )
        _securities.setdefault(address, client.security)
        return _connected(address)
    if client.asynchronous:
        raise InputError("The Client is asynchronous. Give a Client made with asynchronous=False.")
    if client.status == "closed":
        raise InputError(f"The Client at {address} is closed. Give an open Client, or the address of its scheduler.")
    return FetchScheduler(kind="client", client=client)


def _is_client(scheduler: object) -> bool:
    distributed = sys.modules.get("distributed")
    return distributed is not None and isinstance(scheduler, distributed.Client)


def address_of(client: Any) -> str:
    """Return the address of a Client's scheduler, even if the Client is closed."""
    # A closed Client has no `scheduler`, but keeps the address or the cluster that it was created with.
    scheduler = client.scheduler
    if scheduler is not None:
        return str(scheduler.address)
    start: Any = client._start_arg  # private
    if start is None:
        start = client.cluster
    return str(getattr(start, "scheduler_address", start))


def _is_inproc(address: str) -> bool:
    return address.startswith("inproc://")


# One Client per process and address, and security settings by address. `_before_fork` holds the Clients that a forked
# child inherits but cannot use, because the threads of their event loops exist only in the parent. It keeps them alive:
# a garbage-collected Client closes itself, and would wait forever for its loop.
_lock = threading.Lock()
_clients: dict[str, Any] = {}
_securities: dict[str, Any] = {}
_before_fork: set[Client] = set()


def _connected(address: str) -> FetchScheduler:
    import distributed

    with _lock:
        client = _clients.get(address)
        if client is None or client.status == "closed":
            client = distributed.Client.__new__(distributed.Client)
            try:
                client.__init__(address, security=_securities.get(address), set_as_default=False)
            except (OSError, ValueError) as error:
                # Garbage collection would close the Client in any thread, which may hold a lock that closing needs.
                with contextlib.suppress(Exception):
                    client.close(timeout=1)
                raise InputError(
                    f"scheduler={address!r} does not answer: {error}. Check the address, or use scheduler='threads'."
                ) from error
            _clients[address] = client
        return FetchScheduler(kind="client", client=client)


@atexit.register
def _close_clients() -> None:
    for client in _clients.values():
        client.close(timeout=5)
    _clients.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _before_fork.update(_clients.values())
    distributed = sys.modules.get("distributed")
    if distributed is not None and hasattr(distributed, "Client"):
        _before_fork.update(distributed.Client._instances)  # private
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


def default_threads(*, local_world_size: int = 1, n_workers: int = 1) -> int:
    """Return the number of CPUs for one rank, or for one of its `n_workers` DataLoader workers; at least 1."""
    n_cpus: int = cpu_count()
    return max(1, n_cpus // (max(1, local_world_size) * max(1, n_workers)))
