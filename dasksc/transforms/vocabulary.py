"""Vocabularies: the ids of genes, and of tokens that are no genes."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
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

PICKLES = (".pkl", ".pickle")
"""Endings of vocabulary files that are pickles."""

_NAMES_TOLD = 5

_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
# What a pickle of a dict of numbers by name consists of, in any protocol; none of it imports or calls anything.
_PLAIN = _MEMO | {
    *("PROTO", "FRAME", "MARK", "STOP", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "EMPTY_DICT", "DICT"),
    *("SETITEM", "SETITEMS", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
}

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
            A JSON object of ids by name (``{"<pad>": 0, "CD4": 1}``), as scGPT ships it; a pickled dict of these
            (``.pkl``, ``.pickle``), as Geneformer ships it, of which nothing is run; or, of any other ending, text with
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
            if path.suffix in PICKLES:
                return cls(_unpickled(path))
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise MissingPathError(f"there is no vocabulary file {os.fspath(path)!r}") from error
        except IsADirectoryError as error:
            raise InputError(f"{path} is a folder; give the vocabulary file in it") from error
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

    @property
    def genes(self) -> list[str]:
        """Names by ascending id, without tokens that are no genes: names in angle brackets, such as ``"<pad>"``."""
        by_id = sorted(self.ids, key=self.ids.__getitem__)
        return [name for name in by_id if not (name.startswith("<") and name.endswith(">"))]

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


def _unpickled(path: Path) -> dict[str, int]:
    """Return the dict of whole numbers by name in a pickle, which may hold nothing else: other pickles run code."""
    content = path.read_bytes()
    what = f"{path} must hold a pickled dict of ids by name, whole numbers by strings"
    try:
        for opcode, argument, _ in pickletools.genops(content):
            # A place in the memo makes a list that long.
            if opcode.name not in _PLAIN or (opcode.name in _MEMO and (argument or 0) > len(content)):
                raise InputError(f"{what}; {opcode.name} makes another object, which is not read")
        ids = pickle.loads(content)
    except (ValueError, IndexError, EOFError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what}; it cannot be read: {error}") from error
    if not isinstance(ids, dict) or not all(isinstance(name, str) for name in ids):
        raise InputError(f"{what}; got a {type(ids).__name__}")
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
