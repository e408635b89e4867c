"""Matrices over a Dask array, which compute whole row chunks, or single rows from single rows of stored matrices.

For single rows, planning passes the rows of a fetch down through the nodes (`dasksc.pushdown.compiler`) to the stored
matrices, and returns a step for each group of nodes. After one read per matrix, the steps compute the values.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.base import normalize_token
from dask.core import toposort
from dask.local import get_sync
from dask.optimization import cull
from dask.sizeof import sizeof
from dask.task_spec import DataNode, GraphNode
from dask.utils import ensure_dict
from numpy.typing import NDArray

from dasksc._compat.dask import convert_legacy_graph
from dasksc.errors import InputError
from dasksc.pushdown.compiler import Apply, Compiler, Concat, Key, Node, Read, Take, at_rows, layer_of
from dasksc.pushdown.dask_arrays import gather_block
from dasksc.pushdown.functions import with_blocks
from dasksc.storage import FetchCost, Layout, Matrix, RowBuffer, as_matrix, join
from dasksc.storage.matrices import check_rows

# The number of values in a CSR chunk is unknown until the chunk is computed.
_ASSUMED_DENSITY = 0.1
# Largest total size of the results that row chunks share. A statistic per gene takes far less.
_KEPT_BYTES = 2**26


class DaskMatrix:
    """Matrix over any Dask array; a fetch computes every row chunk that contains a requested row."""

    # Chunks are computed one after another on the calling thread. Only the requested rows of each are kept, so memory
    # holds one row chunk at a time, and the result. Intermediate results that both the first and the last row chunk
    # use, such as a mean over the rows, are computed by the first fetch and kept if they are small.

    def __init__(self, array: da.Array) -> None:
        self.array = array
        self.label = f"Dask array {array.name}"
        self.layout = _layout_of(array)
        self.shape: tuple[int, int] = (int(array.shape[0]), int(array.shape[1]))
        self.dtype: np.dtype[Any] = array.dtype
        self.stored_dtype = self.dtype  # values are computed, not stored
        self._pickled: bytes | None = None
        self._bounds = np.concatenate([[0], np.cumsum(array.chunks[0])]).astype(np.int64)
        self._with_shared: Mapping[Key, GraphNode] | None = None
        self._sharing = threading.Lock()

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch; the number of values in a sparse chunk is an assumption."""
        row = self._row_bytes()
        chunk_rows = max(self.array.chunks[0], default=0)
        return FetchCost(
            row=row,
            held=row,
            working=row,
            fixed=int(3 * row * chunk_rows),
            chunk_rows=chunk_rows,
            decoded_rows=chunk_rows,
        )

    def _row_bytes(self) -> float:
        n_vars, itemsize = self.shape[1], self.dtype.itemsize
        if self.layout == "dense":
            return max(1, n_vars * itemsize)
        return 8 + n_vars * _ASSUMED_DENSITY * (itemsize + 4)

    @cached_property
    def _tasks(self) -> dict[Key, GraphNode]:
        tasks: dict[Key, GraphNode] = convert_legacy_graph(ensure_dict(self.array.dask))
        return tasks

    def _keys(self, number: int) -> list[Key]:
        """Return the keys of a row chunk, one per column chunk."""
        return [(self.array.name, number, place) for place in range(self.array.numblocks[1])]

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Compute the row chunks that contain `rows` and return those rows."""
        rows = check_rows(self.label, self.shape[0], rows)
        with self._sharing:
            if self._with_shared is None:
                keys = _shared_keys(self._tasks, self._keys(0), self._keys(len(self._bounds) - 2))
                self._with_shared = _with_computed(self._tasks, keys)
        kept = [
            self._joined(_computed(self._with_shared, self._keys(number)), self.array.chunks[0][number])[
                rows[start:stop] - self._bounds[number]
            ]
            for number, start, stop in runs_by_block(rows, self._bounds)
        ]
        return self._fetched(concatenate_rows(kept) if kept else self._empty())

    def _fetched(self, block: NDArray[Any] | sp.csr_matrix) -> RowBuffer:
        return as_matrix(block, self.label).fetch(np.arange(block.shape[0], dtype=np.int64))

    def _empty(self) -> NDArray[Any] | sp.csr_matrix:
        shape = (0, self.shape[1])
        return sp.csr_matrix(shape, dtype=self.dtype) if self.layout == "csr" else np.empty(shape, dtype=self.dtype)

    def _joined(self, parts: Iterable[Any], n_rows: int) -> NDArray[Any] | sp.csr_matrix:
        """Join the column chunks of `n_rows` rows, and check their shapes."""
        blocks = []
        for part, width in zip(parts, self.array.chunks[1], strict=True):
            if np.shape(part) != (n_rows, width):
                raise InputError(
                    f"{self.label}: array {self.array.name!r} computed a block of shape {np.shape(part)}, but "
                    f"{(n_rows, width)} was declared. If a function in map_blocks changes the number of columns, "
                    "declare it: map_blocks(f, chunks=(array.chunks[0], (n_columns,)), dtype=..., meta=...). It must "
                    "not change the number of rows."
                )
            if self.layout == "csr":
                blocks.append(sp.csr_matrix(part))
            else:
                blocks.append(part.toarray() if sp.issparse(part) else np.asarray(part))
        if len(blocks) == 1:
            return blocks[0]
        return sp.csr_matrix(sp.hstack(blocks, format="csr")) if self.layout == "csr" else np.hstack(blocks)

    def __dask_tokenize__(self) -> object:
        return ("dasksc.DaskMatrix", normalize_token(self.array), self.label)

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader workers receive the matrix by plain pickle, which cannot serialize lambdas given to map_blocks.
        if self._pickled is None:
            self._pickled = cloudpickle.dumps(self.array)
        return _load_dask_matrix, (type(self), self._pickled)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.array!r})"


# Matrices are sent to other processes with every fetch. The cache avoids unpickling the same graphs each time.
@lru_cache(maxsize=8)
def _load_dask_matrix(kind: type[DaskMatrix], state: bytes) -> DaskMatrix:
    return kind(cloudpickle.loads(state))


def _layout_of(array: da.Array) -> Layout:
    # If the class of the blocks has no ``dtype``, the public ``da.utils.meta_from_array`` returns the array instead.
    meta = array._meta
    if sp.issparse(meta):
        return "csr"
    if isinstance(meta, np.ndarray):
        return "dense"
    raise InputError(
        f"the Dask array {array.name!r} has chunks of {type(meta).__module__}.{type(meta).__qualname__}; "
        "numpy and scipy.sparse chunks can be read. Convert them, e.g. array.map_blocks(np.asarray)."
    )


def runs_by_block(rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(number, start, stop)`` for each block with some of the ascending `rows`, namely ``rows[start:stop]``."""
    cuts = np.searchsorted(rows, bounds)
    for number, (start, stop) in enumerate(pairwise(cuts.tolist())):
        if stop > start:
            yield number, start, stop


def concatenate_rows(blocks: list[Any]) -> Any:
    """Concatenate blocks along the rows."""
    if len(blocks) == 1:
        return blocks[0]
    if not any(map(sp.issparse, blocks)):
        return np.concatenate(blocks)
    joined = sp.vstack(list(map(_wide, blocks)), format="csr")
    joined.data = joined.data.astype(np.result_type(*(block.dtype for block in blocks)), copy=False)
    return joined


def _wide(block: Any) -> Any:
    """Return a block in a type that SciPy supports, which float16 is not."""
    return block.astype(np.float32) if block.dtype == np.float16 else block


def _indexed(block: Any, index: Any) -> Any:
    if not sp.issparse(block) or block.dtype != np.float16:
        return block[index]
    taken = _wide(block)[index]
    taken.data = taken.data.astype(np.float16)
    return taken


def _computed(tasks: Mapping[Key, GraphNode], keys: list[Key]) -> list[Any]:
    """Compute keys on the calling thread; functions are elementwise for CSR blocks, too."""
    needed = {key: with_blocks(task) for key, task in cull(tasks, keys)[0].items()}
    # Without callbacks=(), the inner computation would report to the callbacks of the outer one.
    return list(get_sync(da.optimize(needed, keys), keys, callbacks=()))


def _shared_keys(tasks: Mapping[Key, GraphNode], first: list[Key], last: list[Key]) -> set[Key]:
    """Return the keys that tasks of both row chunks, but of no common result, use directly."""
    shared: set[Key] = set()
    while True:
        # The next pass finds what the results found by this one hid: the mean in (X - mean) / std(X - mean).
        cut = {**tasks, **{key: DataNode(key, None) for key in shared}}
        needed = [cull(cut, keys)[0] for keys in (first, last)]
        common = needed[0].keys() & needed[1].keys()
        used = [
            {one for key in chunk.keys() - common for one in chunk[key].dependencies if cut[one].dependencies}
            for chunk in needed
        ]
        if not (more := common & used[0] & used[1]):
            return shared
        shared |= more


def _with_computed(tasks: Mapping[Key, GraphNode], keys: set[Key]) -> Mapping[Key, GraphNode]:
    """Compute some keys, and return the tasks with the values in place of these keys, or as they are if too large."""
    # One value per layer is computed first; the layer's others are assumed to be as large.
    if not keys:
        return tasks
    samples = {layer_of(key): key for key in keys}
    values = dict(zip(samples.values(), _computed(tasks, list(samples.values())), strict=True))
    if sum(sizeof(values[samples[name]]) * n for name, n in Counter(map(layer_of, keys)).items()) > _KEPT_BYTES:
        return tasks
    if rest := list(keys - values.keys()):
        values |= zip(rest, _computed(tasks, rest), strict=True)
    return {**tasks, **{key: DataNode(key, value) for key, value in values.items()}}


# Row numbers for each of several nodes.
Needs = tuple[NDArray[np.int64], ...]
Step = Callable[[], Any]

# Approximate number of rows computed together. With fewer rows, results would stay in the CPU cache from one layer to
# the next, but threads would return to Python more often and wait for each other, which costs more.
N_COMPUTED = 4096


class Plan:
    """Rows that a fetch needs of each matrix, the steps that compute on them, and the constants that they use."""

    def __init__(self, tasks: Mapping[Key, GraphNode], constants: dict[Key, Any]) -> None:
        self.needs: dict[int, tuple[Matrix, list[NDArray[np.int64]]]] = {}
        # The steps of a group of row chunks: each is planned and computed once.
        self.steps: dict[Hashable, tuple[Step, Needs]] = {}
        self._fetched: dict[int, tuple[NDArray[np.int64], RowBuffer]] = {}
        self._tasks = tasks
        # Constants that all rows share outlive this fetch.
        self._constants = constants
        self._row_constants: dict[Key, Any] = {}

    def step(self, nodes: tuple[Node, ...], needs: Needs) -> Step:
        """Return a function that computes and concatenates rows of nodes of the same kind."""
        key = (*map(id, nodes), *map(id, needs))
        if key not in self.steps:
            # `needs` is kept, so that the ids in the key are not reused.
            self.steps[key] = functools.cache(_PLANNED[type(nodes[0])](self, nodes, needs)), needs
        return self.steps[key][0]

    def read(self, fetch: Callable[[Matrix, NDArray[np.int64]], RowBuffer]) -> None:
        """Call `fetch` once per matrix to obtain the rows that are needed."""
        for number, (matrix, parts) in self.needs.items():
            rows = np.unique(np.concatenate(parts))
            self._fetched[number] = rows, fetch(matrix, rows)

    def _block(self, matrix: Matrix, wanted: NDArray[np.int64], columns: NDArray[np.int64] | None) -> Any:
        rows, fetched = self._fetched[id(matrix)]
        return gather_block(fetched, np.searchsorted(rows, wanted), columns)

    def _constant(self, key: Key, *, aligned: bool) -> Any:
        """Return the value of a key that does not depend on a stored matrix."""
        known = self._row_constants if aligned else self._constants
        if key not in known:
            needed, dependencies = cull(self._tasks, [key])
            values: dict[Key, Any] = {}
            for one in toposort(needed, dependencies=dependencies):
                values[one] = with_blocks(needed[one])(values)
            known[key] = values[key]
        return known[key]

    def _read(self, nodes: tuple[Read, ...], needs: Needs) -> Step:
        matrix, columns = nodes[0].matrix, nodes[0].columns
        wanted = np.concatenate([at_rows(node.rows, need) for node, need in zip(nodes, needs, strict=True)])
        self.needs.setdefault(id(matrix), (matrix, []))[1].append(wanted)
        return lambda: self._block(matrix, wanted, columns)

    def _take(self, nodes: tuple[Take, ...], needs: Needs) -> Step:
        # With `needs` itself, the step of a node that others use, too, is found again.
        if not all(isinstance(node.rows, range) and node.rows == range(node.child.n_rows) for node in nodes):
            needs = tuple(at_rows(node.rows, need) for node, need in zip(nodes, needs, strict=True))
        step = self.step(tuple(node.child for node in nodes), needs)
        rest = nodes[0].rest
        return (lambda: _indexed(step(), (slice(None), *rest))) if rest else step

    def _concat(self, nodes: tuple[Concat, ...], needs: Needs) -> Step:
        # Children of the same kind are computed together.
        groups: dict[int, list[tuple[Node, NDArray[np.int64], NDArray[np.int64]]]] = {}
        n_before = 0
        for node, need in zip(nodes, needs, strict=True):
            which = np.searchsorted(node.bounds, need, side="right") - 1
            for number in np.unique(which).tolist():
                child, here = node.children[number], np.flatnonzero(which == number)
                part = child, need[here] - node.bounds[number], n_before + here
                groups.setdefault(child.kind, []).append(part)
            n_before += len(need)
        children, rows, places = zip(*(zip(*group, strict=True) for group in groups.values()), strict=True)
        steps = list(map(self.step, children, rows))
        order = np.argsort(np.concatenate([place for group in places for place in group]), kind="stable")
        return lambda: _indexed(concatenate_rows([step() for step in steps]), order)

    def _apply(self, nodes: tuple[Apply, ...], needs: Needs) -> Step:
        # One call of the first task serves all nodes: their tasks differ only in the names of their inputs.
        first = nodes[0]
        children = zip(*(node.inputs.values() for node in nodes), strict=True)
        steps = {key: self.step(several, needs) for key, several in zip(first.inputs, children, strict=True)}

        def value() -> Any:
            values = {key: step() for key, step in steps.items()}
            keys = zip(*(node.constants for node in nodes), strict=True)
            for (key, aligned), several in zip(first.constants.items(), keys, strict=True):
                constants = [self._constant(one, aligned=aligned) for one in several]
                values[key] = _aligned(constants, nodes, needs) if aligned else constants[0]
            return with_blocks(first.task)(values)

        return value


_PLANNED: dict[type[Node], Callable[..., Step]] = {
    Read: Plan._read,
    Take: Plan._take,
    Concat: Plan._concat,
    Apply: Plan._apply,
}


def _aligned(constants: list[Any], nodes: tuple[Apply, ...], needs: Needs) -> Any:
    """Concatenate the needed rows of the constants of several nodes."""
    first = constants[0]
    if all(one is first for one in constants) and first.shape[0] == 1 != min(node.n_rows for node in nodes):
        return first  # a single row, shared by all nodes, is broadcast
    return concatenate_rows(
        [
            constant[need if constant.shape[0] == node.n_rows else np.zeros(len(need), dtype=np.int64)]
            for constant, node, need in zip(constants, nodes, needs, strict=True)
        ]
    )


class RowLocalMatrix(DaskMatrix):
    """Matrix over a Dask array, each row of which comes from single rows of stored matrices."""

    def __init__(self, array: da.Array) -> None:
        super().__init__(array)
        compiler = Compiler(array, self._tasks)
        self._blocks = compiler.blocks()
        self._constants: dict[Key, Any] = {}
        if self.layout == "dense" and compiler.has_elementwise and self.shape[0]:
            self.layout = self._computed_layout()

    def _computed_layout(self) -> Layout:
        """Return the layout of a row that is computed from made-up stored rows."""
        # Dask's meta may be wrong for elementwise functions, since Dask infers it from SciPy's matrix products and
        # powers.
        plan, steps, _ = self._one_row()
        if not any(matrix.layout == "csr" for matrix, _ in plan.needs.values()):
            return self.layout
        plan.read(_made_up_rows)
        try:
            with np.errstate(all="ignore"):
                return "csr" if all(sp.issparse(step()) for step in steps) else self.layout
        except Exception:  # a function may raise anything for such rows
            return self.layout

    def _one_row(self) -> tuple[Plan, list[Step], int]:
        plan = Plan(self._tasks, self._constants)
        return plan, *self._steps(plan, (0,), (np.zeros(1, dtype=np.int64),))

    def _steps(self, plan: Plan, numbers: Sequence[int], needs: Needs) -> tuple[list[Step], int]:
        """Plan rows of row chunks of one kind; return one step per column chunk, and the number of all steps."""
        steps = [plan.step(nodes, needs) for nodes in zip(*(self._blocks[number] for number in numbers), strict=True)]
        n_steps = len(plan.steps)
        plan.steps = {}  # steps refer to the plan: in a cycle, values and files stay until the garbage collector runs
        return steps, n_steps

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch: stored rows, results of all layers of the graph, and the concatenated result."""
        # The estimate assumes that layers keep zeros, so that a sparse row has as many values as it has in storage.
        if not self.shape[0]:
            return super().cost
        plan, _, n_steps = self._one_row()
        matrices = [matrix for matrix, _ in plan.needs.values()]
        costs = [matrix.cost for matrix in matrices]
        row = self._row_bytes()
        if self.layout == "csr" and costs:
            itemsize = self.dtype.itemsize + np.dtype(np.int32).itemsize
            # Stored column indices take at least two bytes each.
            values = sum(matrix.cost.row / (matrix.stored_dtype.itemsize + 2) for matrix in matrices)
            row = 8 + min(values, self.shape[1]) * itemsize
        return FetchCost(
            row=row,
            held=row,
            working=sum(cost.held + cost.working for cost in costs) + (2 + n_steps) * row,
            fixed=sum(cost.fixed for cost in costs),
            kept=sum(cost.kept for cost in costs),
            chunk_rows=max((cost.chunk_rows for cost in costs), default=0.0),
            decoded_rows=max((cost.decoded_rows for cost in costs), default=0.0),
        )

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Read the rows that `rows` depend on, with one fetch per stored matrix, and compute on them."""
        rows = check_rows(self.label, self.shape[0], rows)
        if not len(rows):
            return self._fetched(self._empty())
        wanted = [
            (number, first, rows[first : min(first + N_COMPUTED, stop)] - self._bounds[number])
            for number, start, stop in runs_by_block(rows, self._bounds)
            for first in range(start, stop, N_COMPUTED)
        ]

        def kinds(one: tuple[int, int, Any]) -> tuple[list[int], int]:
            return [node.kind for node in self._blocks[one[0]]], one[1] // N_COMPUTED

        plan = Plan(self._tasks, self._constants)
        groups: list[tuple[int, list[Step]]] = []
        for _, several in itertools.groupby(wanted, key=kinds):
            numbers, _, needs = zip(*several, strict=True)
            groups.append((sum(map(len, needs)), self._steps(plan, numbers, needs)[0]))
        plan.read(lambda matrix, rows: matrix.fetch(rows))
        blocks = []
        while groups:
            # The values of a group are freed before those of the next, which find its memory in the CPU cache.
            n_rows, steps = groups.pop(0)
            blocks.append(self._joined((step() for step in steps), n_rows))
        if len({_dtypes(block) for block in blocks}) > 1:
            blocks = [concatenate_rows(blocks)]
        # The blocks stay separate: copying them into one costs as much as a layer of the graph.
        return join(list(map(self._fetched, blocks)))


def _dtypes(block: Any) -> tuple[np.dtype[Any], ...]:
    return (block.dtype, block.indices.dtype) if sp.issparse(block) else (block.dtype,)


def _made_up_rows(matrix: Matrix, rows: NDArray[np.int64]) -> RowBuffer:
    # Their sums and variances are not 0, so that zeros divided by these stay zeros.
    values = np.tile(1 + np.arange(matrix.shape[1]) % 2, (len(rows), 1)).astype(matrix.dtype)
    block = sp.csr_matrix(values) if matrix.layout == "csr" else values
    return as_matrix(block, "made-up rows").fetch(np.arange(len(rows), dtype=np.int64))
