"""Refusal of wrappers that would stack the batches of a data set, or share them among the ranks a second time."""

from __future__ import annotations

from types import FrameType

from torch.utils.data import ChainDataset, default_collate

from dasksc.errors import InputError

__all__ = ["refuse_sharding", "refuse_stacking"]

# Classes that yield each rank its part of the items of a data set. transformers uses those of Accelerate.
_SHARDING_RANKS = {"IterableDatasetShard": "Accelerate", "DataLoaderDispatcher": "Accelerate"}
# Classes that also divide the items among DataLoader workers.
_SHARDING_WORKERS = {"ShardingFilterIterDataPipe": "sharding_filter()"}


def refuse_sharding(requested_in: FrameType, *, n_ranks: int, n_workers: int) -> None:
    """Raise an error if a caller of a frame shares the batches of a data set among its ranks or workers once more."""
    # Most cells would be lost, without an error. Such a wrapper does not inform the data set, but it requests the
    # iterator, or starts the worker that requests it: the frames of a forked process include those of the fork, and to
    # spawn a worker, the data set is pickled.
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


def refuse_stacking(requested_in: FrameType) -> None:
    """Raise an error if a DataLoader that would stack the batches of a data set requests them in a frame."""
    # The fetcher of a DataLoader requests the iterator, itself or through a ``ChainDataset``.
    frame: FrameType | None = requested_in
    while frame is not None and isinstance(frame.f_locals.get("self"), ChainDataset):
        frame = frame.f_back
    fetcher = None if frame is None else frame.f_locals.get("self")
    if getattr(fetcher, "auto_collation", False) and getattr(fetcher, "collate_fn", None) is default_collate:
        raise InputError(
            "the DataLoader has a batch_size of its own, and would stack k batches of the data set into arrays of "
            "shape (k, batch_size, n_vars). The data set already yields batches; use "
            "DataLoader(dataset, batch_size=None)"
        )
