#!/usr/bin/env python
"""What does augmentation cost on the way from the file to the loop?

    python benchmarks/augmentation.py --cells 100000 --genes 2000 --out benchmarks/results/augmentation

Cells a second that are handed to a loop by `Streaming` and `BlockShuffling`, CSR and dense, as they are and with each
transform of `scDataset(transform=)`. Each rate is the median over rounds that go through all in turn; the round before
them is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _atlas import add_options, atlas
from _harness import measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc
from dasksc.transforms import Downsample, MaskGenes

_PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "make_atlas.py"
TRANSFORMS: dict[str, Any] = {
    "as they are": lambda batch: batch,
    "Downsample(0.5)": Downsample(0.5),
    "Downsample(target_counts=)": Downsample(target_counts=200),
    "MaskGenes(0.2)": MaskGenes(0.2),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the command line says; write and return what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.set_defaults(genes=2_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    add_out(parser)
    options = parser.parse_args(arguments)

    paths = {"csr": atlas(options)}
    paths["dense"] = paths["csr"].with_name(f"{paths['csr'].stem}-dense.h5ad")
    if not paths["dense"].exists():
        size = ["--cells", str(options.cells), "--genes", str(options.genes)]
        command = [sys.executable, str(_PROGRAM), "--dense", "--out", str(paths["dense"]), *size]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    strategies = {"Streaming": dasksc.Streaming(), "BlockShuffling": dasksc.BlockShuffling(options.block)}
    found: dict[str, Any] = {}
    for layout, path in paths.items():
        read_through(path)
        for strategy, draws in strategies.items():
            epochs: dict[str, Callable[[], Iterator[Any]]] = {}
            for name, transform in TRANSFORMS.items():
                dataset = dasksc.scDataset(
                    path,
                    draws,
                    batch_size=options.batch,
                    fetch_factor=max(1, options.fetch // options.batch),
                    layout=layout,
                    transform=transform,
                    rank=0,
                    world_size=1,
                    seed=0,
                )
                epochs[name] = lambda dataset=dataset: (batch.X for batch in dataset)
            rates: dict[str, list[float]] = {name: [] for name in epochs}
            for i in range(-1, options.rounds):
                for name, epoch in epochs.items():
                    measured = measure(epoch, seconds=options.seconds, fetch_rows=options.fetch, consume=None)
                    if i >= 0:  # the round before fills caches and compiles
                        rates[name].append(measured.rows_per_s)
            found[f"{strategy}, {layout}"] = {name: statistics.median(rate) for name, rate in rates.items()}
    print(f"| cells/s | {' | '.join(TRANSFORMS)} |\n| --- | {' | '.join(['---:'] * len(TRANSFORMS))} |")
    for name, rates_of in found.items():
        plain = rates_of["as they are"]
        print(f"| {name} | {' | '.join(f'{rate:,.0f} ({rate / plain:.0%})' for rate in rates_of.values())} |")
    report = {
        **{name: getattr(options, name) for name in ("cells", "genes", "block", "batch", "fetch", "rounds")},
        "cells_per_s": found,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
