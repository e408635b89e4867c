"""The readers of this process: those of other packages, found by entry point, and those of dasksc."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points

from dasksc.errors import CorruptDataError, InputError, MissingPathError, StorageError
from dasksc.readers.catalog import CatalogReader
from dasksc.readers.hdf5 import Hdf5Reader
from dasksc.readers.interface import Reader, Store
from dasksc.readers.locations import naming_errors
from dasksc.readers.options import ACCEPTED, OpenOptions, refuse_feature_choice
from dasksc.readers.parquet import ParquetReader
from dasksc.readers.soma import SomaReader
from dasksc.readers.zarr import ZarrReader
from dasksc.storage import RemoteLocation

logger = logging.getLogger("dasksc.readers")

ENTRY_POINTS = "dasksc.readers"


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
    return next((reader for reader in readers() if reader.matches(path)), None)


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
