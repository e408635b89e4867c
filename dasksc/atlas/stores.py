"""Files and stores at paths and URLs: location, root group, and error messages with the path."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h5py
from anndata import OldFormatWarning

from dasksc.atlas.lookup import nothing_at
from dasksc.atlas.options import ACCEPTED, OpenOptions
from dasksc.errors import CorruptDataError, InputError, MissingPathError, StorageError
from dasksc.storage import RemoteLocation, caused_by_data, is_url, open_location
from dasksc.storage.hdf5.open_errors import open_local
from dasksc.storage.remote.urls import HDF5_ENDINGS, ZARR_MARKERS
from dasksc.storage.safety.hdf5_links import check_links
from dasksc.storage.zarr.reader import ZarrFile
from dasksc.storage.zarr.zipped import ZipArchive, is_zip

__all__ = ["holds_modalities", "naming_errors", "root_of", "where_of"]

# For error messages: functions of anndata.io for other formats, by suffix; and suffixes of files saved by R.
_READERS = {".csv": "read_csv", ".tsv": "read_text", ".tab": "read_text", ".txt": "read_text", ".mtx": "read_mtx"}
_OF_R = (".rds", ".rda", ".rdata")


def where_of(path: str, options: OpenOptions) -> str | RemoteLocation:
    """Return the absolute path of a local file; a `RemoteLocation` for a URL or a path read through a cache."""
    location = RemoteLocation.of(path, options.storage_options) if is_url(path) else None
    # The path is absolute, since tasks may run in processes with another working directory.
    local = os.path.abspath(path) if location is None else location.local
    if local is None:
        assert location is not None
        return location
    if not os.path.exists(local):
        raise MissingPathError(nothing_at(local))
    # Byte ranges of an archive are read from the file itself, without the cache.
    return local if options.cache is None or is_zip(local) else RemoteLocation.of_local(local)


def holds_modalities(path: str) -> bool:
    """Return True if a path is that of a MuData: an ``.h5mu`` file, or a local Zarr store with modalities."""
    # The store may be zipped. A URL is recognized by its suffix only; a store at a URL is checked when it is opened.
    location = RemoteLocation.of(path) if is_url(path) else None
    if location is not None and location.local is None:
        return location.key.endswith(".h5mu")
    local = path if location is None or location.local is None else location.local
    if is_zip(local):
        return any(name.startswith("mod/") for name in ZipArchive.of(local).members)
    return local.endswith(".h5mu") or (
        os.path.isdir(os.path.join(local, "mod")) and any(os.path.exists(os.path.join(local, m)) for m in ZARR_MARKERS)
    )


@contextmanager
def root_of(path: str | RemoteLocation, options: OpenOptions) -> Iterator[Any]:
    """Open the file or store at a path or location, and yield its root group."""
    if isinstance(path, RemoteLocation):
        with open_location(path, cache=options.remote_cache()) as root:
            yield root
        return
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, marker)) for marker in ZARR_MARKERS):
            raise StorageError(
                f"{path} is a directory, but neither a Zarr group (it has none of {', '.join(ZARR_MARKERS)}) nor a "
                f"directory of .h5ad files or .zarr stores. Expected {ACCEPTED}."
            )
        yield ZarrFile(path).root()
        return
    if is_zip(path):
        yield ZarrFile(path).root()
        return
    if not h5py.is_hdf5(path):
        raise _not_hdf5_error(path)
    with open_local(path) as file:
        check_links(file, path, folder=os.path.dirname(path))
        yield file


def _not_hdf5_error(path: str) -> StorageError:
    name = os.path.basename(path)
    stem, suffix = os.path.splitext(name)
    suffix = suffix.lower()
    n_bytes = os.path.getsize(path)
    if n_bytes and suffix == ".gz":
        return StorageError(f"{path} is compressed as a whole. Decompress it first: gunzip {name}")
    if n_bytes and suffix not in (*HDF5_ENDINGS, ".zarr", ""):
        target = f"{stem}.h5ad"
        read = _READERS.get(suffix)
        advice = (
            f"with anndata: anndata.io.{read}({name!r}).write_h5ad({target!r})"
            if read
            else f"in R: zellkonverter::writeH5AD(object, {target!r})"
            if suffix in _OF_R
            else f"to an AnnData, and write it: adata.write_h5ad({target!r})"
        )
        return StorageError(
            f"{path} is not an atlas: dasksc reads .h5ad, .h5 (10x), .h5mu and .zarr. Convert it {advice}"
        )
    what = f"({n_bytes} bytes) is not an HDF5 file, or its beginning is damaged" if n_bytes else "is empty (0 bytes)"
    return CorruptDataError(f"{path} {what}. Copy, download or write it again.")


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
