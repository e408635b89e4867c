"""Matching of requested genes with the columns of an atlas."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from anndata import AnnData

from dasksc.atlas.elements import matrix_behind, require_key
from dasksc.checks import check_one_of, name_or_none, similar, some
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.plan.arrays import array_of
from dasksc.storage import Columns
from dasksc.storage.combined import ConcatenatedMatrix
from dasksc.transforms.vocabulary import Vocabulary

logger = logging.getLogger("dasksc.loader")

Missing = Literal["error", "zero", "drop"]
Repeated = Literal["error", "sum"]

_N_SHOWN = 3
# A smaller share of matches suggests another naming scheme, such as symbols in place of Ensembl IDs.
_LOW_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneMatch:
    """Match of requested genes with the columns of an atlas; printing it shows a summary.

    Parameters
    ----------
    names
        Gene of each column of a batch, in order.
    n_wanted
        Number of requested genes.
    missing
        Requested genes that the atlas lacks, in the order of the request.
    filled
        True if missing genes are columns of zeros, False if they are left out.
    n_summed
        Number of columns of the atlas that are added up because their names repeat.
    matched_by
        Names that were compared: ``"var_names"``, or a column of var.

    Examples
    --------
    >>> genes = ["gene_001", "gene_002", "MYC"]
    >>> dataset = dasksc.scDataset("atlas.h5ad", genes=genes, genes_missing="zero", seed=0)
    >>> print(dataset.gene_match)
    2 of 3 genes matched by var_names (66.7%); 1 missing, filled with zeros: MYC
    >>> dataset.gene_match.missing
    ('MYC',)
    """

    names: tuple[str, ...]
    n_wanted: int
    missing: tuple[str, ...]
    filled: bool
    n_summed: int
    matched_by: str

    @property
    def n_matched(self) -> int:
        """Number of requested genes that the atlas has."""
        return self.n_wanted - len(self.missing)

    @property
    def share(self) -> float:
        """Share of the requested genes that the atlas has, in [0, 1]."""
        return self.n_matched / self.n_wanted

    def __str__(self) -> str:
        text = f"{self.n_matched:,} of {self.n_wanted:,} genes matched by {self.matched_by} ({self.share:.1%})"
        if self.missing:
            names = ", ".join(self.missing[:_N_SHOWN]) + (", ..." if len(self.missing) > _N_SHOWN else "")
            text += f"; {len(self.missing):,} missing, {'filled with zeros' if self.filled else 'left out'}: {names}"
        if self.n_summed:
            text += f"; {self.n_summed:,} columns of repeated names are added up"
        return text


@dataclass(frozen=True, slots=True)
class GeneRequest:
    """Columns of X and the layers in a batch, as requested by the arguments of `scDataset`."""

    genes: Any = None
    missing: Missing = "error"
    key: str | None = None
    repeated: Repeated = "error"

    def __post_init__(self) -> None:
        check_one_of("genes_missing", self.missing, get_args(Missing))
        check_one_of("genes_repeated", self.repeated, get_args(Repeated))
        name_or_none("genes_key", self.key)
        if self.genes is None and self._names_only:
            raise InputError(f"{self._names_only} cannot be used without genes=")

    @property
    def _names_only(self) -> str:
        """Options that were given but apply only to names, for error messages."""
        given = ["genes_missing="] * (self.missing != "error") + ["genes_repeated="] * (self.repeated != "error")
        return ", ".join(given + ["genes_key="] * (self.key is not None))

    def of(self, modality: str) -> GeneRequest:
        """Return the request for one modality, of a request whose `genes` are a dict by modality, or None."""
        if self.genes is None or modality not in self.genes:
            return GeneRequest()
        return GeneRequest(self.genes[modality], self.missing, self.key, self.repeated)

    def columns_of(
        self, var: pd.DataFrame | None, n_vars: int, *, of: AnnData | None = None
    ) -> tuple[Columns | None, GeneMatch | None]:
        """Return the requested columns (None for all) and the match of names (None without names)."""
        genes = self.genes
        if genes is None:
            return None, None
        if isinstance(genes, os.PathLike):
            genes = Vocabulary.read(genes)
        if isinstance(genes, Vocabulary):
            genes = genes.genes
        if isinstance(genes, str):
            raise WrongTypeError(
                f"genes={genes!r} is a string; give a list of names: genes=[{genes!r}], or the path of a vocabulary: "
                f"genes=pathlib.Path({genes!r})"
            )
        if isinstance(genes, set | frozenset | Mapping):
            # The order of a set, and thus of the columns, would differ between processes.
            raise WrongTypeError(
                f"genes is a {type(genes).__name__}, which does not define an order of columns; give a list: "
                "genes=sorted(...), or for a vocabulary of token ids, dasksc.tokens.Vocabulary(...)"
            )
        wanted = np.arange(n_vars)[genes] if isinstance(genes, slice) else array_of("genes", genes)
        if wanted.ndim != 1:
            raise InputError(f"genes has shape {wanted.shape}; give one list of names, a mask or positions")
        if wanted.dtype == np.bool_:
            if wanted.shape != (n_vars,):
                raise InputError(
                    f"genes is a mask of shape {wanted.shape}, but there are {n_vars} columns; give one entry per "
                    "column"
                )
            wanted = np.flatnonzero(wanted)
        if not len(wanted):
            raise InputError("genes= selects no column; give at least one gene")
        if wanted.dtype.kind in "UOT":
            return self._matched(wanted.tolist(), var, n_vars, of)
        if wanted.dtype.kind not in "iu":
            raise InputError(f"genes has dtype {wanted.dtype}; give gene names, a boolean mask or integer positions")
        if self._names_only:
            raise InputError(
                f"{self._names_only} cannot be used here: genes= contains positions or a mask, not names. Omit the "
                "option, or give gene names"
            )
        wrong = [one for one in (wanted.max(), wanted.min()) if not 0 <= one < n_vars]
        if wrong:
            raise InputError(f"genes contains position {wrong[0]}; positions must lie in [0, {n_vars})")
        return Columns(wanted.astype(np.int64), n_vars), None

    def _matched(
        self, wanted: list[Any], var: pd.DataFrame | None, n_vars: int, of: AnnData | None
    ) -> tuple[Columns, GeneMatch]:
        matched_by = "var_names" if self.key is None else f"var[{self.key!r}]"
        names: Iterable[Any]  # of the columns; None for a column without a name
        if var is None and self.key is not None:
            raise InputError(
                f"genes_key={self.key!r} names a column of var, which an array does not have; omit genes_key="
            )
        if var is None:
            names = range(n_vars)
        elif self.key is None:
            names = var.index
        else:
            column = var[require_key("var", self.key, var.columns, of=of)]
            names = (None if is_missing else str(name) for name, is_missing in zip(column, column.isna(), strict=True))
        places: dict[Any, int] = {}
        repeats: dict[Any, list[int]] = {}
        for i, name in enumerate(names):
            if name is not None and places.setdefault(name, i) != i:
                repeats.setdefault(name, []).append(i)
        unclear = [name for name in wanted if name in repeats]
        if unclear and self.repeated == "error":
            raise InputError(
                f"{matched_by} repeats {unclear[:_N_SHOWN]}, so these names are ambiguous. Give positions, or "
                "genes_repeated='sum' to sum the columns that share a name"
            )
        if len(set(wanted)) < len(wanted):
            twice = next(name for name, n in Counter(wanted).items() if n > 1)
            raise InputError(f"genes= repeats {twice!r}; list each gene once")
        missing = [name for name in wanted if name not in places]
        if missing and (self.missing == "error" or len(missing) == len(wanted)):
            X = None if of is None or of.X is None else matrix_behind(of.X)
            inner = isinstance(X, ConcatenatedMatrix)
            only = "join='inner' keeps only the genes of all atlases, join='outer' those of any. " if inner else ""
            raise MissingKeyError(
                f"{matched_by} lacks {len(missing):,} of {len(wanted):,} requested genes: {some(missing)}; it has "
                f"{some(similar(missing[0], places, n=3) or places)}. {only}Use symbols in both or Ensembl IDs in "
                "both, or match a column of var with genes_key=, or give genes_missing='zero' or 'drop'"
            )
        kept = [name for name in wanted if name in places] if self.missing == "drop" else wanted
        taken = [
            (i, to) for to, name in enumerate(kept) if name in places for i in (places[name], *repeats.get(name, ()))
        ]
        positions, to = np.array(taken, dtype=np.int64).T
        match = GeneMatch(
            names=tuple(map(str, kept)),
            n_wanted=len(wanted),
            missing=tuple(map(str, missing)),
            filled=self.missing == "zero",
            n_summed=sum(1 + len(repeats[name]) for name in kept if name in repeats),
            matched_by=matched_by,
        )
        if match.share < _LOW_SHARE:
            logger.warning(
                "%s. Give names of the same kind as in the atlas, such as Ensembl IDs, or match another column of "
                "var with genes_key=",
                match,
            )
        else:
            logger.info("%s", match)
        return Columns(positions, n_vars, to, len(kept)), match
