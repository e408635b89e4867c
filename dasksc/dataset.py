"""Former location of `scDataset`, for programs and pickles that refer to it."""

from dasksc.loader.dataset import scDataset

__all__ = ["scDataset"]
