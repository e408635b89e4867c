"""Private methods that all file systems of fsspec share; each function raises an error if its method is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dasksc._compat.unsupported import attribute

__all__ = ["options_in_url", "path_in"]


def path_in(kind: Any, url: str) -> str:
    """Return the path that a file system class extracts from a URL (``_strip_protocol``)."""
    return str(attribute(kind, "_strip_protocol", library="fsspec")(url))


def options_in_url(kind: Any, url: str) -> Mapping[str, Any]:
    """Return the options that a file system class extracts from a URL (``_get_kwargs_from_urls``)."""
    options: Mapping[str, Any] = attribute(kind, "_get_kwargs_from_urls", library="fsspec")(url)
    return options
