"""Row-local array code applied to the rows of a fetch, and detection of code that is not row-local."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import anndata as ad
import dask
import dask.array as da
import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp
from numpy.typing import NDArray

import dasksc
from dasksc.errors import InputError
from dasksc.pushdown import DaskMatrix, RowLocalMatrix, gather_block, leaves_of, matrix_of, row_local, to_dask
from dasksc.storage import as_matrix
from tests.support.data import LAYOUTS, dense, make_adata, make_values, write_store
from tests.support.recorders import recorded_reads

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Some cells have zero counts"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
]

N_OBS, N_VARS = 60, 17
SIZES = np.arange(1.0, N_OBS + 1)


def leaf(layout: str, chunk_rows: int = 13) -> da.Array:
    return to_dask(as_matrix(make_values(N_OBS, N_VARS, layout=layout), "X"), chunk_rows=chunk_rows)


def densified(array: da.Array) -> da.Array:
    """Return the array with dense chunks."""
    return to_dask(as_matrix(dense(array.compute(scheduler="synchronous")), "X"), chunk_rows=array.chunks[0][0])


def normalized(array: da.Array) -> da.Array:
    adata = ad.AnnData(array)
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    return adata.X


def weighted(block: Any) -> Any:
    weights = np.arange(1.0, N_VARS + 1)
    return block.multiply(weights).tocsr() if sp.issparse(block) else block * weights


ANY_LAYOUT: dict[str, Callable[[da.Array], da.Array]] = {
    "log1p": da.log1p,
    "normalize_total and log1p": normalized,
    "genes": lambda x: x[:, [5, 1, 3]],
    "astype": lambda x: x.astype("float64"),
    "a run of rows": lambda x: x[5:50],
    "every third row, backwards": lambda x: x[::-3],
    "rows in any order, repeated": lambda x: x[np.array([3, 50, 2, 40, 3] * 5)],
    "a mask": lambda x: da.log1p(x[np.arange(N_OBS) % 3 == 0])[:, [3, 1]],
    "concatenated rows": lambda x: da.concatenate([x[:13], da.log1p(x[20:])]),
    "other chunks": lambda x: da.log1p(x).rechunk((7, N_VARS)),
    "row_local": lambda x: x.map_blocks(row_local(lambda block: block * 2)),
    "gene weights by row_local": lambda x: x.map_blocks(row_local(weighted), dtype=float),
    "a function of numpy": lambda x: x.map_blocks(np.log1p),
    "a view of an AnnData": lambda x: ad.AnnData(x)[np.arange(N_OBS) % 2 == 0, 3:9].X,
}

WEIGHTS = np.arange(1.0, N_VARS + 1)

# Dask cannot compute these if blocks are csr_matrix, for which * is the matrix product.
STAY_CSR: dict[str, Callable[[da.Array], da.Array]] = {
    "row factors": lambda x: da.log1p(x * da.from_array(SIZES[:, None], chunks=(13, 1))),
    "row factors in other chunks": lambda x: x * da.from_array(SIZES[:, None], chunks=(20, 1)),
    "gene weights": lambda x: x * da.from_array(WEIGHTS, chunks=5),
    "both factors, of some rows and genes": lambda x: (x[::2] * SIZES[::2, None])[:, 3:9] * WEIGHTS[3:9],
    "where rows are as many as genes": lambda x: x[:N_VARS].rechunk((N_VARS, N_VARS)) * np.arange(N_VARS),
    "row factors, where rows are as many as genes": lambda x: x[:51].rechunk((N_VARS, N_VARS)) * SIZES[:51, None],
    "a row to a chunk": lambda x: (x[:5].rechunk((1, N_VARS)) * SIZES[:5, None]) * WEIGHTS[None],
    "one gene": lambda x: x[:, 3:4] * SIZES[:, None] * WEIGHTS[:1],
    "gene weights of a partial function": lambda x: x.map_blocks(
        partial(np.multiply, np.arange(N_VARS)), dtype=float, meta=x._meta.astype(float)
    ),
    "shares": lambda x: x / x.sum(axis=1, keepdims=True),
    "squares": lambda x: x**2,
    "squares of what was divided by gene": lambda x: (x / WEIGHTS) ** 2,
    "beyond a number for each gene, and few": lambda x: (x > WEIGHTS) & (x < 9),
}

# Operands with which zeros become NaN: 0 as a divisor, infinity as a factor, and NaN.
UNUSUAL = np.where(np.arange(N_VARS) % 4 == 0, 0, np.where(np.arange(N_VARS) % 4 == 1, np.inf, 2.0))
UNUSUAL[2] = np.nan

# Code that maps zeros to other values.
DENSIFYING: dict[str, Callable[[da.Array], da.Array]] = {
    "one more": lambda x: da.log2(x + 1),
    "made dense": lambda x: x.map_blocks(np.asarray),
    "of the largest that are at most 3": lambda x: x / (1 + np.minimum(x, 3).max(axis=1)[:, None]),
    "divided by zeros": lambda x: x / UNUSUAL,
    "divided by zeros of rows": lambda x: x / (SIZES[:, None] - 5),
    "infinitely weighted by itself": lambda x: x * (x / UNUSUAL),
    "centred and weighted": lambda x: (x - WEIGHTS) * WEIGHTS,
    "centred and weighted, where rows are as many as genes": lambda x: (
        (x[:N_VARS].rechunk((N_VARS, N_VARS)) - WEIGHTS) * WEIGHTS
    ),
}
ELEMENTWISE = STAY_CSR | DENSIFYING

DENSE_ONLY: dict[str, Callable[[da.Array], da.Array]] = {
    "scores by row": lambda x: (
        (da.log1p(x) - da.log1p(x).mean(axis=1, keepdims=True)) / (1 + da.log1p(x).std(axis=1, keepdims=True))
    ),
    "shares of the largest": lambda x: da.log1p(x) / (1 + da.log1p(x).max(axis=1)[:, None]),
    "two matrices": lambda x: x + to_dask(as_matrix(np.arange(1.0 * N_OBS * N_VARS).reshape(N_OBS, -1), "Y")),
    "a matrix and itself, rows apart": lambda x: x[:50] - x[10:],
    "chunks of columns": lambda x: da.log1p(x.rechunk((13, 5))),
    "genes of joined columns": lambda x: da.concatenate([x, x], axis=1)[:, [20, 1, 3]],
}

LOCAL = [(layout, name) for layout in LAYOUTS for name in ANY_LAYOUT | ELEMENTWISE]
LOCAL += [("dense", name) for name in DENSE_ONLY]


pytestmark += [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply"),
]


def rows_of(matrix: Any, rows: NDArray[np.int64]) -> NDArray[Any]:
    return dense(gather_block(matrix.fetch(rows), np.arange(len(rows))))


@cache
def local(layout: str, name: str) -> tuple[Any, NDArray[Any]]:
    """Return the matrix of an array expression, and the values that the expression computes."""
    code = (ANY_LAYOUT | ELEMENTWISE | DENSE_ONLY)[name]
    array = code(leaf(layout))
    same = code(densified(leaf(layout))) if name in ELEMENTWISE else array
    return matrix_of(array), dense(same.compute(scheduler="synchronous"))


@pytest.mark.parametrize(("layout", "name"), LOCAL, ids=[f"{layout}: {name}" for layout, name in LOCAL])
def test_rows_of_row_local_code_are_those_of_the_computed_array(layout: str, name: str) -> None:
    matrix, values = local(layout, name)
    assert type(matrix) is RowLocalMatrix
    for n_rows in (0, 9, 90):
        rows = np.sort(np.random.default_rng(n_rows).integers(0, len(values), n_rows))
        fetched = matrix.fetch(rows)
        assert fetched.dtype == values.dtype
        if layout == "csr" and name in STAY_CSR:
            assert matrix.layout == fetched.layout == "csr"
        np.testing.assert_allclose(rows_of(matrix, rows), values[rows], rtol=1e-6)


MIXING: dict[str, Callable[[da.Array], da.Array]] = {
    "the mean over rows": lambda x: x - x.mean(axis=0),
    "the largest value": lambda x: x / x.max(),
    "a lambda": lambda x: x.map_blocks(lambda block: block + 1),
    "a wrapper of a known function": lambda x: x.map_blocks(wraps(np.log1p)(lambda block: block + 1)),
    "block_info": lambda x: x.map_blocks(row_local(with_block_info), dtype=x.dtype),
    "transposed": lambda x: x.T,
    "no matrix of ours": lambda x: da.from_array(np.arange(12.0).reshape(4, 3), chunks=2),
    "sorted columns": lambda x: x.map_blocks(np.sort, axis=0),
    "sums over genes along the genes": lambda x: (
        x[:N_VARS].rechunk((N_VARS, N_VARS)) / (1 + x[:N_VARS].rechunk((N_VARS, N_VARS)).sum(axis=1))
    ),
    "optimized sums over genes along the genes": lambda x: dask.optimize(
        x[:N_VARS].rechunk((N_VARS, N_VARS)) / (1 + x[:N_VARS].rechunk((N_VARS, N_VARS)).sum(axis=1))
    )[0],
    "rows as columns, in square chunks": lambda x: da.blockwise(
        np.multiply, "ij", x[:N_VARS].rechunk((N_VARS, N_VARS)), "ij", x[:N_VARS].rechunk(N_VARS)[:, 0], "i", dtype="f4"
    ),
    "rows in a partial function": lambda x: (
        x[:26].rechunk((13, N_VARS)).map_blocks(partial(np.add, SIZES[:13, None]), dtype="f8")
    ),
    "delayed rows": lambda x: (
        x[:26].rechunk((13, N_VARS)).map_blocks(np.add, dask.delayed(SIZES[:13, None]), dtype="f8")
    ),
    "sorted genes": lambda x: x.map_blocks(np.sort, axis=1),
    "one stage of several": lambda x: da.log1p(da.log1p(x).map_blocks(lambda block: block + 1)),
}


def with_block_info(block: Any, block_info: Any = None) -> Any:
    return block + block_info[0]["chunk-location"][0]


@pytest.mark.parametrize("name", MIXING)
def test_code_that_mixes_rows_is_computed_by_whole_chunks_and_still_right(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    array = MIXING[name](leaf("dense"))
    values = array.compute(scheduler="synchronous")
    rows = np.sort(np.random.default_rng(0).integers(0, len(values), 12))
    np.testing.assert_allclose(rows_of(matrix_of(array), rows), values[rows], rtol=1e-6)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_rows_needed_are_read_and_each_matrix_once(tmp_path: Path, layout: str) -> None:
    with dask.config.set({"dasksc.chunk-bytes": 2000}):
        adata = dasksc.open(write_store(make_adata(layout=layout), tmp_path, "h5ad"))
    with recorded_reads() as reads:
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        matrix = matrix_of(adata[np.arange(N_OBS) % 2 == 0].X)
    assert not reads.reached
    with recorded_reads() as reads:
        matrix.fetch(np.array([0, 3, 3, 28]))
    stored = [reach for reach in reads.reached if reach.label.startswith(f"{tmp_path}")]
    # Three rows are read once.
    values = [reach for reach in stored if reach.label.endswith("X/data" if layout == "csr" else "X")]
    assert [reach.n_runs for reach in values] == [3]


def test_a_row_local_matrix_pickles_and_keeps_what_it_compiled_in_a_process() -> None:
    array = leaf("csr").map_blocks(row_local(lambda block: block * 2))
    matrix = matrix_of(array)
    first, second = (pickle.loads(pickle.dumps(matrix)) for _ in range(2))
    assert type(first) is RowLocalMatrix
    assert first is second
    rows = np.array([1, 30])
    np.testing.assert_array_equal(rows_of(first, rows), dense(array.compute())[rows])


def test_a_graph_deeper_than_the_stack_is_computed_by_whole_chunks() -> None:
    n_layers = 500
    array = leaf("dense")
    values = array.compute()
    for _ in range(n_layers):
        array = array + 1
    rows = np.array([3, 40])
    np.testing.assert_allclose(rows_of(matrix_of(array), rows), values[rows] + n_layers)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_are_elementwise_in_whole_chunks_too(name: str) -> None:
    def shifted(block: Any) -> Any:
        return (block.toarray() if sp.issparse(block) else np.asarray(block)) + 1

    x = leaf("csr")
    expected = ELEMENTWISE[name](densified(x)).compute() + 1
    array = ELEMENTWISE[name](x).map_blocks(shifted, dtype=float, meta=np.empty((0, 0)))
    for one in (array, *dask.optimize(array)):
        matrix = matrix_of(one)
        assert type(matrix) is DaskMatrix
        np.testing.assert_allclose(rows_of(matrix, np.arange(len(expected))), expected, rtol=1e-6)


WRONG_WIDTHS: dict[str, Callable[[da.Array], da.Array]] = {
    "fewer": lambda x: x.map_blocks(row_local(lambda b: b[:, :10])),
    "fewer in whole chunks": lambda x: x.map_blocks(lambda b: b[:, :10]),
    "more": lambda x: x.map_blocks(row_local(tripled), dtype="float32"),
    "more in whole chunks": lambda x: x.map_blocks(tripled, dtype="float32"),
    "one row": lambda x: x.map_blocks(lambda b: b[:1]),
}


def tripled(block: Any) -> Any:
    return sp.hstack([block] * 3, format="csr") if sp.issparse(block) else np.hstack([block] * 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WRONG_WIDTHS)
def test_code_that_makes_another_shape_than_it_declares_is_refused_by_name(
    tmp_path: Path, name: str, layout: str
) -> None:
    lazy = dasksc.open(write_store(make_adata(layout=layout), tmp_path, "h5ad"))
    lazy.X = WRONG_WIDTHS[name](lazy.X)
    genes = ["gene0", "gene11"] if name == "fewer" else None
    one = dasksc.scDataset(lazy, dasksc.BlockShuffling(4), batch_size=8, genes=genes, layout="csr", seed=0)
    with pytest.raises(dasksc.FetchError) as caught:
        next(iter(one))
    assert isinstance(caught.value.__cause__, InputError)
    message = str(caught.value)
    assert f"array {lazy.X.name!r}" in message
    assert "map_blocks(f, chunks=" in message
    assert "corrupt" not in message


@pytest.mark.parametrize(
    "code", [lambda x: x / x.max(), lambda x: (x - x.mean(axis=0)) / (x - x.mean(axis=0)).std(axis=0)]
)
def test_what_all_row_chunks_need_is_computed_once(
    code: Callable[[da.Array], da.Array], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array, rows, counts = code(leaf("dense", 5)), np.array([1, 17, 18, 40]), []
    expected = array.compute(scheduler="synchronous")[rows]
    (stored,) = leaves_of(array)
    fetch = type(stored).fetch

    def counted_fetch(self: Any, rows: NDArray[np.int64]) -> Any:
        counts.append(len(rows) * (self is stored))
        return fetch(self, rows)

    monkeypatch.setattr(type(stored), "fetch", counted_fetch)
    matrix = matrix_of(array)
    assert type(matrix) is DaskMatrix
    # Each fetch reads the three chunks that contain the rows; the first also reads all rows once.
    for n_rows in (N_OBS + 15, 15, 15):
        counts.clear()
        np.testing.assert_allclose(rows_of(matrix, rows), expected, rtol=1e-5)
        assert sum(counts) == n_rows
    (record,) = caplog.records
    assert ".mean(axis=0).compute()" in record.getMessage()
