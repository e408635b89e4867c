"""Suggestions for the parameters of a data set; may change between versions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.opening import is_several
from dasksc.atlas.opening import open as open_atlas
from dasksc.checks import check_flags, whole_number
from dasksc.errors import InputError
from dasksc.inspection.report import Report
from dasksc.loader import scDataset
from dasksc.memory import memory_limit
from dasksc.multiindexable import MultiIndexable, count_rows
from dasksc.plan.strategies import BlockShuffling, Streaming

Hook = Callable[..., Any]

# Rows to read if metadata do not determine the size of a row.
_N_READ = 16
_GIB = 1024**3
_MIB = 1024**2
# A fetch of this many batches has enough blocks to shuffle well; a larger one only takes longer.
_MAX_FETCH_FACTOR = 256
# One fetch is yielded while the next one is read.
_FETCHES_IN_FLIGHT = 2
# Block sizes to measure if there are labels.
_BLOCK_SIZES = (1, 4, 16, 64, 256, 1024)
# Minimum entropy of the labels of a batch, as a fraction of that of ideal batches.
_LEAST_DIVERSITY = {"conservative": 0.99, "balanced": 0.95, "aggressive": 0.8}
# A smaller block size is preferred if its rate is at least this fraction of the highest rate.
_FAST_ENOUGH = 0.9


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
) -> Report:
    """Suggest parameters from the memory of this machine, the size of a row, and measured mixing and speed.

    Parameters
    ----------
    data_collection
        Argument of `scDataset`.
    batch_size
        Rows per minibatch.
    target_ram_fraction
        Fraction of the available memory that loading may take, over all DataLoader workers.
    max_workers, min_workers
        Bounds on ``num_workers``. The suggested ``num_workers`` is the lower bound, because each rank already reads
        with its own threads.
    verbose
        If True, print the suggestions and their reasons.
    fetch_callback, fetch_transform, batch_callback, batch_transform
        Hooks of the `scDataset`.
    labels
        Labels that batches should mix: one label per row, or the name of an obs column. Blocks of 1 to 1,024 rows are
        then compared by the diversity of their batches and the measured rate. Otherwise, block sizes are derived from
        ``fetch_factor``.

    Returns
    -------
    Report
        A dict with ``num_workers`` and ``prefetch_factor`` for the DataLoader (None without workers, as PyTorch
        requires), ``fetch_factor``, ``block_size_conservative`` (more random), ``block_size_balanced``,
        ``block_size_aggressive`` (faster on compressed files), ``estimated_memory_per_fetch_mb``,
        ``estimated_total_memory_mb`` and ``system_info``. With `labels`, it also has ``measured``, with the
        ``diversity`` (1 for ideal batches) and ``rows_per_s`` of each block size. Of the sizes that reach 99%, 95% and
        80% of the ideal diversity, the three block sizes are then the smallest within 10% of the highest rate.

    Notes
    -----
    The suggestion depends on the machine, and the order of an epoch depends on ``fetch_factor``. Choose
    ``fetch_factor`` once, and use the same value on every rank and in every later run.

    Examples
    --------
    >>> suggested = dasksc.suggest_parameters("atlas.h5ad", batch_size=64, verbose=False)
    >>> suggested["num_workers"], suggested["block_size_balanced"] >= 1
    (0, True)
    """
    check_flags(verbose=verbose)
    whole_number("batch_size", batch_size)
    whole_number("max_workers", max_workers, 0)
    whole_number("min_workers", min_workers, 0)
    share: Any = target_ram_fraction
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"target_ram_fraction={target_ram_fraction!r} must be a share of the memory, in (0, 1]")
    if isinstance(data_collection, str | os.PathLike) and is_modalities(data_collection):
        data_collection = Modalities(data_collection)
    elif isinstance(data_collection, str | os.PathLike) or is_several(data_collection):
        data_collection = open_atlas(data_collection)
    limit = memory_limit()  # of the machine or the cgroup
    available_bytes = limit.n_bytes - limit.held
    hooks: dict[str, Any] = {
        "fetch_callback": fetch_callback,
        "fetch_transform": fetch_transform,
        "batch_callback": batch_callback,
        "batch_transform": batch_transform,
    }
    sample_bytes = _row_bytes(data_collection, hooks)
    num_workers = min(min_workers, max_workers)
    readers = max(num_workers, 1)
    budget_bytes = target_ram_fraction * available_bytes / (readers * _FETCHES_IN_FLIGHT)
    fetch_factor = int(budget_bytes // max(batch_size * sample_bytes, 1))
    fetch_factor = min(fetch_factor, _MAX_FETCH_FACTOR)
    n_obs = data_collection.shape[0] if hasattr(data_collection, "shape") else len(data_collection)
    if isinstance(n_obs, int):  # a fetch cannot exceed the collection
        fetch_factor = min(fetch_factor, -(-n_obs // batch_size))
    fetch_factor = max(fetch_factor, 1)
    fetch_bytes = batch_size * fetch_factor * sample_bytes

    result = Report(
        num_workers=num_workers,
        prefetch_factor=fetch_factor + 1 if num_workers else None,
        fetch_factor=fetch_factor,
        block_size_conservative=max(1, fetch_factor // 2),
        block_size_balanced=fetch_factor,
        block_size_aggressive=fetch_factor * 2,
        estimated_memory_per_fetch_mb=fetch_bytes / _MIB,
        estimated_total_memory_mb=fetch_bytes * readers * _FETCHES_IN_FLIGHT / _MIB,
        system_info=Report(
            available_ram_gb=available_bytes / _GIB,
            total_ram_gb=limit.n_bytes / _GIB,
            cpu_count=os.cpu_count() or 1,
            estimated_sample_size_bytes=sample_bytes,
        ),
    )
    if labels is not None:
        measured = _measure_blocks(data_collection, batch_size, fetch_factor, labels, hooks)
        result |= {f"block_size_{name}": _best_block(measured, least) for name, least in _LEAST_DIVERSITY.items()}
        result["measured"] = measured
    if verbose:
        print(result)
    return result


def _measure_blocks(
    data: Any, batch_size: int, fetch_factor: int, labels: Any, hooks: Mapping[str, Any]
) -> list[Report]:
    """Return the diversity and the rows per second of each block size."""
    measured = []
    for block_size in _BLOCK_SIZES:
        dataset = scDataset(
            data, BlockShuffling(block_size), batch_size, fetch_factor, **hooks, rank=0, world_size=1, seed=0
        )
        source = dataset.source
        of_rows = source.labels_of(labels) if isinstance(labels, str) else labels
        if count_rows(of_rows) != source.n_obs:
            raise InputError(f"labels has {count_rows(of_rows):,} labels, but the collection has {source.n_obs:,} rows")
        share = dataset.plan().diversity(of_rows).share
        measured.append(Report(block_size=block_size, diversity=share, rows_per_s=rows_per_s(dataset)))
    return measured


def rows_per_s(dataset: scDataset, seconds: float = 0.0) -> float:
    """Measure the rate of epochs from their start, over two fetches and at least `seconds`, with compiled kernels."""
    for _ in dataset:
        break
    n_batches, elapsed_s, start = 0, 0.0, time.perf_counter()
    for _ in chain.from_iterable(repeat(dataset)) if len(dataset) else ():
        n_batches += 1
        elapsed_s = time.perf_counter() - start
        if elapsed_s >= seconds and n_batches >= min(2 * dataset.fetch_factor, len(dataset)):
            break
    return n_batches * dataset.plan().n_rank_rows / len(dataset) / elapsed_s if n_batches else 0.0


def _best_block(measured: Sequence[Mapping[str, float]], least: float) -> int:
    """Return the smallest block size with about the highest rate, of those that mix well enough or, if none, best."""
    mixed = [one for one in measured if one["diversity"] >= least] or [max(measured, key=lambda one: one["diversity"])]
    fastest = max(one["rows_per_s"] for one in mixed)
    return int(min(one["block_size"] for one in mixed if one["rows_per_s"] >= _FAST_ENOUGH * fastest))


def _row_bytes(data: Any, hooks: Mapping[str, Any]) -> int:
    """Return the size of a row as batches have it; rows of data other than an atlas are read."""
    is_atlas = hasattr(data, "obs") and hasattr(data, "n_vars")
    if (is_atlas or (hasattr(data, "dask") and data.ndim == 2)) and not any(hooks.values()):
        return int(np.dtype(np.float32).itemsize * data.shape[1])
    n_rows = count_rows(data)
    n_read = min(_N_READ, n_rows)
    if not n_read:
        return 0
    rows = np.linspace(0, n_rows - 1, n_read).astype(np.int64)
    dataset = scDataset(data, Streaming(indices=rows), n_read, 1, **hooks, rank=0, world_size=1, seed=0)
    return _memory_bytes(next(iter(dataset))) // n_read


def _memory_bytes(data: Any) -> int:
    """Return the size of `data` and its members in bytes; for a tensor, that of its elements."""
    if hasattr(data, "element_size"):
        return int(data.element_size() * data.numel())
    members = data.values() if isinstance(data, Mapping | MultiIndexable) else data
    if isinstance(members, list | tuple) or members is not data:
        return sum(map(_memory_bytes, members))
    return int(sizeof(data))
