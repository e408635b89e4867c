"""What an epoch draws."""

from dasksc.sampling.strategies import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    SamplingStrategy,
    Streaming,
)

__all__ = ["BlockShuffling", "BlockWeightedSampling", "ClassBalancedSampling", "SamplingStrategy", "Streaming"]
