"""Private or unstable parts of ``distributed``: errors, and internals of Clients and schedulers.

``distributed`` is imported on first use of one of its names, since the import takes half a second. The other modules of
dasksc use public names of ``distributed`` directly, such as ``Client``, ``client.run``, ``gather`` and ``status``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, warn_once

if TYPE_CHECKING:
    from distributed.client import FutureCancelledError
    from distributed.comm import CommClosedError
    from distributed.http.utils import RequestHandler

__all__ = [
    "CommClosedError",
    "FutureCancelledError",
    "RequestHandler",
    "add_operation",
    "add_pages",
    "announce",
    "clients_of_process",
    "event_loop",
    "given_address",
    "http_address",
    "known_n_threads",
    "page_names",
    "report",
]

# Accessing a missing name raises an error.
__getattr__ = late_names(
    "distributed",
    __name__,
    {
        "CommClosedError": ("distributed.comm", "CommClosedError"),
        "FutureCancelledError": ("distributed.client", "FutureCancelledError"),
        "RequestHandler": ("distributed.http.utils", "RequestHandler"),
    },
)


def _get(owner: Any, name: str) -> Any:
    return attribute(owner, name, library="distributed")


# Clients


def clients_of_process(distributed: Any) -> Iterable[Any]:
    """Return the Clients of this process (``Client._instances``); raises if missing."""
    # A forked child inherits the Clients of its parent, but cannot use them.
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


async def report(client: Any, operation: str, **message: Any) -> Any:
    """Call an operation of a scheduler that `add_operation` registered; returns None if it is not registered."""
    return await getattr(client.scheduler, operation)(client=client.id, **message)


# In the process of a scheduler


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
    """Return the mutable list of the dashboard's page names, or an empty list if there is no dashboard."""
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
