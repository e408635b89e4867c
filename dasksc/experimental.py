"""Suggestions for the parameters of a data set; may change between versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from dasksc.multiindexable import MultiIndexable, count_rows, take_rows

__all__ = ["estimate_sample_size", "suggest_parameters"]

Hook = Callable[..., Any]

_GIB = 1024**3
_MIB = 1024**2
# Beyond this the blocks of a fetch are many enough for any shuffle, and a fetch only gets later.
_MAX_FETCH_FACTOR = 256
# One fetch is being handed out while the next is read.
_FETCHES_IN_FLIGHT = 2


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
        Bytes per row. Without hooks a path, an AnnData on disk or on Dask and a Dask array are not read:
        a row is n_vars float32 values then, as it is yielded. Otherwise `n_samples` rows spread
        over the collection are read in one go, and the mean is taken.
    """
    if isinstance(data_collection, (str, os.PathLike)):
        from dasksc.collection import open as open_collection

        data_collection = open_collection(data_collection)
    hooks = (fetch_callback, fetch_transform, batch_callback, batch_transform)
    if _is_lazy(data_collection) and not any(hooks):
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
) -> dict[str, Any]:
    """Suggest parameters from the memory of this machine and the size of a row.

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

    Returns
    -------
    dict
        ``num_workers`` and ``prefetch_factor`` for the DataLoader (None without workers, as torch wants
        it), ``fetch_factor``, ``block_size_conservative`` (more random), ``block_size_balanced``,
        ``block_size_aggressive`` (faster on compressed files), ``estimated_memory_per_fetch_mb``,
        ``estimated_total_memory_mb`` and ``system_info``.

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

    result = {
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
    if verbose:
        print(_explain(result, target_ram_fraction))
    return result


def _is_lazy(data: Any) -> bool:
    """Whether `data` is a 2-D Dask array, or an AnnData whose X is one or is on disk."""
    if hasattr(data, "dask") and getattr(data, "ndim", 0) == 2:
        return True
    if not (hasattr(data, "obs") and hasattr(data, "n_vars")):
        return False
    return bool(getattr(data, "isbacked", False)) or hasattr(data.X, "dask")


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
    import psutil
    from distributed.system import MEMORY_LIMIT

    memory = psutil.virtual_memory()
    return min(int(memory.available), int(MEMORY_LIMIT)), min(int(memory.total), int(MEMORY_LIMIT))


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
        "Memory",
        f"  per row          {system['estimated_sample_size_bytes']:,} bytes",
        f"  per fetch        {suggestion['estimated_memory_per_fetch_mb']:.1f} MiB",
        f"  in all           {suggestion['estimated_total_memory_mb']:.1f} MiB; the limit is"
        f" {target_ram_fraction:.0%} of the {system['available_ram_gb']:.1f} GiB available",
        "The order of an epoch depends on fetch_factor: give every rank and every later run the same.",
    ]
    return "\n".join(lines)
