"""Elementwise functions of CSR blocks, as the array that they are in declares them.

``X * s`` and ``X ** 2`` are elementwise for Dask, which declares an array as wide as X. Their blocks are computed by
SciPy, for whose ``csr_matrix`` they are matrix product and power: of another shape, so that computing such an array
fails, or of the same shape and wrong if a block has as many rows as columns. ``X + 1``, ``da.clip(X, 0, 10)`` and the
like SciPy does not know. Here they are what was declared. The blocks stay ``csr_matrix`` all the same where zeros stay
zero, since that is what scanpy, anndata and Dask's serialisers know, and what code in the user's hands takes ``*`` of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.task_spec import Task

from dasksc._compat.dask import Blockwise, blockwise_task, with_blockwise_task
from dasksc.pushdown.csr_functions import OF_VALUES, is_canonical, is_csr, with_values

__all__ = ["Elementwise", "elementwise"]

_PRODUCTS = (operator.mul, np.multiply)
# What Dask has Python's own functions for, and SciPy does otherwise, or for some arguments only.
_OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
    *(operator.and_, operator.or_, operator.xor, operator.invert),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
_FUNCTIONS = (np.clip, np.round, np.where)


def elementwise(array: da.Array) -> da.Array:
    """Return an array in whose graph such functions of CSR blocks are elementwise; the array itself if it has none."""
    before = array.dask.layers
    layers = {name: _with_layer(layer) for name, layer in before.items()}
    if all(layers[name] is layer for name, layer in before.items()):
        return array
    graph = HighLevelGraph(layers, array.dask.dependencies)
    return da.Array(graph, array.name, chunks=array.chunks, dtype=array.dtype, meta=da.utils.meta_from_array(array))


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
        large = [other for other in others if np.ndim(other)]
        if len(blocks) == 1 and len(large) <= 1:
            return _of_values(functools.partial(_called, function, args, kwargs), blocks[0], *large)
        if function in _PRODUCTS and len(args) == 2 and not kwargs and all(np.isfinite(arg.data).all() for arg in args):
            return args[0].multiply(args[1]).tocsr()
        if function in (operator.add, operator.sub):  # which SciPy does as declared
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


def _called(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: Any, *others: Any
) -> Any:
    """Call a function with `values` in the place of its block, and `others` in the place of its other array."""
    given = [values if sp.issparse(arg) else others[0] if others and np.ndim(arg) else arg for arg in args]
    named = {key: others[0] if others and np.ndim(arg) else arg for key, arg in kwargs.items()}
    return function(*given, **named)


def _of_values(function: Callable[..., Any], block: Any, *others: Any) -> Any:
    """Apply a function to the values of a CSR block; to zeros, too, if it makes something else of them.

    With another array of the block's shape, of one row for all, or of one column for all.
    """
    with np.errstate(all="ignore"):
        of_zeros = function(np.zeros(1, block.dtype), *others)
    if of_zeros.any():  # NaN is such a value
        return function(block.toarray(), *others)
    if not is_canonical(block) or block.indptr[-1] != len(block.indices):  # values at one place are added up first
        block = block.tocoo().tocsr()
    return with_values(block, function(block.data, *(_at_values(other, block) for other in others)))


def _at_values(array: Any, block: Any) -> Any:
    """Return what stands beside each value of a CSR block in an array that is broadcast to its shape."""
    n_rows, n_columns = block.shape
    array = np.atleast_2d(array)
    if array.shape == (1, n_columns):
        return array[0].take(block.indices)
    if array.shape == (n_rows, 1):
        return np.repeat(array[:, 0], np.diff(block.indptr))
    rows = np.repeat(np.arange(n_rows), np.diff(block.indptr))
    return np.broadcast_to(array, block.shape)[rows, block.indices]


def _with_layer(layer: Layer) -> Layer:
    if isinstance(layer, Blockwise):
        before = blockwise_task(layer)
        task = _with_task(before)
        return layer if task is before else with_blockwise_task(layer, task)
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
