"""Elementwise functions of CSR blocks with the semantics that Dask declares.

For Dask, ``X * s`` and ``X ** 2`` are elementwise, and the resulting array has the width of X. SciPy computes the
blocks, and for its ``csr_matrix`` these operators mean matrix product and matrix power. The result has a different
shape, so computing the array fails. If a block has as many rows as columns, the shape is the same but the values are
wrong. SciPy does not support ``X + 1``, ``da.clip(X, 0, 10)`` and similar calls. This module gives all of them the
elementwise result. Where zeros remain zero, blocks remain ``csr_matrix``: scanpy, anndata and Dask's serializers expect
that class, and user functions called with a block may use its ``*`` as the matrix product.

Each function in the tables below, and each ufunc with one result, is applied to the stored values of a block. It is
also applied to a zero. If the result is zero, the zeros of the block stay implicit, otherwise the block becomes dense.
NumPy's and SciPy's other functions do not know sparse blocks: some raise an error about a different matter, others
return the block unchanged. Called with a CSR block, they raise an error with their name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.task_spec import Task

from dasksc._compat.dask import Blockwise, blockwise_task, with_blockwise_task
from dasksc.errors import InputError
from dasksc.pushdown.csr_functions import OF_VALUES, is_canonical, is_csr, with_values

__all__ = ["ELEMENTWISE_FUNCTIONS", "DenseOnly", "Elementwise", "elementwise", "of_blocks"]

_PRODUCTS = (operator.mul, np.multiply)
# Python operators that Dask calls on blocks. SciPy gives them another meaning, or supports them for some operands only.
_OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow),
    *(operator.and_, operator.or_, operator.xor, operator.invert),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
ELEMENTWISE_FUNCTIONS = (
    *(np.clip, np.round, np.around, np.fix, np.where, np.nan_to_num, np.isclose),
    *(np.angle, np.i0, np.sinc, np.iscomplex, np.isposinf, np.isneginf),
)
# Keyword arguments with which Dask passes an elementwise function to a function of its own.
_FUNCTION_KEYWORDS = ("enforce_dtype_function", "elemwise_where_function")
# Functions of NumPy that use only methods and operators that SciPy's matrices have.
_METHODS = (
    *(np.real, np.imag, np.isreal, np.transpose, np.flip),
    *(np.sum, np.mean, np.min, np.max, np.amin, np.amax),
)


def elementwise(array: da.Array) -> da.Array:
    """Make the operators and functions in the graph of an array elementwise on CSR blocks."""
    # Return the array itself if no function in its graph needs to be replaced.
    before = array.dask.layers
    layers = {name: _with_layer(layer) for name, layer in before.items()}
    if all(layers[name] is layer for name, layer in before.items()):
        return array
    graph = HighLevelGraph(layers, array.dask.dependencies)
    return da.Array(graph, array.name, chunks=array.chunks, dtype=array.dtype, meta=da.utils.meta_from_array(array))


class Elementwise:
    """Function of blocks that is elementwise for every class of block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function elementwise."""
        # If the function keeps zeros, the result for a single CSR block is a CSR block that shares the index arrays of
        # the argument; otherwise it is dense.
        function = self._function
        args = tuple(map(_plain, args))
        blocks = [arg for arg in args if sp.issparse(arg)]
        if not blocks:
            return function(*args, **kwargs)
        others = [arg for arg in (*args, *kwargs.values()) if not sp.issparse(arg)]
        large = [other for other in others if np.ndim(other)]
        # A block with a single column or row may be broadcast to the shape of the other argument.
        shape = np.broadcast_shapes(*(np.shape(one) for one in (*blocks, *large)))
        if len(blocks) == 1 and len(large) <= 1 and shape == blocks[0].shape:
            return _of_values(functools.partial(_called, function, args, kwargs), blocks[0], *large)
        if function in _PRODUCTS and len(args) == 2 and not kwargs and all(np.isfinite(arg.data).all() for arg in args):
            return args[0].multiply(args[1]).tocsr()
        if function in (operator.add, operator.sub) and len({np.shape(arg) for arg in args}) == 1:
            return function(*args, **kwargs)  # SciPy's operators are elementwise, but do not broadcast
        return function(*(arg.toarray() if sp.issparse(arg) else arg for arg in args), **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of, (self._function,)


@functools.cache
def _of(function: Callable[..., Any]) -> Elementwise:
    """Return the same object for the same function, since tasks are compared by the identity of their functions."""
    return Elementwise(function)


class DenseOnly:
    """Function of NumPy or SciPy that does not know sparse blocks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with dense blocks."""
        if any(map(sp.issparse, args)):
            name = getattr(self.function, "__name__", repr(self.function))
            raise InputError(
                f"{name!r} of {_module_of(self.function)} cannot be applied to sparse blocks, since it does not know "
                "them. Make the blocks dense first: X.map_blocks(dasksc.row_local(lambda block: block.toarray()), "
                "dtype=X.dtype, meta=np.empty((0, 0)))"
            )
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _refusing, (self.function,)


@functools.cache
def _refusing(function: Callable[..., Any]) -> DenseOnly:
    return DenseOnly(function)


def of_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an elementwise function for every class of block, or one that refuses sparse blocks."""
    # Return `function` itself if it supports sparse blocks, or if this is unknown.
    if isinstance(function, functools.partial):
        inner = of_blocks(function.func)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    if _is_elementwise(function):
        return _of(function)
    return _refusing(function) if _is_dense_only(function) else function


def _is_elementwise(function: object) -> bool:
    if isinstance(function, np.ufunc):
        # SciPy applies the ufuncs in OF_VALUES elementwise. A ufunc with a signature, like matmul, is not elementwise.
        return function not in OF_VALUES and function.nout == 1 and function.signature is None
    if isinstance(function, np.vectorize):
        return function.signature is None
    return _is_one_of(function, (*_OPERATORS, *ELEMENTWISE_FUNCTIONS))


def _is_dense_only(function: object) -> bool:
    if isinstance(function, np.ufunc):
        return function not in OF_VALUES
    package, module, *_ = *_module_of(function).split("."), ""
    return package in ("numpy", "scipy") and module != "sparse" and not _is_one_of(function, _METHODS)


def _module_of(function: object) -> str:
    # The attribute __module__ of a wrapper may be that of the function that it wraps.
    if isinstance(function, FunctionType):
        return str(function.__globals__["__name__"])
    named = function if isinstance(function, type | BuiltinFunctionType) else type(function)
    return str(named.__module__)


def _is_one_of(function: object, functions: tuple[Any, ...]) -> bool:
    return any(function is one for one in functions)


def _plain(value: Any) -> Any:
    """Convert ``np.matrix`` to ``ndarray``, and other sparse formats to CSR."""
    # SciPy returns ``np.matrix`` for some operations on a sparse and a dense operand. The operators ``*`` and ``**`` of
    # that class are not elementwise.
    if isinstance(value, np.matrix):
        return np.asarray(value)
    return value.tocsr() if sp.issparse(value) and not is_csr(value) else value


def _called(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: Any, *others: Any
) -> Any:
    """Call a function with `values` in place of its sparse argument."""
    # `others` holds at most one array, which replaces the other array argument.
    given = [values if sp.issparse(arg) else others[0] if others and np.ndim(arg) else arg for arg in args]
    named = {key: others[0] if others and np.ndim(arg) else arg for key, arg in kwargs.items()}
    return function(*given, **named)


def _of_values(function: Callable[..., Any], block: Any, *others: Any) -> Any:
    """Apply a function to the stored values of a CSR block, and to its zeros if the function does not keep them."""
    # `others` holds at most one array, which is broadcast: it has the block's shape, or a single row or column.
    with np.errstate(all="ignore"):
        of_zeros = function(np.zeros(1, block.dtype), *others)
    if of_zeros.any():  # also True for NaN
        return function(block.toarray(), *others)
    if not is_canonical(block) or block.indptr[-1] != len(block.indices):  # add up duplicate entries first
        block = block.tocoo().tocsr()
    return with_values(block, function(block.data, *(_at_values(other, block) for other in others)))


def _at_values(array: Any, block: Any) -> Any:
    """Return the element of a broadcast array at the position of each stored value of a CSR block."""
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
    """Replace the functions of a task, and of tasks fused into it, by elementwise ones."""
    # Return the same object if there is nothing to replace.
    if isinstance(value, dict):
        changed = {key: _with_task(one) for key, one in value.items()}
        return changed if any(changed[key] is not one for key, one in value.items()) else value
    if type(value) is not Task:
        return value
    args = tuple(map(_with_task, value.args))
    function = of_blocks(value.func)
    # Dask calls functions with these keywords where it was given a dtype, or rows and columns to compute.
    kwargs = {key: of_blocks(one) if key in _FUNCTION_KEYWORDS else one for key, one in value.kwargs.items()}
    unchanged = all(map(operator.is_, (*args, *kwargs.values()), (*value.args, *value.kwargs.values())))
    if function is value.func and unchanged:
        return value
    return Task(value.key, function, *args, **kwargs)
