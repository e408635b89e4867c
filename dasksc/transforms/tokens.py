"""Cells as tokens, for transformers: transforms of a `Batch` between a data set and a model.

``scDataset(..., layout="csr", transform=RankTokens(adata.var_names))`` yields batches with ``input_ids``,
``values`` and ``attention_mask``, and with ``labels`` where tokens are masked; ``obs`` and ``index`` stay as they
are. Nothing is made dense on the way.

Tokens of cells by rank follow Geneformer [1]_, values in bins scGPT [2]_.

.. [1] Theodoris et al.: Transfer learning enables predictions in network biology, Nature 618 (2023).
.. [2] Cui et al.: scGPT: toward building a foundation model for single-cell multi-omics using generative AI,
   Nature Methods 21 (2024).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dasksc.batches.batch import Batch
from dasksc.config import whole_number
from dasksc.errors import InputError
from dasksc.kernels import csr
from dasksc.kernels import tokens as kernels
from dasksc.sampling.random_keys import Purpose, epoch_keys
from dasksc.storage import buffers
from dasksc.transforms.vocabulary import Missing, Vocabulary

__all__ = ["IGNORED", "RankTokens", "ValueBins", "check_choice"]

IGNORED = -100
"""The label of a token that is not to be predicted: what ``cross_entropy`` ignores."""

_MASKED_VALUE = -1.0

Padding: TypeAlias = Literal["longest", "max_length"]
T = TypeVar("T", bound="_Tokens")


class _Cells(NamedTuple):
    """The rows of a batch, CSR; how many tokens each has, and its key."""

    indptr: NDArray[np.int64]
    columns: NDArray[Any]
    values: NDArray[np.float32]
    counts: NDArray[np.int64]
    keys: NDArray[np.uint64]


class _Tokens:
    """What both kinds of tokens have in common."""

    # Set by `at_epoch`; masks and samples differ from epoch to epoch.
    _epoch = 0

    def __init__(
        self,
        genes: Iterable[str],
        *,
        vocabulary: Vocabulary | str | os.PathLike[str] | None,
        max_genes: int,
        prepend_cls: bool,
        mask_ratio: float,
        random_replace_ratio: float,
        keep_ratio: float,
        missing: Missing,
        padding: Padding,
        seed: int,
    ) -> None:
        names = [str(gene) for gene in genes]
        if vocabulary is None:
            vocabulary = Vocabulary.of_genes(names)
        elif not isinstance(vocabulary, Vocabulary):
            vocabulary = Vocabulary.read(vocabulary)
        check_choice("missing", missing, ("error", "drop"))
        check_choice("padding", padding, ("longest", "max_length"))
        if not _is_share(mask_ratio) or mask_ratio == 1:
            raise InputError(f"mask_ratio={mask_ratio!r} is no share of the tokens; it must be a number in [0, 1)")
        for name, share in (("random_replace_ratio", random_replace_ratio), ("keep_ratio", keep_ratio)):
            if not _is_share(share):
                raise InputError(f"{name}={share!r} is no share of the masked tokens; it must be a number in [0, 1]")
        if random_replace_ratio + keep_ratio > 1:
            raise InputError(
                f"random_replace_ratio={random_replace_ratio} and keep_ratio={keep_ratio} are more than 1 together"
            )
        if not isinstance(prepend_cls, bool):
            raise InputError(f"prepend_cls must be true or false; got {prepend_cls!r}")
        self.vocabulary = vocabulary
        self.max_genes = whole_number("max_genes", max_genes, 1)
        self.prepend_cls = prepend_cls
        self.mask_ratio = float(mask_ratio)
        self.random_replace_ratio = float(random_replace_ratio)
        self.keep_ratio = float(keep_ratio)
        self.padding = padding
        self.seed = whole_number("seed", seed, 0, 2**64)
        self._ids = vocabulary.ids_of(names, missing=missing)
        self._genes = self._ids[self._ids >= 0]  # what a gene may be replaced by

    @property
    def max_length(self) -> int:
        """Tokens of a cell at most."""
        return self.max_genes + self.prepend_cls

    def at_epoch(self: T, epoch: int) -> T:
        """Return this transform with the masks and samples of an epoch.

        Parameters
        ----------
        epoch
            Which epoch. `scDataset` asks for that of each epoch by itself.
        """
        same = copy.copy(self)
        same._epoch = epoch
        return same

    def __call__(self, batch: Batch) -> Batch:
        """Turn a batch into one of tokens.

        Parameters
        ----------
        batch
            With ``X``, dense or CSR, of as many columns as there are genes, and ``index``. On the CPU.

        Returns
        -------
        Batch
            Instead of X and layers: ``input_ids``, int64, ``values``, float32, and ``attention_mask``, bool, true where
            there is a token, each of shape (batch, length). If tokens are masked, ``labels``, int64, of that shape.
            Everything else as in `batch`, not copied.

        Raises
        ------
        InputError
            If X has another number of columns, or holds NaN.
        """
        indptr, columns, values = _nonzeros(batch, len(self._ids))
        n_rows = len(indptr) - 1
        counts = np.empty(n_rows, dtype=np.int64)
        bad = kernels.count_tokens(indptr, columns, values, self._ids, counts)
        if bad >= 0:
            raise InputError(
                f"row {int(batch.index[bad])} of X holds NaN, which has no rank; fill missing values first"
            )
        keys = np.empty(n_rows, dtype=np.uint64)
        (key,) = epoch_keys(self.seed, self._epoch, Purpose.TOKENS)
        kernels.row_keys(key, batch.index.numpy(), keys)

        first = int(self.prepend_cls)
        lengths = np.minimum(counts, self.max_genes)
        longest = self.max_genes if self.padding == "max_length" else int(lengths.max(initial=0))
        shape = (n_rows, first + longest)
        # In memory that batches before have left, where a data set recycles it.
        ids = buffers.empty(shape, np.int64)
        ids.fill(self.vocabulary.pad_id)
        ids[:, :first] = self.vocabulary.cls_id
        token_values = buffers.empty(shape, np.float32)
        token_values.fill(0)
        self._fill(_Cells(indptr, columns, values, counts, keys), ids, token_values)

        made = Batch({name: part for name, part in batch.items() if name not in ("X", "layers")})
        if self.mask_ratio > 0:
            fates = np.zeros(shape, dtype=np.uint8)
            draws = np.zeros(shape if self.random_replace_ratio > 0 else (0, 0))
            shares = self.mask_ratio, self.random_replace_ratio, self.keep_ratio
            kernels.mask_tokens(lengths, keys, *shares, first, fates, draws)
            made["labels"] = torch.from_numpy(self._mask(fates, draws, ids, token_values))
        made["input_ids"] = torch.from_numpy(ids)
        made["values"] = torch.from_numpy(token_values)
        made["attention_mask"] = torch.from_numpy(np.arange(shape[1]) < first + lengths[:, None])
        return made

    def _fill(self, cells: _Cells, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Write the tokens of all rows."""
        raise NotImplementedError

    def _mask(
        self,
        fates: NDArray[np.uint8],
        draws: NDArray[np.float64],
        ids: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """Hide or replace what is to be predicted, and return it; see `dasksc.kernels.tokens.mask_tokens`."""
        raise NotImplementedError


class RankTokens(_Tokens):
    """The genes of a cell by descending value, as Geneformer reads cells.

    Parameters
    ----------
    genes
        Names of the columns of X, in their order: ``adata.var_names``, or those that ``scDataset(genes=...)`` keeps.
    vocabulary
        A `Vocabulary` or the path of one; None numbers `genes` (`Vocabulary.of_genes`).
    medians
        Divide the values of each gene by these before they are ranked, shape (n_genes,): medians over the cells that
        express it, say. Above 0.
    max_genes
        Of more genes the lowest are left out.
    prepend_cls
        Put the token of the cell first.
    mask_ratio
        The share of a cell's genes whose ids are hidden behind ``"<mask>"``, at least one of each cell. ``labels`` has
        them, -100 elsewhere.
    random_replace_ratio, keep_ratio
        Of those genes the shares that another gene, drawn at random, stands for instead, and that stay as they are:
        0.1 and 0.1 in BERT.
    missing
        What to do about genes that the vocabulary does not have: ``"error"``, or ``"drop"`` them.
    padding
        Up to the ``"longest"`` cell of the batch, or to ``"max_length"``.
    seed
        Of what is masked, with the epoch and the rows of the batch: the same on any rank and in any worker.

    Attributes
    ----------
    vocabulary
        The `Vocabulary`.
    max_length
        Tokens of a cell at most.

    Raises
    ------
    MissingKeyError
        If the vocabulary lacks genes, and they are not to be dropped.
    InputError
        If an argument is not as described.

    Notes
    -----
    Only nonzeros count. Of equal values the gene of the lower column comes first. ``values`` has the values that
    were ranked. About 20 ns a nonzero.
    """

    def __init__(
        self,
        genes: Iterable[str],
        *,
        vocabulary: Vocabulary | str | os.PathLike[str] | None = None,
        medians: Any = None,
        max_genes: int = 2048,
        prepend_cls: bool = False,
        mask_ratio: float = 0.0,
        random_replace_ratio: float = 0.0,
        keep_ratio: float = 0.0,
        missing: Missing = "error",
        padding: Padding = "longest",
        seed: int = 0,
    ) -> None:
        super().__init__(
            genes,
            vocabulary=vocabulary,
            max_genes=max_genes,
            prepend_cls=prepend_cls,
            mask_ratio=mask_ratio,
            random_replace_ratio=random_replace_ratio,
            keep_ratio=keep_ratio,
            missing=missing,
            padding=padding,
            seed=seed,
        )
        self.medians = None if medians is None else np.asarray(medians, dtype=np.float32)
        if self.medians is not None:
            if self.medians.shape != self._ids.shape:
                raise InputError(
                    f"medians has shape {self.medians.shape}; one for each of {len(self._ids)} genes is needed"
                )
            if not (self.medians > 0).all() or not np.isfinite(self.medians).all():
                raise InputError("medians must be finite and above 0; give genes that no cell expresses 1")

    def _fill(self, cells: _Cells, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        indptr, columns, ranked, counts, _ = cells
        if self.medians is not None:
            ranked = ranked / self.medians[columns]
        kernels.rank_tokens(indptr, columns, ranked, self._ids, counts, int(self.prepend_cls), ids, values)

    def _mask(
        self,
        fates: NDArray[np.uint8],
        draws: NDArray[np.float64],
        ids: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        labels = np.where(fates > 0, ids, IGNORED)
        hidden, replaced = fates == kernels.HIDDEN, fates == kernels.REPLACED
        ids[hidden] = self.vocabulary.mask_id
        values[hidden] = _MASKED_VALUE
        if replaced.any():
            ids[replaced] = self._genes[(draws[replaced] * len(self._genes)).astype(np.int64)]
        return labels


class ValueBins(_Tokens):
    """The genes that a cell expresses, each with the bin of its value, as scGPT reads cells.

    Parameters
    ----------
    genes
        Names of the columns of X, in their order: ``adata.var_names``, or those that ``scDataset(genes=...)`` keeps.
    n_bins
        How many values there are: 0, for what is not expressed, and ``n_bins - 1`` bins of the cell's nonzeros, those
        of scGPT's ``binning``. Bins begin at ``n_bins - 1`` quantiles of the nonzeros, from the smallest to the
        largest, which is alone in the last. Where several quantiles are one value, as 1 is in counts, it lies in any of
        the bins that begin there, drawn at random.
    vocabulary
        A `Vocabulary` or the path of one; None numbers `genes` (`Vocabulary.of_genes`).
    max_genes
        Of more genes a sample is taken, another one in each epoch.
    prepend_cls
        Put the token of the cell first, with the value 0.
    mask_ratio
        The share of a cell's genes whose bins are hidden behind -1, at least one of each cell. ``labels`` has them,
        -100 elsewhere.
    random_replace_ratio, keep_ratio
        Of those genes the shares that get another bin, drawn at random, instead, and that stay as they are.
    missing
        What to do about genes that the vocabulary does not have: ``"error"``, or ``"drop"`` them.
    padding
        Up to the ``"longest"`` cell of the batch, or to ``"max_length"``.
    seed
        Of what is masked, sampled and drawn between bins, with the epoch and the rows of the batch: the same on any
        rank and in any worker.

    Attributes
    ----------
    vocabulary
        The `Vocabulary`.
    max_length
        Tokens of a cell at most.

    Raises
    ------
    MissingKeyError
        If the vocabulary lacks genes, and they are not to be dropped.
    InputError
        If an argument is not as described.

    Notes
    -----
    Genes come in the order of their columns. Quantiles are those of all genes of the cell that the vocabulary has,
    also where only a sample of them is taken.
    """

    def __init__(
        self,
        genes: Iterable[str],
        *,
        n_bins: int = 51,
        vocabulary: Vocabulary | str | os.PathLike[str] | None = None,
        max_genes: int = 1200,
        prepend_cls: bool = False,
        mask_ratio: float = 0.0,
        random_replace_ratio: float = 0.0,
        keep_ratio: float = 0.0,
        missing: Missing = "error",
        padding: Padding = "longest",
        seed: int = 0,
    ) -> None:
        super().__init__(
            genes,
            vocabulary=vocabulary,
            max_genes=max_genes,
            prepend_cls=prepend_cls,
            mask_ratio=mask_ratio,
            random_replace_ratio=random_replace_ratio,
            keep_ratio=keep_ratio,
            missing=missing,
            padding=padding,
            seed=seed,
        )
        self.n_bins = whole_number("n_bins", n_bins, 2)  # zeros, and one bin of all else

    def _fill(self, cells: _Cells, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        indptr, columns, binned, counts, keys = cells
        first = int(self.prepend_cls)
        kernels.bin_tokens(indptr, columns, binned, self._ids, counts, keys, self.n_bins, first, ids, values)

    def _mask(
        self,
        fates: NDArray[np.uint8],
        draws: NDArray[np.float64],
        ids: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        labels = np.where(fates > 0, values.astype(np.int64), IGNORED)
        replaced = fates == kernels.REPLACED
        values[fates == kernels.HIDDEN] = _MASKED_VALUE
        if replaced.any():
            values[replaced] = 1 + (draws[replaced] * (self.n_bins - 1)).astype(np.int64)
        return labels


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool) and bool(0 <= value <= 1)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise InputError(f"{name} must be {' or '.join(map(repr, choices))}; got {value!r}")


def _nonzeros(batch: Batch, n_genes: int) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """Return X as CSR: row starts, columns and values."""
    if not {"X", "index"} <= set(batch):
        raise InputError(
            f"tokens are made of a Batch with X and index; got {type(batch).__name__}. "
            "Give the transform to scDataset(transform=...), not as a hook"
        )
    X: torch.Tensor = batch["X"].detach()
    if X.shape[1] != n_genes:
        raise InputError(
            f"X has {X.shape[1]} columns, and there are names of {n_genes} genes; give those of the columns"
        )
    if X.layout == torch.sparse_csr:
        indptr = X.crow_indices().numpy().astype(np.int64)
        return indptr, X.col_indices().numpy(), X.values().float().numpy()
    dense = X.float().numpy()  # kernels take no halves
    indptr = np.zeros(len(dense) + 1, dtype=np.int64)
    csr.count_nonzeros(dense, indptr[1:])
    np.cumsum(indptr, out=indptr)
    columns = np.empty(indptr[-1], dtype=np.int32)
    values = np.empty(indptr[-1], dtype=np.float32)
    csr.squeeze(dense, indptr[:-1], columns, values)
    return indptr, columns, values
