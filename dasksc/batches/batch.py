"""Minibatches of tensors, gathered from the rows of a fetch."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from dasksc.displays import brief, first_of
from dasksc.errors import InputError, MissingKeyError
from dasksc.executor.tasks import FetchedMatrices
from dasksc.storage import Columns, Layout, RowBuffer, buffers

# PyTorch warns once per process, at the first sparse CSR tensor, that such tensors are in beta. If warnings are errors,
# this one would end an epoch, so it is triggered and ignored here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), size=(1, 1))


# Both index arrays of a CSR tensor must have the same type, and columns are int32.
_MOST_NONZEROS = np.iinfo(np.int32).max
# Number of entries in the error for a missing key.
_N_SHOWN = 20


class _Named(dict[str, Any]):
    """Dict whose error for a missing key lists its entries, and whose copies have its type."""

    def copy(self) -> Self:
        return copy.copy(self)

    def __or__(self, others: Any) -> Self:  # type: ignore[override]
        joined = self.copy()
        joined.update(others)
        return joined

    def __missing__(self, key: Any) -> Any:
        raise MissingKeyError(self._lacks(key))

    def _lacks(self, key: Any) -> str:
        held = first_of([name for _, _, name in _leaves(self)], _N_SHOWN)
        return (
            f"there is no {key!r} here{f', only {held}' if held else ''}. scDataset adds the columns, layers and "
            "entries of obsm that obs=, layers= and obsm= name"
        )


class Categories(_Named):
    """Labels of obs columns, in the order of their codes."""


class NamedTensors(_Named):
    """Tensors of one part of a batch (obs, layers or obsm), by name."""

    n_classes: Mapping[str, int] = MappingProxyType({})  # of each tensor of codes, for display


class Batch(_Named):
    """A minibatch: a dict of tensors whose items are also attributes.

    A `Batch` can be constructed from any mapping or sequence of pairs. Code that moves or copies dicts of tensors
    (DataLoader, DataParallel, Lightning, Accelerate) therefore returns a `Batch`. Printing a batch shows the name,
    shape, data type and number of classes of each tensor, without values.

    Parameters
    ----------
    items
        Tensors by name: a mapping, or pairs of names and tensors.
    **tensors
        Further tensors by name.

    Attributes
    ----------
    X
        Shape (batch, n_vars), dense or sparse CSR. Column indices within a CSR row ascend and are unique.
    obs
        Dict of tensors of shape (batch,). Categoricals and strings are int64 codes, -1 for missing values. Dates and
        durations are seconds, float64.
    layers, obsm
        Dicts of tensors whose first dimension is the batch. With `dasksc.Modalities`, the batch instead holds one
        `Batch` of X, layers and obsm per modality, by name (``batch["rna"].X``), and a single obs and index.
    index
        Row numbers in the collection, shape (batch,), int64.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type"], seed=0)
    >>> batch = next(iter(dataset))
    >>> batch
    Batch
      X                 (64, 300) float32
      obs['cell_type']  (64,) int64, 6 classes
      index             (64,) int64
    >>> batch.X.shape, batch.obs["cell_type"].dtype
    (torch.Size([64, 300]), torch.int64)
    """

    # inspect cannot determine the signature of a dict.
    __signature__ = inspect.Signature(
        [
            inspect.Parameter("items", inspect.Parameter.POSITIONAL_ONLY, default=()),
            inspect.Parameter("tensors", inspect.Parameter.VAR_KEYWORD),
        ]
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._lacks(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise AttributeError(f"{name!r} is a method of batches; set the item: batch[{name!r}] = ...")
        if hasattr(type(self), name):  # such as a property of a subclass
            super().__setattr__(name, value)
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self:
            del self[name]
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self)]

    def __repr__(self) -> str:
        leaves = list(_leaves(self))
        width = max((len(name) for *_, name in leaves), default=0)
        lines = [f"  {name:<{width}}  {_described(entries, key)}" for entries, key, name in leaves]
        return "\n".join([type(self).__name__, *lines])

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Return the batch with every tensor on `device`.

        Parameters
        ----------
        device
            Target device, as for ``torch.Tensor.to``.
        non_blocking
            If True, do not wait for copies from pinned memory.

        Raises
        ------
        InputError
            If `device` is a data type. Converting row numbers and labels would lose information.
        """
        if isinstance(device, torch.dtype):
            raise InputError(
                f"Batch.to takes a device; got the data type {device}, which cannot hold row numbers and labels "
                "exactly. Convert batch.X alone, or request the type of X: "
                f"scDataset(..., dtype={str(device).removeprefix('torch.')!r})"
            )
        return cast(Batch, map_tensors(self, lambda tensor: on_device(tensor, device, non_blocking=non_blocking)))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory."""
        return cast(Batch, map_tensors(self, lambda tensor: by_parts(tensor, torch.Tensor.pin_memory)))


def device_of(given: torch.device | str | int) -> torch.device:
    """Return a device of PyTorch; raise an `InputError` if `given` does not name one."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={given!r} is not a device of PyTorch, such as 'cpu' or 'cuda:0': {error}") from error


def on_device(tensor: torch.Tensor, device: torch.device | str | int, *, non_blocking: bool = False) -> torch.Tensor:
    """Return `tensor` on `device`."""
    # ``Tensor.to`` releases the GIL even if the tensor is already on `device`. While other threads make batches, it
    # takes milliseconds to reacquire the GIL.
    return tensor if tensor.device == torch.device(device) else tensor.to(device, non_blocking=non_blocking)


def _leaves(entries: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[Mapping[Any, Any], Any, str]]:
    """Yield each entry that is not a mapping: its containing mapping, its key, and the expression for it."""
    for key, value in entries.items():
        is_attribute = isinstance(entries, Batch) and isinstance(key, str) and key.isidentifier()
        name = f"{prefix}.{key}".lstrip(".") if is_attribute else f"{prefix}[{key!r}]"
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield entries, key, name


def _described(entries: Mapping[Any, Any], key: Any) -> str:
    tensor = entries[key]
    if not isinstance(tensor, torch.Tensor):
        return brief(tensor)
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout == torch.sparse_csr:
        text += f", sparse CSR with {tensor.values().numel():,} values"
    elif tensor.layout != torch.strided:
        text += f", {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type != "cpu":
        text += f", on {tensor.device}"
    n_classes = entries.n_classes if isinstance(entries, NamedTensors) else {}
    return f"{text}, {n_classes[key]:,} classes" if key in n_classes else text


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Apply `function` to each tensor in a batch, and `other` to each object that is neither tensor nor container."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _Named) or (isinstance(value, Mapping) and not hasattr(value, "to")):
        items = {key: map_tensors(item, function, other) for key, item in value.items()}
        if not isinstance(value, _Named):
            return items
        mapped = type(value)(items)
        # Only attributes that were set: the default of `n_classes` cannot be pickled.
        vars(mapped).update(vars(value))
        return mapped
    if isinstance(value, list | tuple):
        made: Callable[[Any], Any] = getattr(value, "_make", type(value))  # named tuples have `_make`
        return made(map_tensors(item, function, other) for item in value)
    return other(value)


def by_parts(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `function` to a tensor or, if it is CSR, to its row pointers, columns and values."""
    if tensor.layout != torch.sparse_csr:
        return function(tensor)
    indptr, indices, values = map(function, (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    return csr_tensor(indptr, indices, values, (tensor.shape[0], tensor.shape[1]))


def check_rows(matrix: torch.Tensor, index: torch.Tensor, what: str) -> torch.Tensor:
    """Return a dense or CSR matrix with one row per number in `index`, which kernels need; refuse others."""
    if matrix.layout not in (torch.strided, torch.sparse_csr) or matrix.shape[:1] != index.shape:
        raise InputError(
            f"{what} takes a dense or CSR matrix with a row for each of the {len(index)} cells in `index`; got "
            f"{str(matrix.layout).removeprefix('torch.')} of shape {tuple(matrix.shape)}"
        )
    return matrix


def csr_tensor(
    indptr: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Return a CSR tensor of its parts."""
    # The arrays are valid by construction; checking them would cost a pass over the nonzeros.
    return torch.sparse_csr_tensor(indptr, indices, values, size=shape, check_invariants=False)


class Memory:
    """Memory in which the arrays of a batch are gathered, and their tensors; here, that of this process."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array."""
        return buffers.empty(shape, dtype)

    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a tensor that shares the memory of a contiguous array, whose data type may be `BFLOAT16`."""
        if array.dtype.kind == "V":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaker:
    """Thread-safe assembly of minibatches from fetched rows."""

    obs: Mapping[str, NDArray[Any]]  # encoded columns by name, each of shape (n_obs,)
    n_classes: Mapping[str, int]  # of each column of codes; batches hold codes as int64, whatever their stored type
    layout: Layout  # of X and the layers; obsm is always dense
    dtype: np.dtype[Any] | None  # None keeps the data type of each matrix
    columns: Mapping[str, Columns]  # by key of the matrix; matrices without an entry keep all columns
    only_x: bool  # yields the tensor X rather than a `Batch`
    modalities: tuple[str, ...] = ()  # their matrices have keys such as "rna:X"; empty for a single modality
    expanded: frozenset[str] = frozenset()  # matrices that are CSR here, and become dense on the device

    def make(
        self,
        fetched: FetchedMatrices,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        memory: Memory,
    ) -> torch.Tensor | Batch:
        """Gather a batch from a fetch into `memory`: the row numbers `rows` of the fetch at some `positions`."""
        if self.only_x:
            return self._tensor("X", fetched.parts["X"], positions, memory)
        index = rows[positions]
        obs = NamedTensors(
            (
                name,
                memory.tensor(column[index].astype(np.int64 if name in self.n_classes else column.dtype, copy=False)),
            )
            for name, column in self.obs.items()
        )
        obs.n_classes = self.n_classes
        batch = Batch()
        if self.modalities:
            for name in self.modalities:
                batch[name] = self._grouped(fetched, positions, f"{name}:", memory)
            batch["obs"] = obs
        else:
            one = self._grouped(fetched, positions, "", memory)
            batch.update(X=one.pop("X"), obs=obs, **one)
        batch["index"] = memory.tensor(index)
        return batch

    def _grouped(self, fetched: FetchedMatrices, positions: NDArray[np.int64], prefix: str, memory: Memory) -> Batch:
        """Gather the matrices of one modality: X, layers and obsm."""
        batch = Batch(X=None, layers=NamedTensors(), obsm=NamedTensors())
        for key, buffer in fetched.parts.items():
            if not key.startswith(prefix):
                continue
            group, _, name = key.removeprefix(prefix).partition("/")
            tensor = self._tensor(key, buffer, positions, memory)
            if name:
                batch[group][name] = tensor
            else:
                batch[group] = tensor
        return batch

    def _tensor(self, key: str, buffer: RowBuffer, positions: NDArray[np.int64], memory: Memory) -> torch.Tensor:
        columns = self.columns.get(key)
        dtype = tensor_dtype(buffer.dtype) if self.dtype is None else self.dtype
        shape = len(positions), buffer.shape[1] if columns is None else len(columns)
        if is_obsm(key) or (self.layout == "dense" and key not in self.expanded):
            out = memory.empty(shape, dtype)
            buffer.gather(positions, out=out, columns=columns)
            return memory.tensor(out)
        indptr, indices, data = buffer.gather_csr(positions, dtype=dtype, columns=columns, empty=memory.empty)
        if indptr[-1] > _MOST_NONZEROS:
            raise InputError(
                f"a batch of {len(positions)} rows has {indptr[-1]} nonzeros, but a sparse tensor holds at most "
                f"{_MOST_NONZEROS}. Lower batch_size"
            )
        starts = memory.empty(len(indptr), np.int32)
        starts[:] = indptr
        indptr_there, indices_there, data_there = map(memory.tensor, (starts, indices, data))
        return csr_tensor(indptr_there, indices_there, data_there, shape)


def is_obsm(key: str) -> bool:
    """Return True for a matrix of obsm: ``"obsm/X_pca"``, or ``"rna:obsm/X_pca"`` for several modalities."""
    group, slash, _ = key.partition("/")
    return bool(slash) and group.endswith("obsm")


def tensor_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type of tensors for values of `dtype`: native byte order, at most float64."""
    if dtype.kind == "f" and dtype.itemsize > 8:
        return np.dtype(np.float64)
    return dtype.newbyteorder("=")


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the PyTorch equivalent of a NumPy data type or `BFLOAT16`."""
    return Memory().tensor(np.empty(0, dtype=dtype)).dtype
