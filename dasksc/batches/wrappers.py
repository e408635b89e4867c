"""Detection of wrappers that would stack batches, or share them among the ranks a second time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import ChainDataset

from dasksc._compat.torch import is_stacking_fetcher
from dasksc.errors import InputError

__all__ = ["refuse_sharding", "refuse_stacking"]

_STACKED = (
    "the DataLoader has a batch_size of its own, and would stack k batches of the data set into an array of shape "
    "(k, batch_size, n_vars). The data set already yields batches; use DataLoader(dataset, batch_size=None)"
)

# Classes that yield each rank its part of the items of a data set. transformers uses those of Accelerate.
_SHARDING_RANKS = {"IterableDatasetShard": "Accelerate", "DataLoaderDispatcher": "Accelerate"}
# Classes that also divide the items among DataLoader workers.
_SHARDING_WORKERS = {"ShardingFilterIterDataPipe": "sharding_filter()"}


def refuse_sharding(requested_in: FrameType, *, n_ranks: int, n_workers: int) -> None:
    """Raise an error if a caller shares the batches of a data set among its ranks or workers once more.

    Most cells would be lost, without an error. Such a wrapper does not inform the data set, but it requests the
    iterator, or starts the worker that requests it: the frames of a forked process include those of the fork, and to
    spawn a worker, the data set is pickled.

    Parameters
    ----------
    requested_in
        Frame in which the iterator or the pickle is requested.
    n_ranks, n_workers
        Numbers of ranks and DataLoader workers, each of which reads its own share.

    Raises
    ------
    InputError
        If the method of such a wrapper is among the callers.
    """
    wrappers = (_SHARDING_RANKS if n_ranks > 1 else {}) | (_SHARDING_WORKERS if n_ranks * n_workers > 1 else {})
    frame: FrameType | None = requested_in if wrappers else None
    while frame is not None:
        caller = type(frame.f_locals.get("self")).__name__
        if caller in wrappers:
            raise InputError(
                f"{wrappers[caller]} divides the batches among the ranks or workers ({caller}), but the data set "
                "already yields each of them its own share, so most cells would never be used. Iterate over the data "
                "set, or a DataLoader of it, as it is: prepare only the model and the optimizer. Or give the data set "
                "rank=0, world_size=1 and a seed, to leave the division among ranks to Accelerate"
            )
        frame = frame.f_back


def refuse_stacking(items: Iterator[Any], requested_in: FrameType, *, n_hook_rows: int | None) -> Iterator[Any]:
    """Return the iterator `items`, or raise an error if a DataLoader would stack its batches.

    A DataLoader stacks the items of an iterable data set unless its ``batch_size`` is None, and does not inform the
    data set. The fetcher object of PyTorch's DataLoader requests the iterator, in this process or in a DataLoader
    worker. The fetcher is therefore found in the requesting frame or, behind a ``ChainDataset``, in one of its callers.

    Parameters
    ----------
    items
        Iterator over the items of a data set, from which no item has been taken.
    requested_in
        Frame in which the iterator is requested.
    n_hook_rows
        Number of rows in a batch if the data set has hooks, such as `batch_transform`; None if it has none. Items that
        hooks return need not be batches: stacking one number per batch, for example, is allowed.

    Raises
    ------
    InputError
        If batches would be stacked. With hooks, the returned iterator raises the error if `n_hook_rows` is greater than
        1 and the first item contains an array, table or list of length `n_hook_rows`.
    """
    frame: FrameType | None = requested_in
    while frame is not None and isinstance(frame.f_locals.get("self"), ChainDataset):
        frame = frame.f_back
    if frame is None or not is_stacking_fetcher(frame.f_locals.get("self")):
        return items
    if n_hook_rows is None:
        raise InputError(_STACKED)
    return _without_batches(items, n_hook_rows)


def _without_batches(items: Iterator[Any], n_rows: int) -> Iterator[Any]:
    for first in items:
        if n_rows > 1 and n_rows in _lengths(first):
            raise InputError(_STACKED)
        yield first
        break
    yield from items


def _lengths(item: Any) -> set[int]:
    """Return the lengths of the arrays, tables and lists in an item."""
    if isinstance(item, Mapping | tuple | list):
        own = {len(item)} if isinstance(item, list) else set[int]()
        return own.union(*map(_lengths, item.values() if isinstance(item, Mapping) else item))
    shape: tuple[int, ...] = getattr(item, "shape", ())
    return {int(shape[0])} if len(shape) else set()
