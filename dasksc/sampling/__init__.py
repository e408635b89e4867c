"""Sampling strategies, which select and order the rows of an epoch."""

from dasksc.sampling.cell_sets import CellSets
from dasksc.sampling.strategies import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    SamplingStrategy,
    Streaming,
)

__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "CellSets",
    "ClassBalancedSampling",
    "SamplingStrategy",
    "Streaming",
]
