"""Opening of 10x ``.h5`` files, the output of Cell Ranger, as two tables and a lazy matrix of cells by features.

The columns of the tables have the names that `scanpy.read_10x_h5` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.assemble import assemble
from dasksc.atlas.cell_names import nameless_index, read_names
from dasksc.atlas.element_sizes import check_before_reading
from dasksc.atlas.elements import Unwrapped, stored_matrix
from dasksc.atlas.lookup import known_columns, require_key
from dasksc.atlas.options import OpenOptions
from dasksc.errors import CorruptDataError, InputError
from dasksc.storage import ColumnMaps, ConcatenatedMatrix, RemoteLocation
from dasksc.storage.hdf5.cell_ranger import is_cell_ranger_matrix

__all__ = ["cell_ranger_matrices", "read_barcodes", "read_cell_ranger"]

# All features in files of version 2 are genes. Version 3 gives genes this feature type.
_GENES = "Gene Expression"
# Number of fixed-length strings that are decoded together. Decoding temporarily takes four times their size.
_PIECE_ROWS = 2**20


def cell_ranger_matrices(root: Any) -> list[str]:
    """Return the names of the matrices in a 10x ``.h5`` file; an empty list for any other file or store."""
    # Version 3 has one, ``matrix``. Version 2 has one for each genome.
    if not isinstance(root, h5py.Group) or "obs" in root or "var" in root:
        return []
    names = [name for name in root if is_cell_ranger_matrix(root.get(name))]
    return ["matrix"] if "matrix" in names else names


def read_cell_ranger(
    path: str | RemoteLocation, root: h5py.File, obs: Sequence[str] | None, options: OpenOptions
) -> AnnData:
    """Open a 10x ``.h5`` file at `path`, whose root group is `root`."""
    names = cell_ranger_matrices(root)
    name = "matrix" if names == ["matrix"] else _genome_of(path, names, options)
    group = root[name]
    is_v3 = "features" in group
    if name == "matrix" and not is_v3:
        raise CorruptDataError(f"{path}:/{name} has no group 'features'. Copy or download the file again.")
    features = _datasets(group["features"] if is_v3 else group, is_v3=is_v3, where=f"{path}:/{name}")
    held = {"barcodes": group["barcodes"]} if options.has_names else {}
    if is_v3 and "filtered_barcodes" in group:
        held["filtered_barcodes"] = group["filtered_barcodes"]
    for column, stored in (*features.items(), *held.items(), ("barcodes", group["barcodes"])):
        if not isinstance(stored, h5py.Dataset) or stored.shape is None or stored.ndim != 1:
            raise CorruptDataError(f"{path}:/{name} has no list of {column}. Copy or download the file again.")
    if "filtered_barcodes" in held and held["filtered_barcodes"].dtype.kind not in "biu":
        raise CorruptDataError(
            f"{path}:/{name}/filtered_barcodes has dtype {held['filtered_barcodes'].dtype}; expected booleans. Copy or "
            "download the file again."
        )
    check_before_reading(path, {"features": list(features.values()), "barcodes": list(held.values())})
    _check_lengths(path, name, features)
    var = pd.DataFrame(
        {column: _values(stored, path, options) for column, stored in features.items() if column != "name"},
        index=pd.Index(_values(features["name"], path, options)),
    )
    x = stored_matrix(path, name, options)
    if x.matrix.shape[1] != len(var):
        raise CorruptDataError(
            f"{x.matrix.label} has {x.matrix.shape[1]} columns, but there are {len(var)} features. Copy or download "
            "the file again."
        )
    kept = _kept(path, var, options, is_v3=is_v3)
    if kept is not None:
        to = np.where(kept, np.cumsum(kept) - 1, -1)
        maps = ColumnMaps([to], int(kept.sum()))
        x = Unwrapped(matrix=ConcatenatedMatrix(label=x.matrix.label, parts=[x.matrix], maps=maps))
        var = var[kept]
    return assemble(
        x=x,
        obs=_cells(path, group, held, obs, options),
        var=var,
        uns={},
        layers={},
        obsm={},
        varm={},
        obsp={},
        varp={},
        raw=None,
        options=options,
    )


def read_barcodes(path: str | RemoteLocation, group: h5py.Group, options: OpenOptions) -> NDArray[Any]:
    """Read the barcodes of the cells from the group of a matrix."""
    return _values(group["barcodes"], path, options)


def _genome_of(path: str | RemoteLocation, names: Sequence[str], options: OpenOptions) -> str:
    """Return the name of the requested matrix in a file of version 2."""
    wanted = options.genomes
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is None or len(wanted) > 1:
        raise InputError(
            f"{path} has {len(names)} genomes ({', '.join(names)}), each with its own cells; choose one: "
            f"genome={names[0]!r}"
        )
    return require_key(f"{path}", wanted[0], names)


def _datasets(table: Any, *, is_v3: bool, where: str) -> dict[str, Any]:
    """Return the datasets that describe the features, by their column names in scanpy; the feature names come first."""
    if not isinstance(table, h5py.Group):
        raise CorruptDataError(f"{where}/features is not a table. Copy or download the file again.")
    renamed = {"name": "gene_names", "gene_ids": "genes"}
    if is_v3:
        # Probes have an identifier of their own, in addition to that of their gene.
        of_probes = {"gene_ids": "gene_id", "probe_ids": "id"}
        renamed = {"name": "name", **(of_probes if "gene_id" in table else {"gene_ids": "id"})}
        renamed["feature_types"] = "feature_type"
    lacking = [name for name in renamed.values() if name not in table]
    if lacking:
        raise CorruptDataError(f"{where} lacks {' and '.join(lacking)}. Copy or download the file again.")
    found = {column: table[name] for column, name in renamed.items()}
    if is_v3:
        others = [name for name in table if name not in (*renamed.values(), "_all_tag_keys")]
        found |= {name: table[name] for name in others if isinstance(table[name], h5py.Dataset)}
    return found


def _check_lengths(path: str | RemoteLocation, name: str, features: dict[str, Any]) -> None:
    lengths = {column: len(stored) for column, stored in features.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{column} {n}" for column, n in lengths.items())
        raise CorruptDataError(
            f"{path}:/{name}: features have lists of different lengths: {found}. Copy or download the file again"
        )


def _cells(
    path: str | RemoteLocation, group: h5py.Group, held: dict[str, Any], obs: Sequence[str] | None, options: OpenOptions
) -> pd.DataFrame:
    columns = [column for column in held if column != "barcodes"]
    if obs is not None:
        columns = known_columns(obs, columns, path, may_lack=options.may_lack)
    stored = group["barcodes"]
    index = pd.Index(read_barcodes(path, group, options)) if options.has_names else nameless_index(len(stored))
    return pd.DataFrame({column: held[column][()].astype(bool) for column in columns}, index=index, columns=columns)


def _kept(
    path: str | RemoteLocation, var: pd.DataFrame, options: OpenOptions, *, is_v3: bool
) -> NDArray[np.bool_] | None:
    """Return a mask of the features to keep; None if all are kept."""
    kept = np.ones(len(var), dtype=bool)
    chosen: dict[str, tuple[str, ...]] = {}
    if options.feature_types is not None:
        chosen["feature_types"] = options.feature_types
    if options.genomes is not None and is_v3:
        chosen["genome"] = options.genomes
    for column, names in chosen.items():
        if column in var:
            held = var[column].to_numpy()
        else:  # version 2, or a file whose features have no genome
            held = np.full(len(var), _GENES if column == "feature_types" else "", dtype=object)
        present = set(held)
        # If several files are joined, some may have features that others lack.
        if not (options.may_lack and present.intersection(names)):
            for name in names:
                require_key(f"{column} of {path}", name, present)
        kept &= np.isin(held.astype(str), names)
    if chosen and not kept.any():
        requested = " and ".join(f"{column}={list(names)}" for column, names in chosen.items())
        raise InputError(f"{path} has no feature that matches {requested} together; change one of them")
    return None if kept.all() else kept


def _values(stored: h5py.Dataset, path: str | RemoteLocation, options: OpenOptions) -> NDArray[Any]:
    """Return the values of a dataset: booleans unchanged, all others as strings."""
    if stored.dtype.kind == "b":
        return np.asarray(stored[()])
    if h5py.check_string_dtype(stored.dtype) is None:
        return np.asarray(stored[()]).astype(str).astype(object)
    if stored.dtype.kind == "O":
        return np.asarray(read_names(stored, path, options), dtype=object)
    found = np.empty(len(stored), dtype=object)
    for start in range(0, len(stored), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        found[piece] = np.char.decode(stored[piece], "utf-8")
    return found
