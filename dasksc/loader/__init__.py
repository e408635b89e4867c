"""The data set that a training loop iterates, and its parts."""

from dasksc.loader.dataset import LoaderParts, parts_of, scDataset
from dasksc.loader.source import IndexedSource, MatrixSource

__all__ = ["IndexedSource", "LoaderParts", "MatrixSource", "parts_of", "scDataset"]
