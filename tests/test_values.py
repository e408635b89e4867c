"""What comes out is what AnnData reads: matrices by rows, obs columns, and the tensors of a dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.collection import AnnDataView, encode_column
from dasksc.lazy import matrix_of
from tests.support.data import (
    SAMPLE_FILES,
    SAMPLE_ZARRS,
    STORES,
    dense,
    make_adata,
    sample,
    unpacked_sample,
    write_store,
)

# What AnnData 0.13 asks of pandas 3 when it subsets.
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:The 'mode.chained_assignment' option is deprecated")]

# As we open it, and as AnnData reads it.
Opened = tuple[ad.AnnData, ad.AnnData]


def both(path: Path) -> Opened:
    """A store as we open it and as AnnData reads it, without AnnData's warnings about old files."""
    opened = dasksc.open(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opened, ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


@pytest.fixture(scope="module", params=STORES, ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    format, layout = request.param
    return both(write_store(make_adata(layout=layout), tmp_path_factory.mktemp("stores"), format))


@pytest.fixture(scope="module", params=SAMPLE_FILES + SAMPLE_ZARRS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    name = request.param
    if name.endswith(".h5ad"):
        return both(sample(name))
    return both(unpacked_sample(name, tmp_path_factory.mktemp("archives")))


def matrices(opened: ad.AnnData, expected: ad.AnnData) -> Iterator[tuple[str, Any, Any]]:
    """Every lazy matrix of `opened`, and the same as AnnData read it."""
    if expected.X is not None:
        yield "X", opened.X, expected.X
    for part in ("layers", "obsm", "obsp"):
        for name in getattr(expected, part):
            if name is None or not isinstance(getattr(opened, part)[name], da.Array):
                # Tables, and the graphs that AnnData before 0.7 kept in uns, are in memory.
                continue
            yield f"{part}/{name}", getattr(opened, part)[name], getattr(expected, part)[name]
    if expected.raw is not None:
        yield "raw/X", opened.raw.X, expected.raw.X


def assert_rows_equal(opened: ad.AnnData, expected: ad.AnnData, draws: list[float]) -> None:
    for name, array, values in matrices(opened, expected):
        matrix = matrix_of(array)
        n_obs, n_vars = values.shape
        rows = np.sort((np.array(draws) * n_obs).astype(np.int64))
        order = np.random.default_rng(0).permutation(len(rows))
        fetched = matrix.fetch(rows)
        out = np.empty((len(rows), n_vars), dtype=values.dtype)
        fetched.gather(order, out=out)
        np.testing.assert_array_equal(out, dense(values)[rows][order], err_msg=name)


@given(draws=st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_any_rows_of_any_matrix_are_those_that_anndata_reads(written: Opened, draws: list[float]) -> None:
    assert_rows_equal(*written, draws)


def test_every_row_of_a_real_file_and_scattered_ones_are_those_that_anndata_reads(real: Opened) -> None:
    n_obs = real[0].n_obs
    assert_rows_equal(*real, (np.arange(n_obs) / n_obs + 1e-9).tolist())
    for n_rows in (0, 1, 7, 30):
        assert_rows_equal(*real, np.random.default_rng(n_rows).random(n_rows).tolist())


def assert_column_equal(column: pd.Series, array: np.ndarray, labels: list[Any] | None) -> None:
    """The encoded column, decoded again, holds the values of `column`."""
    assert len(array) == len(column)
    missing = column.isna().to_numpy()
    if labels is None:
        decoded, known = array, ~missing
        assert np.isnan(array[missing].astype(float)).all()
    else:
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array == -1, missing)
        decoded, known = np.array([*labels, None], dtype=object)[array], ~missing
    assert decoded[known].tolist() == column.to_numpy(dtype=object)[known].tolist()


def test_every_obs_column_of_every_kind_survives_being_written_and_encoded(written: Opened) -> None:
    opened, expected = written
    original = make_adata().obs
    assert list(opened.obs.columns) == list(original.columns)
    for name in original.columns:
        array, labels = encode_column(opened.obs[name])
        assert_column_equal(original[name], array, labels)
        assert_column_equal(expected.obs[name], array, labels)
        torch.from_numpy(array.copy())


def test_every_obs_column_of_a_real_file_is_encoded(real: Opened) -> None:
    opened, expected = real
    for name in expected.obs.columns:
        array, labels = encode_column(opened.obs[name])
        assert_column_equal(expected.obs[name], array, labels)
        torch.from_numpy(array.copy())


def test_the_kinds_of_column_get_the_dtypes_promised(written: Opened) -> None:
    opened, _ = written
    encoded = {name: encode_column(opened.obs[name]) for name in opened.obs}
    dtypes = {name: str(array.dtype) for name, (array, _) in encoded.items()}
    assert dtypes == {
        "cell_type": "int64",
        "cell_type_missing": "int64",
        "ordered": "int64",
        "text": "int64",
        "flag": "bool",
        "flag_missing": "int64",
        "int8": "int8",
        "int64": "int64",
        "uint16": "uint16",
        "nullable_int": "int64",
        "nullable_int_missing": "float64",
        "float32": "float32",
        "float64_missing": "float64",
    }
    assert encoded["cell_type"][1] == ["T cell", "B cell", "NK cell", "never seen"]
    assert encoded["ordered"][1] == ["B cell", "NK cell", "T cell"]
    assert encoded["text"][1] == ["B cell", "NK cell", "T cell"]
    assert (encoded["cell_type_missing"][0] == -1).any()


def test_every_batch_of_a_dataset_holds_the_rows_it_names(written: Opened) -> None:
    opened, expected = written
    assert_batches_equal(opened, expected, batch_size=7)


def test_every_batch_of_a_real_file_holds_the_rows_it_names(real: Opened) -> None:
    opened, expected = real
    if expected.X is None:
        pytest.skip("this file has no X")
    assert_batches_equal(opened, expected, batch_size=64)


def assert_batches_equal(opened: ad.AnnData, expected: ad.AnnData, batch_size: int) -> None:
    dataset = dasksc.scDataset(
        opened,
        dasksc.BlockShuffling(block_size=3),
        batch_size=batch_size,
        fetch_factor=2,
        obs=list(opened.obs.columns),
        layers=[name for name in opened.layers if name is not None],
        obsm=[name for name in expected.obsm if not isinstance(expected.obsm[name], pd.DataFrame)],
        seed=0,
        dtype=None,
    )
    values = dense(expected.X)
    encoded = {name: encode_column(opened.obs[name])[0] for name in opened.obs}
    seen = []
    for batch in dataset:
        rows = batch.index.numpy()
        seen.extend(rows.tolist())
        np.testing.assert_array_equal(batch.X.numpy(), values[rows])
        for name, tensor in batch.layers.items():
            np.testing.assert_array_equal(tensor.numpy(), dense(expected.layers[name])[rows])
        for name, tensor in batch.obsm.items():
            np.testing.assert_array_equal(tensor.numpy(), dense(expected.obsm[name])[rows])
        for name, tensor in batch.obs.items():
            np.testing.assert_array_equal(tensor.numpy(), encoded[name][rows])
    assert sorted(seen) == list(range(expected.n_obs))


def test_the_rows_that_a_hook_reads_are_those_that_anndata_reads(real: Opened) -> None:
    opened, expected = real
    rows = np.array([7, 0, 3, 3])
    got = AnnDataView(opened)[rows]
    if expected.X is not None:
        np.testing.assert_array_equal(dense(got.X), dense(expected.X)[rows])
    assert got.obs.astype(str).to_numpy().tolist() == expected.obs.iloc[rows].astype(str).to_numpy().tolist()
    for name in expected.obsm:
        np.testing.assert_array_equal(dense(got.obsm[name]), dense(expected.obsm[name])[rows])
