"""Opening of the MuData in a file or store: its modalities and their shared tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anndata import AnnData

from dasksc.atlas.assemble import raw_of, unchecked, without_genes
from dasksc.atlas.element_sizes import check_before_reading, items_of_table
from dasksc.atlas.elements import is_lazy_matrix, lazy_element
from dasksc.atlas.options import OpenOptions
from dasksc.atlas.stored_anndata import read_root
from dasksc.atlas.stores import naming_errors, root_of, where_of
from dasksc.atlas.tables import column_names, read_table
from dasksc.errors import StorageError
from dasksc.storage import Cache, UseMmap

__all__ = ["open_modalities", "split_columns"]


def open_modalities(
    path: str,
    obs: Sequence[str] | None,
    *,
    mmap: UseMmap,
    storage_options: Mapping[str, Any] | None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None,
    raw: bool,
) -> tuple[AnnData, dict[str, AnnData]]:
    """Open a stored MuData: its own obs and obsm, and its modalities, as AnnData of Dask arrays with rows as stored."""
    options = OpenOptions(mmap=mmap, storage_options=dict(storage_options or {}), cache=Cache.of(cache))
    with unchecked():
        where = where_of(path, options)
        with naming_errors(where), root_of(where, options) as root:
            if "mod" not in root or "obs" not in root:
                raise StorageError(
                    f"{where} is not a MuData: it contains {', '.join(sorted(root)) or 'nothing'}. Give an .h5mu file "
                    "or a Zarr store that mudata wrote"
                )
            order = [str(name) for name in root["mod"].attrs.get("mod-order", sorted(root["mod"]))]
            held = {name: column_names(root["mod"][name]["obs"]) for name in order}
            own, columns = split_columns(obs, column_names(root["obs"]), held)
            # An entry of obsm with the name of a modality is a mask of the cells of that modality.
            stored = {name: root["obsm"][name] for name in root.get("obsm", ()) if name not in order}
            read = [item for item in stored.values() if not is_lazy_matrix(item)]
            check_before_reading(where, {"obs": items_of_table(root["obs"], own, options), "obsm": read})
            mod = {name: read_root(where, root["mod"][name], columns[name], options) for name in order}
            shared = without_genes(
                read_table(root["obs"], own, where, options),
                {name: lazy_element(where, item, options) for name, item in stored.items()},
                options,
            )
    return shared, {name: raw_of(adata, name) for name, adata in mod.items()} if raw else mod


def split_columns(
    obs: Sequence[str] | None, own: Collection[str], held: Mapping[str, Collection[str]]
) -> tuple[list[str] | None, dict[str, list[str] | None]]:
    """Assign requested columns to the obs of a MuData and to those of its modalities; None stands for all."""
    if obs is None:
        return None, dict.fromkeys(held)
    of_own: list[str] = []
    of_modality: dict[str, list[str]] = {name: [] for name in held}
    for name in obs:
        modality, _, column = name.partition(":")
        if modality in held and (column in held[modality] or name not in own) and column:
            of_modality[modality].append(column)
        else:
            of_own.append(name)
    return of_own, dict(of_modality)
