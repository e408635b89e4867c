"""Opening of AnnData objects: in memory, backed, or with lazy tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData

from dasksc._compat.anndata import selected_rows_and_columns
from dasksc.atlas.assemble import Elements, known_columns
from dasksc.pushdown import to_dask
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.locations import naming_errors
from dasksc.readers.options import OpenOptions


def open_anndata(adata: AnnData, obs: Sequence[str] | None, options: OpenOptions) -> Elements:
    """Return the elements of an AnnData, with its matrices lazy."""
    table = _in_memory(adata.obs)
    if not options.has_names:
        table.index = pd.RangeIndex(len(table))
    elif isinstance(table.index, pd.RangeIndex):
        table.index = table.index.astype(str)
    if obs is not None:
        table = table[known_columns(obs, table.columns, "the given AnnData", may_lack=options.may_lack)]
    x, raw = adata.X if not adata.isbacked else None, None
    if adata.isbacked:
        path = os.path.abspath(adata.filename)
        with naming_errors(path):
            x = _backed_x(adata, options)
            # The raw of a backed view is skipped, since AnnData creates it without X.
            if adata.raw is not None and not adata.is_view:
                key = "raw/X" if "raw/X" in adata.file else "raw.X"
                x_of_raw = lazily(adata.file[key], key, options)
                raw = {"X": x_of_raw, "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    elif adata.raw is not None:
        raw = {"X": lazily(adata.raw.X, "raw/X", options), "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    return Elements(
        X=lazily(x, "X", options),
        obs=table,
        var=_in_memory(adata.var),
        uns=dict(adata.uns),
        layers={name: lazily(array, f"layers/{name}", options) for name, array in layers_of(adata).items()},
        obsm={name: lazily(array, f"obsm/{name}", options) for name, array in adata.obsm.items()},
        varm=dict(adata.varm),
        obsp=dict(adata.obsp),
        varp=dict(adata.varp),
        raw=raw,
    )


def layers_of(adata: AnnData) -> dict[str, Any]:
    """Return the layers by name."""
    # From AnnData 0.13 on, layers[None] is X, which a backed file may lack.
    return {name: adata.layers[name] for name in adata.layers if name is not None}


def _in_memory(table: Any) -> pd.DataFrame:
    """Return a table as a new DataFrame that shares its columns; a lazy table is read."""
    return pd.DataFrame(table if isinstance(table, pd.DataFrame) else table.to_memory(), copy=False)


def _backed_x(adata: AnnData, options: OpenOptions) -> da.Array | Lazy | None:
    """Return the lazy X of a backed AnnData; for a view, only its rows and columns."""
    if "X" not in adata.file:
        return None
    # A modality of a MuData is a group of the file.
    stored: Lazy = lazily(adata.file["X"], "X", options)
    if not adata.is_view:
        return stored
    # Select by the indices that AnnData keeps for a view, since names may repeat.
    array = to_dask(stored.matrix)
    n_obs, n_vars = array.shape
    rows, columns = selected_rows_and_columns(adata)
    selected: da.Array = array[np.arange(n_obs)[rows], :][:, np.arange(n_vars)[columns]]
    return selected
