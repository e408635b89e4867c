"""Intermediate results that most row chunks of an array share, computed once.

Row chunks are computed one at a time, so that memory holds only one of them. In ``D - D.mean(axis=0)`` each row chunk
needs the mean, which reads every row. Computing the mean again for each chunk would read the whole array once per
chunk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.sizeof import sizeof
from dask.task_spec import DataNode, GraphNode

from dasksc._compat.dask import convert_legacy_graph, ensure_dict, get_sync, toposort

__all__ = ["shared_keys", "with_computed"]

Key = Any

# Largest total size of the cached results. A statistic per gene takes far less.
_KEPT_BYTES = 2**26


def shared_keys(array: da.Array) -> set[Key]:
    """Return the keys of intermediate results that at least half of the row chunks use directly."""
    # The result excludes the dependencies of these keys. It also excludes keys that only neighboring row chunks share,
    # such as the chunks before a rechunk, since caching these would amount to caching the whole array.
    n_row_chunks, n_column_chunks = array.numblocks
    if n_row_chunks < 2:
        return set()
    nodes: dict[Key, GraphNode] = convert_legacy_graph(ensure_dict(array.dask))
    below = {key: node.dependencies & nodes.keys() for key, node in nodes.items()}
    upwards = toposort(nodes, dependencies=below)
    # Each set of row chunks is a bit mask in a Python integer.
    outputs = {(array.name, i, j): 1 << i for i in range(n_row_chunks) for j in range(n_column_chunks)}
    shared: set[Key] = set()
    while more := _shared(below, upwards, outputs, shared, n_least=max(2, (n_row_chunks + 1) // 2)):
        # A result is shared if tasks of at least half of the row chunks use it directly. Only tasks that contribute to
        # exactly one row chunk are considered. Each pass of this loop ignores paths through the keys that earlier
        # passes found. Without these paths, some tasks that contributed to several row chunks contribute to only one,
        # so the pass may find further shared results.
        shared |= more
    return shared


def _shared(
    below: Mapping[Key, Set[Key]], upwards: list[Key], outputs: Mapping[Key, int], earlier: set[Key], *, n_least: int
) -> set[Key]:
    needed: dict[Key, int] = defaultdict(int, outputs)
    used: dict[Key, int] = defaultdict(int)
    for key in reversed(upwards):
        chunks = needed[key]
        if not chunks or key in earlier:
            continue
        for dependency in below[key]:
            needed[dependency] |= chunks
            if chunks.bit_count() == 1:
                used[dependency] |= chunks
    return {key for key, chunks in used.items() if chunks.bit_count() >= n_least and below[key]} - earlier


def with_computed(array: da.Array, keys: set[Key]) -> da.Array:
    """Compute some keys of an array, and return the array with the values in place of the tasks."""
    # Return `array` unchanged if the values would take too much memory, for example if they are the chunks of an array
    # whose rows are reordered.
    if not keys:
        return array
    # One value per layer of the graph is computed first; the layer's other values are assumed to have the same size.
    counts = Counter(map(_layer_of, keys))
    samples = {_layer_of(key): key for key in keys}
    values = _computed(array, list(samples.values()))
    if sum(sizeof(values[samples[name]]) * n for name, n in counts.items()) > _KEPT_BYTES:
        return array
    values |= _computed(array, list(keys - values.keys()))
    layers: dict[str, Layer] = {}
    dependencies = dict(array.dask.dependencies)
    for name, layer in array.dask.layers.items():
        here = values.keys() & layer.get_output_keys()
        layers[name] = layer
        if here:
            rest = {key: layer[key] for key in layer if key not in here}
            layers[name] = MaterializedLayer(rest | {key: DataNode(key, values[key]) for key in here})
            dependencies[name] = dependencies[name] if rest else set()
    graph = HighLevelGraph(layers, dependencies)
    return da.Array(graph, array.name, chunks=array.chunks, dtype=array.dtype, meta=da.utils.meta_from_array(array))


def _layer_of(key: Key) -> str:
    return str(key[0] if isinstance(key, tuple) else key)


def _computed(array: da.Array, keys: list[Key]) -> dict[Key, Any]:
    # Without callbacks=(), the inner computation would report to the callbacks of the outer one.
    return dict(zip(keys, get_sync(da.optimize(array.dask, keys), keys, callbacks=()), strict=True))
