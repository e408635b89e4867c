"""Rank and seed of a data set, in agreement with the other ranks."""

from __future__ import annotations

import secrets
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from dasksc import checks
from dasksc.errors import InputError
from dasksc.plan.agreement import Agreement
from dasksc.plan.ranks import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RankSession:
    """Rank, world size and seed of a data set, fixed when the first epoch begins or earlier."""

    def __init__(
        self,
        rank: int | None,
        world_size: int | None,
        group: ProcessGroup | DeviceMesh | None,
        *,
        seed: int | None,
        is_random: bool,
    ) -> None:
        self._given: tuple[int | None, int | None, Any] = (rank, world_size, group)
        self._world: World | None = None
        self.agreement: Agreement | None = None
        self._is_random = is_random
        # Without a seed, one is drawn, on which the ranks agree later. It is drawn on creation rather than on use, so
        # that forked DataLoader workers share the same seed.
        self.seed_is_given = seed is not None
        drawn = secrets.randbits(63) if is_random else 0
        self.own_seed = drawn if seed is None else checks.whole_number("seed", seed, 0, 2**64)

    def detect(self) -> World:
        """Return the rank and world size as detected now, which may differ from the fixed ones."""
        return World.detect(*self._given)

    def current_world(self) -> World:
        """Return the fixed or detected rank and world size, without fixing them."""
        return self.detect() if self._world is None else self._world

    @property
    def seed(self) -> int:
        """Seed that all ranks agree on."""
        if not self.seed_is_given and self.current_world().world_size > 1:
            self.fix_world()
        return self.own_seed

    @seed.setter
    def seed(self, seed: int) -> None:
        # The seed of a loaded state takes precedence, since the earlier batches of the epoch were drawn with that seed.
        self.own_seed, self.seed_is_given = seed, True

    def fix_world_if_distributed(self) -> None:
        """Fix rank, world size and seed if there are several ranks, unless they cannot agree on a seed yet."""
        # A world of one rank is not fixed, because a process group may be created later.
        if self.detect().world_size > 1 and (self.seed_is_given or not self._is_random or Agreement.is_possible()):
            self.fix_world()

    def fix_world(self) -> World:
        """Fix rank, world size and seed, unless they are already fixed."""
        world = self._world
        if world is None:
            world = self.detect()
            agreement = Agreement(world) if world.world_size > 1 else None
            if agreement is not None and not self.seed_is_given and self._is_random:
                if get_worker_info() is not None:
                    raise InputError(
                        "a DataLoader worker cannot agree on a seed with other ranks: pass seed=, or call "
                        "len(dataset) once on every rank after init_process_group and before iterating"
                    )
                self.own_seed = agreement.seed(self.own_seed)
            self.agreement = agreement
            self._world = world
        return world

    def require_same_world(self) -> World:
        """Fix the world; raise an error if the rank or world size detected now differs from the fixed one."""
        world = self.fix_world()
        if get_worker_info() is None:
            found = self.detect()
            if (found.rank, found.world_size) != (world.rank, world.world_size):
                raise InputError(
                    f"this data set was created as rank {world.rank} of {world.world_size} (from {world.source}), but "
                    f"this process is rank {found.rank} of {found.world_size} (from {found.source}) now. Create the "
                    "data set after the process group is initialized"
                )
        return world

    def __getstate__(self) -> dict[str, Any]:
        # Spawned DataLoader workers have no process group, so the world is fixed for them. Other copies of the session
        # detect their own world, for example in ranks spawned by a parent process that is not in the group.
        if get_spawning_popen() is not None and self.current_world().world_size > 1:
            self.fix_world()
        state = self.__dict__ | {"agreement": None}
        if self._given[2] is not None:
            # A process group cannot be pickled, so the copy receives the rank and world size instead.
            world = self.current_world()
            state["_given"] = (world.rank, world.world_size, None)
        return state
