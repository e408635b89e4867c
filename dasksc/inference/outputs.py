"""Outputs of a model: named arrays with one row per cell, checked batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dasksc.errors import InputError, WrongTypeError

__all__ = ["Output", "Outputs", "check_categories", "check_name", "check_same", "nan_rows"]

# File names have at most 255 bytes. The name of a work folder may contain the key and the name of the store, so keys
# must be shorter.
_NAME_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Specification of one array of predictions.

    Parameters
    ----------
    name
        Name in obs or obsm.
    width
        Number of columns of a matrix in obsm; None for a column of obs.
    dtype
        Data type of the values.
    labels
        Labels of the codes of a categorical column of obs.
    """

    name: str
    width: int | None
    dtype: str
    labels: tuple[Any, ...] | None = None

    @property
    def key(self) -> str:
        """Key of the array in a store."""
        return f"obs/{self.name}" if self.width is None else f"obsm/{self.name}"

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return max(1, np.dtype(self.dtype).itemsize * (1 if self.width is None else self.width))

    def shape(self, n_rows: int) -> tuple[int, ...]:
        """Return the shape of an array of `n_rows` rows."""
        return (n_rows,) if self.width is None else (n_rows, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Conversion of the results of a model to arrays.

    Parameters
    ----------
    key
        Name of an array that the model returns without a name.
    categories
        Labels of categorical outputs, by name.
    """

    key: str
    categories: Mapping[str, Sequence[Any]]

    def arrays(self, returned: Any, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the results of a model for a batch of `n_rows` rows as arrays, by name.

        Raises
        ------
        WrongTypeError
            If the result is not an array, a tensor or a dict of these.
        InputError
            If an array does not have `n_rows` rows, has more than two dimensions, or is not numeric; if a code has no
            label; or if `categories` names an output that the model does not return.
        """
        given = returned if isinstance(returned, Mapping) else {self.key: returned}
        if not given:
            raise InputError("the model returned an empty dict; expected an array or {name: array}")
        if missing := [name for name in self.categories if name not in given]:
            raise InputError(
                f"categories= has the key {missing[0]!r}, but the model returned only {', '.join(map(repr, given))}"
            )
        return {check_name(name): self._array(name, value, n_rows) for name, value in given.items()}

    def _array(self, name: str, value: Any, n_rows: int) -> NDArray[Any]:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise InputError(f"{name!r} is a sparse tensor; return a dense one: .to_dense()")
            value = value.detach()
            # NumPy lacks this data type.
            value = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
        if not isinstance(value, np.ndarray):
            raise WrongTypeError(
                f"the model returned {name!r} as {type(value).__name__}; expected a tensor, an array or a dict of these"
            )
        if value.ndim not in (1, 2) or len(value) != n_rows:
            raise InputError(
                f"the model returned {name!r} of shape {value.shape} for a batch of {n_rows} cells; expected "
                f"({n_rows}, k), or ({n_rows},) for a column of obs"
            )
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise InputError(f"the model returned {name!r} of type {value.dtype}; expected numbers of at most 64 bits")
        return value if name not in self.categories else self._codes(name, value)

    def _codes(self, name: str, codes: NDArray[Any]) -> NDArray[Any]:
        n_labels = len(self.categories[name])
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise InputError(
                f"categories= has the key {name!r}, an output of shape {codes.shape} and type {codes.dtype}; expected "
                "one integer code per cell, such as scores.argmax(1)"
            )
        if len(codes) and (codes.min() < -1 or codes.max() >= n_labels):
            raise InputError(
                f"{name!r} has codes from {codes.min()} to {codes.max()}, and categories= has {n_labels} labels for "
                f"it; expected codes in [0, {n_labels}), or -1 for a missing value"
            )
        return codes.astype(np.min_scalar_type(-max(1, n_labels)))

    def described(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Output, ...]:
        """Return the specifications of arrays, in ascending order of their names."""
        return tuple(
            Output(
                name=name,
                width=None if array.ndim == 1 else array.shape[1],
                dtype=array.dtype.newbyteorder("=").name,
                labels=tuple(self.categories[name]) if name in self.categories else None,
            )
            for name, array in sorted(arrays.items())
        )


def check_name(name: Any) -> str:
    """Return the name of an output, if it is valid.

    Raises
    ------
    InputError
        If the name cannot be a key of a store.
    """
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or not 0 < len(name.encode()) <= _NAME_BYTES
        or set(name) & set("/\\")
        or name.startswith((".", "__"))
        or name in ("_index", "zarr.json")  # the names of the cells, and the metadata of the group
    ):
        raise InputError(
            f"{name!r} cannot be a key of obsm or obs. Give a name such as 'X_emb': at most {_NAME_BYTES} bytes, no "
            "'/', '\\' or control characters, no '.' or '__' at the beginning, and not a name that the store reserves"
        )
    return name


def check_same(expected: Sequence[Output], found: Sequence[Output], where: str) -> None:
    """Raise an error for outputs that differ from those of other batches.

    Raises
    ------
    InputError
        If names, widths, types or labels differ.
    """
    if tuple(expected) == tuple(found):
        return

    def summary(outputs: Sequence[Output]) -> str:
        return ", ".join(
            f"{one.name!r} {one.dtype} of shape ({', '.join(['n', *map(str, one.shape(0)[1:])])})" for one in outputs
        )

    raise InputError(
        f"the model returned {summary(found)} for {where}, and {summary(expected)} for other cells. A model must "
        "return the same names, widths and types for every batch"
    )


def nan_rows(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.int64]]:
    """Return the rows with NaN by output; outputs without NaN are left out."""
    found = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            is_nan = np.isnan(array)
            found[name] = np.flatnonzero(is_nan if is_nan.ndim == 1 else is_nan.any(axis=1))
    return found


def check_categories(categories: Any) -> dict[str, list[Any]]:
    """Return the labels of categorical outputs as plain types, by name.

    Raises
    ------
    WrongTypeError
        If `categories` is not a mapping, or labels are not in an ordered sequence.
    InputError
        If labels are missing, repeat, or are neither all text nor all numbers.
    """
    if categories is None:
        return {}
    if not isinstance(categories, Mapping):
        raise WrongTypeError(
            f"categories={categories!r} is not a dict; give labels by name: {{'predicted': ['B', 'T']}}"
        )
    return {check_name(name): _labels(name, given) for name, given in categories.items()}


def _labels(name: str, given: Any) -> list[Any]:
    # The order of a set differs between processes.
    if isinstance(given, str | bytes | Mapping | set | frozenset) or not hasattr(given, "__iter__"):
        raise WrongTypeError(
            f"categories[{name!r}] is {given!r}; give the labels in the order of the codes: ['B', 'T']"
        )
    labels = [label.item() if isinstance(label, np.generic) else label for label in given]
    if not labels:
        raise InputError(f"categories[{name!r}] has no labels; give one for each code")
    is_one_kind = any(all(type(label) is kind for label in labels) for kind in (str, bool, int, float))
    if not is_one_kind or any(isinstance(label, float) and not math.isfinite(label) for label in labels):
        raise InputError(
            f"categories[{name!r}] has labels such as {labels[:3]!r}; expected all text or all numbers, none missing. "
            "The code -1 stands for a missing value"
        )
    if len(set(labels)) < len(labels):
        repeated = next(label for i, label in enumerate(labels) if label in labels[:i])
        raise InputError(f"categories[{name!r}] has the label {repeated!r} twice; labels must differ")
    return labels
