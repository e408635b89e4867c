"""What is private or unstable in Dask's distributed: questions to schedulers and workers, and what these are made of.

``distributed`` is imported when a name of it is asked for, since that takes half a second. A question that a scheduler
or worker of another version does not know fails there, and names the question. Public, and used directly: ``Client``,
``Future``, ``LocalCluster``, ``Security``, plugins, ``client.run``, ``register_plugin``, ``gather``, ``status``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, say_once

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
    "carrier_of",
    "clients_of_process",
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
    "take_back_plugin",
    "worker_plugin_names",
    "workers_of",
]

# All raise where missing.
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
    """Return the Clients of this process (``Client._instances``), which a forked child cannot use; raises."""
    clients: Iterable[Any] = _get(distributed.Client, "_instances")
    return clients


def address_once_given(client: Any) -> Any:
    """Return what a Client was started with (``_start_arg``), which stays when it is closed; raises where missing."""
    return _get(client, "_start_arg")


def event_loop(client: Any) -> asyncio.AbstractEventLoop:
    """Return the event loop of a Client (``loop`` is tornado's); raises where missing."""
    loop: asyncio.AbstractEventLoop = _get(_get(client, "loop"), "asyncio_loop")
    return loop


def n_threads_heard_of(client: Any) -> int:
    """Return the threads of all workers, as a Client has heard of (``_scheduler_identity``); 0 where missing."""
    try:
        heard: Mapping[str, Any] = _get(client, "_scheduler_identity")
    except UnsupportedVersionError as error:
        say_once(error, without="the number of fetches under way does not follow that of workers")
        return 0
    return int(heard.get("total_threads", 0))


# Questions to a scheduler, through a Client


async def scheduler_identity(scheduler: Any, *, n_workers: int) -> Mapping[str, Any]:
    """Ask a Client's ``scheduler`` who it is; with -1 workers, of all of them."""
    identity: Mapping[str, Any] = await scheduler.identity(n_workers=n_workers)
    return identity


async def workers_of(client: Any) -> dict[str, Any]:
    """Ask a scheduler for its workers, by address, each with ``status`` and ``last_seen``."""
    workers: dict[str, Any] = (await scheduler_identity(client.scheduler, n_workers=-1))["workers"]
    return workers


async def processing(client: Any, addresses: list[str]) -> Mapping[str, Any]:
    """Ask a scheduler for the keys that workers have been sent, by address."""
    keys: Mapping[str, Any] = await client.scheduler.processing(workers=addresses)
    return keys


async def holders(client: Any, key: Any) -> Iterable[str]:
    """Ask a scheduler for the addresses of the workers that hold a result."""
    addresses: Iterable[str] = (await client.scheduler.who_has(keys=[key])).get(key, ())
    return addresses


async def metadata(client: Any, key: str, *, default: Any) -> Any:
    """Ask a scheduler for what is written under a name in its metadata."""
    return await client.scheduler.get_metadata(keys=[key], default=default)


async def report(client: Any, operation: str, **message: Any) -> Any:
    """Call an operation of a scheduler, one of those that `add_operation` adds."""
    return await getattr(client.scheduler, operation)(client=client.id, **message)


async def answer_of_worker(client: Any, address: str) -> Any:
    """Ask a worker who it is, through the Client's own pool, so that a gather finds the connection open."""
    return await client.rpc(address).identity()


# In the process of a worker


def memory_shares(worker: Any) -> tuple[int, float | None, float | None, float | None]:
    """Return a worker's memory limit, 0 for none, and the shares of it at which it spills, pauses, and spills results.

    By ``worker.memory_manager``; raises where missing.
    """
    manager = _get(worker, "memory_manager")
    return (
        _get(manager, "memory_limit") or 0,
        _get(manager, "memory_spill_fraction"),
        _get(manager, "memory_pause_fraction"),
        _get(manager, "memory_target_fraction"),
    )


def process_memory(worker: Any) -> Callable[[], int]:
    """Return what measures the memory of a worker's process (``worker.monitor``); raises where missing."""
    measure: Callable[[], int] = _get(_get(worker, "monitor"), "get_process_memory")
    return measure


def carrier_of(worker: Any, name: str) -> Any:
    """Return the ``carrier`` of a plugin on a worker, None without one (``worker.plugins``); raises where missing."""
    return getattr(_get(worker, "plugins").get(name), "carrier", None)


# In the process of a scheduler


def n_threads_of(scheduler: Any) -> int:
    """Return the threads of all workers; raises where missing."""
    return int(_get(scheduler, "total_nthreads"))


def worker_plugin_names(scheduler: Any) -> list[str]:
    """Return the names of the plugins that a scheduler gives to its workers; raises where missing."""
    return list(_get(scheduler, "worker_plugins"))


def take_back_plugin(scheduler: Any, name: str) -> asyncio.Future[Any]:
    """Begin to take a plugin back from all workers; raises where missing."""
    taking: asyncio.Future[Any] = asyncio.ensure_future(
        _get(scheduler, "unregister_worker_plugin")(comm=None, name=name)
    )
    return taking


def add_operation(scheduler: Any, name: str, call: Callable[..., Any]) -> None:
    """Have a scheduler answer another question (``handlers``); raises where missing."""
    _get(scheduler, "handlers")[name] = call


def announce(scheduler: Any, name: str) -> None:
    """Write in a scheduler's metadata that it has something (``task_metadata``); raises where missing."""
    _get(scheduler, "task_metadata")[name] = True


def add_pages(scheduler: Any, handlers: list[tuple[str, type, dict[str, Any]]]) -> None:
    """Add pages to those that a scheduler serves; once more changes nothing. Raises where missing."""
    application = _get(scheduler, "http_application")
    if not getattr(application, "has_loader_page", False):
        application.has_loader_page = True
        application.add_handlers(r".*$", handlers)


def page_names(scheduler: Any) -> list[str]:
    """Return the very list of names with which the dashboard's pages are made; a copy where there are no such pages.

    Raises
    ------
    UnsupportedVersionError
        If the function behind it (``distributed.dashboard.scheduler.template_variables``) is missing.
    """
    try:
        with needed("distributed"):
            from distributed.dashboard.scheduler import template_variables
    except ImportError:  # no Bokeh, so there are no such pages
        return []
    pages: list[str] = template_variables(scheduler)["pages"]
    return pages


def listening_at(scheduler: Any) -> tuple[str, int] | None:
    """Return host and port at which a `distributed.Scheduler` serves its pages; None if it serves none."""
    server = getattr(scheduler, "http_server", None)  # it is there once it serves
    return None if server is None else (str(_get(server, "address")), int(_get(server, "port")))


# Certificates


def ssl_contexts(security: Any, roles: Iterable[str]) -> list[Any]:
    """Return what a `distributed.Security` connects with in several roles, None where it has nothing; raises."""
    return [_get(security, "get_connection_args")(role)["ssl_context"] for role in roles]
