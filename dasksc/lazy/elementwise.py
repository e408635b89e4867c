"""Elementwise functions of CSR blocks, as the array that they are in declares them.

``X * s`` and ``X ** 2`` are elementwise for Dask, which declares an array as wide as X. Their blocks are computed by
SciPy, for whose ``csr_matrix`` they are matrix product and power: of another shape, so that computing such an array
fails, or of the same shape and wrong if a block has as many rows as columns. ``X + 1``, ``da.clip(X, 0, 10)`` and the
like SciPy does not know. Here they are what was declared. The blocks stay ``csr_matrix`` all the same where zeros stay
zero, since that is what scanpy, anndata and Dask's serialisers know, and what code in the user's hands takes ``*`` of.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask._task_spec import Task
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from dasksc.lazy.known import OF_VALUES, is_canonical, is_csr, with_values

__all__ = ["Elementwise", "elementwise"]

_PRODUCTS = (operator.mul, np.multiply)
# What Dask has Python's own functions for, and SciPy does otherwise, or for some arguments only.
_OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
)
_FUNCTIONS = (np.clip, np.round, np.where)


def elementwise(array: da.Array) -> da.Array:
    """Return an array in whose graph such functions of CSR blocks are elementwise; the array itself if it has none."""
    before = array.dask.layers
    layers = {name: _with_layer(layer) for name, layer in before.items()}
    if all(layers[name] is layer for name, layer in before.items()):
        return array
    graph = HighLevelGraph(layers, array.dask.dependencies)
    return da.Array(graph, array.name, chunks=array.chunks, dtype=array.dtype, meta=array._meta)


class Elementwise:
    """A function of blocks, elementwise whatever they are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; where zeros stay zero the result of a CSR block is one, and shares its index arrays."""
        function = self._function
        args = tuple(map(_plain, args))
        blocks = [arg for arg in args if sp.issparse(arg)]
        if not blocks:
            return function(*args, **kwargs)
        others = [arg for arg in (*args, *kwargs.values()) if not sp.issparse(arg)]
        if len(blocks) == 1 and all(np.ndim(other) == 0 for other in others):
            return _of_values(functools.partial(_with_block, function, args, kwargs), blocks[0])
        if function in _PRODUCTS and len(args) == 2 and not kwargs:
            one, other = args
            return _scaled(one, other) if sp.issparse(one) else _scaled(other, one)
        if function in (operator.add, operator.sub, operator.truediv):  # which SciPy does as declared
            return function(*args, **kwargs)
        return function(*(arg.toarray() if sp.issparse(arg) else arg for arg in args), **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of, (self._function,)


@functools.cache
def _of(function: Callable[..., Any]) -> Elementwise:
    """One of each: tasks with the same function in them are found to be alike."""
    return Elementwise(function)


def _is_wanted(function: object) -> bool:
    if isinstance(function, np.ufunc):
        # Those of the values alone SciPy does as they are; matmul is no such function.
        return function not in OF_VALUES and function.nout == 1 and function.signature is None
    return any(function is one for one in (*_OPERATORS, *_FUNCTIONS))


def _plain(value: Any) -> Any:
    """What SciPy makes of a block and a dense one without the meaning of ``*`` and ``**`` that it has for matrices."""
    if isinstance(value, np.matrix):
        return np.asarray(value)
    return value.tocsr() if sp.issparse(value) and not is_csr(value) else value


def _with_block(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], block: Any) -> Any:
    return function(*(block if sp.issparse(arg) else arg for arg in args), **kwargs)


def _of_values(function: Callable[[Any], Any], block: Any) -> Any:
    """Apply a function to the values of a CSR block; to zeros, too, if it makes something else of them."""
    with np.errstate(all="ignore"):
        of_zero = function(np.zeros(1, block.dtype))[0]
    if of_zero != 0:
        return function(block.toarray())
    if not is_canonical(block):  # values at one place are added up first
        block = block.copy()
        block.sum_duplicates()
    return with_values(block, function(block.data))


def _scaled(block: Any, factors: Any) -> Any:
    if sp.issparse(factors) or block.indptr[0] != 0 or block.indptr[-1] != len(block.indices):
        return block.multiply(factors).tocsr()
    n_rows, n_columns = block.shape
    factors = np.atleast_2d(factors)
    if factors.shape == (1, n_columns):
        return with_values(block, block.data * factors[0].take(block.indices))
    if factors.shape == (n_rows, 1):
        return with_values(block, block.data * np.repeat(factors[:, 0], np.diff(block.indptr)))
    return block.multiply(factors).tocsr()


def _with_layer(layer: Layer) -> Layer:
    if isinstance(layer, Blockwise):
        task = _with_task(layer.task)
        if task is layer.task:
            return layer
        changed = copy.copy(layer)
        changed.task = task
        # Its tasks, if it has made them.
        vars(changed).pop("_cached_dict", None)
        return changed
    if isinstance(layer, MaterializedLayer):
        tasks = {key: _with_task(node) for key, node in layer.mapping.items()}
        if any(tasks[key] is not node for key, node in layer.mapping.items()):
            return MaterializedLayer(tasks, annotations=layer.annotations)
    return layer


def _with_task(value: Any) -> Any:
    """A task whose functions are elementwise, also those of tasks fused into it; the very same if it has none."""
    if isinstance(value, dict):
        changed = {key: _with_task(one) for key, one in value.items()}
        return changed if any(changed[key] is not one for key, one in value.items()) else value
    if type(value) is not Task:
        return value
    args = tuple(map(_with_task, value.args))
    function = _of(value.func) if _is_wanted(value.func) else value.func
    if function is value.func and all(map(operator.is_, args, value.args)):
        return value
    return Task(value.key, function, *args, **value.kwargs)
