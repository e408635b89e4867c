"""Functions of blocks: which ones treat every row independently, and what they do to CSR blocks.

For Dask, ``X * s`` and ``X ** 2`` are elementwise. SciPy computes the matrix product and power for ``csr_matrix``, does
not support ``X + 1`` or ``da.clip(X, 0, 10)``, and NumPy's ``nan_to_num`` returns a CSR block unchanged. `for_blocks`
gives all of them the elementwise result: it applies the function to the stored values, among them stored zeros, NaN and
infinity, as NumPy would to an array. Implicit zeros become what the function makes of a zero. Blocks stay
``csr_matrix`` while zeros stay zero, and share the index arrays of the argument, which become read-only: the copies
that SciPy and scanpy make take a fifth of the processor time of normalized batches (benchmarks/README.md).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import scipy.sparse as sp
from dask.array import chunk
from dask.array import reductions as of_dask
from dask.base import tokenize
from dask.task_spec import DataNode, GraphNode, List, Task
from numpy.typing import NDArray

from dasksc._compat.dask import concatenate2, elemwise_handle_where, enforce_dtype, identity_cast
from dasksc.errors import InputError
from dasksc.pushdown.dask_arrays import chunk_extreme, chunk_moments, chunk_sum, combine_moments, variance_of

# Known elementwise functions other than ufuncs.
ELEMENTWISE = frozenset(
    [
        *(np.angle, np.around, np.clip, np.fix, np.i0, np.imag, np.isclose, np.iscomplex, np.isneginf, np.isposinf),
        *(np.isreal, np.nan_to_num, np.real, np.round, np.sinc, np.where, of_dask._sqrt),
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.and_, operator.or_, operator.xor, operator.invert, operator.abs, operator.neg, operator.pos),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    ]
)

# Functions that scanpy applies to chunks of Dask arrays, by module and name. The first multiplies or divides rows or
# columns by factors, which are another input of the task, so the graph shows whether they are aligned with rows.
_SCALE_ROWS = ("scanpy._utils", "axis_mul_or_truediv")
_SCANPY_SUMS = (
    ("scanpy._utils", "_.<locals>.sum_drop_keepdims"),  # scanpy 1.11
    ("scanpy._utils", "_.<locals>.aggregate_sum"),
    ("fast_array_utils.stats._utils", "_dask_block"),  # scanpy 1.12
)
# Conversions, and functions that only call the functions given to them or join columns.
_CONVERSIONS = frozenset(
    [
        *(np.asarray, np.ascontiguousarray, sp.csr_matrix, sp.csr_array, chunk.astype, list, tuple, variance_of),
        *(concatenate2, elemwise_handle_where, enforce_dtype, identity_cast, List.to_container),
    ]
)
# Functions that treat every row independently if they reduce columns only (``axis=1``).
_REDUCTIONS = frozenset(
    [
        *(np.sum, np.prod, np.min, np.max, np.mean, np.var, np.std, np.any, np.all, np.nansum, np.nanmin, np.nanmax),
        *(of_dask.chunk_max, of_dask.chunk_min, of_dask.mean_chunk, of_dask.mean_combine, of_dask.mean_agg),
        *(of_dask.moment_chunk, of_dask.moment_combine, of_dask.moment_agg),
        *(chunk_sum, chunk_extreme, chunk_moments, combine_moments),
    ]
)
# Functions of NumPy that use only methods and operators that SciPy's matrices have.
_METHODS = frozenset([np.transpose, np.flip])
# Libraries whose functions do not write into their arguments.
_LIBRARIES = frozenset(
    ["_operator", "builtins", "cytoolz", "dask", "dasksc", "fast_array_utils", "numpy", "scanpy", "scipy", "toolz"]
)


# Largest share of rows whose zeros become other values, as by a division by 0, up to which a block stays CSR.
_MOST_CHANGED = 0.1


class row_local:
    """Declare that a function of blocks computes every row from that row alone.

    ``array.map_blocks(dasksc.row_local(f))`` can be fetched row by row. Elementwise functions of NumPy, sums over genes
    and scanpy's ``normalize_total`` and ``log1p`` need no declaration. Any other function without a declaration is
    computed on whole chunks, since dasksc cannot tell whether it mixes rows. The declaration is not checked.

    Parameters
    ----------
    function
        Function called with blocks of any number of rows. Row i of its result may depend only on row i
        of its arguments, and on nothing that differs between calls.

    Examples
    --------
    >>> import numpy as np
    >>> adata = dasksc.open("atlas.h5ad")
    >>> adata.X = adata.X.map_blocks(dasksc.row_local(np.sqrt))
    >>> batch = next(iter(dasksc.scDataset(adata, batch_size=64, seed=0)))
    >>> batch.shape
    torch.Size([64, 300])
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._for_blocks = for_blocks(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._for_blocks(*args, **kwargs)

    def __dask_tokenize__(self) -> object:
        return ("dasksc.row_local", tokenize(self.function))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function,)


# Which functions treat every row independently


def unknown_function(task: Task) -> Any:
    """Return a function in a task that is not known to treat every row independently, or None if there is none."""
    return next((function for function, keywords in _calls(task) if not _is_known(function, keywords)), None)


def _is_known(function: Any, keywords: Mapping[str, Any]) -> bool:
    name = _name(function)
    if isinstance(function, row_local) or is_elementwise(function) or name == _SCALE_ROWS:
        return True
    if not _is_among(function, _REDUCTIONS) and name not in _SCANPY_SUMS:
        return _is_among(function, _CONVERSIONS)
    axis = keywords.get("axis")
    axes = axis if isinstance(axis, tuple) else (axis,)
    return axes != () and all(isinstance(one, int | np.integer) and one == 1 for one in axes)


def is_elementwise(function: Any) -> bool:
    """Return True if a function is known to be elementwise."""
    if isinstance(function, np.ufunc):  # of NumPy or SciPy; one with a signature, like matmul, combines elements
        return function.nout == 1 and function.signature is None
    if isinstance(function, np.vectorize):
        # Without `otypes`, the first element of a call determines the type of its results.
        return function.signature is None and function.otypes is not None
    return _is_among(function, ELEMENTWISE)


def _calls(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield every function in a task, also inside partial and composed functions, with its keyword arguments."""
    if isinstance(value, Task):
        yield from _inner_calls(value.func, value.kwargs)
        yield from _calls((value.args, value.kwargs))
    elif isinstance(value, DataNode):
        yield from _calls(value.value)
    elif isinstance(value, Mapping):
        yield from _calls(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _calls(part)
    elif callable(value) and not isinstance(value, GraphNode | type):
        yield from _inner_calls(value, {})


def _inner_calls(function: Any, keywords: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    if isinstance(function, functools.partial):
        # The keyword arguments of the call override those of the partial.
        yield from _inner_calls(function.func, {**function.keywords, **keywords})
        yield from _calls((function.args, function.keywords))
    elif hasattr(function, "first") and hasattr(function, "funcs"):  # toolz.compose
        yield from _calls((function.first, function.funcs))
    else:
        yield function, keywords


def _name(function: Any) -> tuple[str, str | None]:
    return getattr(function, "__module__", None) or type(function).__module__, getattr(function, "__qualname__", None)


def _is_among(function: Any, functions: Container[Any]) -> bool:
    try:
        return function in functions
    except TypeError:  # not hashable
        return False


# What functions do to CSR blocks


def with_blocks(value: Any) -> Any:
    """Return a task with functions as from `for_blocks`, also in tasks inside it."""
    if type(value) is dict:
        return {key: with_blocks(one) for key, one in value.items()}
    if type(value) is not Task:
        return value
    # Dask passes the function under these names if it was given a dtype, or rows and columns to compute.
    inner = ("enforce_dtype_function", "elemwise_where_function")
    kwargs = {key: for_blocks(one) if key in inner else one for key, one in value.kwargs.items()}
    return Task(value.key, for_blocks(value.func), *map(with_blocks, value.args), **kwargs)


def for_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same for dense blocks, and the elementwise result or an error for CSR."""
    if isinstance(function, functools.partial):
        return functools.partial(for_blocks(function.func), *function.args, **function.keywords)
    if is_elementwise(function):
        return functools.partial(_elementwise, function)
    if _name(function) == _SCALE_ROWS:
        return functools.partial(_scaled_rows, function)
    package, module, *_ = *_module_of(function).split("."), ""
    if function in (np.asarray, np.ascontiguousarray) or (_is_among(function, _REDUCTIONS) and package != "dasksc"):
        return lambda *args, **kwargs: function(*map(_dense, args), **kwargs)
    if package in ("numpy", "scipy") and module != "sparse" and not _is_among(function, _METHODS):
        return functools.partial(_of_dense, function)
    return function if package in _LIBRARIES else functools.partial(_with_own_arrays, function)


def _module_of(function: object) -> str:
    # The attribute __module__ of a wrapper may be that of the function that it wraps.
    if isinstance(function, FunctionType):
        return str(function.__globals__["__name__"])
    named = function if isinstance(function, type | BuiltinFunctionType) else type(function)
    return str(named.__module__)


def _elementwise(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Apply an elementwise function to blocks of any class."""
    args = tuple(map(_plain, args))
    blocks = [arg for arg in args if sp.issparse(arg)]
    if any(map(sp.issparse, kwargs.values())):
        args, kwargs, blocks = tuple(map(_dense, args)), {key: _dense(arg) for key, arg in kwargs.items()}, []
    if not blocks:
        return function(*args, **kwargs)
    others = [arg for arg in (*args, *kwargs.values()) if not sp.issparse(arg) and np.ndim(arg)]
    # A block with a single column or row may be broadcast to the shape of another argument.
    shape = np.broadcast_shapes(*(np.shape(one) for one in (*blocks, *others)))
    if len(blocks) == 1 and len(others) <= 1 and shape == blocks[0].shape:
        return _of_values(function, args, kwargs, blocks[0], *others)
    if len(blocks) == len(args) == 2 and not kwargs and all(block.dtype != np.float16 for block in blocks):
        if function in (operator.mul, np.multiply) and all(np.isfinite(block.data).all() for block in blocks):
            return args[0].multiply(args[1]).tocsr()
        if function in (operator.add, operator.sub) and args[0].shape == args[1].shape:
            return function(*args)  # SciPy's operators are elementwise, but do not broadcast
    return function(*map(_dense, args), **kwargs)


def _dense(arg: Any) -> Any:
    if not sp.issparse(arg):
        return arg
    # SciPy has no function for float16, the type of NumPy's square roots of 8-bit integers.
    return arg.astype(np.float32).toarray().astype(np.float16) if arg.dtype == np.float16 else arg.toarray()


def _of_values(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], block: Any, *others: Any
) -> Any:
    # `others` holds at most one array, which is broadcast: it has the block's shape, or a single row or column.
    def call(values: Any, *others: Any) -> Any:
        def given(arg: Any) -> Any:
            return values if sp.issparse(arg) else others[0] if others and np.ndim(arg) else arg

        return function(*map(given, args), **{key: given(arg) for key, arg in kwargs.items()})

    with np.errstate(all="ignore"):
        of_zero = call(np.zeros(1, block.dtype), *others)
    if of_zero.any():  # NaN is true
        changed = of_zero.any(axis=1) if of_zero.shape == (block.shape[0], 1) else np.ones(1, dtype=bool)
        if changed.mean() > _MOST_CHANGED or block.dtype == np.float16:
            return call(_dense(block), *others)
        block = _with_whole_rows(block, changed)
    if not block.has_canonical_format or block.indptr[-1] != len(block.indices):  # add up duplicate entries first
        block = block.copy()
        block.prune()
        block.sum_duplicates()
    return _with_values(block, call(block.data, *(_at_values(other, block) for other in others)))


def _with_whole_rows(block: Any, which: NDArray[np.bool_]) -> Any:
    """Return a CSR block that stores the zeros of some rows."""
    whole = _dense(block[which])
    n_rows, n_columns = whole.shape
    parts = whole.ravel(), np.tile(np.arange(n_columns), n_rows), n_columns * np.arange(n_rows + 1)
    order = np.argsort(np.concatenate([np.flatnonzero(~which), np.flatnonzero(which)]))
    return sp.vstack([block[~which], type(block)(parts, shape=whole.shape)], format="csr")[order]


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


def _scaled_rows(function: Callable[..., Any], /, block: Any, *args: Any, **kwargs: Any) -> Any:
    """Call scanpy's ``axis_mul_or_truediv`` in place on a new block that shares the original's index arrays."""
    # scanpy has no implementation for csr_array and returns a dense array for it.
    if not isinstance(block, sp.csr_matrix) or not block.has_canonical_format or kwargs.get("out") is not None:
        return function(block, *args, **kwargs)
    # scanpy replaces the data attribute of `like`; it does not write into the values of `block`.
    like = _with_values(block, block.data)
    return function(like, *args, **{**kwargs, "out": like})


def _of_dense(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of NumPy or SciPy that does not know sparse blocks: some give wrong values for them."""
    if any(map(sp.issparse, args)):
        name = getattr(function, "__name__", repr(function))
        raise InputError(
            f"{name!r} of {_module_of(function)} cannot be applied to sparse blocks, since it does not know "
            "them. Make the blocks dense first: X.map_blocks(dasksc.row_local(lambda block: block.toarray()), "
            "dtype=X.dtype, meta=np.empty((0, 0)))"
        )
    return function(*args, **kwargs)


def _with_own_arrays(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that may write into its blocks with copies of index arrays that other blocks share."""

    def owned(value: Any) -> Any:
        if not _is_csr(value) or (value.indices.flags.writeable and value.indptr.flags.writeable):
            return value
        return type(value)((value.data, value.indices.copy(), value.indptr.copy()), shape=value.shape, copy=False)

    return function(*map(owned, args), **kwargs)


def _plain(value: Any) -> Any:
    """Convert ``np.matrix`` to ``ndarray``, and other sparse formats to CSR."""
    # SciPy returns ``np.matrix`` for some operations on a sparse and a dense operand. The operators ``*`` and ``**`` of
    # that class are not elementwise.
    if isinstance(value, np.matrix):
        return np.asarray(value)
    return value.tocsr() if sp.issparse(value) and not _is_csr(value) else value


def _is_csr(block: Any) -> bool:
    return isinstance(block, sp.csr_matrix | sp.csr_array)


def _with_values(block: Any, values: NDArray[Any]) -> Any:
    """Return a canonical block with new values that shares the index arrays of `block`, which become read-only."""
    for shared in (block.indices, block.indptr):
        shared.flags.writeable = False
    result = type(block)((values, block.indices, block.indptr), shape=block.shape, copy=False)
    result.has_canonical_format = True  # checking that again would take a pass over the column indices
    return result
