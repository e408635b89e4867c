"""Transforms of the batches of a data set, in their order; built-in hooks, augmentation, and tokenization of cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dasksc.errors import InputError, WrongTypeError
from dasksc.transforms.augmentation import Augmentation, Downsample, MaskGenes
from dasksc.transforms.hooks import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor

__all__ = [
    "Downsample",
    "MaskGenes",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "fetch_transform_adata",
    "hf_tahoe_to_tensor",
]


@dataclass(frozen=True, slots=True)
class Transforms:
    """Transforms, each applied to the result of the previous one.

    A transform may have a method ``at_epoch``, which returns the transform for an epoch, and a method ``at_batch``,
    which returns the transform for a batch by its number in the epoch.
    """

    steps: tuple[Any, ...]
    first_number: int = 0  # of the first batch

    def at_epoch(self, epoch: int) -> Transforms:
        """Return the transforms for an epoch.

        Leading augmentations change batches in place. Any other transform may keep a reference to its batch.
        """
        steps = [one.at_epoch(epoch) if hasattr(one, "at_epoch") else one for one in self.steps]
        for i, one in enumerate(steps):
            if not isinstance(one, Augmentation):
                break
            steps[i] = one.in_place()
        return replace(self, steps=tuple(steps))

    def parted(self) -> tuple[Transforms, Callable[[Any], Any] | None]:
        """Return the transforms on the host, and the part of the last one that follows on the device, if any."""
        *others, last = self.steps
        if not hasattr(last, "_on_device"):
            return self, None
        return replace(self, steps=(*others, last._on_host)), last._on_device

    def check_columns(self, names: list[str]) -> None:
        """Raise an error if a tokenizer has the genes of X in another order; other transforms may reorder them."""
        for one in self.steps:
            if not getattr(one, "_takes_csr", False):
                return
            if hasattr(one, "_check_columns"):
                one._check_columns(names)

    def apply(self, batch: Any, number: int) -> Any:
        """Apply all transforms to a batch that no other code refers to, given its number in the epoch."""
        for one in self.steps:
            bound = one.at_batch(self.first_number + number) if hasattr(one, "at_batch") else one
            batch = bound(batch)
        return batch


def as_transforms(given: Any) -> Transforms | None:
    """Return the `transform` argument of `scDataset` (None, a transform or a list of them) as `Transforms` or None."""
    if given is None or isinstance(given, Transforms):
        return given
    steps = tuple(given) if isinstance(given, list | tuple) else (given,)
    drawn: set[tuple[Any, ...]] = set()
    for one in steps:
        is_class = isinstance(one, type) and hasattr(one, "at_epoch")
        if not callable(one) or is_class:
            raise WrongTypeError(
                f"transform must be a function of a batch, or a list of them; got {one!r}"
                + (f". Create an instance: {one.__name__}(...)" if is_class else "")
            )
        if isinstance(one, Augmentation):
            draws = type(one), one.seed, one.layer
            if draws in drawn:
                raise InputError(
                    f"transform has {type(one).__name__} twice with seed={one.seed}, so both would draw the same "
                    "random numbers; give one of them another seed"
                )
            drawn.add(draws)
    return Transforms(steps) if steps else None
