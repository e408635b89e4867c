"""Reading of a range of rows into batches like those of a data set, in storage order and in this process alone."""

from __future__ import annotations

import secrets
from typing import Any

from dasksc.executor.progress import EpochStats
from dasksc.loader.dataset import scDataset
from dasksc.loader.epoch_run import DeviceTransfer
from dasksc.loader.position import EpochTracker
from dasksc.loader.rank_session import RankSession
from dasksc.plan.binding import bind
from dasksc.plan.epochs import EpochCounter
from dasksc.plan.ranks import World
from dasksc.plan.strategies import Streaming
from dasksc.transforms.composed import Transforms, as_transforms

__all__ = ["over_range", "world_of"]


def over_range(dataset: scDataset, start: int, stop: int, *, device: Any = None) -> scDataset:
    """Return a data set that yields the rows ``[start, stop)`` once, in storage order, in this process alone.

    Parameters
    ----------
    dataset
        Data set whose request (genes, obs, layers, obsm, layout, dtype, hooks and transform) and batch size are used.
        The fetch factor of the result is at most that of this data set. Its strategy, filter, rank and epochs are not
        used. The data set is not changed, and shares its matrices with the result.
    start, stop
        Range of rows of the collection; `start` is a multiple of the batch size. Random transforms depend on the
        position of a batch in the collection, not in the range.
    device
        Device of the batches. Default: that of `dataset`.
    """
    one = scDataset.__new__(scDataset)
    one.__dict__.update(dataset.__dict__)
    one.__dict__.pop("_identity", None)  # cached for the other strategy
    one.strategy = Streaming(indices=slice(start, stop))
    one.drop_last = False
    one.equal_ranks = False
    one._sampler = bind(one.strategy, one.collection, one._source.n_obs, one._source.labels_of)
    one._session = RankSession(0, 1, None, seed=0, is_random=False)
    one._projection = dataset._projection.in_storage_order(one._session)
    one.fetch_factor = one._projection.fetch_factor
    one._counter = EpochCounter()
    one._iteration = 0
    one._tracker = EpochTracker()
    one._stats = EpochStats()
    one._token = secrets.token_hex(4)
    one._progress = False
    one._title = f"rows {start:,} to {stop:,}"
    given = as_transforms(dataset.transform)
    if given is not None:
        numbered: Any = Transforms(given.steps, start // dataset.batch_size)
        one.transform = numbered
    if device is not None:
        one._placement = DeviceTransfer(device, dataset._placement.pin_memory)
    return one


def world_of(dataset: scDataset) -> World:
    """Return the current rank and world size of a data set."""
    return dataset._session.current_world()
