"""Ranks as threads of one process that share a store in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from torch.distributed import HashStore, Store

from dasksc import BlockShuffling, World, scDataset
from dasksc.plan.ranks import Agreement

T = TypeVar("T")


def on_ranks(world_size: int, act: Callable[[int, Store], T], store: Store | None = None) -> list[T | Exception]:
    """Call `act` with each rank and one store, in a thread per rank; return each result or exception."""
    shared = HashStore() if store is None else store
    # Threads change the filters of warnings for each other, so this call ignores warnings throughout.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(world_size) as threads:
        acts = [threads.submit(act, rank, shared) for rank in range(world_size)]
        return [act.exception() or act.result() for act in acts]


def rank_of(
    rank: int, world_size: int, store: Store, data: Any = None, *, group: str = "", **options: Any
) -> scDataset:
    """Return the data set of a rank that shares `store` with other ranks; by default, it shuffles 103 numbers."""
    options = {"batch_size": 5, "fetch_factor": 2, "seed": 3, "scheduler": "synchronous", **options}
    strategy = options.pop("strategy", BlockShuffling(4))
    collection = np.arange(103) if data is None else data
    dataset = scDataset(collection, strategy, rank=rank, world_size=world_size, **options)
    dataset.ranks.agreement = Agreement(World(rank, world_size, group=group), store)
    return dataset
