"""Products with CSR blocks, elementwise, as the array that they are in declares them.

``X * s`` is elementwise for Dask, which declares an array as wide as X. Its blocks are multiplied by SciPy, for whose
``csr_matrix`` that is the matrix product: of the shape declared for no vector, so that computing such an array fails.
Here it is what was declared. The blocks stay ``csr_matrix`` all the same, since that is what scanpy, anndata and Dask's
serialisers know, and what code in the user's hands takes ``*`` of.
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

from dasksc.lazy.known import is_csr, with_values

__all__ = ["Product", "elementwise_products"]

_PRODUCTS = (operator.mul, np.multiply)


def elementwise_products(array: da.Array) -> da.Array:
    """Return an array in whose graph products with CSR blocks are elementwise; the array itself if it has none."""
    before = array.dask.layers
    layers = {name: _with_products(layer) for name, layer in before.items()}
    if all(layers[name] is layer for name, layer in before.items()):
        return array
    graph = HighLevelGraph(layers, array.dask.dependencies)
    return da.Array(graph, array.name, chunks=array.chunks, dtype=array.dtype, meta=array._meta)


class Product:
    """A product of two blocks, elementwise whatever they are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, one: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiply; with a CSR block the result is one, and shares its index arrays."""
        if np.ndim(one) == 0 or np.ndim(other) == 0 or not (sp.issparse(one) or sp.issparse(other)):
            return self._function(one, other, *args, **kwargs)
        return _scaled(one, other) if sp.issparse(one) else _scaled(other, one)

    def __reduce__(self) -> tuple[Any, ...]:
        return product, (self._function,)


@functools.cache
def product(function: Callable[..., Any]) -> Product:
    """One of each: tasks with the same function in them are found to be alike."""
    return Product(function)


def _scaled(block: Any, factors: Any) -> Any:
    if not is_csr(block) or sp.issparse(factors) or block.indptr[0] != 0 or block.indptr[-1] != len(block.indices):
        return block.multiply(factors).tocsr()
    n_rows, n_columns = block.shape
    factors = np.atleast_2d(factors)
    if factors.shape == (1, n_columns):
        return with_values(block, block.data * factors[0].take(block.indices))
    if factors.shape == (n_rows, 1):
        return with_values(block, block.data * np.repeat(factors[:, 0], np.diff(block.indptr)))
    return block.multiply(factors).tocsr()


def _with_products(layer: Layer) -> Layer:
    if isinstance(layer, Blockwise):
        task = _with_product(layer.task)
        if task is layer.task:
            return layer
        changed = copy.copy(layer)
        changed.task = task
        # Its tasks, if it has made them.
        vars(changed).pop("_cached_dict", None)
        return changed
    if isinstance(layer, MaterializedLayer):
        tasks = {key: _with_product(node) for key, node in layer.mapping.items()}
        if any(tasks[key] is not node for key, node in layer.mapping.items()):
            return MaterializedLayer(tasks, annotations=layer.annotations)
    return layer


def _with_product(value: Any) -> Any:
    """A task whose products are elementwise, also those of tasks fused into it; the very same if it has none."""
    if isinstance(value, dict):
        changed = {key: _with_product(one) for key, one in value.items()}
        return changed if any(changed[key] is not one for key, one in value.items()) else value
    if type(value) is not Task:
        return value
    args = tuple(map(_with_product, value.args))
    function = product(value.func) if any(value.func is one for one in _PRODUCTS) else value.func
    if function is value.func and all(map(operator.is_, args, value.args)):
        return value
    return Task(value.key, function, *args, **value.kwargs)
