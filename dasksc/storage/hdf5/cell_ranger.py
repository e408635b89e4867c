"""Matrices in the ``.h5`` files of 10x Genomics' Cell Ranger.

Cell Ranger stores a CSC matrix of features by barcodes. The same three arrays form the CSR matrix of cells by genes, so
rows are read in place. The shape is a dataset rather than an attribute. Layout: "Feature-Barcode Matrices HDF5 Format"
in the documentation of Cell Ranger, for version 3 (a group ``matrix``) and version 2 (a group for each genome).
"""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from dasksc.errors import CorruptDataError
from dasksc.storage.files import LocalFile
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.safety.hdf5_links import check_item

__all__ = ["csr_attributes", "is_cell_ranger_matrix"]

# Size of the only chunk of a shape, which is read whole.
_MOST_SHAPE_BYTES = 2**25
_MEMBERS = frozenset({"barcodes", "data", "indices", "indptr", "shape"})


def is_cell_ranger_matrix(item: Any) -> bool:
    """Return True if an HDF5 object is a matrix in the format of Cell Ranger."""
    return isinstance(item, h5py.Group) and "encoding-type" not in item.attrs and item.keys() >= _MEMBERS


def csr_attributes(group: h5py.Group, file: LocalFile | RemoteFile) -> dict[str, Any]:
    """Return the attributes of a Cell Ranger matrix as AnnData would write them for CSR, cells by features."""
    stored, label = group["shape"], f"{file.path}:{group.name}/shape"
    if isinstance(file, LocalFile):  # remote files are checked when they are opened
        check_item(stored, file.path, folder=os.path.dirname(file.path))
    if not isinstance(stored, h5py.Dataset) or stored.shape != (2,) or stored.dtype.kind not in "iu":
        raise CorruptDataError(
            f"{label} must be two integers, the numbers of features and cells. Copy or download the file again."
        )
    if stored.chunks and stored.chunks[0] * stored.dtype.itemsize > _MOST_SHAPE_BYTES:
        raise CorruptDataError(
            f"{label} holds two integers, but in chunks of {stored.chunks[0]} values. The file is corrupt or malicious."
        )
    n_vars, n_obs = map(int, stored[()])
    if min(n_vars, n_obs) < 0 or n_obs >= np.iinfo(np.int64).max:
        raise CorruptDataError(
            f"{label} claims the impossible shape of {n_vars} features by {n_obs} cells. Copy or download the file "
            "again."
        )
    return {"encoding-type": "csr_matrix", "shape": (n_obs, n_vars)}
