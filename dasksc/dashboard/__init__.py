"""Loader page of a Dask scheduler's dashboard: the rate at which every rank receives batches, and its waiting times.

There are two ways to add the page:

- `install`, for a running Client, LocalCluster or Scheduler;
- ``dask scheduler --preload dasksc.dashboard``.

Ranks that fetch through the scheduler report to the page about once a second (`dasksc.executor.reporting`).
The reports of a rank are dropped when its Client disconnects.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import distributed

from dasksc._compat.distributed import add_pages, http_address, page_names
from dasksc.dashboard.page import FiguresHandler, PageHandler, page_of
from dasksc.errors import InputError

__all__ = ["dask_setup", "install"]

logger = logging.getLogger("dasksc.dashboard")


def install(target: Any) -> str | None:
    """Add the loader page to the dashboard of a running scheduler.

    Parameters
    ----------
    target
        A ``distributed.Client``, not asynchronous (its scheduler must be able to import dasksc), a ``LocalCluster`` or
        a ``Scheduler``. Repeated calls have no effect.

    Returns
    -------
    str or None
        Link to the page; None for a Scheduler. If the dashboard listens on loopback or is disabled, the link works only
        on the scheduler's machine.

    Examples
    --------
    >>> import distributed
    >>> with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
    ...     print(dasksc.dashboard.install(cluster))
    http://127.0.0.1:.../loader
    """
    if isinstance(target, distributed.Client):
        if target.asynchronous:
            raise InputError(
                f"the Client {target!r} is asynchronous. Give one made with asynchronous=False, or start a scheduler "
                "that has the loader page: dask scheduler --preload dasksc.dashboard"
            )
        listens_at = target.run_on_scheduler(_install_here)
    elif isinstance(scheduler := getattr(target, "scheduler", target), distributed.Scheduler):
        listens_at = _install_here(scheduler)
    else:
        raise InputError(f"a Client, LocalCluster or Scheduler is needed; got {target!r}")
    link = getattr(target, "dashboard_link", None)
    return _with_host(link.removesuffix("status") + "loader", listens_at) if link else None


def dask_setup(scheduler: Any) -> None:
    """Install the page on a starting scheduler; called by ``dask scheduler --preload``."""
    _install_here(scheduler)


def _install_here(dask_scheduler: Any) -> tuple[str, int] | None:
    """Add the page to a scheduler in this process; return the host and port of its dashboard."""
    # The dashboard may be served under any prefix.
    routes: dict[str, type] = {"loader": PageHandler, "loader.json": FiguresHandler}
    handlers = [(rf"/(?:.*/)?{path}", handler, {"dask_server": dask_scheduler}) for path, handler in routes.items()]
    try:
        page_of(dask_scheduler)
        add_pages(dask_scheduler, handlers)
        if "loader" not in (pages := page_names(dask_scheduler)):
            pages.append("loader")  # in the navigation bar of the other pages
    except (AttributeError, ImportError) as error:  # The scheduler must start even without the page.
        logger.warning("There is no loader page, since this version of distributed is not supported: %s", error)
    return http_address(dask_scheduler)


def _with_host(link: str, listens_at: tuple[str, int] | None) -> str:
    """Return Dask's link, which has the host of the scheduler, with the host on which the dashboard listens."""
    if listens_at is None:
        return link
    host, port = listens_at
    parts = urlsplit(link)
    # Unchanged on all interfaces, and if ``distributed.dashboard.link`` sets another link, such as that of a proxy.
    if host in ("", "0.0.0.0", "::") or not parts.netloc.endswith(f":{port}"):
        return link
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()
