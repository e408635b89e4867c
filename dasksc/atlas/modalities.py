"""Several modalities of the same cells, with aligned rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData

from dasksc.atlas.elements import Elements, matrix_behind, raw_of, require_key
from dasksc.atlas.opening import elements_of
from dasksc.atlas.stored import open_modalities, split_columns
from dasksc.checks import check_flags
from dasksc.errors import InputError
from dasksc.readers.anndata import holds_modalities
from dasksc.readers.arrays import Lazy
from dasksc.readers.options import OpenOptions, naming_errors
from dasksc.storage import Cache, UseMmap
from dasksc.storage.combined import ReorderedMatrix

# Keys of a `Batch` that modalities could replace.
_RESERVED = ("X", "obs", "index", "sets", "control")


class Modalities:
    """Several modalities of the same cells, such as RNA and surface proteins, for `dasksc.scDataset`.

    Row i is the same cell in each modality. Cells that any modality lacks are left out. Matrices are neither read nor
    rewritten.

    Parameters
    ----------
    data
        Path or URL of an ``.h5mu`` file or of the Zarr store of a MuData, a MuData (in memory or backed), or a dict
        of inputs of `dasksc.open` by modality.
    obs
        Columns of obs to read: ``"modality:column"`` for those of a modality, plain names for those of the MuData
        itself. Default: all.
    mmap
        As for `dasksc.open`.
    raw
        As for `dasksc.open`, for each modality.
    storage_options, cache
        As for `dasksc.open`.

    Attributes
    ----------
    mod
        AnnData of Dask arrays for each modality, with the cells that all modalities have. Cells are in the order of
        the MuData or, for a dict, of the first modality.
    obs
        Table with the columns of the MuData's own obs, and those of the modalities as ``"modality:column"``. Copies of
        the latter in the MuData's obs are omitted.
    obsm
        obsm of the MuData itself, as Dask arrays; empty for a dict of modalities. To yield an entry in batches,
        assign it to a modality and request it: ``data["rna"].obsm["X_mofa"] = data.obsm["X_mofa"]`` and
        ``obsm=["rna:X_mofa"]``.

    Raises
    ------
    InputError
        If there is no modality, cell names of a modality repeat, or no cell is in all modalities.
    MissingPathError, StorageError
        As for `dasksc.open`.
    MissingKeyError
        If obs lacks a column, or a modality has no raw.

    Examples
    --------
    >>> data = dasksc.Modalities("cite.h5mu")
    >>> list(data), data.n_obs
    (['rna', 'prot'], 600)
    >>> dataset = dasksc.scDataset(data, batch_size=32, obs=["rna:cell_type"], seed=0)
    >>> next(iter(dataset))["prot"].X.shape
    torch.Size([32, 5])
    """

    def __init__(
        self,
        data: Any,
        *,
        obs: Sequence[str] | None = None,
        mmap: UseMmap = "auto",
        raw: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(obs, str):
            raise InputError(f"obs={obs!r} is a string; give a list of column names: obs=[{obs!r}]")
        check_flags(raw=raw)
        options = OpenOptions(mmap=mmap, storage_options=storage_options or {}, cache=Cache.of(cache))
        shared, opened = _opened(data, obs, options)
        opened = {name: raw_of(one, name) if raw else one for name, one in opened.items()}
        if not opened:
            raise InputError(f"{data!r:.100} contains no modality; give at least one, as in {{'rna': 'rna.h5ad'}}")
        for name in opened:
            if name in _RESERVED or not name or ":" in name or "/" in name:
                reason = "a name that batches use" if name in _RESERVED else "which is empty or contains : or /"
                raise InputError(f"a modality cannot be called {name!r}, {reason}. Rename it")
        for name, one in [*opened.items(), *([] if shared is None else [("the MuData", shared)])]:
            if not one.obs.index.is_unique:
                raise InputError(
                    f"obs_names of {name} repeat, so its cells cannot be matched with those of other modalities. Make "
                    "them unique: obs_names_make_unique()"
                )
        names = (next(iter(opened.values())) if shared is None else shared).obs.index
        for one in opened.values():
            if not one.obs.index.equals(names):
                names = names[names.isin(one.obs.index)]
        if not len(names):
            raise InputError(
                f"no cell is in all modalities ({', '.join(opened)}): their obs_names share no name. Use the "
                "same cell names in each"
            )
        with naming_errors(f"{data!r:.100}"):
            self.mod = {name: _aligned(one, names).to_anndata() for name, one in opened.items()}
        tables = [adata.obs.add_prefix(f"{name}:") for name, adata in self.mod.items()]
        self.obsm: dict[str, Any] = {}
        if shared is not None:
            own = _aligned(shared, names).to_anndata()
            copied = {name for table in tables for name in table}
            self.obsm = dict(own.obsm)
            tables.insert(0, own.obs[[name for name in own.obs if name not in copied]])
        self.obs = pd.concat(tables, axis=1)
        if obs is not None:
            self.obs = self.obs[[require_key("obs", name, self.obs.columns) for name in obs]]

    @property
    def n_obs(self) -> int:
        """Number of cells that all modalities have."""
        return len(self.obs)

    @property
    def obs_names(self) -> pd.Index[Any]:
        """Names of the cells."""
        return self.obs.index

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, name: str) -> AnnData:
        return self.mod[require_key("modalities", name, self.mod)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.mod)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {adata.n_vars} variables" for name, adata in self.mod.items())
        return f"<Modalities of {self.n_obs} cells; {sizes}>"


def is_modalities(data: Any) -> bool:
    """Return True if `data` is a `Modalities`, a MuData, or the path of a MuData."""
    if isinstance(data, Modalities) or _is_mudata(data):
        return True
    return isinstance(data, str | os.PathLike) and holds_modalities(os.fspath(data))


def _is_mudata(data: Any) -> bool:
    return type(data).__name__ == "MuData" and hasattr(data, "mod")


def _opened(data: Any, obs: Sequence[str] | None, options: OpenOptions) -> tuple[Elements | None, dict[str, Elements]]:
    """Return the MuData's own obs and obsm (None for a dict), and the modalities with rows as stored."""
    if isinstance(data, str | os.PathLike):
        return open_modalities(os.fspath(data), obs, options)
    if _is_mudata(data):
        own, columns = split_columns(obs, data.obs, {name: adata.obs for name, adata in data.mod.items()})
        # An entry of obsm with the name of a modality is a mask of the cells of that modality.
        obsm = {name: array for name, array in data.obsm.items() if name not in data.mod}
        shared = AnnData(obs=data.obs if own is None else data.obs[own], obsm=obsm)
        modalities = {name: elements_of(adata, columns[name], options) for name, adata in data.mod.items()}
        return elements_of(shared, None, OpenOptions()), modalities
    if isinstance(data, Mapping):
        parts = {str(name): part for name, part in data.items()}
        if len(parts) < len(data):
            raise InputError(f"two modalities have the same name as text: {', '.join(map(repr, data))}. Rename one")
        _, columns = split_columns(obs, (), dict.fromkeys(parts, ()))
        return None, {name: elements_of(part, columns[name], options) for name, part in parts.items()}
    raise InputError(
        f"cannot open a {type(data).__name__} as modalities; expected the path of an .h5mu file or of a MuData's Zarr "
        "store, a MuData, or a dict of atlases by modality"
    )


def _aligned(atlas: Elements, names: pd.Index[Any]) -> Elements:
    """Return the rows with these names, with matrices still lazy."""
    if atlas.obs.index.equals(names):
        return atlas
    rows = atlas.obs.index.get_indexer(names).astype(np.int64)

    def selected(array: Any) -> Any:
        if isinstance(array, Lazy) or (isinstance(array, da.Array) and array.ndim == 2):
            return Lazy(matrix=ReorderedMatrix(matrix_behind(array), rows))
        return array.iloc[rows] if isinstance(array, pd.DataFrame) else array[rows]

    return Elements(
        X=None if atlas.X is None else selected(atlas.X),
        obs=atlas.obs.iloc[rows],
        var=atlas.var,
        uns=atlas.uns,
        varm=atlas.varm,
        layers={name: selected(array) for name, array in atlas.layers.items()},
        obsm={name: selected(array) for name, array in atlas.obsm.items()},
    )
