"""Where a dashboard can be opened: Dask's own link has the scheduler's host in it, wherever the dashboard listens."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["with_host"]

_ANYWHERE = ("", "0.0.0.0", "::")


def with_host(link: str, listens_at: tuple[str, int] | None) -> str:
    """Return Dask's link to a dashboard with the host at which it listens.

    Unchanged where the dashboard listens on every interface, and where the link is the site's own, as through a
    proxy (``distributed.dashboard.link`` in Dask's configuration).
    """
    if listens_at is None:
        return link
    host, port = listens_at
    parts = urlsplit(link)
    if host in _ANYWHERE or not parts.netloc.endswith(f":{port}"):
        return link
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()
