"""Private or unstable parts of ``distributed``: requests to schedulers and workers, and their internals.

``distributed`` is imported on first use of one of its names, since the import takes half a second. A request that a
scheduler or worker does not support raises an error that names the request. The other modules of dasksc use public
names of ``distributed`` directly, such as ``Client``, ``Future``, ``LocalCluster``, ``Security``, plugins,
``client.run``, ``register_plugin``, ``gather`` and ``status``.
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
    "announce",
    "clients_of_process",
    "ensure_ip",
    "event_loop",
    "given_address",
    "heartbeat_interval",
    "holders",
    "http_address",
    "known_n_threads",
    "memory_thresholds",
    "metadata",
    "n_threads_of",
    "page_names",
    "process_memory",
    "processing",
    "report",
    "scheduler_identity",
    "ssl_contexts",
    "task_plugin_of",
    "unregister_plugin",
    "worker_identity",
    "worker_plugin_names",
    "workers_of",
]

# Accessing a missing name raises an error.
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
    """Return the Clients of this process (``Client._instances``); raises if missing.

    A forked child inherits the Clients of its parent, but cannot use them.
    """
    clients: Iterable[Any] = _get(distributed.Client, "_instances")
    return clients


def given_address(client: Any) -> Any:
    """Return the address given to a Client (``_start_arg``), which a closed Client keeps; raises if missing."""
    return _get(client, "_start_arg")


def event_loop(client: Any) -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop of a Client, whose ``loop`` is Tornado's; raises if missing."""
    loop: asyncio.AbstractEventLoop = _get(_get(client, "loop"), "asyncio_loop")
    return loop


def known_n_threads(client: Any) -> int:
    """Return the number of threads of all workers known to a Client (``_scheduler_identity``); 0 if missing."""
    try:
        heard: Mapping[str, Any] = _get(client, "_scheduler_identity")
    except UnsupportedVersionError as error:
        warn_once(error, without="the number of fetches in flight does not adapt to the number of workers")
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
    """Request the identity of a scheduler, including up to `n_workers` workers (-1 for all)."""
    identity: Mapping[str, Any] = await _answer(scheduler.identity(n_workers=n_workers), "identity")
    return identity


async def workers_of(client: Any) -> dict[str, Any]:
    """Request a dict of the workers of a scheduler, with ``status`` and ``last_seen`` of each, by address."""
    workers: dict[str, Any] = (await scheduler_identity(client.scheduler, n_workers=-1))["workers"]
    return workers


async def processing(client: Any, addresses: list[str]) -> Mapping[str, Any]:
    """Ask a scheduler for the keys that each worker processes, by address of the worker."""
    keys: Mapping[str, Any] = await _answer(client.scheduler.processing(workers=addresses), "processing")
    return keys


async def holders(client: Any, key: Any) -> Iterable[str]:
    """Ask a scheduler for the addresses of the workers that hold a result."""
    addresses: Mapping[Any, Iterable[str]] = await _answer(client.scheduler.who_has(keys=[key]), "who_has")
    return addresses.get(key, ())


async def metadata(client: Any, key: str, *, default: Any) -> Any:
    """Request an entry of the metadata of a scheduler; neither the entry nor `default` may be None."""
    return await _answer(client.scheduler.get_metadata(keys=[key], default=default), "get_metadata")


async def report(client: Any, operation: str, **message: Any) -> Any:
    """Call an operation of a scheduler that `add_operation` registered; returns None if it is not registered."""
    return await getattr(client.scheduler, operation)(client=client.id, **message)


async def worker_identity(client: Any, address: str) -> Any:
    """Request the identity of a worker over a pooled connection of a Client; a later gather reuses the connection."""
    return await _answer(client.rpc(address).identity(), "identity")


# In the process of a worker


def memory_thresholds(worker: Any) -> tuple[int, float | None, float | None, float | None]:
    """Return the memory limit of a worker (0 for none) and its spill, pause and target fractions; raises if missing.

    They are attributes of ``worker.memory_manager``.
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
    """Return the ``task_plugin`` of a named plugin in ``worker.plugins``, or None; raises if missing."""
    return getattr(_get(worker, "plugins").get(name), "task_plugin", None)


# In the process of a scheduler


def n_threads_of(scheduler: Any) -> int:
    """Return the number of threads of all workers; raises if missing."""
    return int(_get(scheduler, "total_nthreads"))


def worker_plugin_names(scheduler: Any) -> list[str]:
    """Return the names of the plugins that a scheduler installs on its workers; raises if missing."""
    return list(_get(scheduler, "worker_plugins"))


def unregister_plugin(scheduler: Any, name: str) -> asyncio.Future[Any]:
    """Start removing a plugin from all workers; raises if missing."""
    removal: asyncio.Future[Any] = asyncio.ensure_future(
        _get(scheduler, "unregister_worker_plugin")(comm=None, name=name)
    )
    return removal


def add_operation(scheduler: Any, name: str, call: Callable[..., Any]) -> None:
    """Register an operation of a scheduler (``handlers``); raises if missing."""
    _get(scheduler, "handlers")[name] = call


def announce(scheduler: Any, name: str) -> None:
    """Record a name in the metadata of a scheduler (``task_metadata``); raises if missing."""
    _get(scheduler, "task_metadata")[name] = True


def add_pages(scheduler: Any, handlers: list[tuple[str, type, dict[str, Any]]]) -> None:
    """Add pages to the HTTP server of a scheduler, unless an earlier call has added them; raises if missing."""
    application = _get(scheduler, "http_application")
    if not getattr(application, "has_loader_page", False):
        application.has_loader_page = True
        application.add_handlers(r".*$", handlers)


def page_names(scheduler: Any) -> list[str]:
    """Return the mutable list of the dashboard's page names, or an empty list if there is no dashboard.

    Raises
    ------
    UnsupportedVersionError
        If the function that returns the list (``distributed.dashboard.scheduler.template_variables``) is missing.
    """
    try:
        with needed("distributed"):
            from distributed.dashboard.scheduler import template_variables
    except ImportError:  # the dashboard requires Bokeh
        return []
    pages: list[str] = template_variables(scheduler)["pages"]
    return pages


def http_address(scheduler: Any) -> tuple[str, int] | None:
    """Return the host and port of the HTTP server of a `distributed.Scheduler`; None if it has none."""
    server = getattr(scheduler, "http_server", None)  # set when the server starts
    return None if server is None else (str(_get(server, "address")), int(_get(server, "port")))


# Certificates


def ssl_contexts(security: Any, roles: Iterable[str]) -> list[Any]:
    """Return the SSL context of each role of a `distributed.Security`, None if a role has none; raises if missing."""
    return [_get(security, "get_connection_args")(role)["ssl_context"] for role in roles]
