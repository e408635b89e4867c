"""The seam between reading and everything above it.

A *matrix* is an array on disk (or in memory) whose rows are cells. `Matrix.fetch` brings the chunks
that some rows need into reach and returns a `Fetched`, from which minibatches are gathered in any
order. Everything above this seam (the Dask tasks, the batches) knows these two protocols only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import csr as kernels

__all__ = ["ColumnMaps", "Columns", "FetchCost", "Fetched", "Layout", "Matrix"]

Layout = Literal["csr", "dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCost:
    """Anonymous memory that fetching takes, in bytes; rows are of average length.

    Parameters
    ----------
    row
        A row in memory, in the types it is stored in; depends on nothing but what is stored.
    held
        For each row of a fetch, as long as batches are made of it; less where files are mapped.
    working
        For each row of a fetch, while it is being read.
    fixed
        While a fetch is being read, whatever its rows: chunks being decoded.
    kept
        From the first fetch on: offsets, what was converted.
    chunk_rows
        Rows of what must be decoded as one, a chunk; below 1 where rows are longer than chunks, 0 where any row
        can be read by itself.
    """

    row: float
    held: float
    working: float = 0.0
    fixed: int = 0
    kept: int = 0
    chunk_rows: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """Where columns go, as `dasksc.kernels.csr` takes it; one row for each map.

    Parameters
    ----------
    to
        Shape (n_maps, n_columns), int32: -1 where a column is left out, -2 where no row may have one.
    kinds
        What is done with each column, uint8.
    renumbered
        `to`, unsigned and narrow, if none is left out; else None.
    ascends
        Whether the columns that are kept stay in their order in every map.
    """

    to: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    renumbered: NDArray[np.unsignedinteger[Any]] | None
    ascends: bool

    @classmethod
    def of(cls, to: NDArray[np.int32]) -> Lookups:
        """Return the tables that say the same as `to`."""
        kinds = np.select([to == -1, to < -1], [kernels.LEFT_OUT, kernels.REFUSED], default=kernels.KEPT)
        # What is refused wraps to the largest numbers, so some of them are left for it.
        narrow: type[np.unsignedinteger[Any]] = np.uint16 if to.max(initial=0) < 2**16 - 3 else np.uint32
        leaves_out = bool((to == -1).any())
        return cls(
            to=to,
            kinds=kinds.astype(np.uint8),
            renumbered=None if leaves_out else to.astype(narrow),
            ascends=all(bool((np.diff(one[one >= 0]) > 0).all()) for one in to),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns to keep while gathering, in the order they come out.

    Parameters
    ----------
    positions
        Column numbers in the matrix, shape (n_out,), int64, without repeats.
    n_vars
        Number of columns of the matrix.

    Attributes
    ----------
    lookup
        Where each column of the matrix goes, shape (n_vars,), int32; -1 where it is left out.
    lookups
        The same as tables for kernels, of one row.
    """

    positions: NDArray[np.int64]
    n_vars: int
    lookup: NDArray[np.int32] = field(init=False, repr=False)
    lookups: Lookups = field(init=False, repr=False)

    def __post_init__(self) -> None:
        positions = np.ascontiguousarray(self.positions, dtype=np.int64)
        object.__setattr__(self, "positions", positions)
        if len(positions) and (positions.min() < 0 or positions.max() >= self.n_vars):
            raise InputError(f"column positions must lie in [0, {self.n_vars}); got {positions}")
        if len(np.unique(positions)) != len(positions):
            raise InputError("a column was asked for twice; ask for each gene once")
        lookup = np.full(self.n_vars, -1, dtype=np.int32)
        lookup[positions] = np.arange(len(positions), dtype=np.int32)
        object.__setattr__(self, "lookup", lookup)
        object.__setattr__(self, "lookups", Lookups.of(lookup[None]))

    def __len__(self) -> int:
        return len(self.positions)


class ColumnMaps:
    """How the columns of several matrices become common ones.

    Parameters
    ----------
    positions
        For each matrix, where each of its columns goes, shape (n_columns,), integers; -1 where it is left out.
        Matrices may share one.
    n_vars
        Number of common columns.
    fill_value
        What dense matrices have in columns that nothing goes to; None: NaN. In CSR ones it is 0.

    Attributes
    ----------
    which
        Which row of the tables holds for each matrix, shape (n_matrices,), int32.
    n_columns
        Columns of the widest matrix.
    """

    def __init__(
        self, positions: Sequence[NDArray[np.integer[Any]]], n_vars: int, *, fill_value: float | None = None
    ) -> None:
        shared = {id(one): one for one in positions}
        numbers = {key: number for number, key in enumerate(shared)}
        self.n_vars = n_vars
        self.fill_value = fill_value
        self.n_columns = max(len(one) for one in positions)
        self.which = np.array([numbers[id(one)] for one in positions], dtype=np.int32)
        # Beyond the columns of a narrower matrix no row of it may have one.
        lookups = np.full((len(shared), self.n_columns), -2, dtype=np.int32)
        for lookup, one in zip(lookups, shared.values(), strict=True):
            lookup[: len(one)] = one
        self._all = Lookups.of(lookups), _sources(lookups, n_vars)
        self._selected: tuple[Columns, _Tables] | None = None

    def lookups(self, columns: Columns | None) -> Lookups:
        """Return where each column goes if of the common ones only `columns` are kept."""
        return self._tables(columns)[0]

    def sources(self, columns: Columns | None) -> NDArray[np.int64]:
        """Return where each kept column comes from, -1 if from nowhere, shape (n_maps, n_kept)."""
        return self._tables(columns)[1]

    def n_filled(self, columns: Columns | None = None) -> int:
        """Return how many columns, of all or of those kept, some matrix does not have."""
        return int((self.sources(columns) < 0).any(axis=0).sum())

    def filled_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type of dense values of `dtype` beside what fills the columns that some do not have."""
        if dtype.kind == "f":
            return dtype
        if self.fill_value is None or self.fill_value % 1:
            return np.dtype(np.float64)
        needed = np.min_scalar_type(int(self.fill_value))
        return dtype if self.fill_value in (0, 1) else np.promote_types(dtype, needed)

    def _tables(self, columns: Columns | None) -> _Tables:
        if columns is None:
            return self._all
        # Every batch of an epoch asks for the same. To replace the pair is one step, so threads may race.
        selected = self._selected
        if selected is None or selected[0] is not columns:
            # What is left out or refused stays so: its negative numbers are no columns of `lookup`.
            to = self._all[0].to.copy()
            goes = to >= 0
            to[goes] = columns.lookup[to[goes]]
            selected = self._selected = columns, (Lookups.of(to), _sources(to, len(columns)))
        return selected[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_selected": None}


_Tables = tuple[Lookups, NDArray[np.int64]]


def _sources(lookups: NDArray[np.int32], n_kept: int) -> NDArray[np.int64]:
    sources = np.full((len(lookups), n_kept), -1, dtype=np.int64)
    maps, taken = np.nonzero(lookups >= 0)
    sources[maps, lookups[maps, taken]] = taken
    return sources


@runtime_checkable
class Fetched(Protocol):
    """The rows of one fetch, within reach of memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows fetched, columns of the matrix."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type to compute in, whatever the values are stored or held in."""

    @property
    def layout(self) -> Layout:
        """How the rows are stored."""

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes; mapped pages do not count."""

    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        """Write the rows at `positions` of the fetch into `out`, dense, converted to its dtype.

        Values that a row has at one column more than once are added up first; see `gather_csr`.
        `out` is C-contiguous, shape (len(positions), n_vars or len(columns)); every element is
        written. Releases the GIL; may be called from several threads at once.

        Raises
        ------
        InputError
            If `out` is of an integer type or float16 that cannot hold one of the values.
        """

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of the rows at `positions`, in that order.

        `indices` strictly ascend within each row, whatever their order on disk and that of `columns`. Values
        that a row has at one column more than once are added up in the order they are stored in, in the type of
        the matrix (integers in 64 bits), and then converted. `dtype` is that of `data` (default: the type to compute
        in). Works for dense matrices too, dropping zeros.

        Raises
        ------
        InputError
            If `dtype` is an integer type or float16 that cannot hold one of the values.
        """

    def compact(self) -> Fetched:
        """Return the same rows in a block of their own that pickles and holds nothing else."""


@runtime_checkable
class Matrix(Protocol):
    """A stored array of cells by columns. Pickles; holds no open file handle across processes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Cells, columns."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values for everything that computes with them."""

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Type of the values as stored, for sizes and exact copies only: arithmetic in it may wrap."""

    @property
    def layout(self) -> Layout:
        """How rows are stored: ``"csr"`` or ``"dense"``."""

    @property
    def label(self) -> str:
        """What to call it in errors: ``"/data/atlas.h5ad:/X"``."""

    @property
    def cost(self) -> FetchCost:
        """What memory a fetch takes."""

    def fetch(self, rows: NDArray[np.int64]) -> Fetched:
        """Fetch `rows`: int64, ascending, repeats allowed, in [0, n_obs).

        Position i of the result is ``rows[i]``.

        Raises
        ------
        CorruptDataError
            If the stored array is truncated or contradicts itself; names file, array and row.
        """
