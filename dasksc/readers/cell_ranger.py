"""10x ``.h5`` files, the output of Cell Ranger: two tables and a lazy matrix of cells by features.

Cell Ranger stores a CSC matrix of features by barcodes. The same three arrays form the CSR matrix of cells by genes, so
rows are read in place. The shape is a dataset rather than an attribute. Layout: "Feature-Barcode Matrices HDF5 Format"
in the documentation of Cell Ranger, for version 3 (a group ``matrix``) and version 2 (a group for each genome). The
columns of the tables have the names that `scanpy.read_10x_h5` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.checks import known
from dasksc.errors import CorruptDataError, InputError
from dasksc.readers.anndata import described
from dasksc.readers.interface import Store, StoredMatrix
from dasksc.readers.names import nameless_index, read_names
from dasksc.readers.options import OpenOptions
from dasksc.readers.tables import ReadSizes
from dasksc.storage import ColumnMaps, ConcatenatedMatrix, Matrix, RemoteLocation
from dasksc.storage.hdf5.reader import H5File
from dasksc.storage.opening import matrix_in

_MEMBERS = frozenset({"barcodes", "data", "indices", "indptr", "shape"})
# All features in files of version 2 are genes. Version 3 gives genes this feature type.
_GENES = "Gene Expression"
_AGAIN = "Copy or download the file again."


class CellRangerStore(Store):
    """Matrix of one genome, or of all features, in a file of Cell Ranger."""

    selects_features = True

    def __init__(self, path: str | RemoteLocation, file: H5File, root: h5py.Group, options: OpenOptions) -> None:
        self._path, self._file, self._options = path, file, options
        names = _matrices(root)
        self._name = "matrix" if names == ["matrix"] else self._genome_of(names)
        self._group = root[self._name]
        self._label = f"{self._path}:/{self._name}"
        self._is_v3 = "features" in self._group
        if self._name == "matrix" and not self._is_v3:
            raise CorruptDataError(f"{self._label} has no group 'features'. {_AGAIN}")
        self._features = self._datasets()
        self._flags = {
            name: self._group[name] for name in ("filtered_barcodes",) if self._is_v3 and name in self._group
        }
        held = {**self._features, **self._flags, "barcodes": self._group["barcodes"]}
        for column, stored in held.items():
            if not isinstance(stored, h5py.Dataset) or stored.shape is None or stored.ndim != 1:
                raise CorruptDataError(f"{self._label} has no list of {column}. {_AGAIN}")
        for column, stored in self._flags.items():
            if stored.dtype.kind not in "biu":
                raise CorruptDataError(f"{self._label}/{column} has dtype {stored.dtype}; expected booleans. {_AGAIN}")
        if len(set(map(len, self._features.values()))) > 1:
            raise CorruptDataError(f"{self._label}: features have lists of different lengths. {_AGAIN}")
        self._sizes = ReadSizes(self._path)

    @classmethod
    def holds(cls, root: h5py.Group) -> bool:
        """Return True if a file has matrices of Cell Ranger, and no tables of AnnData."""
        return "obs" not in root and "var" not in root and bool(_matrices(root))

    def keys(self) -> list[str]:
        return ["obs", "var", "X"]

    def columns(self, name: str) -> list[str]:
        return list(self._flags) if name == "obs" else list(self.table(name).columns)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the features that are kept, or read the barcodes."""
        if name == "var":
            return self._genes if self._kept is None else self._genes[self._kept]
        kept = {column: one for column, one in self._flags.items() if columns is None or column in columns}
        has_names, barcodes = self._options.has_names, self._group["barcodes"]
        self._sizes.check("barcodes", [*kept.values(), *([barcodes] if has_names else [])])
        index = pd.Index(self._values(barcodes)) if has_names else nameless_index(len(barcodes))
        return pd.DataFrame({column: one[()].astype(bool) for column, one in kept.items()}, index, columns=list(kept))

    def matrix(self, key: str) -> Matrix:
        matrix = matrix_in(self._file, self._name, attributes=self._csr_attributes())
        if matrix.shape[1] != len(self._genes):
            raise CorruptDataError(
                f"{matrix.label} has {matrix.shape[1]} columns, but there are {len(self._genes)} features. {_AGAIN}"
            )
        if self._kept is None:
            return matrix
        to = np.where(self._kept, np.cumsum(self._kept) - 1, -1)
        maps = ColumnMaps([to], int(self._kept.sum()))
        return ConcatenatedMatrix(label=matrix.label, parts=[matrix], maps=maps)

    def description(self) -> Iterator[StoredMatrix]:
        yield from described("X", self._group)

    def close(self) -> None:
        self._file.close()

    def _genome_of(self, names: Sequence[str]) -> str:
        """Return the name of the requested matrix in a file of version 2."""
        wanted = self._options.genomes
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted is None or len(wanted) > 1:
            raise InputError(
                f"{self._path} has {len(names)} genomes ({', '.join(names)}), each with its own cells; choose one: "
                f"genome={names[0]!r}"
            )
        return known(f"{self._path}", wanted[0], names)

    def _datasets(self) -> dict[str, Any]:
        """Return the datasets that describe the features, by their column names in scanpy; names come first."""
        table = self._group["features"] if self._is_v3 else self._group
        if not isinstance(table, h5py.Group):
            raise CorruptDataError(f"{self._label}/features is not a table. {_AGAIN}")
        renamed = {"name": "gene_names", "gene_ids": "genes"}
        if self._is_v3:
            # Probes have an identifier of their own, in addition to that of their gene.
            of_probes = {"gene_ids": "gene_id", "probe_ids": "id"}
            renamed = {"name": "name", **(of_probes if "gene_id" in table else {"gene_ids": "id"})}
            renamed["feature_types"] = "feature_type"
        lacking = [name for name in renamed.values() if name not in table]
        if lacking:
            raise CorruptDataError(f"{self._label} lacks {' and '.join(lacking)}. {_AGAIN}")
        found = {column: table[name] for column, name in renamed.items()}
        if self._is_v3:
            others = [name for name in table if name not in (*renamed.values(), "_all_tag_keys")]
            found |= {name: table[name] for name in others if isinstance(table[name], h5py.Dataset)}
        return found

    @cached_property
    def _genes(self) -> pd.DataFrame:
        self._sizes.check("features", list(self._features.values()))
        values = {column: self._values(stored) for column, stored in self._features.items()}
        return pd.DataFrame(values).set_index("name").rename_axis(None)

    @cached_property
    def _kept(self) -> NDArray[np.bool_] | None:
        """Mask of the features to keep; None if all are kept."""
        var, options = self._genes, self._options
        kept = np.ones(len(var), dtype=bool)
        given = {"feature_types": options.feature_types, "genome": options.genomes if self._is_v3 else None}
        chosen = {column: names for column, names in given.items() if names is not None}
        for column, names in chosen.items():
            if column in var:
                held = var[column].to_numpy()
            else:  # version 2, or a file whose features have no genome
                held = np.full(len(var), _GENES if column == "feature_types" else "", dtype=object)
            present = set(held)
            # If several files are joined, some may have features that others lack.
            if not (options.may_lack and present.intersection(names)):
                for name in names:
                    known(f"{column} of {self._path}", name, present)
            kept &= np.isin(held.astype(str), names)
        if chosen and not kept.any():
            requested = " and ".join(f"{column}={list(names)}" for column, names in chosen.items())
            raise InputError(f"{self._path} has no feature that matches {requested} together; change one of them")
        return None if kept.all() else kept

    def names(self) -> Iterator[Sequence[str]]:
        yield self._values(self._group["barcodes"]).astype(str).tolist()

    def _values(self, stored: h5py.Dataset) -> NDArray[Any]:
        """Return the values of a dataset: booleans unchanged, all others as strings."""
        if stored.dtype.kind == "b":
            return np.asarray(stored[()])
        if h5py.check_string_dtype(stored.dtype) is None:
            return np.asarray(stored[()]).astype(str).astype(object)
        if stored.dtype.kind == "O":
            return np.asarray(read_names(stored, self._path, mmap=self._options.mmap), dtype=object)
        return np.asarray(stored.asstr("utf-8")[()], dtype=object)

    def _csr_attributes(self) -> dict[str, Any]:
        """Return the attributes of the matrix as AnnData would write them for CSR, cells by features."""
        stored, label = self._group["shape"], f"{self._label}/shape"
        self._sizes.check("shape", [stored])
        if not isinstance(stored, h5py.Dataset) or stored.shape != (2,) or stored.dtype.kind not in "iu":
            raise CorruptDataError(f"{label} must be two integers, the numbers of features and cells. {_AGAIN}")
        n_vars, n_obs = map(int, stored[()])
        if min(n_vars, n_obs) < 0 or n_obs >= np.iinfo(np.int64).max:
            raise CorruptDataError(
                f"{label} claims the impossible shape of {n_vars} features by {n_obs} cells. {_AGAIN}"
            )
        return {"encoding-type": "csr_matrix", "shape": (n_obs, n_vars)}


def _matrices(root: h5py.Group) -> list[str]:
    """Return the names of the matrices: ``matrix`` in version 3, one for each genome in version 2."""
    names = [name for name in root if _is_matrix(root.get(name))]
    return ["matrix"] if "matrix" in names else names


def _is_matrix(item: Any) -> bool:
    return isinstance(item, h5py.Group) and "encoding-type" not in item.attrs and item.keys() >= _MEMBERS
