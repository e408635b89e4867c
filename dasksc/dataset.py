"""The former place of `scDataset`, by which programs and pickles may know it."""

from dasksc.loader.dataset import scDataset

__all__ = ["scDataset"]
