"""Construction of AnnData objects from lazy matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anndata
import pandas as pd
from anndata import AnnData

from dasksc.errors import CorruptDataError, MissingKeyError
from dasksc.pushdown import chunk_rows_for, to_dask
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.options import OpenOptions

__all__ = ["assemble", "raw_of", "without_genes", "unchecked"]


@contextmanager
def unchecked() -> Iterator[None]:
    """Suppress the check for repeated names that AnnData makes at each step; `open` checks once."""
    with anndata.settings.override(check_uniqueness=False):
        yield


def assemble(
    *,
    x: Any,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    uns: Mapping[str, Any],
    layers: dict[str, Any],
    obsm: dict[str, Any],
    varm: dict[str, Any],
    obsp: dict[str, Any],
    varp: dict[str, Any],
    raw: dict[str, Any] | None,
    options: OpenOptions,
) -> AnnData:
    """Build an AnnData, with matrices as Dask arrays; X and the layers have the same chunks."""
    # Checked first, since a Dask array with a corrupt number of rows could have a huge number of chunks.
    for array in (x, *layers.values(), *obsm.values(), *obsp.values(), (raw or {}).get("X")):
        if isinstance(array, Lazy) and array.matrix.shape[0] != len(obs):
            raise CorruptDataError(
                f"{array.matrix.label} has {array.matrix.shape[0]} rows, but obs has {len(obs)}. The file is corrupt; "
                "write it again from its source."
            )
    alike = [array.matrix for array in (x, *layers.values()) if isinstance(array, Lazy)]
    chunk_rows = chunk_rows_for(*alike) if alike else None

    def wrapped(array: Any, chunk_rows: int | None = None) -> Any:
        if not isinstance(array, Lazy):
            return array
        return to_dask(array.matrix, chunk_rows=chunk_rows, token=array.token)

    def all_wrapped(arrays: dict[str, Any], chunk_rows: int | None = None) -> dict[str, Any]:
        return {name: wrapped(array, chunk_rows) for name, array in arrays.items() if array is not None}

    return AnnData(
        X=wrapped(x, chunk_rows),
        obs=obs,
        var=var,
        uns=dict(uns),
        layers=all_wrapped(layers, chunk_rows),
        obsm=all_wrapped({name: lazily(array, f"obsm/{name}", options) for name, array in obsm.items()}),
        varm=varm,
        obsp=all_wrapped(obsp),
        varp=varp,
        raw=None if raw is None else all_wrapped(raw),
        shape=(len(obs), len(var)) if x is None else None,
    )


def without_genes(obs: pd.DataFrame, obsm: dict[str, Any], options: OpenOptions) -> AnnData:
    """Return an AnnData of obs and obsm, without genes."""
    return assemble(
        x=None,
        obs=obs,
        var=pd.DataFrame(index=pd.Index([], dtype=str)),
        uns={},
        layers={},
        obsm=obsm,
        varm={},
        obsp={},
        varp={},
        raw=None,
        options=options,
    )


def raw_of(adata: AnnData, name: str) -> AnnData:
    """Return raw as an AnnData with the obs, obsm and uns of `adata`; error messages call `adata` by `name`."""
    if adata.raw is None:
        raise MissingKeyError(f"{name} has no raw; leave out raw=True")
    return AnnData(
        X=adata.raw.X,
        obs=adata.obs,
        var=adata.raw.var,
        uns=adata.uns,
        obsm=dict(adata.obsm),
        varm=dict(adata.raw.varm),
    )
