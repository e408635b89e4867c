"""What a batch holds of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from dasksc.atlas.lookup import known
from dasksc.batches.batch import Batch, torch_dtype
from dasksc.errors import InputError, WrongTypeError
from dasksc.sampling.arrays import array_of
from dasksc.storage import Columns, Layout

__all__ = ["BatchRequest", "columns_of"]


@dataclass(frozen=True)
class BatchRequest:
    """What a batch holds of its rows, as the arguments of `scDataset` say.

    Raises
    ------
    InputError
        If a value is none that the argument takes.
    """

    obs: Sequence[str] = ()
    layers: Sequence[str] = ()
    obsm: Sequence[str] = ()
    genes: Any = None
    layout: Layout = "dense"
    dtype: Any = "float32"
    transform: Callable[[Batch], Any] | None = None
    pin_memory: bool = False
    in_sets: bool = False

    def __post_init__(self) -> None:
        for option in ("obs", "layers", "obsm"):
            names = getattr(self, option)
            if isinstance(names, str):
                raise WrongTypeError(f"{option}={names!r} is a string; give a list of names: {option}=[{names!r}]")
            object.__setattr__(self, option, tuple(names))
        if self.layout not in ("dense", "csr"):
            raise InputError(f"layout must be 'dense' or 'csr'; got {self.layout!r}")

    @property
    def only_x(self) -> bool:
        """Whether a batch is X alone, a tensor rather than a `Batch`."""
        return not (self.obs or self.layers or self.obsm or self.in_sets) and self.transform is None

    @property
    def value_dtype(self) -> np.dtype[Any] | None:
        """Type of the values of X and the layers; None: that of each matrix.

        Raises
        ------
        InputError
            If tensors cannot have it.
        """
        if self.dtype is None:
            return None
        name = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else self.dtype
        try:
            # Tensors have no byte order.
            result = np.dtype(name).newbyteorder("=")
            torch_dtype(result)
        except TypeError as error:
            raise InputError(f"dtype={self.dtype!r} is no type that tensors gathered from NumPy can have") from error
        return result

    def refuse_where_rows_are_indexed(self, why: str) -> None:
        """Refuse the options that only matrices of an atlas have."""
        given = {name: getattr(self, name) for name in ("obs", "layers", "obsm") if getattr(self, name)}
        given |= {name: True for name in ("genes", "transform") if getattr(self, name) is not None}
        if self.layout != "dense":
            given["layout"] = self.layout
        if given:
            ordered = [name for name in ("obs", "layers", "obsm", "genes", "layout", "transform") if name in given]
            raise InputError(f"{', '.join(f'{name}=' for name in ordered)} cannot be used here: {why}")


def columns_of(genes: Any, var_names: Iterable[Any]) -> Columns | None:
    """Return the columns that names, a mask or positions choose; None: all."""
    if genes is None:
        return None
    n_vars = len(cast(Sequence[Any], var_names))
    if isinstance(genes, str):
        raise WrongTypeError(f"genes={genes!r} is a string; give a list of names: genes=[{genes!r}]")
    if isinstance(genes, set | frozenset | Mapping):
        # The order of a set differs between processes, and with it the columns.
        raise WrongTypeError(f"genes is a {type(genes).__name__}, which has no order; give a list: genes=sorted(...)")
    wanted = np.arange(n_vars)[genes] if isinstance(genes, slice) else array_of("genes", genes)
    if wanted.ndim != 1:
        raise InputError(f"genes has shape {wanted.shape}; give one list of names, a mask or positions")
    if wanted.dtype == np.bool_:
        if wanted.shape != (n_vars,):
            raise InputError(f"genes is a mask of shape {wanted.shape} for {n_vars} columns")
        wanted = np.flatnonzero(wanted)
    if not len(wanted):
        raise InputError("genes leave no column; give at least one")
    if wanted.dtype.kind not in "iu":
        if wanted.dtype.kind not in "UOT":
            raise InputError(f"genes holds {wanted.dtype}; names, a mask or whole positions are needed")
        position: dict[Any, int] = {}
        repeated = set()
        for i, name in enumerate(var_names):
            if position.setdefault(name, i) != i:
                repeated.add(name)
        unclear = [name for name in wanted.tolist() if name in repeated]
        if unclear:
            raise InputError(f"var_names repeats {unclear[:3]}, so they do not say which column; give positions")
        wanted = np.array([position[known("var_names", name, position)] for name in wanted.tolist()], dtype=np.int64)
    elif wanted.max() >= n_vars:  # also those that int64 does not hold
        raise InputError(f"genes holds position {wanted.max()}; positions lie in [0, {n_vars})")
    return Columns(wanted.astype(np.int64), n_vars)
