"""Suggestions for the parameters of a data set; may change between versions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from dasksc.loader import parts_of, scDataset
from dasksc.memory.limits import memory_limit
from dasksc.multiindexable import MultiIndexable, count_rows, take_rows
from dasksc.sampling.strategies import BlockShuffling

__all__ = ["estimate_sample_size", "suggest_parameters"]

Hook = Callable[..., Any]

_GIB = 1024**3
_MIB = 1024**2
# Beyond this the blocks of a fetch are many enough for any shuffle, and a fetch only gets later.
_MAX_FETCH_FACTOR = 256
# One fetch is being handed out while the next is read.
_FETCHES_IN_FLIGHT = 2
# Block sizes that are measured, where there are labels to measure by.
_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
# How well batches are mixed at least, as a share of the entropy of ideal ones.
_LEAST_DIVERSITY = {"conservative": 0.99, "balanced": 0.95, "aggressive": 0.8}
# A block that reads this near to the fastest is not made larger.
_FAST_ENOUGH = 0.9


def estimate_sample_size(
    data_collection: Any,
    n_samples: int = 16,
    fetch_callback: Hook | None = None,
    fetch_transform: Hook | None = None,
    batch_callback: Hook | None = None,
    batch_transform: Hook | None = None,
) -> int:
    """Estimate what one row takes in memory on its way to the training loop.

    Parameters
    ----------
    data_collection
        What `scDataset` takes: a path, an AnnData, a Dask array, or anything indexed by rows.
    n_samples
        How many rows to read where metadata do not tell.
    fetch_callback, fetch_transform, batch_callback, batch_transform
        The hooks that `scDataset` will be given; they run on the rows that are read.

    Returns
    -------
    int
        Bytes per row. Without hooks a path, an AnnData and a Dask array are not read:
        a row is n_vars float32 values then, as it is yielded. Otherwise `n_samples` rows spread
        over the collection are read in one go, and the mean is taken.
    """
    if isinstance(data_collection, (str, os.PathLike)):
        from dasksc.atlas.opening import open as open_collection

        data_collection = open_collection(data_collection)
    hooks = (fetch_callback, fetch_transform, batch_callback, batch_transform)
    if _is_yielded_dense(data_collection) and not any(hooks):
        return int(np.dtype(np.float32).itemsize * data_collection.shape[1])

    n_rows = count_rows(data_collection)
    n_samples = min(n_samples, n_rows)
    if n_samples < 1:
        return 0
    rows = np.linspace(0, n_rows - 1, n_samples).astype(np.int64)
    sample = (fetch_callback or take_rows)(data_collection, rows)
    if fetch_transform is not None:
        sample = fetch_transform(sample)
    if batch_callback is not None:
        sample = batch_callback(sample, np.arange(n_samples))
    if batch_transform is not None:
        sample = batch_transform(sample)
    return _memory_bytes(sample) // n_samples


def suggest_parameters(
    data_collection: Any,
    batch_size: int,
    target_ram_fraction: float = 0.20,
    max_workers: int = 16,
    min_workers: int = 0,
    verbose: bool = True,
    fetch_callback: Hook | None = None,
    fetch_transform: Hook | None = None,
    batch_callback: Hook | None = None,
    batch_transform: Hook | None = None,
    *,
    labels: Any = None,
) -> dict[str, Any]:
    """Suggest parameters from the memory of this machine, the size of a row, and what mixes labels well and fast.

    Parameters
    ----------
    data_collection
        What `scDataset` takes.
    batch_size
        Rows per minibatch.
    target_ram_fraction
        Share of the memory now available that loading may take, all workers together.
    max_workers, min_workers
        Bounds on ``num_workers``. Loading is threaded within the rank, so the fewest are suggested.
    verbose
        Whether to print the suggestions and their reasons.
    fetch_callback, fetch_transform, batch_callback, batch_transform
        The hooks that `scDataset` will be given.
    labels
        What batches are to mix: one label per row, or the name of an obs column. With them the block sizes
        are chosen by measuring: of blocks from 1 to 1,024 rows the diversity of the batches (from the plan)
        and the rows per second of some fetches, which are read. Without them they follow from `fetch_factor`.

    Returns
    -------
    dict
        ``num_workers`` and ``prefetch_factor`` for the DataLoader (None without workers, as torch wants
        it), ``fetch_factor``, ``block_size_conservative`` (more random), ``block_size_balanced``,
        ``block_size_aggressive`` (faster on compressed files), ``estimated_memory_per_fetch_mb``,
        ``estimated_total_memory_mb`` and ``system_info``. With `labels` also ``measured``: of each block
        size the ``diversity``, 1 for ideal batches, and ``rows_per_s``. The three block sizes are then the
        smallest ones within 10 % of the fastest of those that reach 99 %, 95 % and 80 % of the ideal.

    Notes
    -----
    The suggestion depends on the machine, and the order of an epoch depends on ``fetch_factor``: settle
    it once and give the same to every rank and every later run.
    """
    available_bytes, total_bytes = _memory_of_machine()
    sample_bytes = estimate_sample_size(
        data_collection,
        fetch_callback=fetch_callback,
        fetch_transform=fetch_transform,
        batch_callback=batch_callback,
        batch_transform=batch_transform,
    )
    num_workers = min(max(min_workers, 0), max_workers)
    readers = max(num_workers, 1)
    budget_bytes = target_ram_fraction * available_bytes / (readers * _FETCHES_IN_FLIGHT)
    fetch_factor = int(budget_bytes // max(batch_size * sample_bytes, 1))
    fetch_factor = min(max(fetch_factor, 1), _MAX_FETCH_FACTOR)
    fetch_bytes = batch_size * fetch_factor * sample_bytes

    result: dict[str, Any] = {
        "num_workers": num_workers,
        "fetch_factor": fetch_factor,
        "block_size_conservative": max(1, fetch_factor // 2),
        "block_size_balanced": fetch_factor,
        "block_size_aggressive": fetch_factor * 2,
        "prefetch_factor": fetch_factor + 1 if num_workers else None,
        "estimated_memory_per_fetch_mb": fetch_bytes / _MIB,
        "estimated_total_memory_mb": fetch_bytes * readers * _FETCHES_IN_FLIGHT / _MIB,
        "system_info": {
            "available_ram_gb": available_bytes / _GIB,
            "total_ram_gb": total_bytes / _GIB,
            "cpu_count": os.cpu_count() or 1,
            "estimated_sample_size_bytes": sample_bytes,
        },
    }
    if labels is not None:
        hooks = {
            "fetch_callback": fetch_callback,
            "fetch_transform": fetch_transform,
            "batch_callback": batch_callback,
            "batch_transform": batch_transform,
        }
        measured = _measure_blocks(data_collection, batch_size, fetch_factor, labels, hooks)
        result |= {f"block_size_{name}": _best_block(measured, least) for name, least in _LEAST_DIVERSITY.items()}
        result["measured"] = measured
    if verbose:
        print(_explain(result, target_ram_fraction))
    return result


def _measure_blocks(
    data: Any, batch_size: int, fetch_factor: int, labels: Any, hooks: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Return diversity and rows per second of each block size."""
    if isinstance(data, (str, os.PathLike)):
        from dasksc.atlas.opening import open as open_collection

        data = open_collection(data)
    measured = []
    for block_size in _BLOCK_SIZES:
        dataset = scDataset(
            data, BlockShuffling(block_size), batch_size, fetch_factor, **hooks, rank=0, world_size=1, seed=0
        )
        of_rows = parts_of(dataset).source.labels_of(labels) if isinstance(labels, str) else labels
        measured.append(
            {
                "block_size": block_size,
                "diversity": dataset.plan().diversity(of_rows).share,
                "rows_per_s": _rows_per_s(dataset, batch_size, n_batches=2 * fetch_factor),
            }
        )
    return measured


def _rows_per_s(dataset: scDataset, batch_size: int, *, n_batches: int) -> float:
    """Time the first batches of an epoch, after one that compiles what it needs."""
    for _ in dataset:
        break
    n_read = 0
    start = time.perf_counter()
    for _ in dataset:
        n_read += 1
        if n_read == n_batches:
            break
    return n_read * batch_size / (time.perf_counter() - start)


def _best_block(measured: Sequence[Mapping[str, float]], least: float) -> int:
    """Return the smallest block nearly as fast as the fastest of those that mix well enough, or the best mixing."""
    mixed = [one for one in measured if one["diversity"] >= least] or [max(measured, key=lambda one: one["diversity"])]
    fastest = max(one["rows_per_s"] for one in mixed)
    return int(min(one["block_size"] for one in mixed if one["rows_per_s"] >= _FAST_ENOUGH * fastest))


def _is_yielded_dense(data: Any) -> bool:
    """Whether rows of `data` come as float32 tensors: those of a 2-D Dask array or an AnnData."""
    if hasattr(data, "dask") and getattr(data, "ndim", 0) == 2:
        return True
    return hasattr(data, "obs") and hasattr(data, "n_vars")


def _memory_bytes(data: Any) -> int:
    """Bytes of `data` and what it holds; tensors by their elements."""
    if hasattr(data, "element_size"):
        return int(data.element_size() * data.numel())
    if isinstance(data, (Mapping, MultiIndexable)):
        return sum(_memory_bytes(member) for member in data.values())
    if isinstance(data, (list, tuple)):
        return sum(_memory_bytes(member) for member in data)
    return int(sizeof(data))


def _memory_of_machine() -> tuple[int, int]:
    """Return the available and the total memory in bytes, a cgroup's limit honoured."""
    limit = memory_limit()
    return limit.n_bytes - limit.held, limit.n_bytes


def _explain(suggestion: Mapping[str, Any], target_ram_fraction: float) -> str:
    system = suggestion["system_info"]
    num_workers = suggestion["num_workers"]
    workers = (
        "the rank's own threads read ahead, so DataLoader workers only add copies"
        if num_workers == 0
        else "as asked for with min_workers; 0 is recommended, since the rank's own threads read ahead"
    )
    lines = [
        "Suggested parameters",
        f"  num_workers      {num_workers}  ({workers})",
        f"  prefetch_factor  {suggestion['prefetch_factor']}",
        f"  fetch_factor     {suggestion['fetch_factor']}",
        f"  block_size       {suggestion['block_size_balanced']}",
        f"    more random    {suggestion['block_size_conservative']}",
        f"    faster         {suggestion['block_size_aggressive']}  (on compressed files)",
        *(
            f"    {one['block_size']:>14,}  {one['diversity']:.1%} of the ideal, {one['rows_per_s']:,.0f} rows/s"
            for one in suggestion.get("measured", ())
        ),
        "Memory",
        f"  per row          {system['estimated_sample_size_bytes']:,} bytes",
        f"  per fetch        {suggestion['estimated_memory_per_fetch_mb']:.1f} MiB",
        f"  in all           {suggestion['estimated_total_memory_mb']:.1f} MiB; the limit is"
        f" {target_ram_fraction:.0%} of the {system['available_ram_gb']:.1f} GiB available",
        "The order of an epoch depends on fetch_factor: give every rank and every later run the same.",
    ]
    return "\n".join(lines)
