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
    adds_up
        Whether several columns go to one, where their values are added up.
    """

    to: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    renumbered: NDArray[np.unsignedinteger[Any]] | None
    ascends: bool
    adds_up: bool = False

    @classmethod
    def of(cls, to: NDArray[np.int32], *, adds_up: bool = False) -> Lookups:
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
            adds_up=adds_up,
        )


NOWHERE, ZERO = kernels.NOWHERE, kernels.ZERO
"""Sources of columns that no column of a matrix goes to: filled because a part lacks it, and 0 because it was asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns to keep while gathering, in the order they come out.

    Parameters
    ----------
    positions
        Column numbers in the matrix, shape (n_taken,), int64, without repeats.
    n_vars
        Number of columns of the matrix.
    to
        Which column out each of them goes to, shape (n_taken,), int64. Those that go to one are added up, in the order
        of the matrix's columns; columns out that none goes to are 0. Default: each to one of its own, in this order.
    n_out
        Number of columns out; default: as many as are taken.

    Attributes
    ----------
    lookup
        Where each column of the matrix goes, shape (n_vars,), int32; -1 where it is left out.
    lookups
        The same as tables for kernels, of one row.
    sources
        Where each column out comes from, shape (1, n_out), int64; `ZERO` for a column of zeros.
    sums
        The columns out that several are added up to; None where there are none.
    """

    positions: NDArray[np.int64]
    n_vars: int
    to: NDArray[np.int64] | None = None
    n_out: int | None = None
    lookup: NDArray[np.int32] = field(init=False, repr=False)
    lookups: Lookups = field(init=False, repr=False)
    sources: NDArray[np.int64] = field(init=False, repr=False)
    sums: Sums | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        positions = np.ascontiguousarray(self.positions, dtype=np.int64)
        object.__setattr__(self, "positions", positions)
        if len(positions) and (positions.min() < 0 or positions.max() >= self.n_vars):
            raise InputError(f"column positions must lie in [0, {self.n_vars}); got {positions}")
        if len(np.unique(positions)) != len(positions):
            raise InputError("a column was asked for twice; ask for each gene once")
        to = np.arange(len(positions)) if self.to is None else np.asarray(self.to, dtype=np.int64)
        n_out = len(positions) if self.n_out is None else self.n_out
        if to.shape != positions.shape or (len(to) and (to.min() < 0 or to.max() >= n_out)):
            raise InputError(f"{len(positions)} columns go to {n_out} columns out; got {to}")
        object.__setattr__(self, "n_out", n_out)
        lookup = np.full(self.n_vars, -1, dtype=np.int32)
        lookup[positions] = to
        targets = np.flatnonzero(np.bincount(to, minlength=n_out) > 1)
        sources = np.full(n_out, ZERO, dtype=np.int64)
        sources[to] = positions
        object.__setattr__(self, "lookup", lookup)
        object.__setattr__(self, "lookups", Lookups.of(lookup[None], adds_up=bool(len(targets))))
        object.__setattr__(self, "sources", sources[None])
        object.__setattr__(self, "sums", Sums.of(lookup, targets) if len(targets) else None)

    def __len__(self) -> int:
        return int(self.sources.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The columns out that several columns of a dense matrix are added up to.

    Parameters
    ----------
    targets
        Their numbers among the columns out, shape (n_targets,), int64.
    columns
        The columns to add up: those of each target side by side, ascending.
    starts
        Where those of each target begin, and those of the last one end, shape (n_targets + 1,), int64.
    """

    targets: NDArray[np.int64]
    columns: Columns
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, lookup: NDArray[np.int32], targets: NDArray[np.int64]) -> Sums:
        """Return the sums of ascending `targets`, to each of which `lookup` sends several columns."""
        found = np.flatnonzero(np.isin(lookup, targets))
        order = np.argsort(lookup[found], kind="stable")
        counts = np.unique(lookup[found], return_counts=True)[1]
        starts = np.zeros(len(targets) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        return cls(targets=targets, columns=Columns(found[order], len(lookup)), starts=starts)


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
        self._selected: tuple[tuple[Columns, _Tables], ...] = ()

    def lookups(self, columns: Columns | None) -> Lookups:
        """Return where each column goes if of the common ones only `columns` are kept."""
        return self._tables(columns)[0]

    def sources(self, columns: Columns | None) -> NDArray[np.int64]:
        """Return where each kept column comes from, `NOWHERE` or `ZERO` if from none, shape (n_maps, n_kept)."""
        return self._tables(columns)[1]

    def n_filled(self, columns: Columns | None = None) -> int:
        """Return how many columns, of all or of those kept, some matrix does not have."""
        return int((self.sources(columns) == NOWHERE).any(axis=0).sum())

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
        # Every batch of an epoch asks for the same: its columns, and those that are added up. To replace the tuple is
        # one step, so threads may race.
        kept = self._selected
        for known, tables in kept:
            if known is columns:
                return tables
        # What is left out or refused stays so: its negative numbers are no columns of `lookup`.
        to = self._all[0].to.copy()
        goes = to >= 0
        to[goes] = columns.lookup[to[goes]]
        sources = _sources(to, len(columns))
        sources[:, columns.sources[0] == ZERO] = ZERO
        tables = Lookups.of(to, adds_up=columns.lookups.adds_up), sources
        self._selected = (*kept[-1:], (columns, tables))
        return tables

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_selected": ()}


_Tables = tuple[Lookups, NDArray[np.int64]]


def _sources(lookups: NDArray[np.int32], n_kept: int) -> NDArray[np.int64]:
    sources = np.full((len(lookups), n_kept), NOWHERE, dtype=np.int64)
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
