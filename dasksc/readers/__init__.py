"""File formats: readers of paths and URLs, and the stores that they open.

h5ad, Zarr, 10x, MuData, SOMA and Parquet are readers of this package. A package adds a format with an entry point in
the group ``dasksc.readers``, which names a `Reader`.
"""

from __future__ import annotations

from dasksc.readers.interface import Reader, Store, StoredMatrix
from dasksc.readers.options import OpenOptions

__all__ = ["OpenOptions", "Reader", "Store", "StoredMatrix"]
