"""Inputs of a conversion: files, matrices, and the plan that identifies the conversion."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask.array as da
import pandas as pd
from anndata import AnnData
from dask.base import tokenize

from dasksc.atlas.opening import several_of
from dasksc.conversion.arguments import Recipe
from dasksc.errors import InputError
from dasksc.output.inputs import token_of
from dasksc.pushdown import matrix_of
from dasksc.storage import Matrix, RemoteLocation, is_url

__all__ = ["check_target", "matrices_of", "paths_of", "plan_of"]

# Format version in every plan. A conversion with another version is not resumed.
_FORMAT = 3


def paths_of(data: Any) -> Iterator[str]:
    """Yield the local paths of the inputs, including each atlas that a pattern or directory stands for.

    Remote inputs and opened objects are skipped.
    """
    if isinstance(data, str | os.PathLike) and not _is_local(data):
        return
    several = several_of(data)
    for one in [data] if several is None else several[0]:
        if isinstance(one, str | os.PathLike) and _is_local(one):
            text = os.fspath(one)
            yield str(RemoteLocation.of(text)) if is_url(text) else text


def _is_local(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    return not is_url(text) or text.startswith("file:")


def check_target(path: str, target: Path) -> None:
    """Raise `InputError` if the target is an input, lies inside it, or contains it.

    `path` is the path of the input; it is empty for an input in memory.
    """
    if not path or (is_url(path) and not os.path.exists(path)):
        return
    real, found = Path(os.path.realpath(target)), Path(os.path.realpath(path))
    if real == found or (found in real.parents and (found / "obs").exists()):
        raise InputError(f"{target} is, or lies in, the input {found}. Give another target.")
    if real in found.parents:
        raise InputError(f"{target} contains the input {found}. Give another target.")


def matrices_of(adata: AnnData) -> dict[str, Matrix]:
    """Return the matrices of an AnnData object that have one row per cell, by their keys in a store."""
    arrays: dict[str, Any] = {"X": adata.X}
    # From AnnData 0.13 on, layers[None] is X.
    arrays |= {f"layers/{name}": adata.layers[name] for name in adata.layers if name is not None}
    arrays |= {f"obsm/{name}": array for name, array in adata.obsm.items() if isinstance(array, da.Array)}
    if adata.raw is not None:
        arrays["raw/X"] = adata.raw.X
    for key in arrays:
        if any(part in ("", ".", "..") for part in key.split("/")) or key.count("/") > 1:
            raise InputError(f"{key!r} cannot be a key of a Zarr store; rename the element first")
    return {key: matrix_of(array) for key, array in arrays.items() if array is not None}


def plan_of(adata: AnnData, matrices: Mapping[str, Matrix], data: Any, recipe: Recipe) -> dict[str, Any]:
    """Return the plan that identifies a conversion: the state of the input files, and the arguments.

    `adata` is the atlas to write: the input, or a subset of it.
    """
    groups = [pd.Categorical(adata.obs[name]) for name in recipe.grouped_by]
    return {
        "format": _FORMAT,
        "n_obs": adata.n_obs,
        "genes": tokenize(list(adata.var_names)),
        "inputs": {key: token_of(matrix) for key, matrix in matrices.items()},
        # The columns of obs to group by affect the order; the names of the cells do not.
        "groups": tokenize(*groups) if groups else None,
        **recipe.as_plan(data),
    }
