"""Small stores for the tests, and the paths of the sample files.

The data are identical in every run, and every value differs from its neighbors. A row or column read
from the wrong position therefore changes the result.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray

import dasksc
from dasksc.storage import Matrix

FORMATS = ("h5ad", "zarr2", "zarr3")
LAYOUTS = ("csr", "dense")
# All formats, with X in every layout. The layers of `make_adata` have both layouts in each format.
STORES = (("h5ad", "csr"), ("zarr2", "dense"), ("zarr3", "csr"))

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "data"

SAMPLE_FILES = (
    "pbmc_5k_protein_v3.h5ad",
    "pbmc_10k_protein_v3.h5ad",
    "brainlarge_dataset_test.h5ad",
    "anndata-archives/v0.5.0/adata.h5ad",
    "anndata-archives/v0.7.0/adata.h5ad",
    "anndata-archives/v0.7.8/adata.h5ad",
    "anndata-archives/v0.11.4/adata.h5ad",
)

SAMPLE_ZARRS = (
    "anndata-archives/v0.7.0/adata.zarr.zip",
    "anndata-archives/v0.7.8/adata.zarr.zip",
    "anndata-archives/v0.11.4/adata.zarr.zip",
)

Layout = Literal["csr", "dense"]
session_folder: Path | None = None  # set by conftest.py


def sample(name: str) -> Path:
    """Return the path of a sample file; skip the test if the sample folder is missing."""
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"the sample file {name} is not at {path}")
    return path


def unpacked_sample(name: str, folder: Path) -> Path:
    """Return the path of a zipped sample store, unpacked into `folder`."""
    target = folder / Path(name).with_suffix("").name
    with zipfile.ZipFile(sample(name)) as archive:
        archive.extractall(target)
    return target


def make_values(
    n_obs: int, n_vars: int, *, layout: Layout = "csr", dtype: Any = np.float32, density: float = 0.3, seed: int = 0
) -> sp.csr_matrix | NDArray[Any]:
    """Return counts with distinct nonzero values (within the range of the dtype), an empty row and an empty column."""
    rng = np.random.default_rng(seed)
    values = np.arange(1, n_obs * n_vars + 1).reshape(n_obs, n_vars).astype(dtype)
    values[rng.random(values.shape) >= density] = 0
    values[n_obs // 3] = 0
    values[:, n_vars // 3] = 0
    return sp.csr_matrix(values) if layout == "csr" else values


def make_obs(n_obs: int, *, seed: int = 0) -> pd.DataFrame:
    """Return an obs table with a column of every type that AnnData stores, with and without missing values."""
    rng = np.random.default_rng(seed)
    index = pd.Index([f"cell{i}" for i in range(n_obs)])
    missing = rng.random(n_obs) < 0.25
    missing[:2] = True, False
    types = np.array(["T cell", "B cell", "NK cell"])[rng.integers(0, 3, n_obs)]
    integers = rng.integers(-50, 50, n_obs)
    flags = rng.random(n_obs) < 0.5
    return pd.DataFrame(
        {
            "cell_type": pd.Categorical(types, categories=["T cell", "B cell", "NK cell", "never seen"]),
            "cell_type_missing": pd.Categorical(pd.Series(types).mask(missing)),
            "ordered": pd.Categorical(types, categories=["B cell", "NK cell", "T cell"], ordered=True),
            "text": types.astype(object),
            "flag": flags,
            "flag_missing": pd.array(flags, dtype="boolean").copy(),
            "int8": integers.astype(np.int8),
            "int64": integers.astype(np.int64),
            "uint16": (integers + 50).astype(np.uint16),
            "nullable_int": pd.array(integers, dtype="Int64"),
            "nullable_int_missing": pd.array(pd.Series(integers).mask(missing), dtype="Int64"),
            "float32": rng.random(n_obs).astype(np.float32),
            "float64_missing": np.where(missing, np.nan, rng.random(n_obs)),
        },
        index=index,
    ).assign(flag_missing=pd.array(np.where(missing, None, flags), dtype="boolean"))


FEW_COLUMNS = ["cell_type", "cell_type_missing", "text", "flag", "int8", "int64", "float32"]


def make_adata(
    n_obs: int = 60, n_vars: int = 17, *, layout: Layout = "csr", dtype: Any = np.float32, has_everything: bool = False
) -> ad.AnnData:
    """Return an AnnData with layers in both layouts.

    With `has_everything`, obs has columns of all types, obsm has dense, sparse and tabular entries, and varm, obsp and
    uns have entries, too. Such an atlas takes three times as long to write and to open.
    """
    obs = make_obs(n_obs)
    adata = ad.AnnData(
        X=make_values(n_obs, n_vars, layout=layout, dtype=dtype),
        obs=obs if has_everything else obs[FEW_COLUMNS],
        var=pd.DataFrame({"mean": np.arange(n_vars, dtype=float)}, index=[f"gene{i}" for i in range(n_vars)]),
        layers={
            "counts": make_values(n_obs, n_vars, layout="csr", dtype=np.int32, seed=1),
            "scaled": make_values(n_obs, n_vars, layout="dense", dtype=np.float64, seed=2),
        },
        obsm={"X_pca": make_values(n_obs, 5, layout="dense", dtype=np.float32, density=1, seed=3)},
    )
    if has_everything:
        adata.obsm["sparse"] = make_values(n_obs, 7, layout="csr", seed=4)
        adata.obsm["table"] = pd.DataFrame({"a": np.arange(n_obs), "b": obs["cell_type"]}, index=obs.index)
        adata.varm["loadings"] = make_values(n_vars, 3, layout="dense", seed=5)
        adata.obsp["neighbours"] = sp.diags([np.arange(1.0, n_obs)], [1], shape=(n_obs, n_obs), format="csr")
        adata.uns["source"] = "made up"
    return adata


def write_store(adata: ad.AnnData, folder: Path, format: str, name: str = "atlas") -> Path:
    """Write `adata` as one of `FORMATS` and return the path.

    The same content is written once per session and copied afterwards, since AnnData takes half a second to write a
    small Zarr store.
    """
    path = folder / (f"{name}.h5ad" if format == "h5ad" else f"{name}.{format}.zarr")
    try:
        content = hashlib.blake2b(pickle.dumps(adata), digest_size=16).hexdigest()
    except Exception:  # lazy or backed
        _write_store(adata, path, format)
        return path
    # When AnnData writes the object, it converts strings to categoricals in it.
    adata.strings_to_categoricals()
    if adata.raw is not None:
        adata.strings_to_categoricals(adata.raw.var)
    written = _written() / f"{content}.{format}"
    if not written.exists():
        partial = written.with_name(f"{os.getpid()}.{written.name}")
        _write_store(adata, partial, format)
        with contextlib.suppress(OSError):  # another process was first
            partial.rename(written)
    # Modification times are not copied: they must change when one file replaces another.
    if format == "h5ad":
        shutil.copyfile(written, path)
    else:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(written, path, copy_function=shutil.copyfile)
    return path


@cache
def _written() -> Path:
    """Return the folder of the stores that have been written: that of the pytest session, or a temporary one."""
    if session_folder is not None:
        folder = session_folder / "written"
        folder.mkdir(exist_ok=True)
        return folder
    temporary = tempfile.mkdtemp(prefix="dasksc-stores-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _write_store(adata: ad.AnnData, path: Path, format: str) -> None:
    if format == "h5ad":
        adata.write_h5ad(path)
        return
    with warnings.catch_warnings():
        # Warnings about future formats and defaults.
        warnings.simplefilter("ignore")
        with ad.settings.override(zarr_write_format=int(format[-1])):
            adata.write_zarr(path)


def zip_of(store: Path, *, method: int = zipfile.ZIP_STORED) -> Path:
    archive = store.with_suffix(".zarr.zip")
    with zipfile.ZipFile(archive, "w", method) as file:
        for one in sorted(store.rglob("*")):
            if one.is_file():
                file.write(one, one.relative_to(store))
    return archive


def dense(values: Any) -> NDArray[Any]:
    """Return any matrix as an ndarray, for comparison of values."""
    return values.toarray() if sp.issparse(values) else np.asarray(values)


def rows_of(matrix: Matrix, rows: Any) -> NDArray[Any]:
    """Return rows of a matrix as an ndarray, from a fetch of these rows."""
    out = np.full((len(rows), matrix.shape[1]), 7).astype(matrix.dtype)
    matrix.fetch(np.asarray(rows)).gather(np.arange(len(rows)), out=out)
    return out


def computed(array: Any) -> Any:
    """Return an array of an atlas as NumPy or SciPy has it."""
    return array.compute(scheduler="synchronous") if hasattr(array, "compute") else array


def arrays_of(adata: ad.AnnData) -> dict[str, Any]:
    """Return the matrices of an atlas and the tables among them by their keys."""
    parts = ("layers", "obsm", "obsp", "varm", "varp")
    found = {f"{part}/{name}": value for part in parts for name, value in getattr(adata, part).items() if name}
    return found | {"X": adata.X} | ({} if adata.raw is None else {"raw/X": adata.raw.X, "raw/var": adata.raw.var})


def same(one: ad.AnnData, other: ad.AnnData) -> None:
    """Fail unless two atlases, lazy or in memory, hold the same tables and values."""
    pd.testing.assert_frame_equal(one.obs, other.obs)
    pd.testing.assert_frame_equal(one.var, other.var)
    ours, theirs = arrays_of(one), arrays_of(other)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(ours[key], value)
        else:
            np.testing.assert_array_equal(dense(computed(ours[key])), dense(computed(value)), err_msg=key)


def batches(data: Any, **options: Any) -> list[NDArray[Any]]:
    """Read one epoch of shuffled batches of X on one rank."""
    dataset = dasksc.scDataset(data, dasksc.BlockShuffling(8), 16, fetch_factor=2, seed=0, **options)
    return [batch.numpy().copy() for batch in dataset]


def lzf(data: bytes) -> bytes:
    """Compress a chunk with HDF5; return no bytes if HDF5 would store it uncompressed."""
    with h5py.File("any", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=np.frombuffer(data, np.uint8), chunks=(len(data),), compression="lzf")
        mask, stored = dataset.id.read_direct_chunk((0,))
        return b"" if mask else bytes(stored)
