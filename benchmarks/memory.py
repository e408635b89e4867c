#!/usr/bin/env python
"""Check that the anonymous memory of epochs stays below the projection and does not grow.

    python benchmarks/memory.py --cells 100000 --epochs 5

The program samples RssAnon of the process, which excludes mapped files, during whole epochs. The baseline is the memory
before the first epoch: Python, torch, compiled kernels, and the tables of the atlas. The peak of each epoch beyond the
baseline must stay below ``dataset.projected_bytes``. The last peak may exceed the first by a tenth of the projection
or by four batches, whichever is larger, because the number of batches in memory varies by as much. Otherwise, the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from _atlas import add_options, atlas
from _machine import rss_anon_bytes

import dasksc

MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--no-mmap", action="store_true", help="read files instead of mapping them")
    parser.add_argument(
        "--control",
        metavar="TYPE",
        help="draw sets of --block cells of one type, each with as many control cells of this type",
    )
    options = parser.parse_args(arguments)
    sizes = {"batch_size": options.batch, "fetch_factor": options.fetch // options.batch}
    path = atlas(options)

    compile_kernels(layout=options.layout, control=options.control)
    dataset = dasksc.scDataset(
        path,
        strategy_of(options.block, options.control),
        **sizes,
        layout=options.layout,
        mmap=not options.no_mmap,
        obs=["cell_type"],
        rank=0,
        world_size=1,
        seed=0,
    )
    before = rss_anon_bytes()
    peaks = []
    for epoch in range(options.epochs):
        with peak_of_rss_anon() as peak:
            for _ in dataset:
                pass
        peaks.append(peak[0] - before)
        print(f"epoch {epoch}: peak {peaks[-1] / MIB:,.0f} MiB beyond the {before / MIB:,.0f} MiB before")
    projected = dataset.projected_bytes
    growth = peaks[-1] - peaks[0]
    batch_bytes = options.batch * dataset.collection.shape[1] * 4
    is_ok = max(peaks) <= projected and growth <= max(0.1 * projected, 4 * batch_bytes)
    print(
        f"projected {projected / MIB:,.0f} MiB, peak {max(peaks) / MIB:,.0f} MiB, growth over "
        f"{options.epochs} epochs {growth / MIB:,.0f} MiB: {'within' if is_ok else 'NOT within'} the targets"
    )
    report = {"before": before, "peaks": peaks, "projected": projected, "is_ok": is_ok}
    print(json.dumps(report))
    return report


def strategy_of(block: int, control: str | None) -> dasksc.SamplingStrategy:
    """Return a strategy of blocks or, if `control` is given, of sets with as many cells."""
    if control is None:
        return dasksc.BlockShuffling(block_size=block)
    return dasksc.CellSets("cell_type", set_size=block, control={"cell_type": control})


def compile_kernels(*, layout: str, control: str | None = None) -> None:
    """Iterate over a few cells, so that the memory of compilation is part of the baseline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "few.h5ad"
        X = sp.random(64, 32, density=0.2, format="csr", dtype=np.float32, random_state=0)
        obs = pd.DataFrame({"cell_type": [control or "a", "another"] * 32}, index=np.arange(64).astype(str))
        anndata.AnnData(X=X, obs=obs).write_h5ad(path)
        few = dasksc.scDataset(path, strategy_of(4, control), 8, layout=layout, rank=0, world_size=1, seed=0)
        for _ in few:
            pass


@contextmanager
def peak_of_rss_anon(every_s: float = 0.005) -> Iterator[list[int]]:
    """Sample the anonymous memory of this process, and keep the highest value so far in a list, in bytes."""
    peak = [rss_anon_bytes()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            peak[0] = max(peak[0], rss_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()


if __name__ == "__main__":
    sys.exit(not main()["is_ok"])
