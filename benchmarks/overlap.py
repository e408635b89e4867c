#!/usr/bin/env python
"""Does reading go on while the training loop works?

    python benchmarks/overlap.py --cells 100000

Each round times an epoch of loading alone; of steps alone, each as long as a batch's share of a
fetch; and of both together. Perfect overlap would make both together take as long as the longer of
the two; the median over the rounds may be 1.25 times that. A step is a wait that leaves the CPU alone, as
that for a GPU is. Exits with 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from _atlas import add_options, atlas

import dasksc

TARGET = 1.25


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the command line says; return the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scheduler", choices=["threads", "synchronous"], default="threads")
    options = parser.parse_args(arguments)

    dataset = dasksc.scDataset(
        atlas(options),
        dasksc.BlockShuffling(block_size=options.block),
        batch_size=options.batch,
        fetch_factor=options.fetch // options.batch,
        layout=options.layout,
        scheduler=options.scheduler,
        rank=0,
        world_size=1,
        seed=0,
    )
    epoch_s(dataset, step_s=0)  # compiles, and fills the page cache
    rounds = []
    for i in range(options.rounds):
        loading = epoch_s(dataset, step_s=0)
        step_s = loading / len(dataset)
        stepping = steps_s(len(dataset), step_s)
        both = epoch_s(dataset, step_s=step_s)
        ratio = both / max(loading, stepping)
        rounds.append({"loading_s": loading, "stepping_s": stepping, "both_s": both, "ratio": ratio})
        print(
            f"round {i + 1}/{options.rounds}  loading {loading:.2f} s  steps {stepping:.2f} s  "
            f"both {both:.2f} s  ratio {ratio:.2f}"
        )
    ratio = statistics.median(result["ratio"] for result in rounds)
    print(f"median ratio {ratio:.2f} (target: at most {TARGET})")
    report = {"ratio": ratio, "rounds": rounds, "n_batches": len(dataset)}
    print(json.dumps(report))
    return report


def epoch_s(dataset: Any, *, step_s: float) -> float:
    """Seconds of an epoch with a step after every batch."""
    start = time.perf_counter()
    for _ in dataset:
        if step_s:
            time.sleep(step_s)
    return time.perf_counter() - start


def steps_s(n_steps: int, step_s: float) -> float:
    """Seconds that the steps of an epoch take by themselves: sleeping is longer than it is asked to be."""
    start = time.perf_counter()
    for _ in range(n_steps):
        time.sleep(step_s)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main()["ratio"] > TARGET)
