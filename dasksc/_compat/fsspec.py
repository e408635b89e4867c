"""Private methods that all file systems of fsspec share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def path_in(kind: Any, url: str) -> str:
    """Return the path that a file system class extracts from a URL."""
    return str(kind._strip_protocol(url))


def options_in_url(kind: Any, url: str) -> Mapping[str, Any]:
    """Return the options that a file system class extracts from a URL."""
    options: Mapping[str, Any] = kind._get_kwargs_from_urls(url)
    return options
