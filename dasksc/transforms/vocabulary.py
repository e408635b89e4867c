"""Vocabularies: the ids of genes, and of tokens that are no genes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.config import whole_number
from dasksc.errors import InputError, MissingKeyError, MissingPathError

__all__ = ["CLS", "MASK", "PAD", "Missing", "Vocabulary"]

PAD, MASK, CLS = "<pad>", "<mask>", "<cls>"
"""Names of the tokens that are no genes."""

_NAMES_TOLD = 5

Missing: TypeAlias = Literal["error", "drop"]


class Vocabulary:
    """The id of every gene, and of padding, masks and the token that stands for the cell.

    Parameters
    ----------
    ids
        The id of each name, whole numbers from 0 on, no two the same. ``"<pad>"``, ``"<mask>"`` and ``"<cls>"``
        are added after the largest where they are missing.

    Attributes
    ----------
    ids
        The id of each name.
    size
        One more than the largest id: the rows that an embedding needs.
    pad_id, mask_id, cls_id
        Those of ``"<pad>"``, ``"<mask>"`` and ``"<cls>"``.

    Raises
    ------
    InputError
        If an id is no whole number from 0 on, or that of two names.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {str(name): whole_number(f"the id of {name!r}", i, 0) for name, i in ids.items()}
        if len(set(self.ids.values())) < len(self.ids):
            seen: dict[int, str] = {}
            twice = (
                f"{seen[i]!r} and {name!r}: {i}" for name, i in self.ids.items() if seen.setdefault(i, name) != name
            )
            raise InputError(f"every name needs an id of its own; got {_some(twice)}")
        for special in (PAD, MASK, CLS):
            self.ids.setdefault(special, max(self.ids.values(), default=-1) + 1)
        self.size = max(self.ids.values()) + 1
        self.pad_id, self.mask_id, self.cls_id = (self.ids[special] for special in (PAD, MASK, CLS))

    @classmethod
    def of_genes(cls, genes: Iterable[str]) -> Vocabulary:
        """Number names as they come: padding 0, masks 1, the cell 2, genes from 3 on.

        Parameters
        ----------
        genes
            Names, such as ``adata.var_names``; no two the same.

        Returns
        -------
        Vocabulary
            With ``3 + len(genes)`` names.

        Raises
        ------
        InputError
            If a name is there twice.
        """
        return cls(_numbered([PAD, MASK, CLS, *map(str, genes)], "genes"))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a vocabulary file.

        Parameters
        ----------
        path
            A JSON object of ids by name (``{"<pad>": 0, "CD4": 1}``), or, of any other ending than ``.json``, text with
            one name a line, whose ids are 0 for the first line, and so on.

        Returns
        -------
        Vocabulary
            With the names of the file.

        Raises
        ------
        MissingPathError
            If there is no such file.
        InputError
            If the file holds something else.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise MissingPathError(f"there is no vocabulary file {os.fspath(path)!r}") from error
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is no text; a vocabulary is a .json of ids by name, or one name a line"
            ) from error
        if path.suffix != ".json":
            return cls(_numbered(text.split("\n") if not text.endswith("\n") else text.split("\n")[:-1], str(path)))
        try:
            ids = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path} is no JSON: {error}") from error
        if not isinstance(ids, dict):
            raise InputError(
                f'{path} must hold an object of ids by name, such as {{"CD4": 0}}; got a {type(ids).__name__}'
            )
        return cls(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} names, size {self.size})"

    def ids_of(self, genes: Iterable[str], *, missing: Missing = "error") -> NDArray[np.int64]:
        """Look genes up.

        Parameters
        ----------
        genes
            Names.
        missing
            What to do about genes that the vocabulary does not have: ``"error"``, or ``"drop"`` them.

        Returns
        -------
        NDArray
            The id of each, shape (n_genes,), int64; -1 for those to drop.

        Raises
        ------
        MissingKeyError
            If genes are missing; the error says how many, and which are the first. Also where all are to be dropped.
        """
        names = [str(gene) for gene in genes]
        ids = np.fromiter((self.ids.get(name, -1) for name in names), dtype=np.int64, count=len(names))
        absent = [name for name, i in zip(names, ids, strict=True) if i < 0]
        if absent and (missing == "error" or len(absent) == len(names)):
            raise MissingKeyError(
                f"{len(absent)} of {len(names)} genes are not in the vocabulary of {len(self)} names: "
                f"{_some(map(repr, absent))}. Are both symbols, or both Ensembl ids? missing='drop' leaves them out"
            )
        return ids


def _numbered(names: list[str], where: str) -> dict[str, int]:
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) < len(names):
        twice = (repr(name) for i, name in enumerate(names) if ids[name] != i)
        raise InputError(f"{where}: names are there twice: {_some(twice)}; adata.var_names_make_unique() helps")
    return ids


def _some(items: Iterable[str]) -> str:
    """The first of several."""
    told = list(items)
    return ", ".join(told[:_NAMES_TOLD]) + (", ..." if len(told) > _NAMES_TOLD else "")
