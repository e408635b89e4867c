"""The readers of this process: those of other packages, found by entry point, and those of dasksc.

Those of HDF5 files and Zarr stores are defined here, since the content tells the formats in them apart.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points

import h5py

from dasksc.errors import CorruptDataError, DaskscError, InputError, MissingPathError, StorageError
from dasksc.readers.anndata import AnnDataStore, MuDataStore
from dasksc.readers.catalog import CatalogReader
from dasksc.readers.cell_ranger import CellRangerStore
from dasksc.readers.interface import Reader, Store
from dasksc.readers.options import ACCEPTED, OpenOptions, naming_errors, refuse_feature_choice
from dasksc.readers.parquet import ParquetReader
from dasksc.readers.soma import SomaReader
from dasksc.storage import HDF5_ENDINGS, RemoteLocation
from dasksc.storage.hdf5.reader import check_links
from dasksc.storage.opening import hdf5_file
from dasksc.storage.remote.urls import ZARR_MARKERS
from dasksc.storage.zarr.reader import ZarrFile, is_zip

logger = logging.getLogger("dasksc.readers")

ENTRY_POINTS = "dasksc.readers"


class Hdf5Reader(Reader):
    """Reader of ``.h5ad``, ``.h5mu`` and 10x ``.h5`` files; their content tells them apart."""

    suffixes = HDF5_ENDINGS
    listed_suffixes = (".h5ad",)

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for an HDF5 file, and for any object at a URL."""
        if isinstance(path, RemoteLocation):
            return path.key.endswith(self.suffixes) or path.exists()
        return bool(h5py.is_hdf5(path))

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        """Open a file; its links are checked here, once for all elements."""
        file = hdf5_file(path, use_mmap=options.mmap, cache=options.cache_of(path))
        try:
            root = file.root()
            if isinstance(path, str):  # remote files are checked when they are opened
                check_links(root, path, folder=os.path.dirname(path))
            for kind in (MuDataStore, CellRangerStore):
                if kind.holds(root):
                    return kind(path, file, root, options)
            return AnnDataStore(path, file, root, options)
        except BaseException:
            file.close()
            raise


class ZarrReader(Reader):
    """Reader of AnnData and MuData in Zarr stores."""

    listed_suffixes = (".zarr", ".zarr.zip")

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for a group of Zarr; at a URL, this takes up to three requests."""
        if isinstance(path, RemoteLocation):
            return path.is_zarr()
        if not os.path.isdir(path):
            return is_zip(path)
        return any(os.path.exists(os.path.join(path, marker)) for marker in ZARR_MARKERS)

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        file = ZarrFile(path, use_mmap=options.mmap, cache=options.cache_of(path))
        root = file.root()
        return (MuDataStore if MuDataStore.holds(root) else AnnDataStore)(path, file, root, options)

    def parts(self, path: str | RemoteLocation) -> list[str]:
        """Return the groups ``dataset_*`` of a store, as annbatch writes them."""
        if isinstance(path, RemoteLocation):
            with naming_errors(path):
                root = ZarrFile(path).root()
                names = [] if "obs" in root else [name for name in root if name.startswith("dataset_")]
                return [path.below(name).url for name in sorted(names, key=_by_number)]
        inside = glob.glob(os.path.join(glob.escape(path), "dataset_*"))
        return [] if os.path.exists(os.path.join(path, "obs")) else sorted(inside, key=_by_number)


def _by_number(path: str) -> tuple[int, str]:
    digits = path.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0, path


@cache
def readers() -> tuple[Reader, ...]:
    """Return all readers, in the order in which they are asked; those of other packages come first."""
    found: list[Reader] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            loaded = entry.load()
            found.append(loaded() if isinstance(loaded, type) else loaded)
        except Exception as error:  # another package must not prevent that atlases of dasksc's formats open
            logger.warning("the reader %r (%s) cannot be loaded: %r", entry.name, entry.value, error)
    return (*found, CatalogReader(), ParquetReader(), ZarrReader(), SomaReader(), Hdf5Reader())


def reader_of(path: str | RemoteLocation) -> Reader | None:
    """Return the first reader that recognises a path; None if none does."""
    try:
        return next((reader for reader in readers() if reader.matches(path)), None)
    except DaskscError:
        raise
    except OSError as error:  # such as a file that this user may not read
        raise StorageError(f"{path} cannot be read: {error}") from error


def is_file_name(name: str) -> bool:
    """Return True if a name alone shows that it is one of a file, so that no request is needed."""
    return name.endswith(tuple(suffix for reader in readers() for suffix in reader.suffixes))


def is_listed_name(name: str) -> bool:
    """Return True if a folder's entry is an atlas; hidden files, which some systems add, are not."""
    suffixes = tuple(suffix for reader in readers() for suffix in reader.listed_suffixes)
    return name.endswith(suffixes) and not name.startswith(".")


@contextmanager
def opened(path: str | RemoteLocation, options: OpenOptions) -> Iterator[Store]:
    """Open the store at a path; errors name the path."""
    with naming_errors(path):
        reader = reader_of(path)
        if reader is None:
            raise _unknown(path)
        unknown = [name for name in options.reader_options if name not in reader.options]
        if unknown:
            expected = f"expected {', '.join(reader.options)}" if reader.options else "this format has no options"
            raise InputError(f"reader_options have no {unknown[0]!r} for {path}: {expected}")
        store = reader.open(path, options)
        try:
            if not store.selects_features and not store.modalities():
                refuse_feature_choice(options, str(path))
            yield store
        finally:
            store.close()


def _unknown(path: str | RemoteLocation) -> StorageError:
    if isinstance(path, RemoteLocation):
        return MissingPathError(f"there is nothing at {path}")
    if os.path.isdir(path):
        return StorageError(
            f"{path} is a directory, but neither a Zarr group (it has no zarr.json and no .zgroup) nor a directory of "
            f"atlases. Expected {ACCEPTED}."
        )
    name, n_bytes = os.path.basename(path), os.path.getsize(path)
    suffix = os.path.splitext(name)[1].lower()
    if n_bytes and suffix == ".gz":
        return StorageError(f"{path} is compressed as a whole. Decompress it first: gunzip {name}")
    if n_bytes and suffix and not is_file_name(name) and not is_listed_name(name):
        return StorageError(
            f"{path} is not an atlas: dasksc reads .h5ad, .h5 (10x), .h5mu, .zarr, SOMA, .parquet, and the formats of "
            "installed readers. Read it with anndata.io (read_csv, read_text, read_mtx) and write it: "
            "adata.write_h5ad(...); in R, use zellkonverter::writeH5AD"
        )
    what = f"({n_bytes} bytes) is not an HDF5 file, or its beginning is damaged" if n_bytes else "is empty (0 bytes)"
    return CorruptDataError(f"{path} {what}. Copy, download or write it again.")
