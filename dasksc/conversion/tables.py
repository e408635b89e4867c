"""All of a store that is no matrix of cells: written by AnnData, and put into place when the matrices are there."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anndata
import dask.array as da
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray

from dasksc.conversion.writing import write_group
from dasksc.errors import CorruptDataError

__all__ = ["check_obs", "write_tables"]


def write_tables(adata: anndata.AnnData, folder: Path, store: Path, order: NDArray[np.int64]) -> None:
    """Write obs in its new order, what describes genes, and uns; at last the metadata of the store itself.

    Parameters
    ----------
    adata
        Of Dask arrays, as `dasksc.open` returns it.
    folder
        Where to write what is then moved; what is there is removed.
    store
        Where the matrices are.
    order
        Which row of `adata` each row of the store is.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with _as_anndata_writes():
        written = zarr.open_group(folder, mode="w", zarr_format=3)
        for i, (path, element) in enumerate(_elements(adata, order)):
            write_elem(written, str(i), element)
            shutil.rmtree(store / path, ignore_errors=True)
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / str(i), store / path)
        for group in ("layers", "obsm", "obsp"):
            write_group(store / group, {"encoding-type": "dict", "encoding-version": "0.1.0"})
        if adata.raw is not None:
            write_group(store / "raw", {"encoding-type": "raw", "encoding-version": "0.1.0"})
        write_group(store, {"encoding-type": "anndata", "encoding-version": "0.1.0"})
        zarr.consolidate_metadata(str(store))


def _elements(adata: anndata.AnnData, order: NDArray[np.int64]) -> Iterator[tuple[str, Any]]:
    """Return what is no matrix of cells, by its place in the store."""
    yield "obs", adata.obs.iloc[order]
    yield "var", adata.var
    yield "uns", dict(adata.uns)
    yield "varm", dict(adata.varm)
    yield "varp", dict(adata.varp)
    for name, element in adata.obsm.items():
        if isinstance(element, pd.DataFrame):
            yield f"obsm/{name}", element.iloc[order]
        elif not isinstance(element, da.Array):
            yield f"obsm/{name}", element[order]
    if adata.raw is not None:
        yield "raw/var", adata.raw.var
        yield "raw/varm", dict(adata.raw.varm)


@contextmanager
def _as_anndata_writes() -> Iterator[None]:
    """Keep the libraries from warning of each element, and strings in the type that they have."""
    settings = anndata.settings
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Left alone, AnnData says at each array that the default of this will change.
        stack.enter_context(settings.override(auto_shard_zarr_v3=bool(settings.auto_shard_zarr_v3)))
        if hasattr(settings, "allow_write_nullable_strings"):
            stack.enter_context(settings.override(allow_write_nullable_strings=True))
        yield


def check_obs(adata: anndata.AnnData, store: Path, order: NDArray[np.int64]) -> None:
    """Compare obs as written with what it was to be, column by column.

    Raises
    ------
    CorruptDataError
        If they differ.
    """
    with _as_anndata_writes():
        written = read_elem(zarr.open_group(store, mode="r")["obs"])
    expected = adata.obs.iloc[order]
    differing = [name for name in expected if name not in written or not _equal(written[name], expected[name])]
    if not written.index.equals(expected.index):
        differing.append("the names of the cells")
    if differing or list(written) != list(expected):
        raise CorruptDataError(
            f"{store}: obs differs from the input's in {', '.join(map(str, differing)) or 'its columns'}. The disk or "
            "memory may be failing; convert again."
        )


def _equal(written: pd.Series[Any], expected: pd.Series[Any]) -> bool:
    if isinstance(expected.dtype, pd.CategoricalDtype):
        return bool(np.array_equal(written.cat.codes, expected.cat.codes)) and written.cat.categories.equals(
            expected.cat.categories
        )
    # By value: AnnData may write a type as another one of the same values, strings above all.
    missing = expected.isna().to_numpy()
    if not np.array_equal(written.isna().to_numpy(), missing):
        return False
    return bool((written.to_numpy()[~missing] == expected.to_numpy()[~missing]).all())
