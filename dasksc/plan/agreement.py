"""Agreement between ranks on seed and epoch.

Ranks exchange records through the key-value store of ``torch.distributed``. They never use a collective, which would
hang whenever one rank reads a batch that the others do not read.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dasksc._compat.torch import default_store
from dasksc.errors import InputError, RankMismatchError
from dasksc.plan.process_groups import torch_distributed
from dasksc.plan.ranks import World

logger = logging.getLogger("dasksc.world")


def shared_store(prefix: str) -> Any:
    """Return the key-value store shared by the processes of this run, or None; `prefix` is added to all keys."""
    distributed = torch_distributed()
    return None if distributed is None else distributed.PrefixStore(prefix, default_store(distributed))


# Number of data sets that each rank of each group has created, by store. The run's own store stands under `World`,
# because torch may replace the object by another with the same keys.
_ordinals: weakref.WeakKeyDictionary[Any, defaultdict[tuple[int, str], Iterator[int]]] = weakref.WeakKeyDictionary()


class Agreement:
    """Agreement between the ranks of one data set, through the store of their process group."""

    # Data sets of different ranks are matched by the order in which each rank makes them for the same group. Every rank
    # of the group must therefore make the same data sets in the same order. The exception is a data set that only one
    # rank makes: with ``rank=0, world_size=1``, it is not compared with others. Every call takes one or two round trips
    # to the store and waits for no other rank.

    def __init__(self, world: World, store: Any = None) -> None:
        self._world = world
        self._given_store = store
        ordinals = _ordinals.setdefault(World if store is None else store, defaultdict(itertools.count))
        has_peers = world.world_size > 1 and (store is not None or self.is_possible())
        self._ordinal = next(ordinals[world.rank, world.group]) if has_peers else None

    @staticmethod
    def is_possible() -> bool:
        """Return True if a shared store exists now."""
        return torch_distributed() is not None

    def _under(self, prefix: str) -> Any:
        if self._given_store is None:
            return shared_store(prefix)
        return sys.modules["torch.distributed"].PrefixStore(prefix, self._given_store)

    def _store(self) -> Any:
        if self._ordinal is None:
            return None
        # A store can outlive processes that torchrun restarts. The restart count separates old records from new ones.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._under(f"dasksc/{attempt}/{self._world.group}/{self._ordinal}")

    def seed(self, proposed: int) -> int:
        """Propose a seed and return the agreed one, which is the first proposal of any rank."""
        # All groups of the same size agree on one seed, because tensor-parallel ranks belong to different data-parallel
        # groups and must read the same rows.
        if self._store() is None:
            raise InputError(
                f"seed=None with world_size={self._world.world_size} and no process group: the ranks cannot agree "
                "on a seed. Pass the same seed= on every rank, or call torch.distributed.init_process_group first"
            )
        which = self._world.world_size if self._world.group else "all"
        return int(self._under(f"dasksc/seed/{which}").compare_set(str(self._ordinal), "", str(proposed)))

    def begin(
        self, iteration: int, epoch: int, fingerprint: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Record the epoch and data that an iteration reads, or compare them with those another rank has recorded."""
        store = self._store()
        if store is None:
            return
        mine = f"{self._world.rank} {epoch} {fingerprint} {json.dumps(dict(settings))}"
        note = store.compare_set(f"begin/{iteration}", "", mine).decode()
        rank, its_epoch, its_fingerprint, its_settings = note.split(" ", 3)
        if its_fingerprint != fingerprint:
            raise RankMismatchError(
                f"ranks {rank} and {self._world.rank} read different data, or sample them differently: "
                f"{self._differences(rank, json.loads(its_settings), settings)}. Create the same data sets in the same "
                "order on every rank, with the same files, strategy, batch size, fetch_factor and seed"
            )
        if int(its_epoch) != epoch:
            raise RankMismatchError(
                f"in iteration {iteration} over this data set, rank {rank} reads epoch {its_epoch} and rank "
                f"{self._world.rank} reads epoch {epoch}. Call set_epoch with the same number on every rank, or on none"
            )

    def _differences(self, rank: str, its_settings: Mapping[str, str], settings: Mapping[str, str]) -> str:
        names = [name for name in {**settings, **its_settings} if settings.get(name) != its_settings.get(name)]
        its, mine = ([one.get(name, "not set") for name in names] for one in (its_settings, settings))
        texts = [
            f"{name} is {its} on rank {rank} and {mine} on rank {self._world.rank}"
            for name, its, mine in zip(names, its, mine, strict=True)
        ]
        return "; ".join(texts) or (
            "all arguments look the same, but array values, labels in obs, genes or versions of dasksc differ"
        )

    def require_not_abandoned(self, iteration: int) -> None:
        """Check, after the first batch of an iteration, that no other rank has ended it there."""
        store = self._store()
        if store is not None and store.check([f"end/{iteration}"]):
            rank, n_batches = store.get(f"end/{iteration}").decode().split()
            if n_batches in ("0", "1"):
                raise self._shifted(iteration, rank, n_batches, "continued")

    def end(self, iteration: int, n_batches: int, *, is_whole: bool) -> None:
        """Record the end of an iteration; warn if another rank has ended it after another number of batches."""
        store = self._store()
        if store is None:
            return
        mine = "all" if is_whole else str(n_batches)
        try:
            rank, its = store.compare_set(f"end/{iteration}", "", f"{self._world.rank} {mine}").decode().split()
        except RuntimeError as error:  # the process of the store may have exited
            logger.warning("the other ranks cannot be notified that this rank ended its iteration: %s", error)
            return
        if its != mine:
            what_this_did = "read it to the end" if is_whole else f"stopped it after {mine}"
            logger.warning("%s", self._shifted(iteration, rank, its, what_this_did))

    def _shifted(self, iteration: int, rank: str, n_batches: str, what_this_did: str) -> RankMismatchError:
        return RankMismatchError(
            f"rank {rank} stopped iteration {iteration} over this data set after {n_batches} batches; rank "
            f"{self._world.rank} {what_this_did}. The epochs of these ranks no longer match. Read the same number of "
            "batches on every rank. To inspect a batch on one rank only, create another data set with rank=0, "
            "world_size=1"
        )
