"""What ranks agree on.

`Agreement` lets ranks compare notes through the key-value store of ``torch.distributed`` or
``jax.distributed``: never through a collective, which would hang the ranks whenever one of them reads a
batch by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from dasksc._compat.torch import default_store
from dasksc.errors import InputError, RankMismatchError
from dasksc.planning.process_groups import jax_state, torch_distributed
from dasksc.planning.ranks import World

__all__ = ["Agreement", "shared_store"]

logger = logging.getLogger("dasksc.world")


class _JaxStore:
    """The key-value store of ``jax.distributed``, with the few methods of torch's that are used here."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` unless it is set; return its value. `expected` is torch's, and empty."""
        with contextlib.suppress(RuntimeError):  # somebody was first
            self._client.key_value_set(f"{self._prefix}/{key}", desired)
        return self.get(key)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        value: str = self._client.key_value_try_get(f"{self._prefix}/{key}")
        return value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        try:
            return all(map(self.get, keys))
        except RuntimeError:
            return False


def shared_store(prefix: str) -> Any:
    """Return the store of keys that the processes of this run share, under a prefix; None if they share nothing."""
    distributed = torch_distributed()
    if distributed is not None:
        return distributed.PrefixStore(prefix, default_store(distributed))
    jax = jax_state()
    return None if jax is None else _JaxStore(jax.client, prefix)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Go on where the store went with its process: an iteration that ends must show its own error, not this one."""
    try:
        yield
    except RuntimeError as error:
        logger.warning("the other ranks cannot be told of the end of an iteration: %s", error)


_Ordinals = defaultdict[tuple[int, str], Iterator[int]]

# Data sets that each rank of each group has made: through the store of the run, which torch may replace by another
# object with the same notes, and through each store that was given.
_ordinals: _Ordinals = defaultdict(itertools.count)
_ordinals_of_stores: weakref.WeakKeyDictionary[Any, _Ordinals] = weakref.WeakKeyDictionary()


class Agreement:
    """What the ranks of one data set compare through the store of their process group.

    Ranks find each other by the order in which they make data sets for the same group, so every rank of
    it must make the same ones in the same order; a data set for one rank alone takes ``rank=0,
    world_size=1`` and has none. Every call is one or two round trips to the store and waits for no other
    rank.

    Parameters
    ----------
    world
        Rank, world size and group of this process or thread.
    store
        Key-value store that all ranks share, a ``torch.distributed.Store``. By default that of the process group.
    """

    def __init__(self, world: World, store: Any = None) -> None:
        self._world = world
        self._given_store = store
        ordinals = _ordinals if store is None else _ordinals_of_stores.setdefault(store, defaultdict(itertools.count))
        has_peers = world.world_size > 1 and (store is not None or self.is_possible())
        self._ordinal = next(ordinals[world.rank, world.group]) if has_peers else None

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a store by now."""
        return torch_distributed() is not None or jax_state() is not None

    def _under(self, prefix: str) -> Any:
        if self._given_store is None:
            return shared_store(prefix)
        import torch.distributed as distributed

        return distributed.PrefixStore(prefix, self._given_store)  # type: ignore[attr-defined]

    def _store(self) -> Any:
        if self._ordinal is None:
            return None
        # A store can outlive the processes that torchrun restarts, and notes of those before are not of these.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._under(f"dasksc/{attempt}/{self._world.group}/{self._ordinal}")

    def seed(self, proposed: int) -> int:
        """Return the seed that the first rank to ask proposed.

        Groups of one size agree on one seed: tensor-parallel ranks are in different data-parallel groups,
        and must read the same rows.

        Raises
        ------
        InputError
            If there is no process group through which to agree.
        """
        if self._store() is None:
            raise InputError(
                f"seed=None with world_size={self._world.world_size} and no process group: the ranks cannot agree "
                "on a seed. Pass seed=, the same on every rank, or call torch.distributed.init_process_group first"
            )
        which = self._world.world_size if self._world.group else "all"
        return int(self._under(f"dasksc/seed/{which}").compare_set(str(self._ordinal), "", str(proposed)))

    def begin(self, iteration: int, epoch: int, fingerprint: str) -> None:
        """Say which epoch of what this rank's n-th iteration reads; compare with who said so first.

        Raises
        ------
        RankMismatchError
            If another rank reads another epoch or other data.
        """
        store = self._store()
        if store is None:
            return
        mine = f"{self._world.rank} {epoch} {fingerprint}"
        rank, its_epoch, its_fingerprint = store.compare_set(f"begin/{iteration}", "", mine).decode().split(" ", 2)
        if its_fingerprint != fingerprint:
            raise RankMismatchError(
                f"ranks {rank} and {self._world.rank} read different data or sample it differently in their "
                f"iteration {iteration} (fingerprints {its_fingerprint[:8]} and {fingerprint[:8]}). Make the same "
                "data sets in the same order on every rank, with the same files, strategy, sizes and seed"
            )
        if int(its_epoch) != epoch:
            raise RankMismatchError(
                f"in their iteration {iteration}, rank {rank} reads epoch {its_epoch} and rank {self._world.rank} "
                f"reads epoch {epoch}. Call set_epoch with the same number on every rank, or on none"
            )

    def go_on(self, iteration: int, n_batches: int) -> None:
        """Check, having yielded `n_batches`, that no other rank has given this iteration up by then.

        Raises
        ------
        RankMismatchError
            If one has: its epochs are now shifted against this rank's.
        """
        left = self._left(iteration)
        if left is not None and left[1] <= n_batches:
            raise self._shifted(iteration, *left, f"goes on after {n_batches}")

    def leave(self, iteration: int, n_batches: int) -> None:
        """Say that this rank gives its iteration up after `n_batches`; warn if another did elsewhere."""
        store = self._store()
        if store is None:
            return
        with _unless_gone():
            rank, n = store.compare_set(f"left/{iteration}", "", f"{self._world.rank} {n_batches}").decode().split()
            if int(n) != n_batches:
                logger.warning("%s", self._shifted(iteration, int(rank), int(n), f"left it after {n_batches}"))

    def finish(self, iteration: int) -> None:
        """Warn, at the end of an iteration, if another rank has given it up."""
        with _unless_gone():
            left = self._left(iteration)
            if left is not None:
                logger.warning("%s", self._shifted(iteration, *left, "read it to its end"))

    def _left(self, iteration: int) -> tuple[int, int] | None:
        """The rank that gave an iteration up first, and after how many batches."""
        store = self._store()
        if store is None or not store.check([f"left/{iteration}"]):
            return None
        rank, n = store.get(f"left/{iteration}").decode().split()
        return int(rank), int(n)

    def _shifted(self, iteration: int, rank: int, n: int, what_this_did: str) -> RankMismatchError:
        return RankMismatchError(
            f"rank {rank} left its iteration {iteration} after {n} batches; rank {self._world.rank} {what_this_did}: "
            "the epochs of these ranks no longer match. To look at a batch on one rank alone, make a data set with "
            "rank=0, world_size=1 for it; otherwise take equally many batches on every rank"
        )
