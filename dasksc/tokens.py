"""Tokenization of cells, re-exported from modules of `dasksc.transforms`."""

from dasksc.transforms.tokens import IGNORED, RankTokens, ValueBins
from dasksc.transforms.vocabulary import CLS, MASK, PAD, Vocabulary

__all__ = ["CLS", "IGNORED", "MASK", "PAD", "RankTokens", "ValueBins", "Vocabulary"]
