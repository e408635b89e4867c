"""Private methods that all file systems of fsspec share; each function raises an error if its method is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dasksc._compat.unsupported import attribute

__all__ = ["options_in_url", "parent_of", "path_in", "range_of"]


def path_in(kind: Any, url: str) -> str:
    """Return the path that a file system class extracts from a URL (``_strip_protocol``)."""
    return str(attribute(kind, "_strip_protocol", library="fsspec")(url))


def options_in_url(kind: Any, url: str) -> Mapping[str, Any]:
    """Return the options that a file system class extracts from a URL (``_get_kwargs_from_urls``)."""
    options: Mapping[str, Any] = attribute(kind, "_get_kwargs_from_urls", library="fsspec")(url)
    return options


def parent_of(system: Any, path: str) -> Any:
    """Return the parent folder of a path (``_parent``)."""
    return attribute(system, "_parent", library="fsspec")(path)


def range_of(file: Any, start: int, stop: int) -> bytes:
    """Read bytes [start, stop) of an open ``AbstractBufferedFile``, bypassing its buffer (``_fetch_range``)."""
    return bytes(attribute(file, "_fetch_range", library="fsspec")(start, stop))
