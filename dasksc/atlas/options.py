"""Options of `open`, and types of its input."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from anndata import AnnData

from dasksc import config
from dasksc.errors import InputError
from dasksc.storage import Cache, UseMmap

__all__ = ["ACCEPTED", "OpenOptions", "Openable", "check_mmap"]

Openable: TypeAlias = str | os.PathLike[str] | AnnData

ACCEPTED = (
    "the path of an .h5ad file, the path of a Zarr store (a directory), an AnnData (in memory, backed, or of Dask "
    "arrays), or several: a list or dict of these, a pattern such as 'atlas/*.h5ad', or a directory of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Options of `open` that apply to all elements of a file.

    Parameters
    ----------
    mmap
        Setting for memory-mapping uncompressed local files, as for `open`.
    has_names
        If True, read the names of cells.
    may_lack
        If True, requested columns of obs may be missing, since only some of several atlases may have them.
    storage_options
        Options for accessing URLs.
    cache
        Cache of blocks that are read. None: the cache in the configuration of Dask, for URLs only.
    """

    mmap: UseMmap = "auto"
    has_names: bool = True
    may_lack: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: Cache | None = None

    def cache_of_places(self) -> Cache | None:
        """Return the cache for reading through a `Place`: the given one, or that of the configuration."""
        return self.cache or Cache.of(config.get("cache"))


def check_mmap(mmap: Any) -> None:
    """Raise an error for an invalid value of `mmap`."""
    if not (isinstance(mmap, bool) or mmap == "auto"):
        raise InputError(f"mmap={mmap!r} must be True, False or 'auto'")
