"""Links to dashboards.

A link that Dask returns contains the host of the scheduler, even if the dashboard listens on another address.
"""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["with_host"]

_ALL_INTERFACES = ("", "0.0.0.0", "::")


def with_host(link: str, listens_at: tuple[str, int] | None) -> str:
    """Return Dask's link to a dashboard, with its host replaced by the one on which the dashboard listens.

    The link is unchanged if the dashboard listens on every interface, or if Dask's configuration sets another link
    (``distributed.dashboard.link``), such as that of a proxy.
    """
    if listens_at is None:
        return link
    host, port = listens_at
    parts = urlsplit(link)
    if host in _ALL_INTERFACES or not parts.netloc.endswith(f":{port}"):
        return link
    return parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()
