"""The data set `scDataset` and its components."""

from dasksc.loader.dataset import LoaderParts, parts_of, scDataset
from dasksc.loader.source import IndexedSource, MatrixSource

__all__ = ["IndexedSource", "LoaderParts", "MatrixSource", "parts_of", "scDataset"]
