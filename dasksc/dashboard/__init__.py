"""Loader page of a Dask scheduler's dashboard: the rate at which every rank receives batches, and its waiting times.

There are two ways to add the page:

- `install`, for a running Client, LocalCluster or Scheduler;
- ``dask scheduler --preload dasksc.dashboard``.

Ranks that fetch through the scheduler report to the page about once a second (`dasksc.executor.reporting`).
The reports of a rank are dropped when its Client disconnects.
"""

from __future__ import annotations

import importlib.resources
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import distributed
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.http.utils import RequestHandler

from dasksc.errors import InputError
from dasksc.executor.reporting import OPERATION, PAGE_METADATA_KEY, diagnosis

__all__ = ["dask_setup", "install"]

_NAME = "dasksc-loader-page"
_N_KEPT = 90  # reports of each loader, for the plots
_N_LATEST = 3  # reports that make up the current figures
_SHORT_S = 0.01  # shortest interval for which a rate is computed
_N_LOADERS = 32  # loaders kept per Client; beyond that, the one with the oldest report is dropped


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
        listens_at = target.run_on_scheduler(_set_up)
    elif isinstance(scheduler := getattr(target, "scheduler", target), distributed.Scheduler):
        listens_at = _set_up(scheduler)
    else:
        raise InputError(f"a Client, LocalCluster or Scheduler is needed; got {target!r}")
    link = getattr(target, "dashboard_link", None)
    return _with_host(f"{link.removesuffix('status')}loader", listens_at) if link else None


def _set_up(dask_scheduler: Any) -> tuple[str, int] | None:
    """Add the page to a scheduler in this process; return the host and port of its dashboard."""
    dask_setup(dask_scheduler)
    server = getattr(dask_scheduler, "http_server", None)  # set when the server starts
    return None if server is None else (str(server.address), int(server.port))


def _with_host(link: str, listens_at: tuple[str, int] | None) -> str:
    """Return Dask's link, which has the host of the scheduler, with the host on which the dashboard listens."""
    parts = urlsplit(link)
    # Unchanged on all interfaces, and if ``distributed.dashboard.link`` sets another link, such as that of a proxy.
    if listens_at is None or listens_at[0] in ("", "0.0.0.0", "::") or parts.port != listens_at[1]:
        return link
    host, port = listens_at
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()


def dask_setup(dask_scheduler: Any) -> None:
    """Add the page to a scheduler in this process; called by ``dask scheduler --preload``."""
    if _NAME in dask_scheduler.plugins:
        return
    dask_scheduler.add_plugin(LoaderPage(dask_scheduler), name=_NAME)
    # The dashboard may be served under any prefix.
    routes: dict[str, type] = {"loader": PageHandler, "loader.json": FiguresHandler}
    handlers = [(rf"/(?:.*/)?{path}", handler, {"dask_server": dask_scheduler}) for path, handler in routes.items()]
    dask_scheduler.http_application.add_handlers(r".*$", handlers)
    try:
        from distributed.dashboard.scheduler import template_variables
    except ImportError:  # without Bokeh, the scheduler has no other pages
        return
    if "loader" not in (pages := template_variables(dask_scheduler)["pages"]):
        pages.append("loader")  # in the navigation bar of the other pages


@dataclass(slots=True)
class _Loader:
    """Latest report of a data set of a rank, the time of its arrival, and recent (cells per second, wait, time)."""

    figures: Mapping[str, Any]
    at: float = 0.0
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_N_KEPT))

    def update(self, figures: Mapping[str, Any], at: float) -> None:
        before = self.figures
        is_other = (figures["epoch"], figures["n_batches_before"]) != (before["epoch"], before["n_batches_before"])
        # The same epoch may be read again.
        if is_other or figures["clock_s"] < before["clock_s"] or figures["n_rows"] < before["n_rows"]:
            before = dict.fromkeys(before, 0)
        rows, clock_s, waited_s = (figures[name] - before[name] for name in ("n_rows", "clock_s", "waited_s"))
        if clock_s > _SHORT_S:
            self.recent.append((rows / clock_s, min(1.0, max(0.0, waited_s / clock_s)), at))
        self.figures, self.at = figures, at

    def shown(self, now: float) -> dict[str, Any]:
        """Return the figures of the page; while an epoch runs, waiting is that of the latest reports."""
        waits = [wait for _, wait, _ in self.recent][-_N_LATEST:]
        is_over = self.figures["has_ended"] or not waits
        wait_share = float(self.figures["wait_share"]) if is_over else sum(waits) / len(waits)
        return {
            **self.figures,
            "age_s": now - self.at,
            "recent": [(rate, wait, now - at) for rate, wait, at in self.recent],
            "wait_share_now": wait_share,
            "diagnosis": diagnosis({**self.figures, "wait_share": wait_share}),
        }


class LoaderPage(SchedulerPlugin):
    """Reports of all ranks that fetch through a scheduler."""

    name = _NAME

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._loaders: dict[tuple[str, str, Any], _Loader] = {}
        scheduler.handlers[OPERATION] = self.report
        scheduler.task_metadata[PAGE_METADATA_KEY] = True

    def report(self, client: str, figures: Mapping[str, Any]) -> bool:
        """Store the report of a Client; return True unless the Client has disconnected."""
        if client not in self._scheduler.clients:
            return False
        key = (client, figures["key"], figures["worker"])
        if key not in self._loaders:
            of_client = [other for other in self._loaders if other[0] == client]
            if len(of_client) >= _N_LOADERS:
                del self._loaders[min(of_client, key=lambda other: self._loaders[other].at)]
            self._loaders[key] = _Loader(dict.fromkeys(figures, 0))
        self._loaders[key].update(figures, monotonic())
        return True

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Drop the reports of a Client."""
        self._loaders = {key: loader for key, loader in self._loaders.items() if key[0] != client}

    def figures(self) -> dict[str, Any]:
        """Return the data that the page displays; loaders are sorted by name, rank and worker."""
        now = monotonic()
        loaders = [loader.shown(now) for loader in self._loaders.values()]
        loaders.sort(key=lambda one: (one["name"], one["rank"], one["worker"] or 0, one["key"]))
        return {"loaders": loaders, "n_workers": len(self._scheduler.workers), "address": self._scheduler.address}


class FiguresHandler(RequestHandler):
    """Request handler that serves the figures as JSON."""

    def get(self) -> None:
        """Respond with JSON."""
        self.set_header("Cache-Control", "no-store")
        self.write(self.server.plugins[_NAME].figures())


class PageHandler(RequestHandler):
    """Request handler that serves the page with the current figures."""

    def get(self) -> None:
        """Respond with HTML."""
        html = importlib.resources.files("dasksc.dashboard").joinpath("loader.html").read_text(encoding="utf-8")
        # Inside a script element, only "</" and "<!" could end it.
        figures = json.dumps(self.server.plugins[_NAME].figures()).replace("<", "\\u003c")
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write(html.replace("/*figures*/null", figures))
