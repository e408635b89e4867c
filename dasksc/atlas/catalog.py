"""Catalogues: what opening many files found, written to one file."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import zarr
from anndata.io import write_elem

from dasksc.atlas.elements import matrix_behind
from dasksc.atlas.opening import open as open_atlas
from dasksc.atlas.stored import layers_of
from dasksc.displays import first_of, with_options_of
from dasksc.errors import InputError, StorageError
from dasksc.pushdown import leaf_matrix, require_unchanged
from dasksc.readers.catalog import Identity, as_text, identity_of, write_matrix
from dasksc.storage import RemoteLocation, is_url, redact_url
from dasksc.storage.files import FileIdentity
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import identities
from dasksc.storage.remote.urls import ZARR_MARKERS

logger = logging.getLogger("dasksc.catalog")


@with_options_of(open_atlas)
def index(data: Any, out: str | os.PathLike[str], **options: Any) -> int:
    """Write a catalogue of many files, which `dasksc.open` opens in seconds.

    The catalogue holds the joined obs, var and tables of obsm, and the places of all matrices. Matrices themselves stay
    in the files, which must not change; `dasksc.open` raises an error if one has changed or is gone. For this check,
    objects at URLs are listed, or requested without their content if they cannot be listed.

    Parameters
    ----------
    data
        Several files or stores, as for `dasksc.open`.
    out
        Path of the catalogue, ending with ``.catalog``. Paths of files are stored relative to its folder.
    obs, mmap, names, join, label, keys, index_unique, merge, fill_value, raw, storage_options, cache, feature_types
        As for `dasksc.open`.
    genome, reader_options, attach, files, where, on_error
        As for `dasksc.open`.

    Returns
    -------
    int
        Number of files in the catalogue.

    Raises
    ------
    InputError
        If `out` has another ending, or a matrix is not stored in a file.
    DaskscError
        As for `dasksc.open`.

    Examples
    --------
    >>> dasksc.index("plates/*.h5ad", "plates.catalog")
    2
    >>> dasksc.open("plates.catalog").shape
    (600, 100)
    """
    target = Path(out).absolute()
    if target.suffix != ".catalog":
        raise InputError(f"out={os.fspath(out)!r} must end with .catalog, by which dasksc.open recognizes catalogues")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"out={os.fspath(out)!r} is a folder, or lies in none; give a file in a folder that exists")
    _refuse_queries(data, options.get("files"))
    adata = open_atlas(data, **options)
    if left_out := [f"{group}/{key}" for group in ("uns", "obsp", "varm", "varp") for key in getattr(adata, group)]:
        logger.warning("the catalogue leaves out %s, which only the files have", first_of(left_out))
    matrices = {"X": adata.X} if adata.X is not None else {}
    matrices |= {f"layers/{name}": array for name, array in layers_of(adata).items()}
    tables = {name: array for name, array in adata.obsm.items() if isinstance(array, pd.DataFrame)}
    matrices |= {f"obsm/{name}": array for name, array in adata.obsm.items() if name not in tables}
    if adata.raw is not None:
        matrices["raw/X"] = adata.raw.X
    files: dict[str, Identity | None] = {}
    partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        # An archive cannot replace members, as AnnData does while it writes.
        members: dict[str, Any] = {}
        root = zarr.open_group(zarr.storage.MemoryStore(members), mode="w", zarr_format=2)
        cells = adata.obs.index.astype(str)
        tables = {f"obsm/{name}": table.set_axis(cells) for name, table in tables.items()}
        tables |= {"obs": adata.obs.set_axis(cells), "var": adata.var}
        tables |= {} if adata.raw is None else {"raw/var": adata.raw.var}
        types: dict[str, dict[str, str]] = {}
        write_elem(root, "obsm", {})
        for name, table in tables.items():
            written, types[name] = as_text(table)
            group, _, key = name.rpartition("/")
            write_elem(root.require_group(group) if group else root, key, written)
        for key, array in matrices.items():
            if leaf_matrix(array) is None:
                raise InputError(f"{key} is computed, so a catalogue cannot refer to a file. Write it to a file first")
            write_matrix(root, key, matrix_behind(array), files)
        listed = _list_of(files, target.parent.resolve(), options.get("storage_options"))
        for array in matrices.values():
            require_unchanged(matrix_behind(array))
        root.attrs.update({"dasksc-texts": types, "dasksc-catalog": list(matrices), "files": listed})
        try:
            with zipfile.ZipFile(partial, "w") as archive:
                for name, buffer in members.items():
                    archive.writestr(name, buffer.to_bytes())
            partial.replace(target)
        except OSError as error:  # such as a full disk
            raise StorageError(f"{target} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(files)


def _refuse_queries(data: Any, files: Any) -> None:
    """Refuse URLs with a query or credentials, which a catalogue does not record."""
    given = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else [data]
    for one in data[files] if isinstance(data, pd.DataFrame) and files in data else given:
        # In the key of an object store, a question mark is no query.
        location = RemoteLocation.of(one) if isinstance(one, str) and is_url(one) else None
        if location is not None and redact_url(location.root) != location.root:
            raise InputError(
                f"{location} is given with a query or credentials, which a catalogue does not record. Give the URL "
                "without them, and credentials as storage_options="
            )


def _url_of(path: str) -> str:
    """Return the URL that a displayed location stands for: on a web server, it has percent signs."""
    scheme, _, rest = path.partition("://")
    host, _, key = rest.partition("/")
    return f"{scheme}://{host}/{quote(key)}" if scheme in ("http", "https") else path


def _list_of(
    files: dict[str, Identity | None], folder: Path, storage_options: Any
) -> list[tuple[str, str, int, str, str]]:
    """Return path, object that tells its version, size, ETag and time of change of each file."""
    unknown = {
        path: RemoteLocation.of(_url_of(path), storage_options)
        for path, known in files.items()
        if not known and is_url(path)
    }
    found = dict(zip(unknown, identities(list(unknown.values())), strict=True))
    rows: list[tuple[str, str, int, str, str]] = []
    for path, known in files.items():
        one, member = known or found.get(path), ""
        if not is_url(path):
            one = one if isinstance(one, FileIdentity) else identity_of(path)
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            rows.append((os.path.relpath(real, folder), member, one.size, "", str(one.mtime_ns)))
            continue
        assert not isinstance(one, FileIdentity)
        if one is None:
            member, one = _metadata_of(unknown[path])
        rows.append((_url_of(path), member, one.size, one.etag or "", one.modified))
    return rows


def _metadata_of(store: RemoteLocation) -> tuple[str, ObjectIdentity]:
    """Return the name and the version of the metadata of a store of many objects, which is as old as the store."""
    found = zip(ZARR_MARKERS, identities([store.below(name) for name in ZARR_MARKERS]), strict=True)
    member, identity = next((name, one) for name, one in found if one is not None)
    # Metadata that are written again are often equal, and so are their ETags.
    return member, replace(identity, etag=None)
