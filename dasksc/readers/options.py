"""Options of `open`, and types of its input."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from anndata import AnnData

from dasksc import config
from dasksc.checks import names_or_none
from dasksc.errors import InputError, WrongTypeError
from dasksc.storage import Cache, RemoteLocation, UseMmap

Openable: TypeAlias = str | os.PathLike[str] | AnnData

ACCEPTED = (
    "the path of an .h5ad file, of a 10x .h5 file, of a Zarr store (a directory or a .zarr.zip file), of a SOMA "
    "experiment or of a .parquet file, an AnnData (in memory, backed, or of Dask arrays), or several: a list or dict "
    "of these, a pattern such as 'atlas/*.h5ad', or a directory of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Options of `dasksc.open` that a `dasksc.readers.Reader` receives.

    Parameters
    ----------
    mmap
        Setting for memory-mapping uncompressed local files, as for `dasksc.open`.
    has_names
        If False, the names of cells are not needed.
    may_lack
        If True, the atlas is one of several, of which only some may have the requested columns and features.
    storage_options
        Options for accessing URLs.
    cache
        Cache of blocks that are read; None for the cache in the configuration of Dask, which applies to URLs only.
    feature_types, genomes
        Features of 10x files to keep, as for `dasksc.open`; None for all.
    reader_options
        Options of the format, by name.
    """

    mmap: UseMmap = "auto"
    has_names: bool = True
    may_lack: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: Cache | None = None
    feature_types: tuple[str, ...] | None = None
    genomes: tuple[str, ...] | None = None
    reader_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.mmap, bool) or self.mmap == "auto"):
            raise InputError(f"mmap={self.mmap!r} must be True, False or 'auto'")
        for name in ("storage_options", "reader_options"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise WrongTypeError(f"{name} must be a dict of options, or None; got a {type(given).__name__}")

    def cache_of(self, path: str | RemoteLocation) -> Cache | None:
        """Return the cache for a location, that of the configuration by default; None for a local path."""
        if not isinstance(path, RemoteLocation):
            return None
        return self.cache or Cache.of(config.get("cache"))


def names_given(option: str, value: Any) -> tuple[str, ...] | None:
    """Return the names in an option that takes one name or several; None if the option is None."""
    names = tuple(names_or_none(option, value))
    if value is not None and not names:
        raise InputError(f"{option}={value!r} must be a name, or a list of at least one")
    return names or None


def refuse_feature_choice(options: OpenOptions, what: str) -> None:
    """Raise an error for options that select features of 10x ``.h5`` files; `what` describes the input."""
    chosen = {"feature_types": options.feature_types, "genome": options.genomes}
    for option, names in chosen.items():
        if names is not None:
            raise InputError(
                f"{option}= is for 10x .h5 files, but {what} is not one. Select genes of the result: "
                f"adata[:, adata.var[{option!r}].isin({list(names)})]"
            )
