"""Elements of other stores, such as embeddings, added to an atlas."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from anndata.io import read_elem

from dasksc.atlas.cell_names import digest_names, names_in_pieces, stored_names
from dasksc.atlas.elements import Unwrapped, lazy_element
from dasksc.atlas.lookup import require_key
from dasksc.atlas.options import OpenOptions
from dasksc.atlas.stored_cell_ranger import cell_ranger_matrices, read_barcodes
from dasksc.atlas.stores import naming_errors, root_of, where_of
from dasksc.atlas.tables import column_names, read_table
from dasksc.errors import InputError, MissingKeyError
from dasksc.pushdown import to_dask

__all__ = ["NAMES_ATTRIBUTE", "attach_elements", "check_attach", "names_digest_of", "path_names"]

_GROUPS = ("obsm", "obs")
# Attribute of a store's root group that holds the digest of its cell names, or null if the cells have no names.
NAMES_ATTRIBUTE = "dasksc-names"


def check_attach(attach: Any) -> None:
    """Refuse `attach` unless it maps keys to paths."""
    if not isinstance(attach, Mapping):
        raise InputError(f"attach={attach!r} is not a dict; give paths by key: attach={{'obsm/X_emb': 'emb.zarr'}}")
    for key, path in attach.items():
        group, slash, name = str(key).partition("/")
        if group not in _GROUPS or not slash or not name or "/" in name:
            raise InputError(f"attach= has the key {key!r}; expected 'obsm/NAME' or 'obs/NAME'")
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"attach[{key!r}] is {path!r}; expected the path of a store: 'emb.zarr'")


def attach_elements(adata: AnnData, attach: Mapping[str, str | os.PathLike[str]], options: OpenOptions) -> None:
    """Add elements of other stores to an AnnData: matrices of obsm lazily, columns of obs in memory."""
    digest = None
    for key, path in attach.items():
        group, _, name = key.partition("/")
        if name in getattr(adata, group):
            raise InputError(f"attach= has {key!r}, which the atlas already has. Leave it out of attach=")
        where = where_of(os.fspath(path), options)
        with naming_errors(where), root_of(where, options) as root:
            if group not in root:
                raise MissingKeyError(
                    f"attach= requests {key!r} from {where}, which has no {group}. Give another store, or leave out "
                    "this key"
                )
            held = column_names(root["obs"]) if group == "obs" else list(root["obsm"])
            stored = root[group][require_key(f"{group} of {where}", name, held)]
            value = read_elem(stored) if group == "obs" else lazy_element(where, stored, options)
            if isinstance(value, Unwrapped):
                value = to_dask(value.matrix, token=value.token)
            if len(value) != adata.n_obs:
                raise InputError(
                    f"{where}:/{key} has {len(value)} rows, but the atlas has {adata.n_obs} cells. The store belongs "
                    "to another atlas, or to a subset of this one. Compute the attached elements again, for this atlas"
                )
            if options.has_names:
                digest = digest_names(names_in_pieces(adata.obs_names)) if digest is None else digest
                other = names_digest_of(root, where)
                if other not in (None, digest):
                    raise InputError(
                        f"{where} has as many cells as the atlas ({adata.n_obs}), but their names or their order "
                        "differ. The store belongs to another atlas. Compute the attached elements again, for this "
                        "atlas"
                    )
        if isinstance(value, pd.DataFrame):
            value = value.set_axis(adata.obs.index)
        if group == "obs":
            adata.obs[name] = value if isinstance(value, pd.api.extensions.ExtensionArray) else np.asarray(value)
        else:
            adata.obsm[name] = value


def names_digest_of(root: Any, where: Any) -> str | None:
    """Return the recorded or computed digest of the cell names in a store; None if the cells have no names."""
    if NAMES_ATTRIBUTE in root.attrs:
        recorded = root.attrs[NAMES_ATTRIBUTE]
        return None if recorded is None else str(recorded)
    if "obs" not in root:
        return None
    pieces = stored_names(root["obs"], where)
    if pieces is None:
        pieces = names_in_pieces(read_table(root["obs"], [], where, OpenOptions()).index)
    return digest_names(pieces)


def path_names(path: str, options: OpenOptions | None = None) -> Iterator[list[str]]:
    """Yield the names of the cells of the atlas at a path, in pieces."""
    options = OpenOptions() if options is None else options
    where = where_of(path, options)
    with naming_errors(where), root_of(where, options) as root:
        # A file with several matrices requires `genome`. This file was opened without it, so it has only one matrix.
        if matrices := cell_ranger_matrices(root):
            yield from names_in_pieces(pd.Index(read_barcodes(where, root[matrices[0]], options)))
            return
        pieces = stored_names(root["obs"], where)
        yield from names_in_pieces(read_table(root["obs"], [], where, options).index) if pieces is None else pieces
