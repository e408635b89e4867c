"""Private methods that all file systems of fsspec share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["options_in_url", "parent_of", "path_in", "range_of"]


def path_in(kind: Any, url: str) -> str:
    """Return the path that a file system class extracts from a URL."""
    return str(kind._strip_protocol(url))


def options_in_url(kind: Any, url: str) -> Mapping[str, Any]:
    """Return the options that a file system class extracts from a URL."""
    options: Mapping[str, Any] = kind._get_kwargs_from_urls(url)
    return options


def parent_of(system: Any, path: str) -> Any:
    """Return the parent folder of a path."""
    return system._parent(path)


def range_of(file: Any, start: int, stop: int) -> bytes:
    """Read bytes [start, stop) of an open ``AbstractBufferedFile``, bypassing its buffer."""
    return bytes(file._fetch_range(start, stop))
