"""Position of a data set in its epochs, as returned by `scDataset.state_dict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dasksc import config
from dasksc.errors import InputError
from dasksc.planning.consumed_segments import Stretch

__all__ = ["STATE_VERSION", "EpochPosition", "parse_state"]

STATE_VERSION = 1


@dataclass(frozen=True)
class EpochPosition:
    """Number of an epoch, and the segments that have been read, each with constant sizes."""

    epoch: int
    consumed: tuple[Stretch, ...] = ()

    @property
    def consumed_numbers(self) -> list[tuple[int, ...]]:
        """Segments as tuples of integers."""
        return [dataclasses.astuple(stretch) for stretch in self.consumed]

    def parted(self, sizes: Stretch) -> tuple[tuple[Stretch, ...], int]:
        """Return the segments read with other sizes than `sizes`, and the number of batches read with `sizes` since."""
        if self.consumed and dataclasses.replace(self.consumed[-1], n_batches=0) == sizes:
            return self.consumed[:-1], self.consumed[-1].n_batches
        return self.consumed, 0


def parse_state(
    state: Any, identity: Mapping[str, Any], *, drop_last: bool, seed: int | None
) -> tuple[EpochPosition, int]:
    """Parse a state into a position and a seed.

    Parameters
    ----------
    state
        Return value of `scDataset.state_dict`.
    identity
        Properties that must be equal; see `scDataset.fingerprint`.
    drop_last
        `drop_last` of the data set.
    seed
        Seed of the data set, if it was given.

    Raises
    ------
    InputError
        If a part of the state is missing or invalid, or it is of other data or another strategy. The message lists the
        differences.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        version = state.get("version") if isinstance(state, dict) else state
        raise InputError(f"this is no state of version {STATE_VERSION} of a dasksc.scDataset; got {version!r}")
    position, its_seed = _parsed(state)
    was = dict(state["fingerprint"])
    if "left_out" not in was and "left_out" in identity:
        if position.consumed and was.get("drop_last") == drop_last:
            raise InputError(
                f"the state was taken in the middle of epoch {position.epoch} by a version of dasksc whose "
                "drop_last left out other rows, so the rest of that epoch is unknown. Begin an epoch: set "
                "state['consumed'] = [] and load it again"
            )
        was["left_out"] = identity["left_out"]
    differing = [
        f"{name} is {value!r} and was {was.get(name)!r}" for name, value in identity.items() if value != was.get(name)
    ]
    if seed is not None and seed != its_seed:
        differing.append(f"seed is {seed} and was {its_seed}")
    if differing:
        raise InputError(
            f"the state does not fit this data set: {'; '.join(differing)}. Make the data set as it was made when "
            "the state was taken; rank, world size, batch size and fetch size may differ"
        )
    return position, its_seed


def _whole(value: Any) -> int:
    """Convert a number of a state, possibly a tensor, to int. Raise a ValueError if it is not whole."""
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r} is no whole number")
    return number


def _parsed(state: Mapping[str, Any]) -> tuple[EpochPosition, int]:
    names = [field.name for field in dataclasses.fields(Stretch)]
    part, expected = "", ""
    try:
        part, expected = "fingerprint", "a dict"
        if not hasattr(state["fingerprint"], "keys"):
            raise TypeError("it has no names")
        part, expected = "epoch", "a whole number"
        epoch = config.whole_number(part, _whole(state[part]), 0, 2**32)
        part, expected = "seed", "a whole number"
        seed = config.whole_number(part, _whole(state[part]), 0, 2**64)
        part, expected = "consumed", f"a list of lists of whole numbers: {', '.join(names)}"
        stretches = tuple(
            Stretch(
                **{
                    name: config.whole_number(name, _whole(number), low=name != "n_batches")
                    for name, number in zip(names, stretch, strict=True)
                }
            )
            for stretch in state[part]
        )
    except (KeyError, TypeError, ValueError) as error:
        found = f"{part}={state[part]!r:.100}" if part in state else f"only {', '.join(map(repr, state))}"
        raise InputError(
            f"this is no state that scDataset.state_dict() returned: it needs {part!r}, {expected}, and has {found}. "
            "Load another checkpoint, or set_epoch(n) to begin an epoch anew"
        ) from error
    return EpochPosition(epoch, stretches), seed
