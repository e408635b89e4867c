"""What `open` takes, and what it is told for everything that it opens."""

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
    """What `open` was told, for everything that it opens, however deep in the file.

    Parameters
    ----------
    mmap
        Whether uncompressed files of this machine are mapped into memory, as for `open`.
    has_names
        Whether the names of cells are read.
    may_lack
        Whether columns of obs that were asked for may be missing: of several atlases, some may lack what others have.
    storage_options
        How what is behind a URL is reached.
    cache
        Where blocks of what is read are kept. None: what Dask's configuration says, for URLs only.
    """

    mmap: UseMmap = "auto"
    has_names: bool = True
    may_lack: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: Cache | None = None

    def cache_of_places(self) -> Cache | None:
        """Return the cache of what is read by way of a `Place`: the one given, or that of the configuration."""
        return self.cache or Cache.of(config.get("cache"))


def check_mmap(mmap: Any) -> None:
    """Refuse what is no way of reading files."""
    if not (isinstance(mmap, bool) or mmap == "auto"):
        raise InputError(f"mmap={mmap!r} must be True, False or 'auto'")
