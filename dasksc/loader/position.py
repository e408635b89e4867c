"""Position of a data set in its epochs, as returned by `scDataset.state_dict`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from dasksc import checks
from dasksc.displays import brief
from dasksc.errors import InputError
from dasksc.loader.settings import differences
from dasksc.plan.deal import ConsumedSegment

__all__ = ["EpochPosition", "EpochTracker", "parse_state", "state_of"]

logger = logging.getLogger("dasksc.dataset")

STATE_VERSION = 1


@dataclass(frozen=True)
class EpochPosition:
    """Number of an epoch, and its segments read so far, each with one world size, batch size and fetch factor."""

    epoch: int
    consumed: tuple[ConsumedSegment, ...] = ()

    @property
    def consumed_numbers(self) -> list[tuple[int, ...]]:
        """Segments as tuples of integers."""
        return [dataclasses.astuple(segment) for segment in self.consumed]

    def split_consumed(self, sizes: ConsumedSegment) -> tuple[tuple[ConsumedSegment, ...], int]:
        """Split off the last segment if it was read with `sizes`.

        Return the other segments and the number of batches in the one split off. If none is split off, return all
        segments and 0.
        """
        if self.consumed and dataclasses.replace(self.consumed[-1], n_batches=0) == sizes:
            return self.consumed[:-1], self.consumed[-1].n_batches
        return self.consumed, 0


class _Reading(Protocol):
    """Epoch that is being read."""

    @property
    def position(self) -> EpochPosition:
        """Position after the batches yielded so far."""


class EpochTracker:
    """Current position of a process in its epochs, and the position to resume from."""

    def __init__(self) -> None:
        self._current: EpochPosition | _Reading | None = None
        self._resume: EpochPosition | None = None
        # Epoch that this DataLoader worker has finished, though other workers may still be reading it.
        self._ended: int | None = None

    @property
    def current(self) -> EpochPosition | None:
        """Current position; None before the first epoch."""
        current = self._current
        return current if current is None or isinstance(current, EpochPosition) else current.position

    def load(self, position: EpochPosition) -> None:
        """Set the position from which the next iteration resumes."""
        self._current = self._resume = position

    def move(self, to: EpochPosition | _Reading) -> None:
        """Set the current position, which may be that of an epoch that is being read."""
        self._current = to

    def forget(self) -> None:
        """Set the current position to the loaded one if no iteration has begun since loading, otherwise to None."""
        self._current = self._resume

    def finish(self, epoch: int) -> None:
        """Move to the next epoch; in a DataLoader worker, only when the next iteration begins."""
        if get_worker_info() is None:
            self._current = EpochPosition(epoch + 1)
        else:
            self._ended = epoch

    def begin(self) -> None:
        """Move past the epoch that this DataLoader worker has finished."""
        if self._ended is not None:
            self._current, self._ended = EpochPosition(self._ended + 1), None

    def resuming(self, epoch: int) -> EpochPosition:
        """Return the position from which an epoch would resume: the loaded one if it is in this epoch, or the start."""
        resume = self._resume
        return EpochPosition(epoch) if resume is None or resume.epoch != epoch else resume

    def resume(self, epoch: int) -> EpochPosition:
        """Return the position from which an epoch resumes, and discard the loaded position."""
        position, loaded = self.resuming(epoch), self._resume
        self._resume = None
        if loaded is not None and loaded.epoch != epoch:
            # In DataLoader workers, this is expected: from the second pass on, new workers are copies of a data set
            # that still holds the loaded state.
            logger.log(
                logging.WARNING if get_worker_info() is None else logging.DEBUG,
                "the loaded state belongs to epoch %d and not to epoch %d, which therefore starts from the beginning",
                *(loaded.epoch, epoch),
            )
        return position

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_current": self.current}


def state_of(
    position: EpochPosition,
    identity: Mapping[str, Any],
    settings: Mapping[str, str],
    *,
    seed: int,
    unfinished: Callable[[], int | None],
) -> dict[str, Any]:
    """Return the state at a position, in the format that `parse_state` reads.

    Parameters
    ----------
    position
        Position of this process.
    identity
        Properties that must be equal when the state is loaded.
    settings
        Settings of the strategy as text, for the error message if the properties differ.
    seed
        Seed of the data set.
    unfinished
        Function that returns the epoch that DataLoader workers of this process are reading, if any. The state does not
        contain the positions of these workers.
    """
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "seed": seed,
        "epoch": position.epoch,
        "fingerprint": dict(identity),
        "settings": dict(settings),
        "consumed": position.consumed_numbers,
    }
    worker = get_worker_info()
    if worker is not None:
        state["worker"] = (worker.id, worker.num_workers)
    elif (epoch := unfinished()) is not None:
        logger.warning(
            "the state does not contain the position of DataLoader workers, which are in the middle of epoch %d: a run "
            "resumed from this state skips the rest of that epoch. Use num_workers=0, or save the state of torchdata's "
            "StatefulDataLoader",
            epoch,
        )
    return state


def parse_state(
    state: Any, identity: Mapping[str, Any], settings: Mapping[str, str], *, drop_last: bool, seed: int | None
) -> tuple[EpochPosition, int]:
    """Parse a state into a position and a seed.

    Parameters
    ----------
    state
        Return value of `scDataset.state_dict`.
    identity
        Properties that must be equal; see `scDataset.fingerprint`.
    settings
        Settings of the strategy as text, which an error message compares with those of the state.
    drop_last
        `drop_last` of the data set.
    seed
        Seed of the data set, if it was given.

    Raises
    ------
    InputError
        If a part of the state is missing or invalid, or the state belongs to other data or another strategy. The
        message lists the differences.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise InputError(f"{brief(state)} is not a state of a data set; give the result of dataset.state_dict()")
    if state["version"] != STATE_VERSION:
        raise InputError(
            f"the state has version {state['version']!r}, but this version of dasksc reads states of version "
            f"{STATE_VERSION}. Load another checkpoint, or resume with the version of dasksc that saved this one"
        )
    position, its_seed = _parsed(state)
    was = dict(state["fingerprint"])
    if "left_out" not in was and "left_out" in identity:
        if position.consumed and was.get("drop_last") == drop_last:
            raise InputError(
                f"the state was taken in the middle of epoch {position.epoch} by a version of dasksc whose drop_last "
                "dropped different rows, so the remaining rows of the epoch are unknown. To start the epoch from its "
                "beginning, set state['consumed'] = [] and load it again"
            )
        was["left_out"] = identity["left_out"]
    then = state.get("settings")
    differing = list(differences(identity, was, settings, then if isinstance(then, Mapping) else {}))
    if seed is not None and seed != its_seed:
        differing.append(f"seed is {seed} and was {its_seed}")
    if differing:
        raise InputError(
            f"the state does not fit this data set: {'; '.join(differing)}. Create the data set with the same "
            "arguments as when the state was taken; rank, world size, batch_size and fetch_factor may differ"
        )
    return position, its_seed


def _whole(value: Any) -> int:
    """Convert a number of a state, possibly a tensor, to int. Raise a ValueError if it is not whole."""
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r} is not a whole number")
    return number


def _parsed(state: Mapping[str, Any]) -> tuple[EpochPosition, int]:
    names = [field.name for field in dataclasses.fields(ConsumedSegment)]
    part, expected = "", ""
    try:
        part, expected = "fingerprint", "a dict"
        if not hasattr(state["fingerprint"], "keys"):
            raise TypeError("it is not a dict")
        part, expected = "epoch", "a whole number"
        epoch = checks.whole_number(part, _whole(state[part]), 0, 2**32)
        part, expected = "seed", "a whole number"
        seed = checks.whole_number(part, _whole(state[part]), 0, 2**64)
        part, expected = "consumed", f"a list of lists of whole numbers ({', '.join(names)})"
        segments = tuple(
            ConsumedSegment(
                **{
                    name: checks.whole_number(name, _whole(number), low=name != "n_batches")
                    for name, number in zip(names, segment, strict=True)
                }
            )
            for segment in state[part]
        )
    except (KeyError, TypeError, ValueError) as error:
        found = f"{part}={state[part]!r:.100}" if part in state else f"only {', '.join(map(repr, state))}"
        raise InputError(
            f"the state did not come from scDataset.state_dict(): it must contain {part!r}, {expected}, but "
            f"contains {found}. Load another checkpoint, or call set_epoch(n) to start an epoch from its beginning"
        ) from error
    return EpochPosition(epoch, segments), seed
