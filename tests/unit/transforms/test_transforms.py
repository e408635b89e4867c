from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from dasksc.errors import InputError, MissingKeyError
from dasksc.transforms.hooks import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor

pytestmark = pytest.mark.core

N_OBS, N_VARS = 20, 7


def dense_counts() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.poisson(0.6, (N_OBS, N_VARS)).astype(np.float64)


def make_adata(X: object) -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(np.array(["B", "NK", "T"])[np.arange(N_OBS) % 3]),
            "n_counts": np.arange(N_OBS, dtype=np.float32),
            "donor": np.array(["d1", "d2"], dtype=object)[np.arange(N_OBS) % 2],
        },
        index=[f"cell{i}" for i in range(N_OBS)],
    )
    return ad.AnnData(X=X, obs=obs)


@pytest.fixture(params=["dense", "csr", "dask", "backed csr", "backed dense", "view of backed", "collection"])
def adata(request, tmp_path):
    X = dense_counts()
    path = tmp_path / "cells.h5ad"
    make_adata(X if request.param == "backed dense" else sp.csr_matrix(X)).write_h5ad(path)
    backed = ad.read_h5ad(path, backed="r")
    match request.param:
        case "dense":
            yield make_adata(X)
        case "csr":
            yield make_adata(sp.csr_matrix(X))
        case "dask":
            yield make_adata(da.from_array(X, chunks=(8, -1)))
        case "view of backed":
            yield backed[np.arange(N_OBS)]
        case "collection":
            experimental = pytest.importorskip("anndata.experimental")
            parts = [make_adata(X)[:9], make_adata(X)[9:]]
            yield experimental.AnnCollection(parts, join_vars="inner")[np.arange(N_OBS)]
        case _:
            yield backed
    backed.file.close()


def test_adata_to_mindex_gives_dense_x_and_the_columns_asked_for(adata):
    multi = partial(adata_to_mindex, columns=["cell_type", "n_counts"])(adata)
    assert multi.names == ["X", "cell_type", "n_counts"]
    assert multi["X"].dtype == np.float64
    np.testing.assert_array_equal(multi["X"], dense_counts())
    part = multi[np.array([4, 0])]
    assert list(part["cell_type"]) == ["NK", "B"]
    assert part["n_counts"].tolist() == [4.0, 0.0]


def test_fetch_transform_adata_is_a_float32_tensor_without_columns(adata):
    X = fetch_transform_adata(adata)
    assert X.dtype == torch.float32
    np.testing.assert_array_equal(X.numpy(), dense_counts())


@pytest.mark.parametrize("transform", [adata_to_mindex, fetch_transform_adata])
def test_an_unknown_column_is_named_beside_those_there_are(transform):
    with pytest.raises(MissingKeyError, match="'celltype'.*cell_type"):
        transform(make_adata(dense_counts()), columns=["celltype"])


CELLS = [
    {"genes": [0, 3], "expressions": [2.0, 5.0]},
    {"genes": [], "expressions": []},
    {"genes": [4], "expressions": [1.0]},
]
CELLS_DENSE = [[2, 0, 0, 5, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("as_array", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize("columnar", [False, True], ids=["list of cells", "dict of columns"])
def test_hf_tahoe_to_tensor_fills_rows_and_leaves_empty_cells_zero(as_array, columnar):
    cells = [{name: as_array(values) for name, values in cell.items()} for cell in CELLS]
    batch = {name: [cell[name] for cell in cells] for name in CELLS[0]} if columnar else cells
    dense = hf_tahoe_to_tensor(batch, num_genes=5)
    assert dense.dtype == torch.float32
    assert dense.tolist() == CELLS_DENSE


@pytest.mark.parametrize("batch", [[], {"genes": [], "expressions": []}, CELLS[1:2]])
def test_hf_tahoe_to_tensor_of_no_cells_or_only_empty_ones(batch):
    n_cells = len(batch["genes"]) if isinstance(batch, dict) else len(batch)
    dense = hf_tahoe_to_tensor(batch, num_genes=5)
    assert dense.shape == (n_cells, 5)
    assert not dense.any()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros(3), "got ndarray"),
        ([1, 2], "got list"),
        ([{"genes": [1, 2], "expressions": [1.0]}], "as many expressions as genes"),
        ([{"genes": [5], "expressions": [1.0]}], "num_genes=5"),
        ([{"genes": [-1], "expressions": [1.0]}], r"got -1 to -1"),
    ],
)
def test_hf_tahoe_to_tensor_refuses_what_it_cannot_place(batch, message):
    with pytest.raises(InputError, match=message):
        hf_tahoe_to_tensor(batch, num_genes=5)


@pytest.fixture
def bionemo(monkeypatch):
    """Stand-in for the only function of bionemo-scdl that is called, with the same arguments and result."""

    def collate_sparse_matrix_batch(cells):
        rows = np.concatenate([np.full(len(columns), i) for i, (_, columns) in enumerate(cells)])
        values = np.concatenate([values for values, _ in cells])
        columns = np.concatenate([columns for _, columns in cells])
        return torch.sparse_coo_tensor(np.stack([rows, columns]), values, (len(cells), N_VARS), check_invariants=True)

    names = ["bionemo", "bionemo.scdl", "bionemo.scdl.util", "bionemo.scdl.util.torch_dataloader_utils"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].collate_sparse_matrix_batch = collate_sparse_matrix_batch


class MemMapDataset:
    def __init__(self, X):
        self.X = X

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        assert type(i) is int
        return self.X[i][self.X[i] > 0], np.flatnonzero(self.X[i])


@pytest.mark.usefixtures("bionemo")
@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (3, [3]),
        (np.int64(3), [3]),
        (slice(2, 9, 3), [2, 5, 8]),
        ([1, 0], [1, 0]),
        (np.array([1, 0]), [1, 0]),
        (torch.tensor([1, 0]), [1, 0]),
    ],
)
def test_bionemo_to_tensor_collates_the_rows_asked_for(index, rows):
    X = dense_counts()
    assert bionemo_to_tensor(MemMapDataset(X), index).tolist() == X[rows].tolist()
