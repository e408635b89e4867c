"""The data set `scDataset` and its components."""

from dasksc.loader.dataset import LoaderParts, components_of, scDataset, titled
from dasksc.loader.source import IndexedSource, MatrixSource

__all__ = ["IndexedSource", "LoaderParts", "MatrixSource", "components_of", "scDataset", "titled"]
