"""The data set `scDataset` and its parts."""

from dasksc.loader.dataset import scDataset
from dasksc.loader.source import IndexedSource, MatrixSource

__all__ = ["IndexedSource", "MatrixSource", "scDataset"]
