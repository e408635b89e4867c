"""Transforms that convert the cells of a `Batch` to tokens for transformer models.

``scDataset(..., layout="csr", transform=RankTokens(adata.var_names))`` yields batches with ``input_ids``,
``values`` and ``attention_mask``, and with ``labels`` if tokens are masked; ``obs`` and ``index`` do not change.
CSR batches are not converted to dense.

Rank tokens follow Geneformer [1]_, and value bins follow scGPT [2]_.

.. [1] Theodoris et al.: Transfer learning enables predictions in network biology, Nature 618 (2023).
.. [2] Cui et al.: scGPT: toward building a foundation model for single-cell multi-omics using generative AI,
   Nature Methods 21 (2024).
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from dasksc.batches.batch import Batch, check_rows
from dasksc.checks import check_flags, check_one_of, some, whole_number
from dasksc.errors import InputError, WrongTypeError
from dasksc.kernels import csr
from dasksc.kernels import tokens as kernels
from dasksc.plan.arrays import array_of
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.storage import buffers
from dasksc.transforms import device_tokens
from dasksc.transforms.device_tokens import CellTokens
from dasksc.transforms.vocabulary import Missing, Vocabulary, names_of

__all__ = ["IGNORED", "RankTokens", "ValueBins"]

IGNORED = -100
"""Label of tokens that are not predicted, which ``cross_entropy`` ignores."""

_MASKED_VALUE = -1.0

Padding: TypeAlias = Literal["longest", "max_length"]
T = TypeVar("T", bound="_Tokens")


class _CellRows(NamedTuple):
    """Rows of a batch as CSR, with the number of tokens and the random key of each row."""

    indptr: NDArray[np.int64]
    columns: NDArray[Any]
    values: NDArray[np.float32]
    counts: NDArray[np.int64]
    keys: NDArray[np.uint64]
    lengths: NDArray[np.int64]  # tokens that are kept
    longest: int  # number of columns for them


# Fates of the tokens, and the numbers that choose replacements; see `dasksc.kernels.tokens.mask_tokens`.
_Chosen = tuple[NDArray[np.uint8], NDArray[np.float64]]


class _Tokens:
    """Base class of tokenizing transforms."""

    _takes_csr = True  # dense and CSR batches have the same tokens
    # Set by `at_epoch`, since masks and samples differ between epochs.
    _epoch = 0
    _copies: dict[torch.device, list[torch.Tensor]]  # tables on devices, see `_tables`

    def __init__(
        self,
        genes: Iterable[str],
        vocabulary: Vocabulary | str | os.PathLike[str] | None,
        max_genes: int,
        shares: tuple[float, float, float],
        missing: Missing,
        padding: Padding,
        seed: int,
        *,
        prepend_cls: bool,
    ) -> None:
        mask_ratio, random_replace_ratio, keep_ratio = shares
        names = names_of(genes)
        if vocabulary is None:
            vocabulary = Vocabulary.of_genes(names)
        elif isinstance(vocabulary, Mapping):
            raise WrongTypeError(
                "vocabulary is a dict; wrap it: dasksc.tokens.Vocabulary(...), or give the path of a vocabulary file"
            )
        elif not isinstance(vocabulary, Vocabulary):
            vocabulary = Vocabulary.read(vocabulary)
        check_one_of("missing", missing, ("error", "drop"))
        check_one_of("padding", padding, ("longest", "max_length"))
        if not _is_share(mask_ratio) or mask_ratio == 1:
            raise InputError(f"mask_ratio={mask_ratio!r} must be the share of tokens to mask, a number in [0, 1)")
        for name, share in (("random_replace_ratio", random_replace_ratio), ("keep_ratio", keep_ratio)):
            if not _is_share(share):
                raise InputError(f"{name}={share!r} must be a share of the masked tokens, a number in [0, 1]")
        if random_replace_ratio + keep_ratio > 1:
            raise InputError(
                f"random_replace_ratio={random_replace_ratio} and keep_ratio={keep_ratio} sum to more than 1"
            )
        check_flags(prepend_cls=prepend_cls)
        self.vocabulary = vocabulary
        self.max_genes = whole_number("max_genes", max_genes, 1)
        self.prepend_cls = prepend_cls
        self.mask_ratio = float(mask_ratio)
        self.random_replace_ratio = float(random_replace_ratio)
        self.keep_ratio = float(keep_ratio)
        self.padding = padding
        self.seed = whole_number("seed", seed, 0, 2**64)
        self._names = names
        self._ids = vocabulary.ids_of(names, missing=missing)
        kept = Counter(name for name, i in zip(names, self._ids, strict=True) if i >= 0)
        if repeated := [name for name, n in kept.items() if n > 1]:
            raise InputError(
                f"genes repeats {some(repeated)}, so a cell could have such a token twice. Make them unique "
                "(adata.var_names_make_unique()), or give genes=list(dict.fromkeys(genes)) to the tokenizer and "
                "to scDataset, with genes_repeated='sum'"
            )
        self._genes = self._ids[self._ids >= 0]  # ids that may replace a gene

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a cell."""
        return self.max_genes + self.prepend_cls

    def _check_columns(self, names: list[str]) -> None:
        """Raise `InputError` if the columns of X have the genes of this tokenizer in another order."""
        if names != self._names and sorted(names) == sorted(self._names):
            at = next(i for i, name in enumerate(names) if name != self._names[i])
            raise InputError(
                f"the tokenizer has the genes of X in another order: column {at} of X is {names[at]!r}, but its gene "
                f"{at} is {self._names[at]!r}. Give it the names in the order of the columns, as in genes="
            )

    def at_epoch(self: T, epoch: int) -> T:
        """Return this transform with the random masks and gene subsets of an epoch; `scDataset` calls it."""
        same = copy.copy(self)
        same._epoch, same._copies = epoch, {}
        return same

    def __call__(self, batch: Batch) -> Batch:
        """Convert a batch on the CPU, dense or CSR with one column per gene, to tokens.

        X and layers give way to ``input_ids`` (int64), ``values`` (float32), ``attention_mask`` (bool; False for
        padding) and, if tokens are masked, ``labels`` (int64), each of shape (batch, length). Other elements are not
        copied. A wrong number of columns, or values that are NaN, infinite or negative raise `InputError`.
        """
        cells = self._cells(batch)
        first = int(self.prepend_cls)
        shape = len(cells.counts), first + cells.longest
        # The arrays reuse the memory of earlier batches if the data set recycles it.
        ids = buffers.empty(shape, np.int64)
        ids.fill(self.vocabulary.pad_id)
        ids[:, :first] = self.vocabulary.cls_id
        values = buffers.empty(shape, np.float32)
        values.fill(0)
        self._fill(cells, ids, values)

        made = _without_matrices(batch)
        if self.mask_ratio > 0:
            made["labels"] = torch.from_numpy(self._mask(self._draw(cells), ids, values))
        made["input_ids"] = torch.from_numpy(ids)
        made["values"] = torch.from_numpy(values)
        made["attention_mask"] = torch.from_numpy(np.arange(shape[1]) < first + cells.lengths[:, None])
        return made

    def _cells(self, batch: Batch) -> _CellRows:
        indptr, columns, values = _nonzeros(batch, len(self._ids))
        values = self._scaled(columns, values)
        n_rows = len(indptr) - 1
        counts = np.empty(n_rows, dtype=np.int64)
        bad = kernels.count_tokens(indptr, columns, values, self._ids, counts)
        if bad >= 0:
            raise InputError(
                f"row {int(batch.index[bad])} of X holds a value that is NaN, infinite or negative. Give counts, or "
                "normalized values that are not centered, and fill missing values first"
            )
        keys = np.empty(n_rows, dtype=np.uint64)
        (key,) = epoch_keys(self.seed, self._epoch, Purpose.TOKENS)
        kernels.row_keys(key, batch.index.numpy(), keys)
        lengths = np.minimum(counts, self.max_genes)
        longest = self.max_genes if self.padding == "max_length" else int(lengths.max(initial=0))
        return _CellRows(indptr, columns, values, counts, keys, lengths, longest)

    def _draw(self, cells: _CellRows) -> _Chosen:
        first = int(self.prepend_cls)
        fates = np.zeros((len(cells.counts), first + cells.longest), dtype=np.uint8)
        draws = np.zeros(fates.shape if self.random_replace_ratio > 0 else (0, 0))
        shares = self.mask_ratio, self.random_replace_ratio, self.keep_ratio
        kernels.mask_tokens(cells.lengths, cells.keys, *shares, first, fates, draws)
        return fates, draws

    def _on_host(self, batch: Batch) -> Batch:
        """Return a batch with a CSR X and what `_on_device` needs to convert it; other batches are converted here."""
        cells = self._cells(batch)
        if batch["X"].layout != torch.sparse_csr or not len(cells.values):
            return self(batch)
        drawn: dict[str, Any] = {"counts": cells.counts, "keys": cells.keys.view(np.int64), **self._sampled(cells)}
        if self.mask_ratio > 0:
            drawn["fates"], drawn["draws"] = self._draw(cells)
        tokens = {name: torch.from_numpy(array) for name, array in drawn.items()} | {"longest": cells.longest}
        return Batch(_without_matrices(batch), X=batch["X"], tokens=tokens)

    def _on_device(self, batch: Batch) -> Batch:
        """Return the batch of `_on_host`, which is on a device by now, with the tokens of `__call__`."""
        if "tokens" not in batch:
            return batch
        drawn, made = batch["tokens"], _without_matrices(batch)
        ids, _, medians = self._tables(batch["X"].device)
        cells = device_tokens.cell_tokens(batch["X"], ids, medians, drawn["counts"], drawn["longest"])
        ids, values = self._found(cells, drawn)
        is_token = torch.arange(cells.longest, device=ids.device) < cells.counts.clamp(max=self.max_genes)
        ids, values = torch.where(is_token, ids, self.vocabulary.pad_id), torch.where(is_token, values, 0.0)
        if self.prepend_cls:
            ids, values = pad(ids, (1, 0), value=self.vocabulary.cls_id), pad(values, (1, 0))
            is_token = pad(is_token, (1, 0), value=True)
        if "fates" in drawn:
            made["labels"], ids, values = self._masked(drawn["fates"], drawn["draws"], ids, values)
        return Batch(made, input_ids=ids, values=values, attention_mask=is_token)

    def _tables(self, device: torch.device) -> list[torch.Tensor]:
        """Return the ids of the columns, those that may replace a gene, and the medians, if any, on a device."""
        if device not in self._copies:
            medians = getattr(self, "medians", None)
            tables = self._ids, self._genes, np.empty(0, np.float32) if medians is None else medians
            self._copies[device] = [torch.from_numpy(one).to(device) for one in tables]
        return self._copies[device]

    def _scaled(self, columns: NDArray[Any], values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values

    def _sampled(self, cells: _CellRows) -> dict[str, Any]:
        """Return the tokens that are kept, by row, if they are not the first ones."""
        return {}

    def _found(self, cells: CellTokens, drawn: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and values of the tokens, each of shape (n_rows, longest), on a device."""
        raise NotImplementedError

    def _masked(
        self, fates: torch.Tensor, draws: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the labels, and ids and values with those to predict masked or replaced, on a device."""
        raise NotImplementedError

    def _fill(self, cells: _CellRows, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def _mask(self, chosen: _Chosen, ids: NDArray[np.int64], values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Mask or replace the tokens to predict, and return the labels."""
        raise NotImplementedError


class RankTokens(_Tokens):
    """Transform of cells to genes in descending order of their values, as in Geneformer.

    Parameters
    ----------
    genes
        Names of the columns of X, in their order: ``adata.var_names``, or those that ``scDataset(genes=...)`` keeps.
    vocabulary
        `Vocabulary` or the path of one; None: ids are assigned to `genes` in order (`Vocabulary.of_genes`).
    medians
        One positive number per gene, by which the gene's values are divided before ranking, such as their median over
        the cells that express the gene: an array of shape (n_genes,), or a Series or dict by the names of genes.
    max_genes
        Maximum number of genes per cell; the genes with the smallest values are omitted.
    prepend_cls
        If True, put the cell token ``"<cls>"`` first.
    mask_ratio
        Share of genes to predict in each cell, at least one gene per cell. Their ids are replaced with ``"<mask>"``,
        except where `random_replace_ratio` and `keep_ratio` apply. ``labels`` has the original ids of the genes to
        predict, and -100 elsewhere.
    random_replace_ratio, keep_ratio
        Probabilities that a gene to predict gets the id of a random gene, and that it keeps its own. BERT uses 0.1 for
        both.
    missing
        Treatment of genes that the vocabulary lacks: ``"error"``, or ``"drop"`` to leave them out.
    padding
        ``"longest"`` to pad to the longest cell of the batch, or ``"max_length"``.
    seed
        Seed of the masks. Random numbers depend only on the seed, the epoch and the rows of the batch, so they are
        equal on any rank and in any worker.

    Raises
    ------
    MissingKeyError
        If the vocabulary lacks genes and `missing` is ``"error"``, or it lacks all genes.
    InputError
        If an argument is invalid.

    Notes
    -----
    Zeros are ignored. Among equal values, the gene with the lower column number comes first. ``values`` contains the
    values after division by `medians`. The cost is about 20 ns per nonzero.

    Examples
    --------
    >>> genes = dasksc.open("atlas.h5ad").var_names
    >>> tokens = dasksc.tokens.RankTokens(genes, max_genes=16, prepend_cls=True)
    >>> next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, transform=tokens, seed=0)))
    Batch
      index           (64,) int64
      input_ids       (64, 17) int64
      values          (64, 17) float32
      attention_mask  (64, 17) bool
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
        shares = mask_ratio, random_replace_ratio, keep_ratio
        super().__init__(genes, vocabulary, max_genes, shares, missing, padding, seed, prepend_cls=prepend_cls)
        self.medians: NDArray[np.float32] | None = None
        if medians is not None:
            if isinstance(medians, Mapping | pd.Series) and not isinstance(
                getattr(medians, "index", None), pd.RangeIndex
            ):
                medians = pd.Series(medians).reindex(self._names).where(self._ids >= 0, 1)
            given = array_of("medians", medians)
            if given.dtype.kind not in "biuf":
                raise WrongTypeError("medians must be an array of numbers, one per gene, in the order of `genes`")
            if given.shape != self._ids.shape:
                raise InputError(f"medians has shape {given.shape}; give one for each of the {len(self._ids)} genes")
            self.medians = given.astype(np.float32)
            if not (self.medians > 0).all() or not np.isfinite(self.medians).all():
                raise InputError("medians must be finite and above 0; give 1 for genes without expression")

    def _fill(self, cells: _CellRows, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        indptr, columns, ranked, counts, *_ = cells
        kernels.rank_tokens(indptr, columns, ranked, self._ids, counts, int(self.prepend_cls), ids, values)

    def _scaled(self, columns: NDArray[Any], values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if self.medians is None else values / self.medians[columns]

    def _found(self, cells: CellTokens, drawn: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return device_tokens.ranked(cells)

    def _masked(
        self, fates: torch.Tensor, draws: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels, hidden = torch.where(fates > 0, ids, IGNORED), fates == kernels.HIDDEN
        ids, values = torch.where(hidden, self.vocabulary.mask_id, ids), torch.where(hidden, _MASKED_VALUE, values)
        if draws.numel():
            genes = self._tables(ids.device)[1]
            ids = torch.where(fates == kernels.REPLACED, genes[(draws * len(genes)).long()], ids)
        return labels, ids, values

    def _mask(self, chosen: _Chosen, ids: NDArray[np.int64], values: NDArray[np.float32]) -> NDArray[np.int64]:
        fates, draws = chosen
        labels = np.where(fates > 0, ids, IGNORED)
        hidden, replaced = fates == kernels.HIDDEN, fates == kernels.REPLACED
        ids[hidden] = self.vocabulary.mask_id
        values[hidden] = _MASKED_VALUE
        if replaced.any():
            ids[replaced] = self._genes[(draws[replaced] * len(self._genes)).astype(np.int64)]
        return labels


class ValueBins(_Tokens):
    """Transform of cells to their expressed genes with binned values, as in scGPT.

    Parameters
    ----------
    genes
        As for `RankTokens`.
    n_bins
        Number of distinct values, counted as in the function ``binning`` of scGPT: 0, and the bins 1 to ``n_bins - 1``,
        to which the nonzeros of a cell are assigned. Since unexpressed genes are omitted, only the cell token and
        padding have the value 0. The lower edges of the bins are ``n_bins - 1`` equally spaced quantiles of the
        nonzeros, from the minimum to the maximum, so only the maximum is in the last bin. Several bins may start at the
        same value, commonly at a count of 1. Each gene with that value is then assigned to one of these bins at random.
    vocabulary
        As for `RankTokens`.
    max_genes
        Maximum number of genes per cell; from cells with more, a random sample is drawn in each epoch.
    prepend_cls
        As for `RankTokens`; the cell token has the value 0.
    mask_ratio, random_replace_ratio, keep_ratio
        As for `RankTokens`, but the bins of genes are predicted and replaced (with -1 instead of ``"<mask>"``).
    missing, padding, seed
        As for `RankTokens`.

    Notes
    -----
    Genes are in the order of their columns. Quantiles are computed over all genes of the cell that are in the
    vocabulary, before sampling.

    Examples
    --------
    >>> genes = dasksc.open("atlas.h5ad").var_names
    >>> bins = dasksc.tokens.ValueBins(genes, n_bins=5, max_genes=16)
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, transform=bins, seed=0)))
    >>> batch["values"].shape, int(batch["values"].max()) < 5
    (torch.Size([64, 16]), True)
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
        shares = mask_ratio, random_replace_ratio, keep_ratio
        super().__init__(genes, vocabulary, max_genes, shares, missing, padding, seed, prepend_cls=prepend_cls)
        self.n_bins = whole_number("n_bins", n_bins, 2)  # at least two values: 0, and one bin of nonzeros

    def _fill(self, cells: _CellRows, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        indptr, columns, binned, counts, keys, *_ = cells
        first = int(self.prepend_cls)
        kernels.bin_tokens(indptr, columns, binned, self._ids, counts, keys, self.n_bins, first, ids, values)

    def _sampled(self, cells: _CellRows) -> dict[str, Any]:
        if np.array_equal(cells.lengths, cells.counts):
            return {}
        chosen = np.zeros((len(cells.counts), cells.longest), dtype=np.int64)
        kernels.sample_tokens(cells.counts, cells.keys, chosen)
        return {"chosen": chosen}

    def _found(self, cells: CellTokens, drawn: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return device_tokens.binned(cells, drawn.get("chosen"), drawn["keys"], self.n_bins)

    def _masked(
        self, fates: torch.Tensor, draws: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = torch.where(fates > 0, values.long(), IGNORED)
        values = torch.where(fates == kernels.HIDDEN, _MASKED_VALUE, values)
        if draws.numel():
            random = 1 + (draws * (self.n_bins - 1)).long()
            values = torch.where(fates == kernels.REPLACED, random.float(), values)
        return labels, ids, values

    def _mask(self, chosen: _Chosen, ids: NDArray[np.int64], values: NDArray[np.float32]) -> NDArray[np.int64]:
        fates, draws = chosen
        labels = np.where(fates > 0, values.astype(np.int64), IGNORED)
        replaced = fates == kernels.REPLACED
        values[fates == kernels.HIDDEN] = _MASKED_VALUE
        if replaced.any():
            values[replaced] = 1 + (draws[replaced] * (self.n_bins - 1)).astype(np.int64)
        return labels


def _without_matrices(batch: Batch) -> Batch:
    return Batch({name: part for name, part in batch.items() if name not in ("X", "layers", "tokens")})


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool) and bool(0 <= value <= 1)


def _nonzeros(batch: Any, n_genes: int) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float32]]:
    """Return X as CSR: row starts, columns and values."""
    if not isinstance(batch, Mapping) or not {"X", "index"} <= set(batch):
        raise InputError(
            f"tokenizers take a Batch with X and index; got {type(batch).__name__}. Pass the tokenizer to "
            "scDataset(transform=...); it is not a hook"
        )
    X = check_rows(batch["X"], batch["index"], "a tokenizer").detach()
    if X.shape[1] != n_genes:
        raise InputError(f"X has {X.shape[1]} columns, but {n_genes} gene names are given; give one per column")
    if X.layout == torch.sparse_csr:
        indptr = X.crow_indices().numpy().astype(np.int64)
        return indptr, X.col_indices().numpy(), X.values().float().numpy()
    dense = X.float().contiguous().numpy()  # kernels do not support float16
    indptr = np.zeros(len(dense) + 1, dtype=np.int64)
    csr.count_nonzeros(dense, indptr[1:])
    np.cumsum(indptr, out=indptr)
    columns = np.empty(indptr[-1], dtype=np.int32)
    values = np.empty(indptr[-1], dtype=np.float32)
    csr.squeeze(dense, indptr, columns, values)
    return indptr, columns, values
