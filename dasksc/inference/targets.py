"""Destinations of complete predictions: a new store, an existing store, or an h5ad file.

A reader sees a key with all its rows or not at all. In a new store and in a file all keys appear at once, by one
rename. In an existing store each key appears by the rename of its folder; the metadata that lists the keys is replaced
afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import write_elem

from dasksc.atlas.attaching import NAMES_ATTRIBUTE, names_digest_of
from dasksc.atlas.cell_names import digest_names
from dasksc.atlas.element_sizes import lengths_of
from dasksc.errors import InputError, MissingPathError
from dasksc.inference.outputs import Output
from dasksc.inference.work import NanRows, Work
from dasksc.inference.zarr_elements import (
    ARRAY,
    ATTRIBUTE,
    CATEGORICAL,
    NAN,
    Nan,
    PublishedArray,
    found_in_store,
    is_of,
    metadata_in,
    remove_partial,
    replace_json,
    write_metadata,
    write_obs,
)
from dasksc.output.elements import as_anndata_writes, write_group
from dasksc.output.work_folder import WorkFolder, discard, extend, sync_folder
from dasksc.storage import is_url
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.hdf5.open_errors import open_local

__all__ = ["InFile", "Names", "Target", "target_of"]

Names = Callable[[], Iterable[Sequence[str]] | None]
"""Function that returns the names of the cells in pieces; None if the cells have no names."""

# Root attribute of an h5ad file: size and modification time of the file before predictions were added, and its
# modification time afterwards.
_ORIGINAL = "dasksc-original"
_PIECE_BYTES = 2**24
# Estimates of the disk space of metadata, and of the name of a cell.
_METADATA_BYTES, _NAME_BYTES = 2**16, 24


class Target(Protocol):
    """Protocol of destinations.

    Attributes
    ----------
    path
        Path of the destination.
    original
        Path, size and modification time of the atlas file before predictions were added, if publishing replaces this
        file; otherwise None.
    """

    path: Path
    original: FileIdentity | None

    @property
    def folder(self) -> Path:
        """Path of the work folder."""

    def found(self, digest: str) -> dict[str, PublishedArray]:
        """Return the published predictions whose plan has the given digest, by key."""

    def existing(self, keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that already exist; for a new store, its path if something already exists there."""

    def index_key(self) -> str | None:
        """Return the key of the names of the cells; None if there is no table of cells yet."""

    def publish_bytes(self, n_obs: int, n_bytes: int) -> int:
        """Return the approximate disk space in bytes that `publish` needs besides `n_bytes` of complete units."""

    def check_cells(self, n_obs: int, names: Names) -> None:
        """Raise an error if the cells of the destination are not those of the atlas."""

    def publish(self, work: Work, outputs: Sequence[Output], nan: Nan, names: Names) -> None:
        """Publish complete predictions."""


def target_of(out: Any, key: str, *, in_place: bool, source: str | None) -> Target:
    """Return the destination of the predictions at a path.

    Parameters
    ----------
    out
        Path of the store or file.
    key
        Name of the predictions, for the work folder.
    in_place
        True if an h5ad file may be replaced.
    source
        Path of the atlas that is read; None if it is not read from a single path.

    Raises
    ------
    InputError
        If `out` is not a local path, or is an h5ad file and `in_place` is False.
    MissingPathError
        If `in_place` is True and the file does not exist.
    """
    if not isinstance(out, str | os.PathLike) or is_url(os.fspath(out)):
        raise InputError(f"out={out!r} is not a local path; give the path of a Zarr store: 'emb.zarr'")
    path = Path(os.path.abspath(out))
    around = next((folder for folder in path.parents if _is_node(folder)), None)
    if around is not None:
        raise InputError(
            f"out={str(path)!r} lies inside the Zarr store {around}. Give the path of the store itself, with key=, or "
            "a path outside it"
        )
    is_source = source is not None and not is_url(source) and os.path.realpath(source) == os.path.realpath(path)
    if _is_node(path):
        return InStore(path, key, is_source=is_source)
    if path.suffix in (".h5ad", ".h5") or path.is_file():
        if not in_place and not path.exists():
            raise InputError(
                f"{path} is named like an h5ad file, but predictions are written to a Zarr store, or with "
                "in_place=True (--in-place) to an existing h5ad file. Give the path of a store: out='emb.zarr'"
            )
        if not in_place:
            raise InputError(
                f"{path} is a file, which would be rewritten as a whole. To allow that, give in_place=True "
                "(--in-place); otherwise write a store: out='emb.zarr'"
            )
        if not path.exists():
            raise MissingPathError(f"in_place=True extends an existing file, but there is none at {path}")
        return InFile(path, is_source=is_source)
    if os.path.lexists(path):
        raise InputError(f"{path} exists and is not a Zarr store; give another path")
    if in_place:
        raise MissingPathError(f"in_place=True extends an existing file or store, but there is none at {path}")
    return NewStore(path)


def _is_node(path: Path) -> bool:
    """Return True if a folder is a Zarr group or array."""
    return any((path / marker).exists() for marker in ("zarr.json", ".zgroup", ".zarray"))


def _check_cells(where: Path, root: Any, n_obs: int, names: Names, *, is_source: bool) -> None:
    obs = root["obs"]
    n_stored = lengths_of(obs)[obs.attrs["_index"]]
    if n_stored != n_obs:
        raise InputError(f"{where} has {n_stored} cells, but the atlas has {n_obs}; give another out=")
    if is_source:
        return
    pieces, digest = names(), names_digest_of(root, str(where))
    if pieces is not None and digest is not None and digest_names(pieces) != digest:
        raise InputError(
            f"{where} has as many cells as the atlas, but their names or their order differ. To predict "
            f"the cells of {where}, give it as the atlas; otherwise, give another out="
        )


class NewStore:
    """New Zarr store of the predictions, with the names of the cells; AnnData can read it.

    Parameters
    ----------
    path
        Path of the directory to create.
    """

    original: FileIdentity | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def folder(self) -> Path:
        """See `Target`."""
        return self.path.with_name(self.path.name + ".partial")

    def found(self, digest: str) -> dict[str, PublishedArray]:
        """See `Target`."""
        return found_in_store(self.path, digest)

    def existing(self, keys: Iterable[str]) -> list[str]:
        """See `Target`."""
        return [str(self.path)] if os.path.lexists(self.path) else []

    def index_key(self) -> str | None:
        """See `Target`."""
        return None

    def publish_bytes(self, n_obs: int, n_bytes: int) -> int:
        """See `Target`."""
        return _METADATA_BYTES + _NAME_BYTES * n_obs

    def check_cells(self, n_obs: int, names: Names) -> None:
        """See `Target`. Read the first names, so that unreadable names raise an error before anything is predicted."""
        next(iter(names() or ()), None)

    def publish(self, work: Work, outputs: Sequence[Output], nan: Nan, names: Names) -> None:
        """See `Target`."""
        store = work.store
        with as_anndata_writes():
            for one in outputs:
                write_metadata(work, one, nan)
            columns = [one.name for one in outputs if one.width is None]
            digest = write_obs(store, work.n_obs, names(), columns)
            root = zarr.open_group(store, mode="a", zarr_format=3)
            write_elem(root, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
            write_group(store / "obsm", {"encoding-type": "dict", "encoding-version": "0.1.0"})
            encoding = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
            write_group(store, {**encoding, NAMES_ATTRIBUTE: digest})
            zarr.consolidate_metadata(str(store))
        remove_partial(store)
        os.rename(store, self.path)
        sync_folder(self.path.parent)


class InStore:
    """Existing Zarr store, to which keys of obsm and obs are added.

    Parameters
    ----------
    path
        Path of the store.
    key
        Name of the predictions, for the work folder.
    is_source
        True if the store is the atlas that is read.
    """

    original: FileIdentity | None = None

    def __init__(self, path: Path, key: str, *, is_source: bool) -> None:
        self.path = path
        self._key = key
        self._is_source = is_source
        if not (path / "zarr.json").exists():
            raise InputError(
                f"{path} is a Zarr v2 store, to which nothing can be added; write another store: out='emb.zarr'"
            )
        if not (path / "obs").exists():
            raise InputError(f"{path} is not an AnnData store: it has no obs; give another out=")

    @property
    def folder(self) -> Path:
        """See `Target`."""
        return self.path.with_name(f"{self.path.name}.{self._key}.partial")

    def found(self, digest: str) -> dict[str, PublishedArray]:
        """See `Target`."""
        return found_in_store(self.path, digest)

    def existing(self, keys: Iterable[str]) -> list[str]:
        """See `Target`."""
        return [key for key in keys if os.path.lexists(self.path / key)]

    def publish_bytes(self, n_obs: int, n_bytes: int) -> int:
        """See `Target`."""
        return _METADATA_BYTES

    def index_key(self) -> str | None:
        """See `Target`."""
        return f"obs/{metadata_in(self.path / 'obs' / 'zarr.json')['attributes']['_index']}"

    def check_cells(self, n_obs: int, names: Names) -> None:
        """See `Target`."""
        _check_cells(self.path, zarr.open_group(self.path, mode="r"), n_obs, names, is_source=self._is_source)

    def publish(self, work: Work, outputs: Sequence[Output], nan: Nan, names: Names) -> None:
        """See `Target`."""
        remove_partial(work.store)
        if not (self.path / "obsm").exists():
            write_group(self.path / "obsm", {"encoding-type": "dict", "encoding-version": "0.1.0"})
        with as_anndata_writes():
            for one in outputs:
                element_path = self.path / one.key
                if metadata_in(element_path / "zarr.json").get("attributes", {}).get(ATTRIBUTE) == work.digest:
                    continue  # renamed before the process was killed
                write_metadata(work, one, nan)
                if os.path.lexists(element_path):
                    replaced = work.folder / "replaced"
                    discard(replaced)
                    os.rename(element_path, replaced)
                os.rename(work.store / one.key, element_path)
            sync_folder(self.path / "obsm")
            columns = [one.name for one in outputs if one.width is None]
            # Runs with other keys have other work folders, but change the same metadata. The store therefore has its
            # own lock.
            publishing = self.path.with_name(f"{self.path.name}.publishing")
            with WorkFolder(self.path, publishing, what="prediction").locked(wait=True):
                if columns:
                    table = self.path / "obs" / "zarr.json"
                    metadata = json.loads(table.read_text())
                    order = metadata["attributes"]["column-order"]
                    metadata["attributes"]["column-order"] = [*order, *(name for name in columns if name not in order)]
                    replace_json(table, metadata)
                if json.loads((self.path / "zarr.json").read_text()).get("consolidated_metadata") is not None:
                    zarr.consolidate_metadata(str(self.path))


class InFile:
    """H5ad file, which is replaced by a copy with further keys.

    Parameters
    ----------
    path
        Path of the file.
    is_source
        True if the file is the atlas that is read.
    """

    def __init__(self, path: Path, *, is_source: bool) -> None:
        # A symbolic link is kept, and its target is replaced.
        self.path = Path(os.path.realpath(path))
        self._is_source = is_source
        self._identity = FileIdentity.of(str(self.path))
        if not h5py.is_hdf5(self.path):
            raise InputError(
                f"{path} is not an h5ad file, so nothing can be added to it; write a store: out='emb.zarr'"
            )
        with open_local(str(self.path)) as file:
            if "obs" not in file or not isinstance(file["obs"], h5py.Group):
                raise InputError(
                    f"{path} is not an h5ad file of anndata 0.7 or later, so nothing can be added to it; write a "
                    "store: out='emb.zarr'"
                )
            recorded = np.asarray(file.attrs.get(_ORIGINAL, ()))
        self._before = self._identity
        # If the modification time equals the one recorded when predictions were last added, the file differs from the
        # original only by predictions.
        if recorded.shape == (3,) and recorded[2] == self._identity.mtime_ns:
            size, mtime_ns = map(int, recorded[:2])
            self._before = FileIdentity(path=str(self.path), size=size, mtime_ns=mtime_ns)
        self.original: FileIdentity | None = self._before if is_source else None

    @property
    def folder(self) -> Path:
        """See `Target`. All keys share the folder and its lock, so two runs cannot replace the same file at once."""
        return self.path.with_name(f"{self.path.name}.partial")

    def found(self, digest: str) -> dict[str, PublishedArray]:
        """See `Target`."""
        found = {}
        with h5py.File(self.path, "r") as file:
            for group in ("obsm", "obs"):
                for name, item in file[group].items() if group in file else ():
                    if is_of(item.attrs.get(ATTRIBUTE, ""), digest):
                        array = item["codes"] if isinstance(item, h5py.Group) else item
                        nan = NanRows(*json.loads(item.attrs[NAN]))
                        found[f"{group}/{name}"] = PublishedArray(array.shape, str(array.dtype), nan)
        return found

    def existing(self, keys: Iterable[str]) -> list[str]:
        """See `Target`."""
        with h5py.File(self.path, "r") as file:
            return [key for key in keys if key in file]

    def publish_bytes(self, n_obs: int, n_bytes: int) -> int:
        """See `Target`."""
        return self.path.stat().st_size + n_bytes + 4 * _METADATA_BYTES

    def index_key(self) -> str | None:
        """See `Target`."""
        with h5py.File(self.path, "r") as file:
            return f"obs/{file['obs'].attrs['_index']}"

    def check_cells(self, n_obs: int, names: Names) -> None:
        """See `Target`."""
        with h5py.File(self.path, "r") as file:
            _check_cells(self.path, file, n_obs, names, is_source=self._is_source)

    def publish(self, work: Work, outputs: Sequence[Output], nan: Nan, names: Names) -> None:
        """See `Target`."""
        copy = work.folder / "copy.h5ad"
        try:
            self._write_copy(copy, work, outputs, nan)
            self._identity.require_unchanged()
            os.replace(copy, self.path)
        finally:
            copy.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write_copy(self, copy: Path, work: Work, outputs: Sequence[Output], nan: Nan) -> None:
        self._identity.require_unchanged()
        copy_file(self.path, copy)
        # On a full disk, HDF5 neither reports the error number nor closes the file, so space is reserved first. HDF5
        # truncates unused space.
        with copy.open("rb+") as reserved:
            reserved.seek(0, os.SEEK_END)
            extend(reserved, _METADATA_BYTES + sum(work.n_obs * one.row_bytes for one in outputs))
        # The modification time of the copy at this point is recorded in the copy. Later writes change the time, so it
        # is set back after the last one. The file system assigned this timestamp and can therefore represent it
        # exactly. Any other timestamp might be rounded.
        mtime_ns = copy.stat().st_mtime_ns
        with h5py.File(copy, "r+") as file, as_anndata_writes():
            if "obsm" not in file:
                file.create_group("obsm").attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
            if any(one.key in file for one in outputs):
                self._remove_digests(file)
            for one in outputs:
                write_metadata(work, one, nan)
                if one.key in file:
                    del file[one.key]
                self._write(file, one, work)
                own = {ATTRIBUTE: work.digest, NAN: json.dumps(nan.get(one.name, NanRows()))}
                file[one.key].attrs.update(own)
            obs = file["obs"].attrs
            order = [str(name) for name in obs["column-order"]]
            order += [one.name for one in outputs if one.width is None and one.name not in order]
            obs["column-order"] = np.array(order, dtype=h5py.string_dtype())
            file.attrs[_ORIGINAL] = [self._before.size, self._before.mtime_ns, mtime_ns]
        with copy.open("rb+") as written:
            os.fsync(written.fileno())
        os.utime(copy, ns=(mtime_ns, mtime_ns))

    @staticmethod
    def _remove_digests(file: h5py.File) -> None:
        """Remove the digests of all predictions, since any prediction may have been computed from a replaced key."""
        for group in ("obsm", "obs"):
            for item in file[group].values() if group in file else ():
                item.attrs.pop(ATTRIBUTE, None)

    @staticmethod
    def _write(file: h5py.File, one: Output, work: Work) -> None:
        stored = zarr.open_array(work.folder_of(one), mode="r")
        name = one.key
        if one.labels is not None:
            group = file.create_group(one.key)
            group.attrs.update(CATEGORICAL)
            write_elem(group, "categories", np.array(one.labels))
            name = f"{one.key}/codes"
        written = file.create_dataset(name, shape=stored.shape, dtype=stored.dtype)
        written.attrs.update(ARRAY)
        rows = max(1, _PIECE_BYTES // one.row_bytes)
        for start in range(0, stored.shape[0], rows):
            written[start : start + rows] = stored[start : start + rows]


def copy_file(source: Path, target: Path) -> None:
    """Copy a file with its permissions; share its blocks if the file system supports it (Btrfs, XFS)."""
    with source.open("rb") as read, target.open("wb") as written, contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
    if target.stat().st_size != source.stat().st_size:
        shutil.copyfile(source, target)
    shutil.copymode(source, target)


# Linux ioctl request code (linux/fs.h) that makes a file share the blocks of another file.
_FICLONE = 0x40049409
