"""Writers of 10x ``.h5`` files in the layouts of Cell Ranger 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp


def write_v3(
    path: Path,
    counts: sp.csr_matrix,
    *,
    name: Sequence[str] | None = None,
    feature_type: Sequence[str] | None = None,
    genome: Sequence[str] | None = None,
    features: Mapping[str, Any] | None = None,
    variable_strings: bool = False,
    compression: str | None = "gzip",
) -> Path:
    """Write counts in the layout of Cell Ranger 3: ``matrix`` (genes by cells, CSC) and ``matrix/features``."""
    _n_obs, n_vars = counts.shape
    columns = {
        "name": name or [f"gene {i}" for i in range(n_vars)],
        "id": [f"ENSG{i:011d}" for i in range(n_vars)],
        "feature_type": feature_type or ["Gene Expression"] * n_vars,
        "genome": genome or ["GRCh38"] * n_vars,
        **(features or {}),
    }
    with h5py.File(path, "w") as file:
        file.attrs["filetype"] = "matrix"
        group = file.create_group("matrix")
        _write_matrix(group, counts, variable_strings=variable_strings, compression=compression)
        table = group.create_group("features")
        _write_text(table, "_all_tag_keys", ["genome"], variable_strings=variable_strings)
        for key, values in columns.items():
            _write_text(table, key, values, variable_strings=variable_strings)
    return path


def write_v2(path: Path, genomes: Mapping[str, sp.csr_matrix]) -> Path:
    """Write counts in the layout of Cell Ranger 2: one group per genome, each with its own cells."""
    with h5py.File(path, "w") as file:
        for genome, counts in genomes.items():
            group = file.create_group(genome)
            _write_matrix(group, counts, variable_strings=False, compression="gzip")
            for key, prefix in (("genes", "ENSG"), ("gene_names", f"{genome} gene ")):
                _write_text(group, key, [f"{prefix}{i}" for i in range(counts.shape[1])], variable_strings=False)
    return path


def _write_matrix(group: h5py.Group, counts: sp.csr_matrix, *, variable_strings: bool, compression: str | None) -> None:
    n_obs, n_vars = counts.shape
    for key in ("indptr", "indices", "data"):
        values = getattr(counts, key) if key == "data" else getattr(counts, key).astype(np.int64)
        group.create_dataset(key, data=values, chunks=(100,), maxshape=(None,), compression=compression)
    # The matrix is genes by cells, so each column of the CSC matrix is a cell.
    group["shape"] = np.array([n_vars, n_obs], dtype=np.int32)
    _write_text(group, "barcodes", [f"AAAC{i}-1" for i in range(n_obs)], variable_strings=variable_strings)


def _write_text(group: h5py.Group, key: str, values: Any, *, variable_strings: bool) -> None:
    values = np.asarray(values)
    if values.dtype.kind != "U":
        group[key] = values
    elif variable_strings:
        group.create_dataset(key, data=values.astype(object), dtype=h5py.string_dtype())
    else:
        group[key] = np.char.encode(values, "utf-8")
