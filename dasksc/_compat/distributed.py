"""Private or unstable parts of schedulers of ``distributed``, used in their process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.http.utils import RequestHandler

__all__ = [
    "RequestHandler",
    "add_operation",
    "add_pages",
    "announce",
    "http_address",
    "page_names",
]


def __getattr__(name: str) -> Any:
    if name == "RequestHandler":  # importing ``distributed`` takes half a second
        from distributed.http.utils import RequestHandler

        return RequestHandler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def add_operation(scheduler: Any, name: str, call: Callable[..., Any]) -> None:
    """Register an operation of a scheduler."""
    scheduler.handlers[name] = call


def announce(scheduler: Any, name: str) -> None:
    """Record a name in the metadata of a scheduler."""
    scheduler.task_metadata[name] = True


def add_pages(scheduler: Any, handlers: list[tuple[str, type, dict[str, Any]]]) -> None:
    """Add pages to the HTTP server of a scheduler, unless an earlier call has added them."""
    application = scheduler.http_application
    if not getattr(application, "has_loader_page", False):
        application.has_loader_page = True
        application.add_handlers(r".*$", handlers)


def page_names(scheduler: Any) -> list[str]:
    """Return the mutable list of the dashboard's page names, or an empty list if there is no dashboard."""
    try:
        from distributed.dashboard.scheduler import template_variables
    except ImportError:  # the dashboard requires Bokeh
        return []
    pages: list[str] = template_variables(scheduler)["pages"]
    return pages


def http_address(scheduler: Any) -> tuple[str, int] | None:
    """Return the host and port of the HTTP server of a `distributed.Scheduler`; None if it has none."""
    server = getattr(scheduler, "http_server", None)  # set when the server starts
    return None if server is None else (str(server.address), int(server.port))
