"""Content of a batch as requested by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dasksc.batches.batch import torch_dtype
from dasksc.checks import names_or_none
from dasksc.errors import InputError, WrongTypeError
from dasksc.loader.genes import GeneRequest
from dasksc.storage import Layout
from dasksc.transforms.composed import Transforms

__all__ = ["BatchRequest"]


@dataclass(frozen=True)
class BatchRequest:
    """Content of a batch, as requested by the arguments of `scDataset`.

    Raises
    ------
    InputError
        If the value of an argument is invalid.
    """

    obs: Sequence[str] = ()
    layers: Sequence[str] = ()
    obsm: Sequence[str] = ()
    genes: GeneRequest = field(default_factory=GeneRequest)
    layout: Layout = "dense"
    dtype: Any = "float32"
    transform: Transforms | None = None
    pin_memory: bool = False
    in_sets: bool = False
    return_index: bool = False

    def __post_init__(self) -> None:
        for option in ("obs", "layers", "obsm"):
            names = getattr(self, option)
            if isinstance(names, str):
                raise WrongTypeError(f"{option}={names!r} is a string; give a list of names: {option}=[{names!r}]")
            object.__setattr__(self, option, tuple(names_or_none(option, names)))
        if self.layout not in ("dense", "csr"):
            raise InputError(f"layout must be 'dense' or 'csr'; got {self.layout!r}")

    @property
    def only_x(self) -> bool:
        """True if a batch is the tensor X rather than a `Batch`."""
        has_more = self.obs or self.layers or self.obsm or self.in_sets or self.return_index
        return not has_more and self.transform is None

    @property
    def value_dtype(self) -> np.dtype[Any] | None:
        """Data type of the values of X and the layers; None keeps that of each matrix.

        Raises
        ------
        InputError
            If tensors do not support the data type.
        """
        if self.dtype is None:
            return None
        name = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else self.dtype
        try:
            # Tensors have native byte order.
            result = np.dtype(name).newbyteorder("=")
            torch_dtype(result)
        except TypeError as error:
            raise InputError(
                f"dtype={self.dtype!r} is not supported by both NumPy and PyTorch; give a type such as 'float32' or "
                "'float16'"
            ) from error
        return result

    def refuse_matrix_options(self, why: str) -> None:
        """Raise an error for options that only apply to matrices of an atlas."""
        given = {name: getattr(self, name) for name in ("obs", "layers", "obsm") if getattr(self, name)}
        given |= {
            name: True
            for name, value in (("genes", self.genes.genes), ("transform", self.transform))
            if value is not None
        }
        if self.layout != "dense":
            given["layout"] = self.layout
        if self.return_index:
            given["return_index"] = True
        if given:
            names = ("obs", "layers", "obsm", "genes", "layout", "transform", "return_index")
            ordered = [name for name in names if name in given]
            raise InputError(f"{', '.join(f'{name}=' for name in ordered)} cannot be used here: {why}")
