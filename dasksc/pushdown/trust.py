"""Levels of confidence that a function of blocks treats every row independently.

A function does not reveal this property. Elementwise functions and reductions along axis 1, over the columns of each
row, are known to have it. `row_local` declares it for other functions. Functions of the libraries that array code
commonly uses are believed to have it until a trial shows otherwise. With ``dasksc.array-code: strict``, these functions
are not trusted.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from dask.base import tokenize
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef

from dasksc import config
from dasksc._compat.dask import ELEMENTWISE_NAMES, chunk
from dasksc._compat.scanpy import REDUCTION_NAMES, SCALE_ROWS
from dasksc.errors import InputError
from dasksc.pushdown.elementwise import ELEMENTWISE_FUNCTIONS, DenseOnly, Elementwise, of_blocks
from dasksc.pushdown.reductions import chunk_moments, chunk_sum, combine_moments, variance_of

__all__ = ["Trust", "calls", "is_strict", "row_local", "trust_in"]

Trust = Literal["known", "declared", "believed"]

# Libraries whose functions are believed to treat every row of a block independently. The trial detects functions that
# mix rows, such as a sort along axis 0.
BELIEVED = frozenset(
    [
        "_operator",
        "anndata",
        "builtins",
        "cytoolz",
        "dask",
        "fast_array_utils",
        "numba",
        "numpy",
        "operator",
        "scanpy",
        "scipy",
        "toolz",
    ]
)

_ELEMENTWISE = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(operator.and_, operator.or_, operator.xor, operator.invert, operator.neg, operator.pos, operator.abs),
        *(*ELEMENTWISE_FUNCTIONS, np.real, np.imag, np.isreal),
        # Conversions, which keep every value in its position.
        *(np.asarray, np.ascontiguousarray, sp.csr_matrix, sp.csr_array, chunk.astype, builtins.list, builtins.tuple),
        variance_of,
    ]
)
# SCALE_ROWS counts as elementwise: its scaling factors are a separate input of the task, so the graph shows whether
# they are aligned with the rows of the block.
_ELEMENTWISE_NAMES = ELEMENTWISE_NAMES | {SCALE_ROWS}

_REDUCTIONS = frozenset(
    getattr(module, name)
    for module in (np, chunk)
    for name in ("sum", "prod", "min", "max", "mean", "var", "std", "any", "all", "nansum", "nanmin", "nanmax")
    if hasattr(module, name)
) | {chunk_sum, chunk_moments, combine_moments}


class row_local:
    """Declare that a function of blocks computes every row from that row alone.

    ``array.map_blocks(dasksc.row_local(f))`` can be fetched row by row. Functions of NumPy, SciPy, Dask, scanpy and
    numba need no declaration, unless the setting ``dasksc.array-code`` is ``"strict"``. Any other function without a
    declaration is computed on whole chunks, since dasksc cannot tell whether it mixes rows.

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
        self._of_blocks = of_blocks(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._of_blocks(*args, **kwargs)

    def __dask_tokenize__(self) -> object:
        return ("dasksc.row_local", tokenize(self.function))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function,)


def is_strict() -> bool:
    """Return True if ``dasksc.array-code`` is ``"strict"``."""
    value = config.get("array-code")
    if value not in ("tried", "strict"):
        raise InputError(f"dasksc.array-code={value!r} in Dask's configuration must be 'tried' or 'strict'")
    return bool(value == "strict")


def trust_in(function: Any, keywords: Mapping[str, Any]) -> Trust | None:
    """Return the level of trust that a function treats every row independently, or None if there is none."""
    if isinstance(function, row_local):
        return "declared"
    name = getattr(function, "__module__", None) or type(function).__module__, getattr(function, "__qualname__", None)
    if _is_elementwise(function) or name in _ELEMENTWISE_NAMES:
        return "known"
    if (_is_among(function, _REDUCTIONS) or name in REDUCTION_NAMES) and _is_over_columns(keywords.get("axis")):
        return "known"
    return "believed" if name[0].split(".")[0] in BELIEVED else None


def calls(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield every function in a task, also inside partial and composed functions, with its keyword arguments."""
    if isinstance(value, Task):
        yield from _called(value.func, value.kwargs)
        yield from calls((value.args, value.kwargs))
    elif isinstance(value, DataNode):
        yield from calls(value.value)
    elif isinstance(value, Mapping):
        yield from calls(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from calls(part)
    elif callable(value):
        yield from _called(value, {})


def _called(function: Any, keywords: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    if isinstance(function, functools.partial):
        # The keyword arguments of the call override those of the partial.
        yield from _called(function.func, {**function.keywords, **keywords})
        yield from calls((function.args, function.keywords))
    elif isinstance(function, DenseOnly):
        yield from _called(function.function, keywords)
    elif isinstance(function, np.vectorize) and function.signature is not None:
        # With a signature, the wrapped function receives rows or whole blocks instead of single values.
        yield from calls(function.pyfunc)
    elif hasattr(function, "first") and hasattr(function, "funcs"):  # toolz.compose
        yield from calls((function.first, function.funcs))
    else:
        yield function, keywords


def _is_elementwise(function: Any) -> bool:
    if isinstance(function, np.ufunc):
        return function.signature is None
    # Graph nodes only refer to values or assemble the parts of a block.
    return isinstance(function, Elementwise | GraphNode | Alias | TaskRef) or _is_among(function, _ELEMENTWISE)


def _is_among(function: Any, functions: frozenset[Any]) -> bool:
    try:
        return function in functions
    except TypeError:  # not hashable
        return False


def _is_over_columns(axis: Any) -> bool:
    axes = axis if isinstance(axis, tuple) else (axis,)
    return axes != () and all(isinstance(one, int | np.integer) and one == 1 for one in axes)
