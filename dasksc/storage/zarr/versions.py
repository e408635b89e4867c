"""Versions of the stored objects of a Zarr array.

The metadata of an array do not change when its objects do, and folders do not change when a file is written in place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import partial

from dasksc.errors import MissingPathError
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import in_order
from dasksc.storage.remote.urls import RemoteLocation

__all__ = ["versions_of"]


def versions_of(array: str | RemoteLocation, keys: Iterable[str]) -> str:
    """Return a digest of the sizes and times, or ETags, of the objects of an array."""
    # Web servers are asked for each object, and buckets for a listing.
    found: Iterable[object]
    if isinstance(array, str):
        found = (_local(f"{array}/{key}") for key in keys)
    elif array.is_on_web:
        found = in_order([(partial(_remote, array.below(key)), 0) for key in keys])
    else:
        found = sorted(array.client.listed(array.key).items())
    hashed = hashlib.blake2b(digest_size=16)
    for one in found:
        hashed.update(repr(one).encode())
    return hashed.hexdigest()


def _local(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns


def _remote(location: RemoteLocation) -> ObjectIdentity | None:
    try:
        return location.client.stat(location.key)
    except MissingPathError:
        return None
