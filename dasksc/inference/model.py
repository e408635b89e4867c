"""Calls of a model on batches, and the arrays that it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dasksc.errors import InputError, WrongTypeError

# File names have at most 255 bytes. The name of a work folder may contain the key and the name of the store, so keys
# must be shorter.
_NAME_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A function to call with each batch, and the module whose parameters it uses, if known."""

    function: Callable[[Any], Any]
    module: nn.Module | None

    @classmethod
    def of(cls, model: Any) -> Predictor:
        """Unwrap a module, a method of one, or a function."""
        if isinstance(model, type):
            raise WrongTypeError(f"model is the class {model.__name__}; give an instance: {model.__name__}(...)")
        if not callable(model):
            raise WrongTypeError(f"model must be a torch.nn.Module or a function of a batch; got {model!r}")
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        if isinstance(model, nn.Module):
            return cls(function=model, module=model)
        owner = model.__self__ if isinstance(model, MethodType) else None
        if not isinstance(owner, nn.Module):
            return cls(function=model, module=None)
        if isinstance(owner, FSDPModule):
            # FSDP gathers the parameters only in calls of the module itself and of methods registered as forward
            # methods.
            register_fsdp_forward_method(owner, model.__name__)
            model = getattr(owner, model.__name__)
        return cls(function=model, module=owner)

    @property
    def is_sharded(self) -> bool:
        """True if parameters are gathered from all ranks in every call."""
        return self.module is not None and any(isinstance(part, FSDPModule) for part in self.module.modules())

    @property
    def device(self) -> torch.device | None:
        """Device of the first parameter or buffer; None if there are none."""
        if self.module is None:
            return None
        held = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return None if held is None else held.device

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradients and set the module to evaluation mode; restore the mode of each submodule."""
        parts = [] if self.module is None else [(part, part.training) for part in self.module.modules()]
        # FSDP frees and refills parameters in place. PyTorch forbids this for inference tensors once inference mode has
        # ended, so a sharded model runs under `no_grad`.
        mode = torch.no_grad() if self.is_sharded else torch.inference_mode()
        try:
            if self.module is not None:
                self.module.eval()
            with mode:
                yield
        finally:
            for part, was_training in parts:
                part.training = was_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Specification of one array of predictions: a matrix of obsm, or a column of obs, whose width is None."""

    name: str
    width: int | None
    dtype: str

    @property
    def key(self) -> str:
        return f"obs/{self.name}" if self.width is None else f"obsm/{self.name}"

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * (1 if self.width is None else self.width)

    def shape(self, n_rows: int) -> tuple[int, ...]:
        return (n_rows,) if self.width is None else (n_rows, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Conversion of the results of a model to arrays, with the name of unnamed results and labels by name."""

    key: str
    categories: Mapping[str, Sequence[Any]]

    def arrays(self, returned: Any, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the results of a model for a batch of `n_rows` rows as arrays, in ascending order of their names."""
        given = returned if isinstance(returned, Mapping) else {self.key: returned}
        if not given:
            raise InputError("the model returned an empty dict; expected an array or {name: array}")
        if missing := [name for name in self.categories if name not in given]:
            raise InputError(
                f"categories= has the key {missing[0]!r}, but the model returned only {', '.join(map(repr, given))}"
            )
        arrays = {check_name(name): self._array(name, value, n_rows) for name, value in given.items()}
        return dict(sorted(arrays.items()))

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
        if value.ndim not in (1, 2) or len(value) != n_rows or 0 in value.shape:
            raise InputError(
                f"the model returned {name!r} of shape {value.shape} for a batch of {n_rows} cells; expected "
                f"({n_rows}, k), or ({n_rows},) for a column of obs"
            )
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise InputError(f"the model returned {name!r} of type {value.dtype}; expected numbers of at most 64 bits")
        return self._codes(name, value) if name in self.categories else value

    def _codes(self, name: str, codes: NDArray[Any]) -> NDArray[Any]:
        n_labels = len(self.categories[name])
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise InputError(
                f"categories= has the key {name!r}, an output of shape {codes.shape} and type {codes.dtype}; expected "
                "one integer code per cell, such as scores.argmax(1)"
            )
        if codes.min() < -1 or codes.max() >= n_labels:
            raise InputError(
                f"{name!r} has codes from {codes.min()} to {codes.max()}, and categories= has {n_labels} labels for "
                f"it; expected codes in [0, {n_labels}), or -1 for a missing value"
            )
        return codes.astype(np.min_scalar_type(-max(1, n_labels)))

    def described(self, arrays: Mapping[str, NDArray[Any]]) -> list[Output]:
        return [
            Output(
                name=name,
                width=None if array.ndim == 1 else array.shape[1],
                dtype=array.dtype.newbyteorder("=").name,
            )
            for name, array in arrays.items()
        ]


def check_name(name: Any) -> str:
    """Return the name of an output; refuse it if it cannot be a key of a store."""
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
    """Refuse outputs that differ in names, widths or types from those of other batches."""
    if list(expected) == list(found):
        return

    def summary(outputs: Sequence[Output]) -> str:
        return ", ".join(
            f"{one.name!r} {one.dtype} of shape ({', '.join(['n', *map(str, one.shape(0)[1:])])})" for one in outputs
        )

    raise InputError(
        f"the model returned {summary(found)} for {where}, and {summary(expected)} for other cells. A model must "
        "return the same names, widths and types for every batch"
    )


def nan_rows(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the rows with NaN."""
    return np.flatnonzero(np.isnan(array).reshape(len(array), -1).any(axis=1))


def check_categories(categories: Any) -> dict[str, list[Any]]:
    """Return the labels of categorical outputs as plain types, by name; refuse labels that are not categories."""
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
    labels = pd.Index(list(given))
    kinds = ("string", "boolean", "integer", "floating")
    if labels.inferred_type not in kinds or labels.hasnans or not labels.is_unique:
        raise InputError(
            f"categories[{name!r}] has labels such as {list(labels[:3])!r}; expected distinct labels, all text or all "
            "numbers, none missing, one for each code. The code -1 stands for a missing value"
        )
    return list(labels.to_list())
