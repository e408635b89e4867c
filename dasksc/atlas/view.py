"""View of an AnnData of Dask arrays, passed to the `fetch_callback` of an `scDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.assemble import Elements, matrix_behind, require_key
from dasksc.atlas.stored import layers_of, path_names
from dasksc.errors import InputError
from dasksc.pushdown import MatrixRows, gather_block
from dasksc.readers.arrays import Lazy
from dasksc.readers.names import names_in_pieces
from dasksc.storage import Matrix

# Attributes of an AnnData that do not depend on the names of its cells.
_WITHOUT_NAMES = {"isbacked", "layers", "n_obs", "n_vars", "raw", "shape", "uns", "var", "var_names", "varm", "varp"}


class AnnDataView:
    """View of an AnnData of Dask arrays, passed to the `fetch_callback` of an `scDataset`.

    ``view[rows]`` reads X, layers and obsm with one fetch per matrix. All other attributes are those of the AnnData.

    Parameters
    ----------
    adata
        Result of `open`.
    opening
        Function with the interface of `open`, except for its first argument, that opens the same AnnData when cell
        names or missing columns of obs are used; None if `adata` has all of them.
    path
        Path of the file or store of `adata`; None if there are several, or none.
    names
        Names of cells, if they are in memory although `adata` lacks them.

    Examples
    --------
    >>> def totals(view, rows):
    ...     return view[rows].X.sum(axis=1).A1
    >>> dataset = dasksc.scDataset("atlas.h5ad", "stream", batch_size=4, fetch_callback=totals)
    >>> next(iter(dataset))
    array([23., 70., 23., 42.], dtype=float32)
    """

    __slots__ = ("_has_names", "_matrices", "_names", "_opened", "_opening", "path")

    def __init__(
        self,
        adata: AnnData | Elements,
        opening: Callable[..., AnnData] | None = None,
        path: str | None = None,
        names: pd.Index[Any] | None = None,
    ) -> None:
        self.path = path
        self._names = names
        self._opened: AnnData | Elements = adata
        self._opening = opening
        self._has_names = opening is None
        self._matrices: dict[str, Matrix] = {}

    @property
    def adata(self) -> AnnData:
        """AnnData behind this view."""
        if self._opening is not None and not self._has_names:
            self._opened, self._has_names = self._opening(obs=list(self.table)), True
        return self._unnamed

    @property
    def table(self) -> pd.DataFrame:
        """Columns of obs that were read; the index has the names of the cells, if they were read."""
        return self._opened.obs

    @property
    def X(self) -> Any:
        """X as an array whose rows are read on indexing."""
        array = self._opened.X
        return MatrixRows(matrix=self._matrix("X", array)) if isinstance(array, da.Array | Lazy) else array

    def column(self, name: str) -> pd.Series[Any]:
        """Return a column of obs, which is read on first use."""
        if self._opening is not None and name not in self.table:
            return self._opening(obs=[name], names=False).obs[name]
        return self.table[require_key("obs", name, self.table, of=self._opened)]

    def name_pieces(self) -> Iterator[list[str]] | None:
        """Return an iterator over pieces of the names of cells, or None if the cells have no names.

        For a single file or store, names are read piece by piece, so they are never all in memory at once.
        """
        if self.path is not None:
            return path_names(self.path)
        names = self.adata.obs_names if self._names is None else self._names
        return None if isinstance(names, pd.RangeIndex) else names_in_pieces(names)

    def __len__(self) -> int:
        return int(self._opened.n_obs)

    def __getattr__(self, name: str) -> Any:
        # Pickle looks up special methods before the slots are set.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        if name in ("n_obs", "n_vars", "var"):
            return getattr(self._opened, name)
        return getattr(self._unnamed if name in _WITHOUT_NAMES else self.adata, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opened, self._opening, self.path, self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._unnamed!r}"

    @property
    def _unnamed(self) -> AnnData:
        """AnnData whose cells may lack names."""
        if isinstance(self._opened, Elements):
            if self._opening is None or self.path is None:
                self._opened = self._opened.to_anndata()
            else:  # the elements of a single path are only those that batches need
                self._opened = self._opening(obs=list(self._opened.obs), names=False)
        return self._opened

    def _matrix(self, name: str, array: Any) -> Matrix:
        if name not in self._matrices:
            self._matrices[name] = matrix_behind(array)
        return self._matrices[name]

    def __getitem__(self, index: Any) -> AnnData:
        """Read rows into memory."""
        if isinstance(index, tuple):
            rows, columns = index
            return self[rows][:, columns].copy()
        adata = self.adata
        rows = _row_numbers(index, len(self))
        unique, positions = np.unique(rows, return_inverse=True)

        def read(name: str, array: Any) -> Any:
            if isinstance(array, da.Array) and array.ndim == 2:
                return gather_block(self._matrix(name, array).fetch(unique), positions)
            if isinstance(array, pd.DataFrame):
                return array.iloc[rows].set_axis(numbers)
            return array[rows].compute() if isinstance(array, da.Array) else array[rows]

        # AnnData warns about repeated names on construction; here they only mean that rows were drawn repeatedly.
        numbers = pd.RangeIndex(len(rows)).astype(str)
        obs = adata.obs.iloc[rows]
        result = AnnData(
            X=None if adata.X is None else read("X", adata.X),
            obs=obs.set_axis(numbers),
            var=adata.var,
            uns=adata.uns,
            layers={name: read(f"layers/{name}", array) for name, array in layers_of(adata).items()},
            obsm={name: read(f"obsm/{name}", array) for name, array in adata.obsm.items()},
            varm=dict(adata.varm),
        )
        result.obs_names = obs.index
        return result


def _row_numbers(index: Any, n_obs: int) -> NDArray[np.int64]:
    """Convert row numbers, a boolean mask or a slice to row numbers of at least 0."""
    if isinstance(index, slice):
        return np.arange(*index.indices(n_obs), dtype=np.int64)
    values = np.atleast_1d(np.asarray(index))
    if values.size == 0:
        return np.empty(0, dtype=np.int64)
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise InputError(f"rows must be a list of integers, or a boolean mask; got {index!r:.100}")
    if values.dtype == bool:
        if len(values) != n_obs:
            raise IndexError(f"a boolean mask has {len(values)} entries for {n_obs} rows; give one entry per row")
        return np.flatnonzero(values)
    rows = values.astype(np.int64)
    if rows.min() < -n_obs or rows.max() >= n_obs:
        raise IndexError(f"rows from {rows.min()} to {rows.max()} were requested; the rows are 0 to {n_obs - 1}")
    return np.where(rows < 0, rows + n_obs, rows)
