"""The loader page on a Dask scheduler's own dashboard: how fast every rank is fed, and what it waits for.

There are three ways to it:

- `install`, for a Client, a LocalCluster or a Scheduler that runs;
- ``dask scheduler --preload dasksc.dashboard``;
- ``dasksc.dashboard`` among Dask's ``distributed.scheduler.http.routes``, in its configuration.

Ranks that fetch through the scheduler tell the page once a second how they are doing
(`dasksc.window.reporting`); what a rank told is dropped when its Client goes. The scheduler's
``/metrics`` show the same figures.
"""

from __future__ import annotations

from typing import Any

import distributed

from dasksc.dashboard.page import FiguresHandler, PageHandler, page_of
from dasksc.errors import InputError

__all__ = ["dask_setup", "install", "routes"]

# As Dask's extension point takes them.
routes: list[tuple[str, type, dict[str, Any]]] = [
    (r"loader", PageHandler, {}),
    (r"loader.json", FiguresHandler, {}),
]


def install(target: Any) -> str | None:
    """Put the loader page on the dashboard of a scheduler that runs.

    Parameters
    ----------
    target
        A ``distributed.Client`` (its scheduler must be able to import dasksc), a ``LocalCluster`` or a
        ``Scheduler``. Once more changes nothing.

    Returns
    -------
    str or None
        Where the page is; None for a Scheduler, or without a dashboard.

    Raises
    ------
    InputError
        If `target` is none of these.
    """
    if isinstance(target, distributed.Client):
        target.run_on_scheduler(_install_here)
    elif isinstance(scheduler := getattr(target, "scheduler", target), distributed.Scheduler):
        _install_here(scheduler)
    else:
        raise InputError(f"a Client, LocalCluster or Scheduler is needed; got {target!r}")
    link = getattr(target, "dashboard_link", None)
    return None if link is None else link.removesuffix("status") + "loader"


def dask_setup(scheduler: Any) -> None:
    """Install the page on a scheduler that starts: what ``dask scheduler --preload`` calls."""
    _install_here(scheduler)


def _install_here(dask_scheduler: Any) -> None:
    page_of(dask_scheduler)
    application = dask_scheduler.http_application
    if getattr(application, "has_loader_page", False):
        return
    application.has_loader_page = True
    # Whatever prefix the dashboard is served under.
    handlers = [(rf"/(?:.*/)?{path}", handler, {"dask_server": dask_scheduler}) for path, handler, _ in routes]
    application.add_handlers(r".*$", handlers)
    _add_tab(dask_scheduler)


def _add_tab(scheduler: Any) -> None:
    """Name the page among those at the top of Dask's own."""
    try:
        from distributed.dashboard.scheduler import template_variables
    except ImportError:  # no Bokeh, so there are no such pages
        return
    pages = template_variables(scheduler)["pages"]  # the very list that the pages are made with
    if "loader" not in pages:
        pages.append("loader")
