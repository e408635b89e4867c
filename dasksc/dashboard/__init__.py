"""The loader page on a Dask scheduler's own dashboard: how fast every rank is fed, and what it waits for.

There are three ways to it:

- `install`, for a Client, a LocalCluster or a Scheduler that runs;
- ``dask scheduler --preload dasksc.dashboard``;
- ``dasksc.dashboard`` among Dask's ``distributed.scheduler.http.routes``, in its configuration.

Ranks that fetch through the scheduler tell the page once a second how they are doing
(`dasksc.executor.reporting`); what a rank told is dropped when its Client goes. The scheduler's
``/metrics`` show the same figures.
"""

from __future__ import annotations

from typing import Any

import distributed

from dasksc._compat.distributed import add_pages, listening_at, page_names
from dasksc._compat.unsupported import UnsupportedVersionError, say_once
from dasksc.dashboard.page import FiguresHandler, PageHandler, page_of
from dasksc.errors import InputError
from dasksc.executor.cluster.dashboard_links import with_host

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
        A ``distributed.Client`` (its scheduler must be able to import dasksc), a ``LocalCluster``, a
        ``Scheduler`` or what `dasksc.start_cluster` returned. Once more changes nothing.

    Returns
    -------
    str or None
        Where the page is, as seen from the scheduler's machine if the dashboard listens on loopback; None for a
        Scheduler. Dask serves pages on loopback also if it was told to show no dashboard; this is one of them.

    Raises
    ------
    InputError
        If `target` is none of these, or a Client that is asynchronous.
    """
    target = _client_of(target)
    if isinstance(target, distributed.Client):
        if target.asynchronous:
            raise InputError(
                f"the Client {target!r} is asynchronous. Give one made with asynchronous=False, or start the scheduler "
                "with the page: dask scheduler --preload dasksc.dashboard"
            )
        listens_at = target.run_on_scheduler(_install_here)
    elif isinstance(scheduler := getattr(target, "scheduler", target), distributed.Scheduler):
        listens_at = _install_here(scheduler)
    else:
        raise InputError(f"a Client, LocalCluster, Scheduler or StartedCluster is needed; got {target!r}")
    link = getattr(target, "dashboard_link", None)
    return with_host(link.removesuffix("status") + "loader", listens_at) if link else None


def _client_of(target: Any) -> Any:
    """Return the Client of a `StartedCluster`; anything else as it is."""
    client = getattr(target, "client", None)
    return client if isinstance(client, distributed.Client) else target


def dask_setup(scheduler: Any) -> None:
    """Install the page on a scheduler that starts: what ``dask scheduler --preload`` calls."""
    _install_here(scheduler)


def _install_here(dask_scheduler: Any) -> tuple[str, int] | None:
    """Put the page on a scheduler in this process; return where that listens."""
    try:
        page_of(dask_scheduler)
        _add_page(dask_scheduler)
    except UnsupportedVersionError as error:  # a scheduler that starts does so without it
        say_once(error, without="there is no loader page")
    return listening_at(dask_scheduler)


def _add_page(dask_scheduler: Any) -> None:
    # Whatever prefix the dashboard is served under.
    handlers = [(rf"/(?:.*/)?{path}", handler, {"dask_server": dask_scheduler}) for path, handler, _ in routes]
    add_pages(dask_scheduler, handlers)
    _add_tab(dask_scheduler)


def _add_tab(scheduler: Any) -> None:
    """Name the page among those at the top of Dask's own."""
    pages = page_names(scheduler)
    if "loader" not in pages:
        pages.append("loader")
