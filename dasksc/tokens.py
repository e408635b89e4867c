"""The public module of `dasksc.transforms.tokens`."""

from dasksc.transforms.tokens import CLS, IGNORED, MASK, PAD, RankTokens, ValueBins, Vocabulary, from_config

__all__ = ["CLS", "IGNORED", "MASK", "PAD", "RankTokens", "ValueBins", "Vocabulary", "from_config"]
