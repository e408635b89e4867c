#!/usr/bin/env python
"""Compute statistics, variable genes and predictions in a process whose memory may be limited, and print the results.

    python tests/programs/limited_statistics.py atlas.h5ad emb.zarr

The last line is JSON: sums over all genes, a digest of the genes found and of the predictions, and peaks of anonymous
memory beyond what the process held before, in bytes: of the passes, and of predicting, which is projected, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import dasksc
from dasksc.loader.row_range import over_range


class Embedding(torch.nn.Module):
    """A linear map of dense batches."""

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(n_genes, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.linear(batch)


def main(path: str, out: str) -> None:
    dasksc.statistics(path, filter="plate.str.endswith('1')")  # compiles
    dasksc.highly_variable_genes(path, 100, "seurat_v3", filter="plate.str.endswith('1')")
    with peak_beyond() as peak:
        found = dasksc.statistics(path, by="cell_type")
        genes = dasksc.highly_variable_genes(path, 1000, "seurat_v3", "plate")
    dataset = dasksc.scDataset(path, dasksc.Streaming(), 1024, rank=0, world_size=1)
    model = Embedding(found.genes.shape[0])
    one = over_range(dataset, 0, len(dataset.collection))
    with torch.inference_mode():
        model(next(iter(one)))  # compiles
    with peak_beyond() as predict_peak:
        dasksc.predict(model, dataset, out)
    predictions = dasksc.open(path, attach={"obsm/X_emb": out}).obsm["X_emb"].compute()
    print(
        json.dumps(
            {
                "sums": found.genes[["sum", "var", "count_nonzero"]].sum().tolist(),
                "n": found.groups.n_obs,
                "digest": digest(genes["highly_variable"].to_numpy()) + digest(predictions),
                "peak": peak[0],
                "predict_peak": predict_peak[0],
                "predict_projected": one.projected_bytes,
            }
        )
    )


def digest(values: np.ndarray) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


@contextlib.contextmanager
def peak_beyond() -> Iterator[list[int]]:
    """Sample anonymous memory; afterwards the list holds its peak beyond the beginning, in bytes."""
    before, peaks, done = rss_anon_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peaks[0] = max(peaks[0], rss_anon_bytes() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peaks
    finally:
        done.set()
        sampler.join()


def rss_anon_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
