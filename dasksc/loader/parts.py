"""Components of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dasksc.loader.projection import MemoryProjection
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.epochs import EpochCounter
from dasksc.plan.ranks import World

__all__ = ["LoaderParts"]


class LoaderParts(NamedTuple):
    """Components of a data set, for functions that display, explain or measure it."""

    source: MatrixSource | IndexedSource
    projection: MemoryProjection
    counter: EpochCounter
    plan_of: Callable[[World, int], EpochPlan]
