"""Private or unstable parts of Dask's distributed: requests to schedulers and workers, and their internals.

``distributed`` is imported on first use of one of its names, since the import takes half a second. A request that a
scheduler or worker does not support raises an error that names the request. These names are public and used directly:
``Client``, ``Future``, ``LocalCluster``, ``Security``, plugins, ``client.run``, ``register_plugin``, ``gather``,
``status``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, warn_once

if TYPE_CHECKING:
    from distributed.client import FutureCancelledError
    from distributed.comm import CommClosedError
    from distributed.http.utils import RequestHandler
    from distributed.scheduler import heartbeat_interval
    from distributed.utils import ensure_ip

__all__ = [
    "CommClosedError",
    "FutureCancelledError",
    "RequestHandler",
    "add_operation",
    "add_pages",
    "address_once_given",
    "announce",
    "answer_of_worker",
    "clients_of_process",
    "count_in_panel",
    "ensure_ip",
    "event_loop",
    "heartbeat_interval",
    "holders",
    "listening_at",
    "memory_shares",
    "metadata",
    "n_threads_heard_of",
    "n_threads_of",
    "page_names",
    "processing",
    "process_memory",
    "report",
    "scheduler_identity",
    "ssl_contexts",
    "unregister_plugin",
    "task_plugin_of",
    "worker_plugin_names",
    "workers_of",
]

# Access raises an error if a name is missing.
__getattr__ = late_names(
    "distributed",
    __name__,
    {
        "CommClosedError": ("distributed.comm", "CommClosedError"),
        "FutureCancelledError": ("distributed.client", "FutureCancelledError"),
        "RequestHandler": ("distributed.http.utils", "RequestHandler"),
        "ensure_ip": ("distributed.utils", "ensure_ip"),
        "heartbeat_interval": ("distributed.scheduler", "heartbeat_interval"),
    },
)


def _get(owner: Any, name: str) -> Any:
    return attribute(owner, name, library="distributed")


# Clients


def clients_of_process(distributed: Any) -> Iterable[Any]:
    """Return the Clients of this process (``Client._instances``), unusable in a forked child; raises if missing."""
    clients: Iterable[Any] = _get(distributed.Client, "_instances")
    return clients


def address_once_given(client: Any) -> Any:
    """Return the address that a Client was created with (``_start_arg``), kept after closing; raises if missing."""
    return _get(client, "_start_arg")


def event_loop(client: Any) -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop of a Client (``loop`` is that of tornado); raises if missing."""
    loop: asyncio.AbstractEventLoop = _get(_get(client, "loop"), "asyncio_loop")
    return loop


def n_threads_heard_of(client: Any) -> int:
    """Return the number of threads of all workers known to a Client (``_scheduler_identity``); 0 if missing."""
    try:
        heard: Mapping[str, Any] = _get(client, "_scheduler_identity")
    except UnsupportedVersionError as error:
        warn_once(error, without="the number of fetches in flight does not change with the number of workers")
        return 0
    return int(heard.get("total_threads", 0))


# Requests to a scheduler through a Client


async def _answer(request: Awaitable[Any], operation: str) -> Any:
    """Return the response to a request; raises if it is None, which is the response to an unknown operation."""
    answer = await request
    if answer is None:
        raise UnsupportedVersionError("distributed", f"operation {operation!r} of schedulers or workers")
    return answer


async def scheduler_identity(scheduler: Any, *, n_workers: int) -> Mapping[str, Any]:
    """Request the identity of a scheduler through a Client, with up to `n_workers` workers; -1 for all."""
    identity: Mapping[str, Any] = await _answer(scheduler.identity(n_workers=n_workers), "identity")
    return identity


async def workers_of(client: Any) -> dict[str, Any]:
    """Request the workers of a scheduler by address, each with ``status`` and ``last_seen``."""
    workers: dict[str, Any] = (await scheduler_identity(client.scheduler, n_workers=-1))["workers"]
    return workers


async def processing(client: Any, addresses: list[str]) -> Mapping[str, Any]:
    """Request the keys sent to workers, by address, from a scheduler."""
    keys: Mapping[str, Any] = await _answer(client.scheduler.processing(workers=addresses), "processing")
    return keys


async def holders(client: Any, key: Any) -> Iterable[str]:
    """Request the addresses of the workers that hold a result from a scheduler."""
    addresses: Mapping[Any, Iterable[str]] = await _answer(client.scheduler.who_has(keys=[key]), "who_has")
    return addresses.get(key, ())


async def metadata(client: Any, key: str, *, default: Any) -> Any:
    """Request an entry of the metadata of a scheduler. Neither the entry nor `default` may be None."""
    return await _answer(client.scheduler.get_metadata(keys=[key], default=default), "get_metadata")


async def report(client: Any, operation: str, **message: Any) -> Any:
    """Call an operation of a scheduler that `add_operation` registered; returns None if it is not registered."""
    return await getattr(client.scheduler, operation)(client=client.id, **message)


async def answer_of_worker(client: Any, address: str) -> Any:
    """Request the identity of a worker through the connection pool of a Client, so a later gather reuses it."""
    return await _answer(client.rpc(address).identity(), "identity")


# In the process of a worker


def memory_shares(worker: Any) -> tuple[int, float | None, float | None, float | None]:
    """Return the memory limit of a worker (0 for none), and its shares at which it spills, pauses, and spills results.

    Uses ``worker.memory_manager``; raises if missing.
    """
    manager = _get(worker, "memory_manager")
    return (
        _get(manager, "memory_limit") or 0,
        _get(manager, "memory_spill_fraction"),
        _get(manager, "memory_pause_fraction"),
        _get(manager, "memory_target_fraction"),
    )


def process_memory(worker: Any) -> Callable[[], int]:
    """Return the function that measures the memory of a worker process (``worker.monitor``); raises if missing."""
    measure: Callable[[], int] = _get(_get(worker, "monitor"), "get_process_memory")
    return measure


def task_plugin_of(worker: Any, name: str) -> Any:
    """Return the ``task_plugin`` of a plugin of a worker (``worker.plugins``), or None; raises if missing."""
    return getattr(_get(worker, "plugins").get(name), "task_plugin", None)


# In the process of a scheduler


def n_threads_of(scheduler: Any) -> int:
    """Return the number of threads of all workers; raises if missing."""
    return int(_get(scheduler, "total_nthreads"))


def worker_plugin_names(scheduler: Any) -> list[str]:
    """Return the names of the plugins that a scheduler installs on its workers; raises if missing."""
    return list(_get(scheduler, "worker_plugins"))


def unregister_plugin(scheduler: Any, name: str) -> asyncio.Future[Any]:
    """Start to remove a plugin from all workers; raises if missing."""
    taking: asyncio.Future[Any] = asyncio.ensure_future(
        _get(scheduler, "unregister_worker_plugin")(comm=None, name=name)
    )
    return taking


def add_operation(scheduler: Any, name: str, call: Callable[..., Any]) -> None:
    """Register an operation of a scheduler (``handlers``); raises if missing."""
    _get(scheduler, "handlers")[name] = call


def announce(scheduler: Any, name: str) -> None:
    """Record a name in the metadata of a scheduler (``task_metadata``); raises if missing."""
    _get(scheduler, "task_metadata")[name] = True


def count_in_panel(scheduler: Any, prefix: str, *, n_released: int, n_waiting: int) -> bool:
    """Add to the numbers of tasks of a prefix that the progress panel shows (``TaskPrefix.states``); raises if missing.

    Returns False, and adds nothing, before the first task of the prefix. Versions that compute the numbers on access
    do not show the added ones.
    """
    known = _get(scheduler, "task_prefixes").get(prefix)
    if known is None:
        return False
    states = _get(known, "states")
    states["released"] += n_released
    states["waiting"] += n_waiting
    return True


def add_pages(scheduler: Any, handlers: list[tuple[str, type, dict[str, Any]]]) -> None:
    """Add pages to the server of a scheduler; repeated calls have no effect. Raises if missing."""
    application = _get(scheduler, "http_application")
    if not getattr(application, "has_loader_page", False):
        application.has_loader_page = True
        application.add_handlers(r".*$", handlers)


def page_names(scheduler: Any) -> list[str]:
    """Return the mutable list of the dashboard's page names; an empty list without the dashboard.

    Raises
    ------
    UnsupportedVersionError
        If the function with the list (``distributed.dashboard.scheduler.template_variables``) is missing.
    """
    try:
        with needed("distributed"):
            from distributed.dashboard.scheduler import template_variables
    except ImportError:  # the dashboard requires Bokeh
        return []
    pages: list[str] = template_variables(scheduler)["pages"]
    return pages


def listening_at(scheduler: Any) -> tuple[str, int] | None:
    """Return host and port of the pages of a `distributed.Scheduler`; None if it serves none."""
    server = getattr(scheduler, "http_server", None)  # set when the server starts
    return None if server is None else (str(_get(server, "address")), int(_get(server, "port")))


# Certificates


def ssl_contexts(security: Any, roles: Iterable[str]) -> list[Any]:
    """Return the SSL contexts of a `distributed.Security` for several roles, None without one; raises if missing."""
    return [_get(security, "get_connection_args")(role)["ssl_context"] for role in roles]
