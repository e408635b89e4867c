"""Position of a process among the ranks and in its epochs, and states of `scDataset.state_dict`."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from dasksc import checks
from dasksc.displays import brief
from dasksc.errors import InputError
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.loader.spec import LoaderSpec
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.epochs import EpochCounter
from dasksc.plan.ranks import Agreement, World, is_shared, torch_distributed
from dasksc.storage.dtypes import text_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("dasksc.loader")


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
        kind: str,
    ) -> None:
        self._kind = kind  # text that is equal for data sets that are equal on all ranks
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
        if not self.seed_is_given and is_shared(self.current_world()):
            self.fix_world()
        return self.own_seed

    @seed.setter
    def seed(self, seed: int) -> None:
        # The seed of a loaded state takes precedence, since the earlier batches of the epoch were drawn with that seed.
        self.own_seed, self.seed_is_given = seed, True

    def fix_world_if_distributed(self) -> None:
        """Fix rank, world size and seed if there are several ranks, unless they cannot agree on a seed yet."""
        # A world of one rank is not fixed, because a process group may be created later.
        if is_shared(self.detect()) and (self.seed_is_given or not self._is_random or torch_distributed()):
            self.fix_world()

    def fix_world(self) -> World:
        """Fix rank, world size and seed, unless they are already fixed."""
        world = self._world
        if world is None:
            world = self.detect()
            agreement = Agreement(world) if is_shared(world) else None
            if agreement is not None and not self.seed_is_given and self._is_random:
                if get_worker_info() is not None:
                    raise InputError(
                        "a DataLoader worker cannot agree on a seed with other ranks: pass seed=, or call "
                        "len(dataset) once on every rank after init_process_group and before iterating"
                    )
                self.own_seed = agreement.seed(self.own_seed, self._kind)
            self.agreement = agreement
            self._world = world
        return world

    def require_same_world(self) -> World:
        """Fix the world; raise an error if the rank or world size detected now differs from the fixed one."""
        world = self.fix_world()
        if get_worker_info() is None or torch_distributed():  # spawned workers have no process group
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
        if get_spawning_popen() is not None and (self._world is not None or is_shared(self.current_world())):
            self.require_same_world()
        state = self.__dict__ | {"agreement": None}
        if self._given[2] is not None:
            # A process group cannot be pickled, so the copy receives the rank and world size instead.
            world = self.current_world()
            state["_given"] = (world.rank, world.world_size, None)
        return state


STATE_VERSION = 1

_SAME_TEXT = (
    "{strategy} draws different rows than before, although its arguments look the same: array values, labels in obs, "
    "or the version of dasksc differ"
)


@dataclass(frozen=True)
class EpochPosition:
    """Number of an epoch, and its segments read so far, each with one world size, batch size and fetch factor."""

    epoch: int
    consumed: tuple[ConsumedSegment, ...] = ()

    def parted(self, sizes: tuple[int, int, int]) -> tuple[tuple[ConsumedSegment, ...], int]:
        """Return the segments that were read with other sizes than these, and the number of batches read with these."""
        if not self.consumed:
            return (), 0
        *others, last = self.consumed
        is_same = (last.world_size, last.batch_size, last.fetch_factor) == sizes
        return (tuple(others), last.n_batches) if is_same else (self.consumed, 0)


class EpochTracker:
    """Position of a data set in its epochs: what this process has read or loaded, and the count that all share."""

    def __init__(self) -> None:
        self.counter = EpochCounter()
        # Position, or a function that returns it while an epoch is read; None for the beginning of the next epoch.
        self.place: EpochPosition | Callable[[], EpochPosition] | None = None
        self.is_of_worker = False  # whether the loaded position is that of this DataLoader worker, not of the rank
        self._loaded: EpochPosition | None = None  # position of a state, from which the next iteration resumes
        self._loaded_at = 0  # epochs begun before; the state is of the one that begins next
        self._begun_in: int | None = None  # process that has begun an epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"place": self._position}

    @property
    def _position(self) -> EpochPosition | None:
        return self.place() if callable(self.place) else self.place

    def _coming(self) -> tuple[int, int]:
        """Return how many epochs began before the one that begins next in this process, and its number."""
        worker = get_worker_info()
        if worker is None:
            return self.counter.pass_of(-1, 0)
        return self.counter.pass_of(worker.seed - worker.id, worker.num_workers, before=worker.id)

    def _resumed(self, n_begun: int) -> EpochPosition | None:
        """Return the loaded position, unless an epoch has begun since, perhaps in DataLoader workers."""
        return self._loaded if self.is_of_worker or n_begun == self._loaded_at else None

    def next(self) -> EpochPosition:
        """Return where the next iteration begins."""
        n_begun, number = self._coming()
        loaded = self._resumed(n_begun)
        return loaded if loaded is not None and loaded.epoch == number else EpochPosition(number)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read `epoch`."""
        self.counter.set(epoch)
        position = self.next()
        self.place = position if position.consumed else None

    def begin(self) -> EpochPosition:
        """Begin an epoch, and return where."""
        worker = get_worker_info()
        if worker is None:
            (n_begun, _), number = self._coming(), self.counter.advance()
        else:
            number = self.counter.join(*of_worker(worker))
            n_begun, _ = self.counter.pass_of(worker.seed - worker.id, worker.num_workers)
        loaded = self._resumed(n_begun)
        self._loaded, self._begun_in = None, os.getpid()
        if loaded is None or loaded.epoch == number:
            return loaded or EpochPosition(number)
        # In DataLoader workers, this is expected: from the second pass on, new workers are copies of a data set that
        # still holds the loaded state.
        logger.log(
            logging.WARNING if worker is None else logging.DEBUG,
            "the loaded state belongs to epoch %d and not to epoch %d, which therefore starts from the beginning",
            *(loaded.epoch, number),
        )
        return EpochPosition(number)

    def finish(self, number: int, place: Callable[[], EpochPosition]) -> None:
        """Record that all batches of an epoch have been read, unless another iterator has set another `place`."""
        if get_worker_info() is None and self.place == place:  # other workers may not have read theirs
            self.place = EpochPosition(number + 1)

    def leave(self) -> None:
        """Leave the epoch that this DataLoader worker has read, unless it resumes one."""
        if get_worker_info() is not None and (self._loaded is None or not self.is_of_worker):
            self.place, self.is_of_worker = None, False

    def to_save(self) -> tuple[EpochPosition, bool]:
        """Return the position to save, and if it is that of the rank although this is a DataLoader worker."""
        worker = get_worker_info()
        has_begun = self.place is not None and (self.is_of_worker or self._begun_in == os.getpid())
        if worker is not None and not has_begun:
            return self.next(), True
        position, following = self._position, self.counter.peek()
        by_workers = worker is None and self.counter.reports() is not None
        if position is None or (by_workers and position.epoch < following):
            position = EpochPosition(following)
            if worker is None and (epoch := self.counter.unfinished()) is not None:
                logger.warning(
                    "the state does not contain the position of DataLoader workers, which have read a part of epoch "
                    "%d: a run resumed from this state skips the rest of that epoch. Use num_workers=0, or save the "
                    "state of torchdata's StatefulDataLoader",
                    epoch,
                )
        return position, False

    def load(self, position: EpochPosition, *, of_rank: bool) -> None:
        """Make the next iteration resume from a position, of the rank or of this DataLoader worker."""
        worker = get_worker_info()
        self.place = self._loaded = position
        self.is_of_worker = not of_rank
        if worker is None:
            self.counter.set(position.epoch)
        else:
            self.counter.resume(*of_worker(worker), position.epoch)
        self._loaded_at, _ = self._coming()


def of_worker(worker: Any) -> tuple[int, int, int]:
    """Return the base seed of a DataLoader, the number of one of its workers, and the number of workers."""
    return worker.seed - worker.id, worker.id, worker.num_workers


def settings_of(spec: LoaderSpec) -> dict[str, str]:
    """Return the strategy, its arguments (of arrays, the shape and the data type) and the filter as text."""
    strategy: Any = spec.strategy
    settings = {"strategy": type(strategy).__name__}
    for field in dataclasses.fields(strategy) if dataclasses.is_dataclass(strategy) else ():
        if field.init and field.repr:
            # An argument of `scDataset` has the same name.
            name = "drop_last of the strategy" if field.name == "drop_last" else field.name
            settings[name] = brief(getattr(strategy, field.name))
    return settings if spec.filter is None else settings | {"filter": brief(spec.filter)}


def settings_of_batches(source: MatrixSource | IndexedSource) -> dict[str, str]:
    """Return the number of rows, the matrices, and the content of batches as text."""
    settings = {"n_obs": str(source.n_obs)}
    if isinstance(source, MatrixSource):
        settings |= {name: "{} x {} {}".format(*shape) for name, shape in source.identity.items()}
        settings |= {"layout": source.maker.layout, "dtype": text_of(source.maker.dtype)}
        columns = source.maker.columns
        settings |= {
            f"genes of {name}": str(len(columns[name])) if name in columns else "all" for name in source.matrices
        }
    return settings


def _differences(
    identity: Mapping[str, Any], was: Mapping[str, Any], settings: Mapping[str, str], then: Mapping[str, str]
) -> list[str]:
    """Return a clause for each difference from a state, such as "block_size is 16 and was 8"."""
    mine, before = ({**one, **one["matrices"], "matrices": None} for one in (identity, was))
    if mine.pop("strategy") != before.pop("strategy"):
        if then and settings["strategy"] != then["strategy"]:  # whose arguments cannot be compared
            settings, then = ({"strategy": one["strategy"]} for one in (settings, then))
        mine, before = {**mine, **settings}, {**before, **then}
        if mine == before:
            return [_SAME_TEXT.format(strategy=settings["strategy"])]
    names = [name for name in {**mine, **before} if mine.get(name) != before.get(name)]
    return [f"{name} is {mine.get(name, 'not set')} and was {before.get(name, 'not set')}" for name in names]


def parse_state(
    state: Any, identity: Mapping[str, Any], settings: Mapping[str, str], *, seed: int | None
) -> tuple[EpochPosition, int]:
    """Return the position and the seed in a state; raise an error that lists differences from the data set."""
    if not isinstance(state, dict) or "version" not in state:
        raise InputError(f"{brief(state)} is not a state of a data set; give the result of dataset.state_dict()")
    if state["version"] != STATE_VERSION:
        raise InputError(
            f"the state has version {state['version']!r}, but this version of dasksc reads states of version "
            f"{STATE_VERSION}. Load another checkpoint, or resume with the version of dasksc that saved this one"
        )
    sizes = [field.name for field in dataclasses.fields(ConsumedSegment)]
    try:
        epoch, its_seed = _whole("epoch", state["epoch"], 0, 2**32), _whole("seed", state["seed"], 0, 2**64)
        consumed = tuple(
            ConsumedSegment(
                **{name: _whole(name, n, int(name != "n_batches")) for name, n in zip(sizes, one, strict=True)}
            )
            for one in state["consumed"]
        )
        differing = _differences(identity, state["fingerprint"], settings, state.get("settings", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the state did not come from scDataset.state_dict(): {error!r} in {state!r:.200}. Load another "
            "checkpoint, or call set_epoch(n) to start an epoch from its beginning"
        ) from error
    if seed is not None and seed != its_seed:
        differing.append(f"seed is {seed} and was {its_seed}")
    if differing:
        raise InputError(
            f"the state does not fit this data set: {'; '.join(differing)}. Create the data set with the same "
            "arguments as when the state was taken; rank, world size, batch_size and fetch_factor may differ"
        )
    return EpochPosition(epoch, consumed), its_seed


def _whole(name: str, value: Any, low: int, end: int = 2**63) -> int:
    """Return a number of a state, which may be a tensor, as an int."""
    return checks.whole_number(name, operator.index(value), low, end)
