"""Inputs and arguments of a conversion: paths, matrices, and the plan that identifies it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from dask.base import tokenize

from dasksc.atlas.concat import MERGES, check_fill_value
from dasksc.checks import check_one_of, name_or_none, names_or_none, true_or_false, whole_number
from dasksc.conversion.contents import Contents
from dasksc.errors import InputError
from dasksc.output.inputs import leaves_read, token_of
from dasksc.storage import Matrix, is_url

# Format version in every plan. A conversion with another version is not resumed.
_FORMAT = 4
_FILES = (".h5", ".h5ad", ".h5mu", ".hdf5", ".loom", ".zip")

Order = Literal["shuffle", "keep"]


def target_path(target: Any) -> Path:
    """Return the absolute path of the target; raise `InputError` if no store can be written there."""
    if isinstance(target, str | os.PathLike) and not is_url(os.fspath(target)):
        path = Path(os.path.abspath(target))
        if path.name and path.suffix not in _FILES:
            return path
    raise InputError(f"target={target!r} cannot be written; give the path of a local directory, such as 'atlas.zarr'")


def recipe_of(data: Any, **given: Any) -> dict[str, Any]:
    """Check the arguments of `convert` that affect its output; return them as plain JSON types."""
    check_one_of("order", given["order"], ("shuffle", "keep"))
    check_one_of("layout", given["layout"] or "csr", ("csr",))
    groups, keys = names_or_none("group_by", given["group_by"]), given["keys"]
    if given["group_by"] is not None and not 0 < len(groups) == len(set(groups)):
        raise InputError(f"group_by={groups} must name at least one obs column, each only once")
    name_or_none("index_unique", given["index_unique"])
    if keys is not None and not hasattr(keys, "__len__"):
        raise InputError(f"keys={keys!r} is not a list; give names, one for each input")
    # AnnData also accepts a function, which cannot be compared with that of an unfinished conversion.
    check_one_of("merge", given["merge"] or "same", MERGES)
    check_fill_value(given["fill_value"], given["join"])
    keys = data if isinstance(data, Mapping) else keys
    return {
        **given,
        "group_by": groups[0] if len(groups) == 1 else groups or None,
        "seed": whole_number("seed", given["seed"], 0, 2**64),
        "narrow": true_or_false("narrow", given["narrow"]),
        "fill_value": None if given["fill_value"] is None else float(given["fill_value"]),
        "keys": None if keys is None else [str(key) for key in keys],
    }


def check_target(matrices: Iterable[Matrix], target: Path) -> None:
    """Raise `InputError` if the target is an input, lies inside one, or contains one."""
    # The label of a matrix in memory contains no path.
    for path in {leaf.label.rpartition(":/")[0] for matrix in matrices for leaf in leaves_read(matrix)}:
        if not path or (is_url(path) and not os.path.exists(path)):
            continue
        real, found = Path(os.path.realpath(target)), Path(os.path.realpath(path))
        if real == found or (found in real.parents and (found / "obs").exists()):
            raise InputError(f"{target} is, or lies in, the input {found}. Give another target.")
        if real in found.parents:
            raise InputError(f"{target} contains the input {found}. Give another target.")


def plan_of(contents: Contents, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that identifies a conversion: the state of the input files, and the arguments."""
    groups = [pd.Categorical(contents.cells["obs"][name]) for name in names_or_none("group_by", recipe["group_by"])]
    return {
        "format": _FORMAT,
        "n_obs": contents.n_obs,
        "genes": tokenize(list(contents.others["var"].index)),
        "inputs": {key: token_of(matrix) for key, matrix in contents.matrices.items()},
        # The columns of obs to group by affect the order; the names of the cells do not.
        "groups": tokenize(*groups) if groups else None,
        **recipe,
    }
