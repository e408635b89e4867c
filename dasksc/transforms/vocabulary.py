"""Vocabularies that map genes and special tokens to ids."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import is_whole, some, whole_number
from dasksc.errors import InputError, MissingKeyError, MissingPathError, WrongTypeError

__all__ = ["CLS", "MASK", "PAD", "Missing", "Vocabulary", "names_of"]

PAD, MASK, CLS = "<pad>", "<mask>", "<cls>"
"""Names of the special tokens."""

PICKLES = (".pkl", ".pickle")
"""Suffixes of pickled vocabulary files."""

Missing: TypeAlias = Literal["error", "drop"]


class Vocabulary:
    """Vocabulary of genes and special tokens (padding, mask and cell token).

    Parameters
    ----------
    ids
        Id of each name, distinct non-negative integers. ``"<pad>"``, ``"<mask>"`` and ``"<cls>"`` are added after
        the largest id if they are missing.

    Attributes
    ----------
    ids
        Id of each name.
    size
        Largest id plus 1: the number of rows of an embedding.
    pad_id, mask_id, cls_id
        Ids of ``"<pad>"``, ``"<mask>"`` and ``"<cls>"``.

    Examples
    --------
    >>> vocabulary = dasksc.tokens.Vocabulary.of_genes(["CD3E", "CD4"])
    >>> len(vocabulary)
    5
    >>> vocabulary.ids_of(["CD4", "CD3E"])
    array([4, 3])
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        if not isinstance(ids, Mapping):
            raise WrongTypeError(
                f"ids must map names to ids; got {ids!r}. Use Vocabulary.of_genes for a list of genes, and "
                "Vocabulary.read for a file"
            )
        self.ids = {str(name): whole_number(f"the id of {name!r}", i, 0) for name, i in ids.items()}
        if len(set(self.ids.values())) < len(self.ids):
            seen: dict[int, str] = {}
            name, i = next((name, i) for name, i in self.ids.items() if seen.setdefault(i, name) != name)
            raise InputError(f"every name needs a different id; {seen[i]!r} and {name!r} both have {i}")
        for special in (PAD, MASK, CLS):
            self.ids.setdefault(special, max(self.ids.values(), default=-1) + 1)
        self.size = max(self.ids.values()) + 1
        self.pad_id, self.mask_id, self.cls_id = (self.ids[special] for special in (PAD, MASK, CLS))

    @classmethod
    def of_genes(cls, genes: Iterable[str]) -> Vocabulary:
        """Assign ids to distinct names in the given order: padding 0, mask 1, cell 2, genes from 3."""
        advice = "adata.var_names_make_unique() makes them unique"
        return cls(_numbered([PAD, MASK, CLS, *names_of(genes)], "genes", advice))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a vocabulary file, whose suffix determines its format.

        - ``.json``: an object of ids by name (``{"<pad>": 0, "CD4": 1}``), as distributed with scGPT
        - ``.pkl``, ``.pickle``: a pickled dict of ids by name, as distributed with Geneformer; reading it executes no
          code
        - any other suffix: a text file with one name per line, numbered from 0
        """
        if not isinstance(path, str | os.PathLike):
            raise WrongTypeError(f"a vocabulary is a dasksc.tokens.Vocabulary, or the path of a file; got {path!r}")
        path = Path(path)
        try:
            if path.suffix in PICKLES:
                return cls(_unpickled(path))
            text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark
        except FileNotFoundError as error:
            raise MissingPathError(f"there is no vocabulary file {os.fspath(path)!r}") from error
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a text file: a .json of ids by name, or one name per line") from error
        if path.suffix != ".json":
            advice = "Give every name once, one per line, without blank lines"
            return cls(_numbered(text.removesuffix("\n").split("\n"), str(path), advice))
        try:
            ids = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(ids, dict):
            raise InputError(
                f'{path} must hold an object of ids by name, such as {{"CD4": 0}}; got a {type(ids).__name__}'
            )
        return cls(ids)

    @property
    def genes(self) -> list[str]:
        """Names of genes in ascending order of their ids, without special tokens (names in angle brackets)."""
        by_id = sorted(self.ids, key=self.ids.__getitem__)
        return [name for name in by_id if not (name.startswith("<") and name.endswith(">"))]

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} names, size {self.size})"

    def ids_of(self, genes: Iterable[str], *, missing: Missing = "error") -> NDArray[np.int64]:
        """Return the ids of genes, shape (n_genes,), int64; with ``missing="drop"``, -1 for those that are missing.

        If genes are missing and `missing` is ``"error"``, or if all are, a `MissingKeyError` names the first few.
        """
        names = [str(gene) for gene in genes]
        ids = np.fromiter((self.ids.get(name, -1) for name in names), dtype=np.int64, count=len(names))
        absent = [name for name, i in zip(names, ids, strict=True) if i < 0]
        if absent and len(absent) == len(names):
            raise MissingKeyError(
                f"the vocabulary has none of the {len(names)} genes ({some(absent)}). Use symbols in "
                "both, or Ensembl IDs in both"
            )
        if absent and missing == "error":
            raise MissingKeyError(
                f"{len(absent)} of {len(names)} genes are not in the vocabulary of {len(self)} names "
                f"({some(absent)}). Use symbols in both, or Ensembl IDs in both; missing='drop' leaves "
                "these genes out"
            )
        return ids


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler of plain types: it imports nothing, so that it has nothing to call."""

    # The unpickler in C would allocate as many entries as the largest index of its memo, which could exhaust memory.
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it also holds {module}.{name}")


def _unpickled(path: Path) -> dict[str, int]:
    """Unpickle a dict of ids by name. Raise an error for other content, because unpickling may execute code."""
    content = path.read_bytes()
    what = f"{path} must hold a pickled dict that maps names (strings) to ids (whole numbers)"
    try:
        ids = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # damaged bytes may raise any error
        raise InputError(
            f"{what}, and is not loaded: {error}. If you trust it, load it yourself, and give "
            "Vocabulary({str(name): int(i) for name, i in ids.items()})"
        ) from error
    if not isinstance(ids, dict) or not all(isinstance(name, str) and is_whole(i) for name, i in ids.items()):
        raise InputError(f"{what}; got {ids!r:.100}")
    return ids


def names_of(genes: Iterable[str]) -> list[str]:
    """Return the names of genes as a list of strings; raise an error for a single string, an AnnData or a table."""
    if isinstance(genes, str):
        raise WrongTypeError(f"genes={genes!r} is a string; give a list of names: genes=[{genes!r}]")
    if hasattr(genes, "var_names") or hasattr(genes, "columns"):
        name = "adata.var_names" if hasattr(genes, "var_names") else "var.index"
        raise WrongTypeError(f"genes is of type {type(genes).__name__}; give the names of its genes: {name}")
    if not isinstance(genes, Iterable):
        raise WrongTypeError(f"genes must be a list of names; got {genes!r}")
    return [str(gene) for gene in genes]


def _numbered(names: list[str], where: str, advice: str) -> dict[str, int]:
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) < len(names):
        twice = dict.fromkeys(name for i, name in enumerate(names) if ids[name] != i)
        raise InputError(f"duplicate names in {where}: {some(twice)}. {advice}")
    return ids
