from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import zarr
from numpy.typing import NDArray

import dasksc
from dasksc.errors import CorruptDataError, InputError, MissingKeyError, StorageError
from dasksc.storage import Columns, Matrix, RowBuffer, as_matrix, open_matrix
from dasksc.storage.arrays import logical_dtype
from tests.support.data import arrays_of, dense, make_values, rows_of, write_store
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core

N_OBS, N_VARS = 97, 31


# The first, the last and a middle row are empty.
EMPTY = sp.csr_matrix((1, N_VARS), dtype=np.float32)
COUNTS = sp.csr_matrix(sp.vstack([EMPTY, make_values(N_OBS - 2, N_VARS, density=0.2), EMPTY]))


def atlas() -> ad.AnnData:
    layers = {"dense": make_values(N_OBS, N_VARS, layout="dense", seed=1), "columns": COUNTS.tocsc()}
    adata = ad.AnnData(X=COUNTS.copy(), layers=layers)
    adata.obsm["X_pca"] = make_values(N_OBS, 5, layout="dense", dtype="float64", seed=2)
    adata.raw = adata
    return adata


VALUES = {key: dense(values) for key, values in arrays_of(atlas()).items() if key != "raw/var"}


@pytest.fixture(autouse=True)
def _short_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read neighboring runs separately, as in large files, where the gaps between runs are not worth reading."""
    monkeypatch.setattr("dasksc.storage.hdf5.reader._GAP_BYTES", 8)
    monkeypatch.setattr("dasksc.storage.zarr.reader._GAP_BYTES", 8)


# test_storage_fast covers every filter, codec and size of chunks.
@pytest.fixture(params=["h5ad", "zarr3"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_store(atlas(), tmp_path, request.param)


@pytest.fixture
def h5ad(tmp_path: Path) -> Path:
    return write_store(atlas(), tmp_path, "h5ad")


def check_fetched(fetched: RowBuffer, expected: NDArray[Any]) -> None:
    """Check every way of gathering from `fetched`, whose rows equal those of `expected`."""
    n_rows, n_vars = expected.shape
    rng = np.random.default_rng(3)
    assert fetched.shape == expected.shape
    assert isinstance(fetched, RowBuffer)
    every_other = Columns(positions=rng.permutation(n_vars)[::2], n_vars=n_vars)
    for positions in (rng.permutation(n_rows), rng.integers(0, max(n_rows, 1), min(n_rows, 9))):
        for columns in (None, every_other):
            twin = expected[positions]
            if columns is not None:
                twin = twin[:, columns.positions]
            for dtype in {expected.dtype, np.dtype("float32")}:
                out = np.full(twin.shape, 7, dtype=dtype)
                fetched.gather(positions, out=out, columns=columns)
                np.testing.assert_array_equal(out, twin.astype(dtype))
            indptr, indices, data = fetched.gather_csr(positions, columns=columns)
            assert (indptr.dtype, indices.dtype, data.dtype) == (np.int64, np.int32, fetched.dtype)
            assert len(indptr) == len(twin) + 1
            got = np.zeros_like(twin)
            got[np.repeat(np.arange(len(twin)), np.diff(indptr)), indices] = data
            np.testing.assert_array_equal(got, twin)


def check_matrix(matrix: Matrix, expected: NDArray[Any]) -> None:
    assert isinstance(matrix, Matrix)
    assert (matrix.shape, matrix.stored_dtype) == (expected.shape, expected.dtype)
    assert matrix.dtype == logical_dtype(expected.dtype)
    n_obs = len(expected)
    rng = np.random.default_rng(4)
    for rows in (
        np.arange(n_obs),
        np.sort(rng.integers(0, n_obs, 3 * n_obs)),
        np.array([n_obs - 1]),
        np.empty(0, dtype=np.int64),
        np.arange(0, n_obs, 7),
    ):
        fetched = matrix.fetch(rows)
        assert (fetched.dtype, fetched.layout) == (matrix.dtype, matrix.layout)
        check_fetched(fetched, expected[rows])
    again = pickle.loads(pickle.dumps(matrix)).fetch(rows)
    for one in (fetched.compact(), pickle.loads(pickle.dumps(fetched)), again):
        check_fetched(one, expected[rows])


@pytest.mark.parametrize("key", VALUES)
def test_fetched_rows_equal_those_anndata_reads(written: Path, key: str) -> None:
    check_matrix(open_matrix(written, key), VALUES[key])


def test_a_fetch_reads_the_wanted_rows_only_and_a_long_indptr_is_never_read_whole(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dasksc.storage.matrices._INDPTR_KEPT_BYTES", 0)
    rows, matrix = np.array([3, 4, 50]), open_matrix(written, "X")
    with recorded_reads() as reads:
        matrix.fetch(rows)
    assert reads.n_items("X/indptr") == 6
    for name in ("data", "indices"):
        assert reads.n_calls(f"X/{name}") == 1
        assert reads.n_items(f"X/{name}") == np.diff(COUNTS.indptr)[rows].sum()
    check_matrix(matrix, VALUES["X"])


def test_unusual_integer_types_and_big_endian_values_are_read(h5ad: Path) -> None:
    with h5py.File(h5ad, "r+") as file:
        for name, dtype in (("indices", "uint64"), ("indptr", "uint64"), ("data", ">f4")):
            values = file[f"X/{name}"][:]
            del file[f"X/{name}"]
            file[f"X/{name}"] = values.astype(dtype)
    np.testing.assert_array_equal(rows_of(open_matrix(h5ad, "X"), np.arange(N_OBS)), VALUES["X"])


@pytest.mark.parametrize(
    "convert",
    [
        sp.csr_array,
        lambda x: x.tocsc(),
        lambda x: np.asfortranarray(x.toarray()),
        lambda x: x.toarray().astype(">f4"),
        lambda x: x.toarray()[:, ::-1][:, ::-1],
    ],
    ids=["csr_array", "csc", "fortran", "big-endian", "strided"],
)
def test_arrays_in_memory_are_matrices_too(convert: Callable[[Any], Any]) -> None:
    matrix = as_matrix(convert(COUNTS), "mine")
    assert matrix.label == "mine"
    check_matrix(matrix, VALUES["X"])


def without(name: str, n_kept: int | None = None) -> Callable[[Path], Path]:
    """Return a function that removes an array of X from a file, or all of its entries but `n_kept`."""

    def prepare(h5ad: Path) -> Path:
        with h5py.File(h5ad, "r+") as file:
            values = file[f"X/{name}"][:n_kept]
            del file[f"X/{name}"]
            if n_kept is not None:
                file[f"X/{name}"] = values
        return h5ad

    return prepare


@pytest.mark.parametrize(
    ("prepare", "key", "error", "facts"),
    [
        (without("indices"), "X", CorruptDataError, ["indices"]),
        (without("indptr", -1), "X", CorruptDataError, ["X"]),
        (without("indices", -1), "X", CorruptDataError, ["X"]),
        (without("data", -1), "X", CorruptDataError, ["X"]),
        (Path, "obs", InputError, ["dataframe"]),
        (Path, "obs/_index", InputError, ["obs/_index"]),
        (Path, "layers/spliced", MissingKeyError, ["layers/spliced"]),
    ],
)
def test_what_is_no_matrix_of_a_store_is_refused(
    h5ad: Path, prepare: Callable[[Path], Path], key: str, error: type[Exception], facts: list[str]
) -> None:
    path = prepare(h5ad)
    with pytest.raises(error) as caught:
        open_matrix(path, key)
    assert all(fact in str(caught.value) for fact in facts)


def gathered(n_rows: int, out: NDArray[Any], **more: Any) -> Callable[[Matrix], Any]:
    return lambda matrix: matrix.fetch(np.arange(10)).gather(np.arange(n_rows), out=out, **more)


@pytest.mark.parametrize(
    ("use", "fact"),
    [
        *((lambda matrix, rows=rows: matrix.fetch(np.array(rows)), "rows") for rows in ([5, 4], [-1], [N_OBS], [0.5])),
        (lambda matrix: matrix.fetch(np.array([[1]])), "rows"),
        (gathered(3, np.empty((2, N_VARS))), "out"),
        (gathered(3, np.empty((N_VARS, 3)).T), "out"),
        (gathered(11, np.empty((11, N_VARS))), "positions"),
        (gathered(1, np.empty((1, 2)), columns=Columns(positions=np.arange(2), n_vars=3)), "columns"),
        (lambda matrix: Columns(positions=np.array([0, 0]), n_vars=3), "column"),
        (lambda matrix: Columns(positions=np.array([-1]), n_vars=3), "3"),
        (lambda matrix: Columns(positions=np.array([3]), n_vars=3), "3"),
        (lambda matrix: Columns(np.array([0, 2]), 3, np.array([0, 2]), 2), "2"),
        (lambda matrix: Columns(np.array([0, 2]), 3, np.array([-1, 0]), 2), "2"),
        (lambda matrix: Columns(np.array([0, 2]), 3, np.array([0]), 2), "2"),
        (lambda matrix: as_matrix(np.zeros(3), "mine"), "mine"),
        (lambda matrix: as_matrix(np.array([["a"]]), "mine"), "mine"),
        (lambda matrix: as_matrix(np.zeros((2, 2), "complex64"), "mine"), "mine"),
    ],
)
def test_rows_columns_and_arrays_that_do_not_fit_are_refused(
    h5ad: Path, use: Callable[[Matrix], Any], fact: str
) -> None:
    for key in ("X", "layers/dense", "layers/columns"):
        matrix = open_matrix(h5ad, key)
        with pytest.raises(InputError, match=fact):
            use(matrix)


@pytest.mark.parametrize("value", [0, -5, 10**6])
def test_an_indptr_that_decreases_or_leaves_the_data_is_named_with_its_row(h5ad: Path, value: int) -> None:
    with h5py.File(h5ad, "r+") as file:
        file["X/indptr"][21] = value
    matrix = open_matrix(h5ad, "X")
    matrix.fetch(np.array([19, 22]))
    with pytest.raises(CorruptDataError, match=r"indptr.*20"):
        matrix.fetch(np.array([19, 20]))


def test_a_locked_h5ad_is_refused_until_it_is_released(h5ad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "TRUE")
    with h5ad.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for refused in (lambda: dasksc.open(h5ad), lambda: open_matrix(h5ad, "X")):
            with pytest.raises(StorageError, match="locked") as error:
                refused()
            assert str(h5ad) in str(error.value)
    assert dasksc.open(h5ad).n_obs


@pytest.mark.parametrize("change", ["replaced", "truncated", "removed"])
def test_a_file_that_changed_since_it_was_opened_is_refused(h5ad: Path, change: str) -> None:
    matrix = open_matrix(h5ad, "X")
    matrix.fetch(np.arange(5))
    if change == "replaced":
        write_store(atlas()[:, ::-1].copy(), h5ad.parent, "h5ad", "other").rename(h5ad)
    elif change == "truncated":
        h5ad.write_bytes(h5ad.read_bytes()[:2000])
    else:
        h5ad.unlink()
    with pytest.raises(CorruptDataError, match="since it was opened"):
        matrix.fetch(np.arange(5))


def test_a_broken_zarr_chunk_is_named_with_its_row(tmp_path: Path) -> None:
    store = write_store(atlas(), tmp_path, "zarr3")
    group = zarr.open_group(store, mode="r+", use_consolidated=False)["X"]
    group.create_array("data", data=group["data"][:], chunks=(10,), overwrite=True)
    (store / "X" / "data" / "c" / "4").write_bytes(b"not what was there")
    matrix = open_matrix(store, "X")
    matrix.fetch(np.array([1, 2]))
    row = int(np.searchsorted(COUNTS.indptr, 40, side="right")) - 1
    with pytest.raises(CorruptDataError, match=f"X/data.*{row}"):
        matrix.fetch(np.array([1, row]))


@pytest.mark.parametrize("wrong", [N_VARS, -1, 2**31 - 1])
def test_a_column_number_outside_the_matrix_is_named_with_its_row(h5ad: Path, wrong: int) -> None:
    row = 20
    with h5py.File(h5ad, "r+") as file:
        file["X/indices"][file["X/indptr"][row]] = wrong
    fetched = open_matrix(h5ad, "X").fetch(np.array([3, row, 40]))
    columns = Columns(positions=np.arange(3), n_vars=N_VARS)
    for use in (
        lambda: fetched.gather(np.array([1]), out=np.empty((1, N_VARS), np.float32)),
        lambda: fetched.gather(np.array([1]), out=np.empty((1, 3), np.float32), columns=columns),
        lambda: fetched.gather_csr(np.array([1])),
        lambda: fetched.gather_csr(np.array([1]), columns=columns),
        lambda: fetched.compact(),
        lambda: pickle.dumps(fetched),
    ):
        with pytest.raises(CorruptDataError, match=f"atlas.h5ad:/X/indices.*{row}"):
            use()
    fetched.gather(np.array([0, 2]), out=np.empty((2, N_VARS), np.float32))


N_GENES = 23


def untidy(n_obs: int, n_vars: int, dtype: str, seed: int) -> sp.csr_matrix:
    """Return rows with unsorted columns and up to three values at one position; some rows are canonical."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, n_vars, length) for length in rng.integers(0, 2 * n_vars, n_obs)]
    rows[::3] = [np.unique(row) for row in rows[::3]]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    values = rng.integers(100, 256, indptr[-1]).astype(dtype)
    if values.dtype.kind == "f":
        values += rng.random(len(values)).astype(dtype)
    return sp.csr_matrix((values, np.concatenate(rows).astype(np.int32), indptr), shape=(n_obs, n_vars))


def untidy_atlas(dtype: str, seed: int = 0) -> ad.AnnData:
    X, layer = untidy(60, N_GENES, dtype, seed), untidy(60, N_GENES, dtype, seed + 1)
    columns = untidy(N_GENES, 60, dtype, seed + 2)
    columns = sp.csc_matrix((columns.data, columns.indices, columns.indptr), shape=(60, N_GENES))
    adata = ad.AnnData(X, layers={"counts": layer, "columns": columns})
    adata.var_names = np.random.default_rng(seed).permutation([f"g{i}" for i in range(N_GENES)])
    adata.obs_names = [f"{seed}-{i}" for i in range(60)]
    return adata


def added_up(matrix: Any) -> NDArray[Any]:
    """Return the dense matrix, with duplicates summed in stored order, without integer overflow."""
    parts = matrix.tocoo()
    wide = np.int64 if matrix.dtype.kind in "iu" else matrix.dtype
    return sp.coo_matrix((parts.data.astype(wide), (parts.row, parts.col)), matrix.shape).toarray()


def check_valid(tensor: torch.Tensor) -> None:
    parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    with torch.sparse.check_sparse_tensor_invariants():
        torch.sparse_csr_tensor(*parts, size=tensor.shape)


GENES = {
    "all": None,
    "ascending": np.arange(0, N_GENES, 2),
    "in an order of their own": np.array([20, 3, 22, 0, 11, 7, 8]),
    "all in an order of their own": np.random.default_rng(0).permutation(N_GENES),
}


@pytest.mark.filterwarnings("ignore:.*has (several )?data types?.* and becomes")
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("kind", ["h5ad", "memory", "several"])
def test_batches_are_canonical_whatever_is_stored(kind: str, layout: str, tmp_path: Path) -> None:
    parts = [untidy_atlas("uint8" if kind == "h5ad" else "float32")]
    if kind == "several":
        parts += [untidy_atlas(dtype, 20 + i) for i, dtype in enumerate(("float32", "uint8"))]
    paths = [write_store(part, tmp_path, "h5ad", str(i)) for i, part in enumerate(parts)]
    opened = dasksc.open(parts[0] if kind == "memory" else paths[0] if kind == "h5ad" else paths)
    orders = [part.var_names.get_indexer(opened.var_names) for part in parts]
    values = {
        key or "X": np.concatenate(
            [added_up(part.layers[key] if key else part.X)[:, order] for part, order in zip(parts, orders, strict=True)]
        )
        for key in (None, "counts", "columns")
    }
    for genes in GENES.values():
        kept, seen = slice(None) if genes is None else genes, []
        dataset = dasksc.scDataset(
            opened, dasksc.BlockShuffling(3), 7, 2, layout=layout, layers=["counts", "columns"], genes=genes, seed=0
        )
        for batch in dataset:
            seen += batch.index.tolist()
            for name, tensor in {"X": batch.X, **batch.layers}.items():
                if layout == "csr":
                    check_valid(tensor)
                expected = values[name][batch.index.numpy()][:, kept].astype("float32")
                np.testing.assert_array_equal(tensor.to_dense().numpy(), expected)
        assert sorted(seen) == list(range(60 * len(parts)))


def squared(block: Any) -> Any:
    """Square the stored values; unlike SciPy, do not sum duplicates first."""
    return type(block)((block.data**2, block.indices, block.indptr), shape=block.shape)


SHUFFLED = GENES["in an order of their own"]


# If the user made the Dask array, functions given to map_blocks must handle duplicates and are not tested.
@pytest.mark.parametrize(
    ("kind", "of_array", "of_values"),
    [
        ("memory", da.log1p, np.log1p),
        ("h5ad", lambda X: X.map_blocks(dasksc.row_local(squared), dtype=X.dtype, meta=X._meta), np.square),
        ("h5ad", lambda X: X.map_blocks(squared, dtype=X.dtype, meta=X._meta), np.square),
        ("h5ad", lambda X: da.log1p(X[:, SHUFFLED]), lambda X: np.log1p(X)[:, SHUFFLED]),
        ("dask", lambda X: da.log1p(X[:, SHUFFLED]), lambda X: np.log1p(X)[:, SHUFFLED]),
    ],
)
def test_duplicates_are_summed_before_array_code_sees_them(
    kind: str, of_array: Callable[[Any], Any], of_values: Callable[[Any], Any], tmp_path: Path
) -> None:
    adata = untidy_atlas("float32")
    expected = of_values(added_up(adata.X))
    if kind == "dask":
        array = of_array(da.from_array(adata.X, chunks=(20, N_GENES), asarray=False))
    else:
        array = of_array(dasksc.open(adata if kind == "memory" else write_store(adata, tmp_path, "h5ad")).X)
    np.testing.assert_allclose(array.compute(scheduler="synchronous").toarray(), expected, rtol=1e-5)
    for layout in ("csr", "dense"):
        batches = list(dasksc.scDataset(array, dasksc.Streaming(), batch_size=7, fetch_factor=2, layout=layout, seed=0))
        if layout == "csr":
            for tensor in batches:
                check_valid(tensor)
        got = np.concatenate([tensor.to_dense().numpy() for tensor in batches])
        np.testing.assert_allclose(got, expected, rtol=1e-5)
