#!/usr/bin/env python
"""Measure how far reading overlaps with the steps of a training loop.

    python benchmarks/overlap.py --cells 100000
    python benchmarks/overlap.py --cells 100000 --ranks 2 --epochs 3

Each round times epochs of loading alone, of steps alone, and of both together. A step takes as long as loading a batch.
With perfect overlap, both together take as long as the longer of the two. There are two targets: both together take at
most 1.25 times as long as the longer of the two (median over rounds), and the loop waits for batches during less than
5% of the time that both together take. A step is a wait without CPU time, like a wait for a GPU. With several ranks
under torchrun, each step synchronizes the ranks, as DDP does, and the figures are those of the slowest rank. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _atlas import add_options, atlas

import dasksc
from dasksc.plan.ranks import leave_group

TARGET = 1.25
WAIT_TARGET = 0.05

# Number of steps that calibrate the actual duration of a step.
_N_TRIED = 100


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the ratios."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1, help="epochs per measurement")
    parser.add_argument("--scheduler", choices=["threads", "synchronous"], default="threads")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--step", type=float, default=1.0, help="duration of a step, as a multiple of the time to load a batch"
    )
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    path = atlas(options)
    if options.as_rank or options.ranks == 1:
        return measure(path, options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command += [str(Path(__file__).resolve()), "--as-rank", *arguments, "--atlas", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"the ranks ended with {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on this rank, and print on the first rank."""
    if options.ranks > 1:
        dist.init_process_group("gloo")
    dataset = dasksc.scDataset(
        path,
        dasksc.BlockShuffling(block_size=options.block),
        batch_size=options.batch,
        fetch_factor=options.fetch // options.batch,
        layout=options.layout,
        scheduler=options.scheduler,
        **({} if options.ranks > 1 else {"rank": 0, "world_size": 1}),
        seed=0,
    )
    say = print if dataset.rank == 0 else (lambda line: None)
    n_steps = options.epochs * len(dataset)
    for _ in dataset:  # Compile kernels and fill the page cache.
        pass
    rounds = []
    for i in range(options.rounds):
        loading, _ = slowest(*loop_s(dataset, options.epochs, step_s=None))
        step_s = options.step * loading / n_steps
        # A sleep takes longer than requested, and synchronizing the ranks takes time.
        step_s = max(0.0, step_s - (slowest(steps_s(_N_TRIED, step_s))[0] / _N_TRIED - step_s))
        (stepping,) = slowest(steps_s(n_steps, step_s))
        both, waited = slowest(*loop_s(dataset, options.epochs, step_s=step_s))
        ratio, share = both / max(loading, stepping), waited / both
        rounds.append(
            {"loading_s": loading, "stepping_s": stepping, "both_s": both, "ratio": ratio, "wait_share": share}
        )
        say(
            f"round {i + 1}/{options.rounds}  loading {loading:.2f} s  steps {stepping:.2f} s  "
            f"both {both:.2f} s  ratio {ratio:.2f}  waited {share:.1%}"
        )
    ratio, share = (statistics.median(result[name] for result in rounds) for name in ("ratio", "wait_share"))
    say(f"median ratio {ratio:.2f} (target: at most {TARGET}), waited {share:.1%} (target: below {WAIT_TARGET:.0%})")
    report = {
        "ratio": ratio,
        "wait_share": share,
        "rounds": rounds,
        "n_batches": len(dataset),
        "n_ranks": options.ranks,
        "is_met": ratio <= TARGET and share < WAIT_TARGET,
    }
    say(json.dumps(report))
    if options.ranks > 1:
        dist.barrier()
        leave_group()
    return report


def slowest(*seconds: float) -> list[float]:
    """Return the maximum of each duration over ranks."""
    values = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def take_step(step_s: float) -> None:
    """Sleep like a wait for a GPU, and then wait for the other ranks."""
    time.sleep(step_s)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def loop_s(dataset: Any, n_epochs: int, *, step_s: float | None) -> tuple[float, float]:
    """Return the seconds that epochs take with an optional step after each batch, and the seconds spent waiting."""
    start, waited = time.perf_counter(), 0.0
    for _ in range(n_epochs):
        requested_at = time.perf_counter()
        for _ in dataset:
            waited += time.perf_counter() - requested_at
            if step_s is not None:
                take_step(step_s)
            requested_at = time.perf_counter()
        waited += time.perf_counter() - requested_at
    return time.perf_counter() - start, waited


def steps_s(n_steps: int, step_s: float) -> float:
    """Return the seconds that steps take without loading."""
    start = time.perf_counter()
    for _ in range(n_steps):
        take_step(step_s)
    return time.perf_counter() - start


if __name__ == "__main__":
    report = main()
    sys.exit(0 if "--as-rank" in sys.argv else not report["is_met"])
