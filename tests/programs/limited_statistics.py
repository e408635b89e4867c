#!/usr/bin/env python
"""Compute statistics and variable genes, or predictions, in a process whose memory may be limited; print the results.

    python tests/programs/limited_statistics.py atlas.h5ad
    python tests/programs/limited_statistics.py atlas.h5ad emb.zarr

The last line is JSON: a digest of the results, sums over all genes, and the peak increase of anonymous memory and its
projection, in bytes. Variable genes are found with a low memory limit, and statistics have many groups, so that their
results are a large part of the projection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np

import dasksc


def summarize(path: str) -> dict[str, Any]:
    # Compile and import first, with few cells: the measured steps would reuse the memory that many cells freed, and the
    # peaks would be too low.
    for mmap in (True, False):
        few = dasksc.open(path, obs=[], mmap=mmap)[::15, :2000][:2000].copy()
        few.obs["half"] = np.resize(["a", "b"], 2000)
        dasksc.statistics(few, by="half")
        dasksc.highly_variable_genes(few, 100, "seurat_v3", "half")
    del few
    projected = noted_projections()
    with dask.config.set({"dasksc.memory-limit": "120MB"}), peak_beyond() as of_genes:
        genes = dasksc.highly_variable_genes(path, 1000, "seurat_v3", "plate")
    plates = list(dasksc.open(path, obs=["plate"]).obs["plate"].cat.categories[:8])
    with peak_beyond() as of_groups:
        found = dasksc.statistics(path, by=["cell_type", "plate"], filter=f"plate in {plates}")
    return {
        "sums": found.genes[["sum", "var", "count_nonzero"]].sum().tolist(),
        "n_groups": found.groups.n_obs,
        "digest": digest(genes["highly_variable"].to_numpy()),
        "peaks": [of_genes[0], of_groups[0]],
        "projected": [max(projected[:2]), projected[2]],
    }


def noted_projections() -> list[int]:
    """Return a list to which every later pass appends its projected memory."""
    from dasksc.summaries.reading import Pass

    projected, read = [], Pass.__iter__

    def noted(source: Pass) -> Iterator[Any]:
        projected.append(source.reserved_bytes + source.dataset().projected_bytes)
        return read(source)

    Pass.__iter__ = noted
    return projected


def predict(path: str, out: str) -> dict[str, Any]:
    import torch  # statistics are measured without torch

    from dasksc.inference import RowRange

    dataset = dasksc.scDataset(path, dasksc.Streaming(), 256, rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(dasksc.open(path, obs=[], names=False).n_vars, 8)
    # Compile and import first, with small batches: the measured prediction would reuse the memory that large batches
    # freed, and the peak would be too low.
    for mmap in (True, False):
        few = dasksc.open(path, obs=[], mmap=mmap)[:64]
        dasksc.predict(model, few, f"{out}.few.{mmap}", batch_size=8)
    del few
    with peak_beyond() as peak:
        dasksc.predict(model, dataset, out)
    predictions = dasksc.open(path, attach={"obsm/X_emb": out}).obsm["X_emb"].compute()
    projected = RowRange(dataset, 0, len(predictions)).projected_bytes
    return {"digest": digest(predictions), "peak": peak[0], "projected": projected}


def digest(values: np.ndarray) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


@contextlib.contextmanager
def peak_beyond() -> Iterator[list[int]]:
    """Sample anonymous memory; afterwards, the list holds its peak increase in bytes."""
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
    print(json.dumps(summarize(*sys.argv[1:]) if len(sys.argv) == 2 else predict(*sys.argv[1:])))
