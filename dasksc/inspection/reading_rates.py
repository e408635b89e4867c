"""How fast batches of an atlas come in short probes."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from anndata import AnnData

from dasksc.atlas.modalities import Modalities
from dasksc.batches.batch import Batch
from dasksc.inspection.description import Rate
from dasksc.loader import scDataset
from dasksc.sampling.strategies import BlockShuffling
from dasksc.storage import Layout

__all__ = ["BLOCK_SIZES", "rate_of", "read_rates"]

# As in the benchmarks: batches of 64 rows, of which a fetch holds 64.
_BATCH_SIZE = 64
_FETCH_FACTOR = 64
BLOCK_SIZES = (64, 1)


def read_rates(data: AnnData | Modalities, seconds: float) -> Iterator[Rate]:
    """Read dense and CSR batches for some seconds each, by blocks of each size."""
    layouts: tuple[Layout, ...] = ("dense", "csr")
    for layout in layouts:
        for block_size in BLOCK_SIZES:
            dataset = scDataset(
                data,
                BlockShuffling(block_size),
                min(_BATCH_SIZE, data.n_obs),
                _FETCH_FACTOR,
                layout=layout,
                rank=0,
                world_size=1,
                seed=0,
            )
            yield rate_of(dataset, layout=layout, block_size=block_size, seconds=seconds)


def rate_of(dataset: scDataset, *, layout: Layout, block_size: int, seconds: float) -> Rate:
    """Read for some seconds, and a fetch at least, after a first fetch that is not counted; epoch after epoch."""

    def batches() -> Iterator[Any]:
        while True:
            yield from dataset

    start = perf_counter()
    endless = batches()
    next(endless)
    first_batch_s = perf_counter() - start
    # Kernels are compiled in the first fetch, and it was there when its first batch was.
    for _ in range(min(len(dataset), dataset.fetch_size // dataset.batch_size) - 1):
        next(endless)
    n_rows, elapsed_s = 0, 0.0
    start = perf_counter()
    while elapsed_s < seconds or n_rows < min(dataset.fetch_size, len(dataset) * dataset.batch_size):
        batch = next(endless)
        n_rows += len(batch.index if isinstance(batch, Batch) else batch)
        elapsed_s = perf_counter() - start
    endless.close()  # type: ignore[attr-defined]
    return Rate(layout=layout, block_size=block_size, rows_per_s=n_rows / elapsed_s, first_batch_s=first_batch_s)
