"""Elements of an atlas, of which an AnnData is made when it is asked for, lookup of their names, and added elements."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anndata
import pandas as pd
from anndata import AnnData

from dasksc.checks import known
from dasksc.errors import CorruptDataError, InputError, MissingKeyError
from dasksc.pushdown import chunk_rows_for, matrix_of, to_dask
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.interface import Store
from dasksc.readers.names import digest_names, nameless_index, names_in_pieces
from dasksc.readers.options import OpenOptions, where_of
from dasksc.readers.registry import opened
from dasksc.storage import Matrix, RemoteLocation


@contextmanager
def unchecked() -> Iterator[None]:
    """Suppress the check for repeated names that AnnData makes at each step; `elements_of` checks once."""
    with anndata.settings.override(check_uniqueness=False):
        yield


@dataclass(kw_only=True)
class Elements:
    """Elements of an AnnData; matrices of cells are `Lazy`, or Dask arrays. A RangeIndex of obs is no names."""

    obs: pd.DataFrame
    var: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(index=pd.Index([], dtype=str)))
    X: Any = None
    uns: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    obsm: dict[str, Any] = field(default_factory=dict)
    varm: dict[str, Any] = field(default_factory=dict)
    obsp: dict[str, Any] = field(default_factory=dict)
    varp: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)  # paths of the elements that a join does not keep
    path: str | None = None  # of a single file or store

    def __post_init__(self) -> None:
        of_cells = [self.X, *self.layers.values(), *self.obsm.values(), *self.obsp.values(), (self.raw or {}).get("X")]
        checked = [(array, 0, "rows", "obs", self.n_obs) for array in of_cells]
        checked += [(array, 1, "columns", "var", self.n_vars) for array in (self.X, *self.layers.values())]
        for array, axis, what, table, n in checked:
            if isinstance(array, Lazy) and array.matrix.shape[axis] != n:
                raise CorruptDataError(
                    f"{array.matrix.label} has {array.matrix.shape[axis]} {what}, but {table} has {n} rows. The file "
                    "is corrupt; write it again from its source."
                )

    @property
    def n_obs(self) -> int:
        return len(self.obs)

    @property
    def n_vars(self) -> int:
        return len(self.var)

    def to_anndata(self) -> AnnData:
        """Return an AnnData, with matrices as Dask arrays; X and the layers have the same chunks."""
        has_names = not isinstance(self.obs.index, pd.RangeIndex)
        if not has_names:
            self.obs.index = nameless_index(self.n_obs)  # AnnData converts numbers to strings
        index = self.obs.index
        tables = {name: table.set_axis(index) for name, table in self.obsm.items() if isinstance(table, pd.DataFrame)}
        alike = [array.matrix for array in (self.X, *self.layers.values()) if isinstance(array, Lazy)]
        chunk_rows = chunk_rows_for(*alike) if alike else None

        def wrapped(array: Any, chunk_rows: int | None = None) -> Any:
            return to_dask(array.matrix, chunk_rows=chunk_rows, token=array.token) if isinstance(array, Lazy) else array

        def all_wrapped(arrays: dict[str, Any], chunk_rows: int | None = None) -> dict[str, Any]:
            return {name: wrapped(array, chunk_rows) for name, array in arrays.items() if array is not None}

        with unchecked():
            result = AnnData(
                X=wrapped(self.X, chunk_rows),
                obs=self.obs,
                var=self.var,
                uns=self.uns,
                layers=all_wrapped(self.layers, chunk_rows),
                obsm=all_wrapped(self.obsm | tables),
                varm=self.varm,
                obsp=all_wrapped(self.obsp),
                varp=self.varp,
                raw=None if self.raw is None else all_wrapped(self.raw),
                shape=(self.n_obs, self.n_vars) if self.X is None else None,
            )
        if not has_names:
            for table in (self.obs, result.obs, *(result.obsm[name] for name in tables)):
                table.index = pd.RangeIndex(self.n_obs)
        return result


def matrix_behind(array: Any) -> Matrix:
    """Return the matrix of a Dask array, or the one that would become a Dask array."""
    return array.matrix if isinstance(array, Lazy) else matrix_of(array)


def raw_of(elements: Elements, name: str) -> Elements:
    """Return raw with the obs, obsm and uns of `elements`; error messages call these by `name`."""
    if elements.raw is None:
        raise MissingKeyError(f"{name} has no raw; leave out raw=True")
    return Elements(**elements.raw, obs=elements.obs, uns=elements.uns, obsm=elements.obsm)


def require_key(kind: str, name: str, held: Any, *, of: Any = None) -> str:
    """Return `name` if `held` has it; otherwise raise an error with similar names, and the path of the atlas `of`."""
    if name in held:
        return name
    path = of if isinstance(of, str | RemoteLocation) else ""
    if isinstance(of, Elements) and isinstance(of.X, Lazy):
        path = of.X.matrix.label.rpartition(":/")[0]
    if of is not None and all(one is None for one in held):
        kind = f"columns in {kind}" if kind in ("obs", "var") else kind
        raise MissingKeyError(f"{path or 'the atlas'} has no {kind}; leave out the argument that names {name!r}")
    return known(f"{kind}{f' of {path}' if path else ''}", name, held)


def known_columns(
    wanted: Sequence[str], held: Iterable[str], where: str | RemoteLocation, *, may_lack: bool
) -> list[str]:
    """Return the distinct `wanted` columns of obs; missing ones raise an error, unless `may_lack` is True."""
    held = list(held)
    return [require_key("obs", name, held, of=where) for name in dict.fromkeys(wanted) if name in held or not may_lack]


# Attribute of a store's root group that holds the digest of its cell names, or null if the cells have no names.
NAMES_ATTRIBUTE = "dasksc-names"
_AGAIN = "The store belongs to another atlas; compute its elements again, for this one"


def attach_elements(atlas: Elements, attach: Any, options: OpenOptions) -> None:
    """Add elements of other stores to an atlas: matrices of obsm lazily, columns of obs in memory."""
    if not isinstance(attach, Mapping):
        raise InputError(f"attach={attach!r} is not a dict; give paths by key: attach={{'obsm/X_emb': 'emb.zarr'}}")
    digest = None
    options = replace(options, feature_types=None, genomes=None, reader_options={})  # those are of the atlas
    for key, path in attach.items():
        group, _, name = str(key).partition("/")
        if group not in ("obsm", "obs") or not name or "/" in name:
            raise InputError(f"attach= has the key {key!r}; expected 'obsm/NAME' or 'obs/NAME'")
        if name in getattr(atlas, group):
            raise InputError(f"attach= has {key!r}, which the atlas already has. Leave it out of attach=")
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"attach= must give the path of a store for {key!r}; got a {type(path).__name__}")
        where = where_of(path, options)
        with opened(where, options) as store:
            keys = store.keys()
            held = [one.removeprefix(f"{group}/") for one in keys if one.startswith(f"{group}/")]
            held += store.columns("obs") if group == "obs" and "obs" in keys else []
            require_key(f"{group} of {where}", name, held)
            value = store.table("obs", [name])[name].array if group == "obs" else store.matrix(key)
            value = lazily(value, key, options)
            n_rows = value.matrix.shape[0] if isinstance(value, Lazy) else len(value)
            if n_rows != atlas.n_obs:
                raise InputError(f"{where}:/{key} has {n_rows} rows, but the atlas has {atlas.n_obs} cells. {_AGAIN}")
            if options.has_names:
                digest = digest_names(names_in_pieces(atlas.obs.index)) if digest is None else digest
                if names_digest_of(store) not in (None, digest):
                    raise InputError(
                        f"cells of {where} and of the atlas differ in their names or their order. {_AGAIN}"
                    )
        getattr(atlas, group)[name] = value


def names_digest_of(store: Store) -> str | None:
    """Return the recorded or computed digest of the cell names in a store; None if the cells have no names."""
    if NAMES_ATTRIBUTE in store.attributes:
        recorded = store.attributes[NAMES_ATTRIBUTE]
        return None if recorded is None else str(recorded)
    keys = store.keys()
    return digest_names(store.names()) if "obs" in keys else None
