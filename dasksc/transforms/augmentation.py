"""Random augmentation of batches: downsampled counts and masked genes.

Random numbers are keyed by the seed of the transform, the epoch, the number of the batch in the epoch, its row numbers,
and the position of a row in it. A batch is therefore the same on any rank, thread or DataLoader worker, and after
resuming. A row that an epoch draws twice is augmented differently each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dasksc.batches.batch import Batch
from dasksc.checks import name_or_none, whole_number
from dasksc.errors import InputError
from dasksc.kernels import augment as kernels
from dasksc.sampling.random_keys import Purpose, epoch_keys

__all__ = ["Downsample", "MaskGenes"]

# Key and number of a batch, its row numbers, and the position in the batch of the first row to change.
_BatchRows = tuple[np.uint64, int, NDArray[np.int64], int]
# Indices into the random keys of an epoch: one key is for the rows of a batch, the other for its control cells.
_TARGETS, _CONTROLS = range(2)


class _Augmentation:
    """Base class of random changes to X or a layer of a batch."""

    purpose: Purpose

    def __init__(self, *, layer: str | None, seed: int) -> None:
        self.layer = name_or_none("layer", layer)
        self.seed = whole_number("seed", seed, 0, 2**64)
        self.part = "X" if layer is None else f"layers/{layer}"
        self._number = 0
        self._key_index = _TARGETS
        self._owns = False
        self._set_keys(0)

    def _set_keys(self, epoch: int) -> None:
        self._keys = epoch_keys(self.seed, epoch, self.purpose, n=2)

    def at_epoch(self, epoch: int) -> Self:
        """Return this transform for an epoch.

        Parameters
        ----------
        epoch
            Number of the epoch. `scDataset` calls this method for each epoch.
        """
        same = self._with()
        same._set_keys(epoch)
        return same

    def at_batch(self, number: int) -> Self:
        """Return this transform for a batch.

        Parameters
        ----------
        number
            Number of the batch in its epoch, over all ranks. `scDataset` calls this method for each batch.
        """
        return self._with(_number=number)

    def owning(self) -> Self:
        """Return a copy of this transform that changes batches in place, for batches that no other code refers to."""
        return self._with(_owns=True)

    def of_controls(self) -> Self:
        """Return this transform for the control cells of a batch."""
        return self._with(_key_index=_CONTROLS)

    def _with(self, **attributes: Any) -> Self:
        """Return a copy with other attributes."""
        same = object.__new__(type(self))  # copy.copy would take as long as changing a small batch
        same.__dict__.update(self.__dict__, **attributes)
        return same

    def refuse_beside(self, others: Sequence[Any]) -> None:
        """Raise an error if another transform would draw the same random numbers for the same matrix.

        Parameters
        ----------
        others
            Transforms that come before this one.

        Raises
        ------
        InputError
            If one of them has the same class, seed and layer.
        """
        name = type(self).__name__
        for other in others:
            if type(other) is type(self) and (other.seed, other.layer) == (self.seed, self.layer):
                raise InputError(
                    f"transform has {name} twice with seed={self.seed}, so both would draw the same random numbers; "
                    "give one of them another seed"
                )

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch with changed values.

        Parameters
        ----------
        batch
            Batch on the CPU with X, `index` and the layer to change, dense or CSR. The control cells in ``control``
            are changed with separate random numbers.

        Returns
        -------
        Batch
            Batch with changed copies of X or the layer, of the same layout and dtype. In CSR, new zeros remain stored
            elements. Entries other than X, layers and control are those of `batch`, without copies.

        Raises
        ------
        InputError
            If the batch lacks X or the layer, or contains invalid values.
        """
        made = self._augmented(batch)
        control = batch.get("control")
        if control is not None:
            made["control"] = self.of_controls()._augmented(control)
        return made

    def _augmented(self, batch: Any) -> Batch:
        name = type(self).__name__
        if not isinstance(batch, dict) or not {"X", "index"} <= set(batch):
            parts = f"one with {', '.join(batch)}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
            raise InputError(
                f"{name} takes a Batch with X and index; got {parts}. Pass {name} to scDataset(transform=...) of a "
                "single modality, before any tokenizer; it is not a hook"
            )
        made = Batch(batch)
        rows = batch["index"].numpy()
        if self.layer is None:
            made["X"] = self._values(batch["X"], rows)
            return made
        layers = batch.get("layers") or {}
        if self.layer not in layers:
            raise InputError(
                f"{name}(layer={self.layer!r}): the batch has "
                f"{'the layers ' + ', '.join(map(repr, layers)) if layers else 'no layers'}; request the missing one: "
                f"scDataset(layers=[{self.layer!r}])"
            )
        made["layers"] = type(layers)({**layers, self.layer: self._values(layers[self.layer], rows)})
        return made

    def _values(self, given: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return a matrix with changed values; `given` may be changed in place if no other code refers to the batch."""
        given = given.detach()
        dtype = given.dtype
        if dtype == torch.bfloat16:  # which NumPy does not have
            wide = self._values(given.to(torch.float32), rows)
            rounded = wide.to(dtype)
            is_csr = wide.layout == torch.sparse_csr
            before, after = (one.values() if is_csr else one for one in (wide, rounded))
            _check_same(before.numpy(), after.to(torch.float32).numpy(), dtype)
            return rounded
        made = given if self._owns else given.clone()
        if made.layout == torch.sparse_csr:
            self.change(rows, 0, made.crow_indices().numpy(), made.col_indices().numpy(), made.values().numpy())
        else:
            made = made.contiguous()
            self.change_dense(rows, 0, made.numpy())
        return made

    def change(
        self,
        rows: NDArray[np.int64],
        first_row: int,
        indptr: NDArray[Any],
        columns: NDArray[Any],
        values: NDArray[Any],
    ) -> None:
        """Change the values of consecutive CSR rows of a batch in place.

        Parameters
        ----------
        rows
            Row numbers in the collection, one for each row of the batch, shape (n_rows,), int64.
        first_row
            Position in the batch of the first row to change.
        indptr, columns, values
            Rows to change, in CSR layout: row pointers, shape (n + 1,), and the column and value of each nonzero.

        Raises
        ------
        InputError
            If a value is invalid for this transform.
        """
        # Kernels take the types of the loader's batches, since each combination of types takes seconds to compile.
        indptr, columns = indptr.astype(np.int64, copy=False), columns.astype(np.int32, copy=False)
        with _in_dtype(values, self._kernel_dtype(values.dtype)) as converted:
            self._change((self._keys[self._key_index], self._number, rows, first_row), indptr, columns, converted)

    def change_dense(self, rows: NDArray[np.int64], first_row: int, dense: NDArray[Any]) -> None:
        """Change the values of consecutive dense rows of a batch in place.

        Parameters
        ----------
        rows
            Row numbers in the collection, one for each row of the batch, shape (n_rows,), int64.
        first_row
            Position in the batch of the first row of `dense`.
        dense
            Rows to change, shape (n, n_vars), C-contiguous.

        Raises
        ------
        InputError
            If a value is invalid for this transform.
        """
        with _in_dtype(dense, self._kernel_dtype(dense.dtype)) as converted:
            self._change_dense((self._keys[self._key_index], self._number, rows, first_row), converted)

    def scatter(self, rows: NDArray[np.int64], source: tuple[Any, ...], dense: NDArray[Any]) -> bool:
        """Write CSR rows into dense rows of a batch, with changed values.

        Parameters
        ----------
        rows
            Row numbers in the collection, one for each row of the batch, shape (n_rows,), int64.
        source
            Arguments by which kernels copy the CSR rows of the batch; see `RowBuffer.source`.
        dense
            Rows to write, shape (n_rows, n_vars), C-contiguous.

        Returns
        -------
        bool
            False if the caller must use `change`, which supports more data types and reports invalid values.
        """
        if dense.dtype != self._kernel_dtype(dense.dtype):
            return False
        return bool(self._scatter((self._keys[self._key_index], self._number, rows), source, dense))

    def _kernel_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the data type in which the kernels change values of `dtype`."""
        raise NotImplementedError

    def _change(self, batch: _BatchRows, indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        """Implement `change` for values of a data type that the kernels support."""
        raise NotImplementedError

    def _change_dense(self, batch: _BatchRows, dense: NDArray[Any]) -> None:
        """Implement `change_dense` for values of a data type that the kernels support."""
        raise NotImplementedError

    def _scatter(self, batch: Any, source: tuple[Any, ...], dense: NDArray[Any]) -> Any:
        """Implement `scatter` for values of a data type that the kernels support."""
        raise NotImplementedError


class Downsample(_Augmentation):
    """Transform that downsamples the counts of each cell, as if it had been sequenced less deeply.

    Parameters
    ----------
    fraction
        Probability of keeping each molecule, in (0, 1]: binomial thinning of each value.
    target_counts
        Number of molecules to keep in each cell, drawn without replacement (multivariate hypergeometric), as in
        `scanpy.pp.downsample_counts` with ``counts_per_cell``. Cells with fewer molecules do not change.
    layer
        Name of the layer with the counts; None: X.
    seed
        Random seed, an integer in [0, 2**64).

    Raises
    ------
    InputError
        If not exactly one of `fraction` and `target_counts` is given, or an argument is out of range. When called: if
        a value of the batch is not a whole number from 0 to 2**53 (2**24 in float32), or a drawn number cannot be
        represented in float16 or bfloat16.

    Notes
    -----
    Random numbers depend only on the seed, the epoch, the number of the batch in the epoch, its row numbers, the
    position of the row in the batch, and the gene. Dense and CSR batches therefore have the same values. CSR batches
    keep their structure: a count that drops to 0 is a stored zero.

    CSR batches take about 1.1 ns for each nonzero, or 1.5 ns with `target_counts`. Dense batches from a dense file
    take another 0.17 ns for each value to find the nonzeros.

    With `target_counts`, a cell is first thinned binomially to about the target. If more molecules than the target
    remain, the surplus is drawn from them without replacement and discarded. If fewer remain, the deficit is drawn
    without replacement from the molecules that thinning removed, and restored. Conditional on their total, binomially
    thinned values are distributed like a draw without replacement. The same therefore holds for the result.

    Examples
    --------
    >>> fewer = dasksc.transforms.Downsample(0.5)
    >>> X = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0))).X
    >>> thinned = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0, transform=fewer))).X
    >>> bool((thinned <= X).all()), round(float(thinned.sum() / X.sum()), 1)
    (True, 0.5)
    """

    purpose = Purpose.DOWNSAMPLE

    def __init__(
        self,
        fraction: float | None = None,
        *,
        target_counts: int | None = None,
        layer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(layer=layer, seed=seed)
        if (fraction is None) == (target_counts is None):
            raise InputError(
                f"Downsample takes either fraction= or target_counts=; got fraction={fraction!r} and "
                f"target_counts={target_counts!r}"
            )
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise InputError(f"fraction must be a number in (0, 1]; got {fraction!r}")
        self.fraction = None if fraction is None else float(fraction)
        self.target_counts = None if target_counts is None else whole_number("target_counts", target_counts, 1, 2**53)
        self._steps = () if self.fraction is None else kernels.steps_of(self.fraction)

    def __repr__(self) -> str:
        how = f"fraction={self.fraction}" if self.fraction is not None else f"target_counts={self.target_counts}"
        return f"Downsample({how}, layer={self.layer!r}, seed={self.seed})"

    def _kernel_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(np.float32 if dtype in (np.float16, np.float32) else np.float64)

    def _change(self, batch: _BatchRows, indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        if self.target_counts is not None:
            bad = int(kernels.sample(*batch, indptr, columns, values, self.target_counts))
        else:
            bad = int(kernels.downsample(*batch, indptr, columns, values, self.fraction, *self._steps))
        if bad >= 0:
            row = int(np.searchsorted(indptr, bad, side="right")) - 1
            self._refuse(values[bad], batch, row, int(columns[bad]))

    def _change_dense(self, batch: _BatchRows, dense: NDArray[Any]) -> None:
        if self.target_counts is not None:
            bad = int(kernels.sample_dense(*batch, dense, self.target_counts))
        else:
            bad = int(kernels.downsample_dense(*batch, dense, self.fraction, *self._steps))
        if bad >= 0:
            row, column = divmod(bad, dense.shape[1])
            self._refuse(dense[row, column], batch, row, column)

    def _scatter(self, batch: Any, source: tuple[Any, ...], dense: NDArray[Any]) -> Any:
        if self.target_counts is not None:
            return kernels.sample_scattered(*batch, source, dense, self.target_counts)
        return kernels.downsample_scattered(*batch, source, dense, self.fraction, *self._steps)

    def _refuse(self, value: Any, batch: _BatchRows, position: int, column: int) -> None:
        _, _, rows, first_row = batch
        name = "X" if self.layer is None else f"layer {self.layer!r}"
        largest, number = 2**24 if value.dtype == np.float32 else 2**53, value.item()
        remedy = (
            "Request scDataset(dtype='float64'), which represents larger counts"
            if largest < number <= 2**53
            else "Use the layer with raw counts: scDataset(..., layers=['counts'], "
            "transform=Downsample(..., layer='counts'))"
        )
        raise InputError(
            f"Downsample needs counts: whole numbers from 0 to {largest} in {value.dtype}, whose sum in a cell is at "
            f"most 2**53; {name} has {number!r} in row {rows[first_row + position]}, column {column}. {remedy}"
        )


class MaskGenes(_Augmentation):
    """Transform that sets the values of random genes to zero, independently in each cell.

    Parameters
    ----------
    p
        Probability of masking each gene of each cell, in [0, 1).
    layer
        Name of the layer to mask; None: X. Two transforms with the same seed and different layers mask the same genes
        of each cell.
    seed
        Random seed, an integer in [0, 2**64).

    Raises
    ------
    InputError
        If an argument is out of range.

    Notes
    -----
    Random numbers depend only on the seed, the epoch, the number of the batch in the epoch, its row numbers, the
    position of the row in the batch, and the gene. Dense and CSR batches therefore have the same values. CSR batches
    keep their structure: a masked value is a stored zero.

    CSR batches take about 0.4 ns for each nonzero. Dense batches from a dense file take another 0.17 ns for each value
    to find the nonzeros.

    Examples
    --------
    >>> masked = dasksc.transforms.MaskGenes(p=0.2)
    >>> X = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0))).X
    >>> partial = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0, transform=masked))).X
    >>> round(int(partial.count_nonzero()) / int(X.count_nonzero()), 1)
    0.8
    """

    purpose = Purpose.MASK_GENES

    def __init__(self, p: float, *, layer: str | None = None, seed: int = 0) -> None:
        super().__init__(layer=layer, seed=seed)
        if not (_is_number(p) and 0 <= p < 1):
            raise InputError(f"p must be a probability in [0, 1); got {p!r}")
        self.p = float(p)

    def __repr__(self) -> str:
        return f"MaskGenes({self.p}, layer={self.layer!r}, seed={self.seed})"

    def _kernel_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        # The kernels support neither float16 nor bool.
        wide = {np.float16: np.float32, np.bool_: np.uint8}.get(dtype.type)
        return dtype if wide is None else np.dtype(wide)

    def _change(self, batch: _BatchRows, indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        kernels.mask(*batch, indptr, columns, values, self.p)

    def _change_dense(self, batch: _BatchRows, dense: NDArray[Any]) -> None:
        kernels.mask_dense(*batch, dense, self.p)

    def _scatter(self, batch: Any, source: tuple[Any, ...], dense: NDArray[Any]) -> Any:
        return kernels.mask_scattered(*batch, source, dense, self.p)


@contextlib.contextmanager
def _in_dtype(values: NDArray[Any], kernel_dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield `values` in the data type of a kernel, and write the changed values back."""
    if values.dtype == kernel_dtype:
        yield values
    else:
        converted = values.astype(kernel_dtype)
        yield converted
        values[...] = converted
        _check_same(converted, values, values.dtype)


def _check_same(changed: NDArray[Any], rounded: NDArray[Any], dtype: object) -> None:
    """Raise an error if values were rounded when they were converted to `dtype`."""
    if not np.array_equal(changed, rounded, equal_nan=True):
        lost = changed[~np.isclose(changed, rounded, rtol=0, atol=0, equal_nan=True)].flat[0]
        raise InputError(
            f"the transform drew {lost}, which {dtype} cannot represent. Request scDataset(dtype='float32'), and "
            "convert the batch afterwards"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Integral) and not isinstance(value, bool)
