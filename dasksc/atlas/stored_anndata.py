"""Opening of the AnnData in a file or store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pandas as pd
from anndata import AnnData
from anndata.io import read_elem

from dasksc.atlas.assemble import assemble
from dasksc.atlas.element_sizes import check_before_reading, items_read_whole
from dasksc.atlas.elements import is_group, is_null, lazy_element, read_mapping
from dasksc.atlas.legacy import decode_old_categories, is_record_array, old_raw
from dasksc.atlas.lookup import known_columns
from dasksc.atlas.options import OpenOptions, refuse_feature_choice
from dasksc.atlas.stored_cell_ranger import cell_ranger_matrices, read_cell_ranger
from dasksc.atlas.stores import holds_modalities, naming_errors, root_of, where_of
from dasksc.atlas.tables import read_table
from dasksc.errors import InputError, StorageError
from dasksc.storage import RemoteLocation, is_url, redact_url

__all__ = ["open_path", "read_root"]


def open_path(path: str, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    """Open the AnnData at a path or URL."""
    if holds_modalities(path):
        _refuse_modalities(path)
    where = where_of(path, options)
    with naming_errors(where), root_of(where, options) as root:
        if "mod" in root and is_group(root["mod"]):
            _refuse_modalities(path)
        if cell_ranger_matrices(root):
            return read_cell_ranger(where, root, obs, options)
        refuse_feature_choice(options, str(where))
        missing = [name for name in ("obs", "var") if name not in root]
        if missing:
            raise StorageError(
                f"{where} is not an AnnData: it has no {' and no '.join(missing)}, and contains "
                f"{', '.join(sorted(root)) or 'nothing'}. Give a file that AnnData wrote, or a 10x file of counts, "
                "such as filtered_feature_bc_matrix.h5"
            )
        return read_root(where, root, obs, options)


def _refuse_modalities(path: str) -> NoReturn:
    raise InputError(
        f"{redact_url(path) if is_url(path) else path} contains several modalities. Open it with "
        "dasksc.Modalities(...), which accepts the same path and storage_options and can be passed to scDataset"
    )


def read_root(path: str | RemoteLocation, root: Any, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    """Open the AnnData in a group, such as a modality, of the file or store at `path`."""

    def lazily(stored: Any) -> Any:
        return lazy_element(path, stored, options)

    check_before_reading(path, items_read_whole(root, obs, options))
    uns = read_mapping(root, "uns", read_elem)
    tables = [read_table(root["obs"], obs, path, options), _read_genes(path, root["var"], options)]
    if is_record_array(root["obs"]):
        tables = decode_old_categories(tables, uns)
    if obs is not None:
        wanted = known_columns(obs, tables[0].columns, path, may_lack=options.may_lack)
        if list(tables[0].columns) != wanted:  # avoids a copy of the columns
            tables[0] = tables[0][wanted]
    return assemble(
        x=lazily(root["X"]) if "X" in root else None,
        obs=tables[0],
        var=tables[1],
        uns=uns,
        layers=read_mapping(root, "layers", lazily),
        obsm={
            name: value.set_axis(tables[0].index) if isinstance(value, pd.DataFrame) else value
            for name, value in read_mapping(root, "obsm", lazily).items()
        },
        varm=read_mapping(root, "varm", read_elem),
        obsp=read_mapping(root, "obsp", lazily),
        varp=read_mapping(root, "varp", read_elem),
        raw=_read_raw(path, root, options),
        options=options,
    )


def _read_genes(path: str | RemoteLocation, stored: Any, options: OpenOptions) -> pd.DataFrame:
    """Read var, always with its names, even if the names of cells are not read."""
    return read_table(stored, None, path, replace(options, has_names=True))


def _read_raw(path: str | RemoteLocation, root: Any, options: OpenOptions) -> dict[str, Any] | None:
    if "raw" in root:
        raw = root["raw"]
        if is_null(raw):
            return None
        parts = {name: raw[name] for name in ("X", "var", "varm") if name in raw}
    else:
        parts = old_raw(root)
    if "X" not in parts or "var" not in parts:
        return None
    return {
        "X": lazy_element(path, parts["X"], options),
        "var": _read_genes(path, parts["var"], options),
        "varm": read_mapping(parts, "varm", read_elem),
    }
