"""Options of `open`, types of its input, paths and URLs as readers receive them, and errors that name them."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from anndata import AnnData, OldFormatWarning

from dasksc import config
from dasksc.checks import names_or_none
from dasksc.errors import InputError, MissingPathError, StorageError, WrongTypeError
from dasksc.storage import SCHEMES, Cache, RemoteLocation, UseMmap, caused_by_data, is_url, redact_url
from dasksc.storage.zarr.reader import is_zip

Openable: TypeAlias = str | os.PathLike[str] | AnnData

ACCEPTED = (
    "the path of an .h5ad file, of a 10x .h5 file, of a Zarr store (a directory or a .zarr.zip file), of a SOMA "
    "experiment or of a .parquet file, an AnnData (in memory, backed, or of Dask arrays), or several: a list or dict "
    "of these, a pattern such as 'atlas/*.h5ad', or a directory of them"
)
# Scheme and remainder of a URL that lost a slash: "s3:/bucket/atlas.zarr".
_URL_WITH_ONE_SLASH = re.compile(rf"(?:^|/)((?:{'|'.join(SCHEMES)}):)/(.+)")


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


def where_of(path: str | os.PathLike[str], options: OpenOptions) -> str | RemoteLocation:
    """Return the absolute path of a local file; a `RemoteLocation` for a URL or a path read through a cache."""
    path = os.fspath(path)
    location = RemoteLocation.of(path, options.storage_options) if is_url(path) else None
    # The path is absolute, since tasks may run in processes with another working directory.
    local = os.path.abspath(path) if location is None else location.local
    if local is None:
        assert location is not None
        return location
    if not os.path.exists(local):
        raise MissingPathError(_nothing_at(local))
    # Byte ranges of an archive, such as a catalogue, are read from the file itself, without the cache.
    is_archive = is_zip(local) or local.endswith(".catalog")
    return local if options.cache is None or is_archive else RemoteLocation.of_local(local)


def _nothing_at(path: str) -> str:
    """Return the message for a path that does not exist, with similar names."""
    if url := _URL_WITH_ONE_SLASH.search(path):
        suggested_url = redact_url(f"{url[1]}//{url[2]}")
        return f"there is nothing at {suggested_url.replace('//', '/', 1)}; did you mean {suggested_url}?"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"there is nothing at {path}: {folder} is not a directory"
    names = os.listdir(folder or ".") if os.access(folder or ".", os.R_OK) else []
    near = difflib.get_close_matches(name, names, n=3)
    return f"there is nothing at {path}" + (f"; similar names: {', '.join(near)}" if near else "")


@contextmanager
def naming_errors(path: str | RemoteLocation) -> Iterator[None]:
    """Convert errors of the libraries to errors that name the file, and suppress warnings about old formats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldFormatWarning)
        warnings.filterwarnings("ignore", message="Moving element from", category=FutureWarning)
        # AnnData 0.13 uses an option that pandas 3 deprecates.
        warnings.filterwarnings("ignore", message="The 'future.infer_string' option")
        try:
            yield
        except (StorageError, InputError):
            raise
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        # The libraries may raise any error for damaged metadata.
        except Exception as error:
            if not caused_by_data(error):
                error.add_note(f"The error occurred while {path} was opened.")
                raise
            raise StorageError(f"{path} cannot be read as AnnData: {error}") from error
