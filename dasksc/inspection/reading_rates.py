"""Short probes of the rate at which batches of an atlas are read."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from anndata import AnnData

from dasksc.atlas.modalities import Modalities
from dasksc.batches.batch import Batch
from dasksc.inspection.description import PROBED_BLOCKS, Rate
from dasksc.loader import scDataset
from dasksc.sampling.strategies import BlockShuffling
from dasksc.storage import Layout

__all__ = ["rate_of", "read_rates"]

# As in the benchmarks: batches of 64 rows, and 64 batches per fetch.
_BATCH_SIZE = 64
_FETCH_FACTOR = 64


def read_rates(data: AnnData | Modalities, seconds: float) -> Iterator[Rate]:
    """Measure the rate of dense and of CSR batches for each block size, each for `seconds` seconds."""
    layouts: tuple[Layout, ...] = ("dense", "csr")
    for layout in layouts:
        for block_size in PROBED_BLOCKS:
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
    """Measure the rate of batches for at least `seconds` seconds and one fetch, repeating epochs.

    The first fetch is not counted.
    """

    def batches() -> Iterator[Any]:
        while True:
            yield from dataset

    start = perf_counter()
    endless = batches()
    next(endless)
    first_batch_s = perf_counter() - start
    # Skip the first fetch: it compiles kernels, and all of its batches are available as soon as the first one is.
    for _ in range(min(len(dataset), dataset.fetch_factor) - 1):
        next(endless)
    n_rows, elapsed_s = 0, 0.0
    start = perf_counter()
    while elapsed_s < seconds or n_rows < min(dataset.fetch_size, len(dataset) * dataset.batch_size):
        batch = next(endless)
        n_rows += len(batch.index if isinstance(batch, Batch) else batch)
        elapsed_s = perf_counter() - start
    endless.close()  # type: ignore[attr-defined]
    return Rate(
        layout=layout,
        block_size=block_size,
        rows_per_s=n_rows / elapsed_s,
        first_batch_s=first_batch_s,
        memory_bytes=dataset.projected_bytes,
        page_bytes=dataset.projected_pages,
    )
