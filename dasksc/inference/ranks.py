"""Agreement between the ranks that predict together: all of them finish, or all of them raise an error."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from dasksc.errors import StorageError
from dasksc.plan.ranks import World, shared_store

_POLL_S = 0.05
# Number of calls of `predict` that this process has begun, by rank and group, which tells records of calls apart.
_ordinals: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)


class Ranks:
    """Records of this call in the process group's key-value store: collectives would hang if a rank fails."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._store: Any = None
        if world.world_size > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            number = next(_ordinals[world.rank, world.group])
            self._store = shared_store(f"dasksc/predict/{attempt}/{world.group}/{number}")

    @property
    def can_agree(self) -> bool:
        return self.world.world_size == 1 or self._store is not None

    @property
    def is_first(self) -> bool:
        """True for the rank that acts for all ranks of the process group; without one, each rank acts for itself."""
        return self.world.rank == 0 or self._store is None

    def gather(self, name: str, value: str) -> list[str]:
        """Return the values of all ranks, none of which is empty; without a process group, only that of this rank."""
        if self._store is None:
            return [value]
        self._store.compare_set(f"{name} {self.world.rank}", "", value)
        keys = [f"{name} {rank}" for rank in range(self.world.world_size)]
        while not self._store.check(keys):
            self.check()
            time.sleep(_POLL_S)
        return [self._store.get(key).decode() for key in keys]

    def check(self) -> None:
        """Raise an error if another rank has failed."""
        if self._store is not None and self._store.check(["failed"]):
            raise StorageError(
                f"{self._store.get('failed').decode()}. Run the same command again to resume, on any number of ranks"
            )

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Make the other ranks fail if the body raises an error."""
        try:
            yield
        except BaseException as error:
            if self._store is not None:
                with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited
                    note = f"rank {self.world.rank} failed: {type(error).__name__}: {error}"
                    self._store.compare_set("failed", "", note)
            raise
