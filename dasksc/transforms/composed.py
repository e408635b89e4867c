"""Composition of transforms, for a whole data set, an epoch or a batch.

A transform may have a method ``at_epoch``, which returns the transform for an epoch, and a method ``at_batch``, which
returns the transform for a batch by its number in the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from dasksc.batches.batch import Batch
from dasksc.errors import WrongTypeError

__all__ = ["Composed", "Transform", "as_transform", "at_batch", "at_epoch", "split_early", "owning"]

Transform = Callable[[Any], Any]


class Composed:
    """Sequence of transforms, each applied to the result of the previous one.

    Parameters
    ----------
    transforms
        Transforms, in order.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transforms = tuple(transforms)

    def at_epoch(self, epoch: int) -> Composed:
        """Return the transforms for an epoch."""
        return Composed([at_epoch(one, epoch) for one in self.transforms])

    def at_batch(self, number: int) -> Composed:
        """Return the transforms for a batch."""
        return Composed([at_batch(one, number) for one in self.transforms])

    def owning(self) -> Composed:
        """Return a copy whose leading transforms change batches in place: those before the first that lacks ``owning``.

        A transform without ``owning`` may keep a reference to its batch, so later transforms must not change that batch
        in place.
        """
        n_owning = next(
            (i for i, one in enumerate(self.transforms) if not hasattr(one, "owning")), len(self.transforms)
        )
        return Composed([*map(owning, self.transforms[:n_owning]), *self.transforms[n_owning:]])

    def __call__(self, batch: Batch) -> Any:
        """Apply all transforms."""
        made: Any = batch
        for transform in self.transforms:
            made = transform(made)
        return made

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.transforms))}]"


def as_transform(given: Any) -> Transform | None:
    """Combine the `transform` argument of `scDataset` (None, a transform or a list of them) into one transform or None.

    Raises
    ------
    WrongTypeError
        If a transform is not callable.
    InputError
        If two transforms in a list would draw the same random numbers.
    """
    if given is None or isinstance(given, Composed):
        return given
    if not isinstance(given, list | tuple):
        if not callable(given) or _is_class(given):
            raise WrongTypeError(
                f"transform must be a function of a batch, or a list of them; got {given!r}"
                + (f". Create an instance: {given.__name__}(...)" if _is_class(given) else "")
            )
        return given  # type: ignore[no-any-return]
    for one in given:
        if not callable(one) or _is_class(one):
            raise WrongTypeError(f"transform must be callable; the list has {one!r}. Give functions of a batch")
    for i, one in enumerate(given):
        if hasattr(one, "refuse_beside"):
            one.refuse_beside(given[:i])
    return Composed(given) if given else None


def _is_class(given: Any) -> bool:
    """Return True for a class of transforms, such as `Downsample` instead of ``Downsample(0.5)``."""
    return isinstance(given, type) and hasattr(given, "at_epoch")


def at_epoch(transform: Any, epoch: int) -> Any:
    """Return the transform for an epoch."""
    return transform.at_epoch(epoch) if hasattr(transform, "at_epoch") else transform


def owning(transform: Any) -> Any:
    """Return the transform for batches that no other code refers to, so that it may change them in place."""
    return transform.owning() if hasattr(transform, "owning") else transform


def at_batch(transform: Any, number: int) -> Any:
    """Return the transform for the batch with a given number in the epoch."""
    return transform.at_batch(number) if hasattr(transform, "at_batch") else transform


def split_early(transform: Any, parts: Container[str]) -> tuple[list[Any], Any]:
    """Split a transform into early ones, which change values before a batch is complete, and the rest.

    Parameters
    ----------
    transform
        A transform, or None. The early transforms are the leading ones whose attribute ``part`` is in `parts`.
    parts
        Keys of the matrices that early transforms can change.

    Returns
    -------
    list
        Early transforms, in order.
    Any
        The other transforms as one, or None.
    """
    given = list(transform.transforms) if isinstance(transform, Composed) else [transform]
    n_early = next((i for i, one in enumerate(given) if getattr(one, "part", None) not in parts), len(given))
    late = given[n_early:]
    return given[:n_early], late[0] if len(late) == 1 else Composed(late) if late else None
