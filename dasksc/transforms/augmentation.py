"""Random augmentation of batches: downsampled counts and masked genes.

Random numbers are keyed by the seed of the transform, the epoch, the number of the batch in the epoch, its row numbers,
and the position of a row in it. A batch is therefore the same on any rank, thread or DataLoader worker, and after
resuming. A row that an epoch draws twice is augmented differently each time.
"""

from __future__ import annotations

import copy
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dasksc.batches.batch import Batch, check_rows
from dasksc.checks import name_or_none, whole_number
from dasksc.errors import InputError
from dasksc.kernels import augment as kernels
from dasksc.plan.keys import Purpose, epoch_keys

__all__ = ["Augmentation", "Downsample", "MaskGenes"]

# Key of the random numbers, number of the batch and its row numbers.
_Draws = tuple[np.uint64, int, NDArray[np.int64]]


class Augmentation:
    """Base class of random changes to X or a layer of a batch."""

    _takes_csr = True  # dense and CSR batches get the same values
    _purpose: Purpose

    def __init__(self, *, layer: str | None, seed: int) -> None:
        self.layer = name_or_none("layer", layer)
        self.seed = whole_number("seed", seed, 0, 2**64)
        self._keys = epoch_keys(self.seed, 0, self._purpose, n=2)
        self._number = 0
        self._in_place = False

    def at_epoch(self, epoch: int) -> Self:
        """Return this transform for an epoch; `scDataset` calls it for each."""
        return self._with(_keys=epoch_keys(self.seed, epoch, self._purpose, n=2))

    def at_batch(self, number: int) -> Self:
        """Return this transform for the batch with a number in the epoch, over all ranks; `scDataset` calls it."""
        return self._with(_number=number)

    def in_place(self) -> Self:
        """Return a copy of this transform that changes batches in place, for batches that no other code refers to."""
        return self._with(_in_place=True)

    def _with(self, **attributes: Any) -> Self:
        same = object.__new__(type(self))  # copy.copy would take as long as changing a small batch
        same.__dict__.update(self.__dict__, **attributes)
        return same

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch on the CPU, dense or CSR, with changed values of X or the layer, of the same layout and dtype.

        All other tensors are those of `batch`, without copies. The control cells in ``control`` are changed with
        separate random numbers. A batch without X, `index` or the layer, or with invalid values, raises `InputError`.
        """
        of_targets, of_controls = self._keys
        made = self._augmented(batch, of_targets)
        if made.get("control") is not None:
            made["control"] = self._augmented(made["control"], of_controls)
        return made

    def _augmented(self, batch: Any, key: np.uint64) -> Batch:
        name = type(self).__name__
        if not isinstance(batch, dict) or not {"X", "index"} <= set(batch):
            parts = f"one with {', '.join(batch)}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
            raise InputError(
                f"{name} takes a Batch with X and index; got {parts}. Pass {name} to scDataset(transform=...) of a "
                "single modality, before any tokenizer; it is not a hook"
            )
        made = Batch(batch)
        draws = key, self._number, batch["index"].numpy()
        if self.layer is None:
            made["X"] = self._changed(check_rows(batch["X"], batch["index"], name), draws)
            return made
        layers = batch.get("layers") or {}
        if self.layer not in layers:
            raise InputError(
                f"{name}(layer={self.layer!r}): the batch has the layers {list(layers)}; request the missing one: "
                f"scDataset(layers=[{self.layer!r}])"
            )
        made["layers"] = copy.copy(layers)
        made["layers"][self.layer] = self._changed(check_rows(layers[self.layer], batch["index"], name), draws)
        return made

    def _changed(self, given: torch.Tensor, draws: _Draws) -> torch.Tensor:
        """Return a matrix with changed values."""
        if given.requires_grad:
            given = given.detach()
        is_csr = given.layout == torch.sparse_csr
        values = given.values() if is_csr else given
        dtype = self._kernel_dtype(values.dtype)
        changed = values
        if not self._in_place or dtype != values.dtype:
            changed = values.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if is_csr:
            # Kernels take the types of the loader's batches, since each combination of types takes seconds to compile.
            indptr = given.crow_indices().numpy().astype(np.int64, copy=False)
            columns = given.col_indices().numpy().astype(np.int32, copy=False)
            self._change(draws, indptr, columns, changed.numpy())
        else:
            self._change_dense(draws, changed.numpy())
        if changed is values:
            return given
        made = changed.to(values.dtype)
        if made is not changed:
            is_lost = (made.to(dtype) != changed) & ~changed.isnan()
            if is_lost.any():
                raise InputError(
                    f"the transform drew {changed[is_lost][0].item()}, which {values.dtype} cannot represent. Request "
                    "scDataset(dtype='float32'), and convert the batch afterwards"
                )
        if not is_csr:
            return made
        parts = given.crow_indices(), given.col_indices(), made
        return torch.sparse_csr_tensor(*parts, size=given.shape, check_invariants=False)

    def _kernel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the data type in which the kernels change values of `dtype`."""
        raise NotImplementedError

    def _change(self, draws: _Draws, *csr: NDArray[Any]) -> None:
        """Change the values of CSR rows in place; `csr` holds their row pointers, columns and values."""
        raise NotImplementedError

    def _change_dense(self, draws: _Draws, dense: NDArray[Any]) -> None:
        """Change the values of dense rows in place."""
        raise NotImplementedError


class Downsample(Augmentation):
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
    keep their structure: a count that drops to 0 is a stored zero. The cost is one pass over the batch.

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

    _purpose = Purpose.DOWNSAMPLE

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
        self._tables = () if self.fraction is None else kernels.tables_of(self.fraction)

    def __repr__(self) -> str:
        how = f"fraction={self.fraction}" if self.fraction is not None else f"target_counts={self.target_counts}"
        return f"Downsample({how}, layer={self.layer!r}, seed={self.seed})"

    def _kernel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float64

    def _change(self, draws: _Draws, *csr: NDArray[Any]) -> None:
        if self.target_counts is not None:
            bad = kernels.sample(*draws, *csr, self.target_counts)
        else:
            bad = kernels.downsample(*draws, *csr, self.fraction, *self._tables)
        if bad >= 0:
            indptr, columns, values = csr
            self._refuse(draws, values[bad], int(np.searchsorted(indptr, bad, side="right")) - 1, columns[bad])

    def _change_dense(self, draws: _Draws, dense: NDArray[Any]) -> None:
        if self.target_counts is not None:
            bad = kernels.sample_dense(*draws, dense, self.target_counts)
        else:
            bad = kernels.downsample_dense(*draws, dense, self.fraction, *self._tables)
        if bad >= 0:
            self._refuse(draws, dense.flat[bad], *divmod(bad, dense.shape[1]))

    def _refuse(self, draws: _Draws, value: Any, position: int, column: int) -> None:
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
            f"most 2**53; {name} has {number!r} in row {draws[2][position]}, column {column}. {remedy}"
        )


class MaskGenes(Augmentation):
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
    Random numbers, stored zeros of CSR batches, and the cost are those of `Downsample`.

    Examples
    --------
    >>> masked = dasksc.transforms.MaskGenes(p=0.2)
    >>> X = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0))).X
    >>> partial = next(iter(dasksc.scDataset("atlas.h5ad", return_index=True, seed=0, transform=masked))).X
    >>> round(int(partial.count_nonzero()) / int(X.count_nonzero()), 1)
    0.8
    """

    _purpose = Purpose.MASK_GENES

    def __init__(self, p: float, *, layer: str | None = None, seed: int = 0) -> None:
        super().__init__(layer=layer, seed=seed)
        if not (_is_number(p) and 0 <= p < 1):
            raise InputError(f"p must be a probability in [0, 1); got {p!r}")
        self.p = float(p)

    def __repr__(self) -> str:
        return f"MaskGenes({self.p}, layer={self.layer!r}, seed={self.seed})"

    def _kernel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        half = torch.float16, torch.bfloat16
        return torch.float32 if dtype in half else torch.uint8 if dtype == torch.bool else dtype

    def _change(self, draws: _Draws, *csr: NDArray[Any]) -> None:
        kernels.mask(*draws, *csr, self.p)

    def _change_dense(self, draws: _Draws, dense: NDArray[Any]) -> None:
        kernels.mask_dense(*draws, dense, self.p)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
