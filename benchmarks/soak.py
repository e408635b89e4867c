#!/usr/bin/env python
"""Test training on several ranks over many epochs, with random stalls and resumes.

    python benchmarks/soak.py --minutes 10 --ranks 3

The program trains under DDP (gloo, on the CPU) epoch after epoch, while ranks stall at random for up to two
seconds, in the training loop or in reading. Epochs cycle through three modes: threads of the rank, two DataLoader
workers, and threads with a stop at a random step, after which a second data set resumes from the state. Every other
cycle of three epochs reads with hooks (a `fetch_callback` that may stall, and a `batch_transform`), and the others read
without hooks. After each epoch, the ranks check that all took equally many steps, that each cell was seen once except
for the reported padding, and that the order is new. At the end, they check that memory and the number of open files
have not grown. The exit status is 1 if a check fails or if there is no progress for a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _atlas import add_options, atlas
from _machine import rss_anon_bytes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dasksc
from dasksc.plan.ranks import leave_group

MIB = 1 << 20
MODES = ("threads", "workers", "resumed")
_NOTHING_MOVES_S = 60
_LONGEST_STALL_S = 2.0
# Minimum number of epochs for a check of growth: each mode then runs twice with hooks and twice without. In fewer
# epochs, growth may be due to the warm-up.
_FEWEST_EPOCHS = 12
# Allowed growth of memory, which an allocator may retain.
_FLAT_BYTES = 32 * MIB


@dataclass(kw_only=True)
class Stalls:
    """Random stalls of one rank, independent of the other ranks.

    Parameters
    ----------
    random
        Random generator, with a different seed on each rank.
    probability
        Probability of a stall at each opportunity.
    longest_s
        Maximum duration of a stall in seconds.
    """

    random: random.Random
    probability: float
    longest_s: float
    n: int = 0
    total_s: float = 0.0

    def maybe(self) -> None:
        if self.random.random() < self.probability:
            stall_s = self.random.uniform(0, self.longest_s)
            self.n += 1
            self.total_s += stall_s
            time.sleep(stall_s)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Record of an epoch on one rank.

    Parameters
    ----------
    mode
        Mode of reading.
    n_steps
        Number of batches.
    digest
        Digest of the row numbers in order.
    n_padded
        Number of repeated rows over all ranks, as reported by the data set.
    anon_bytes, n_files
        Anonymous memory in bytes and number of open files of the rank at the end of the epoch.
    """

    mode: str
    n_steps: int
    digest: str
    n_padded: int
    anon_bytes: int
    n_files: int


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Start the ranks with the options of the command line, wait for them, and return their report."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=20_011)
    parser.set_defaults(genes=500)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--stalls", type=float, default=0.01, help="probability of a stall, per step and per fetch")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank:
        soak(options)
        return {"is_ok": True}
    path = atlas(options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command += [str(Path(__file__).resolve()), "--as-rank", *arguments, "--atlas", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    print(*lines[:-1], sep="\n")
    if done.returncode or not lines:
        raise SystemExit(f"the ranks ended with {done.returncode}")
    report: dict[str, Any] = json.loads(lines[-1])
    print(json.dumps(report))
    return report


def soak(options: argparse.Namespace) -> None:
    """Train on one rank until the time is up."""
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=_NOTHING_MOVES_S))
    rank = dist.get_rank()
    stalls = Stalls(
        random=random.Random(rank),
        probability=options.stalls,
        longest_s=min(_LONGEST_STALL_S, 60 * options.minutes / 20),
    )
    datasets = [make_dataset(options, stalls, hooked=hooked) for hooked in (False, True)]
    model = DistributedDataParallel(torch.nn.Linear(datasets[0].collection.n_vars, 1))
    n_obs = datasets[0].plan(0).n_rows
    start, seen_orders, epochs, problems = time.monotonic(), set[str](), list[Epoch](), list[str]()
    while go_on(start, options.minutes):
        number = len(epochs)
        mode, hooked = MODES[number % len(MODES)], number // len(MODES) % 2
        dataset = datasets[hooked]
        n_padded = dataset.plan().n_padded
        counts = torch.zeros(n_obs, dtype=torch.int32)
        order, n_steps = hashlib.blake2b(), 0
        again = functools.partial(make_dataset, options, stalls, hooked=bool(hooked))
        for batch in epoch_of(datasets, hooked, mode, number, again):
            model(batch.X).sum().backward()  # Synchronizes with all other ranks.
            stalls.maybe()
            counts += torch.bincount(batch.index, minlength=n_obs).to(torch.int32)
            order.update(batch.index.numpy().tobytes())
            n_steps += 1
        gc.collect()  # closes the file of a replaced data set, which AnnData keeps in a reference cycle
        epochs.append(
            Epoch(
                mode=mode,
                n_steps=n_steps,
                digest=order.hexdigest()[:16],
                n_padded=n_padded,
                anon_bytes=rss_anon_bytes(),
                n_files=len(os.listdir("/proc/self/fd")),
            )
        )
        problems += compare(epochs[-1], counts, seen_orders, number)
        if rank == 0:
            print(f"epoch {number} ({mode}): {n_steps} steps, {epochs[-1].anon_bytes / MIB:,.0f} MiB", flush=True)
        if problems:
            break
    finish(epochs, stalls, problems, time.monotonic() - start)
    leave_group()


def make_dataset(options: argparse.Namespace, stalls: Stalls, *, hooked: bool) -> dasksc.scDataset:
    """Return a data set of this rank; its seed is negotiated between ranks, or restored from a state on resuming."""

    def slowly(data: Any, rows: Any) -> Any:
        stalls.maybe()
        return dasksc.MultiIndexable(X=data[rows].X.toarray(), index=rows)

    def as_batch(parts: Any) -> dasksc.Batch:
        return dasksc.Batch(X=torch.from_numpy(parts["X"]), index=torch.from_numpy(parts["index"]))

    how: dict[str, Any] = {"fetch_callback": slowly, "batch_transform": as_batch} if hooked else {"obs": ["cell_type"]}
    return dasksc.scDataset(options.atlas, dasksc.BlockShuffling(8), batch_size=options.batch, fetch_factor=4, **how)


def epoch_of(
    datasets: list[dasksc.scDataset], which: int, mode: str, number: int, again: Callable[[], dasksc.scDataset]
) -> Iterator[Any]:
    """Yield the batches of the next epoch, and replace the data set by a new one where the epoch is resumed."""
    dataset = datasets[which]
    n_steps = len(dataset)
    if mode == "resumed":
        n_before = random.Random(number).randrange(n_steps)
        yield from islice(iter(dataset), n_before)
        datasets[which] = again()
        datasets[which].load_state_dict(dataset.state_dict())
        dataset, n_steps = datasets[which], n_steps - n_before
    source: Any = DataLoader(dataset, batch_size=None, num_workers=2) if mode == "workers" else dataset
    n_yielded = 0
    for batch in source:
        yield batch
        n_yielded += 1
    assert n_yielded == n_steps, f"{n_yielded} batches of {n_steps}"


def go_on(start: float, minutes: float) -> bool:
    """Return True if time remains for another epoch on the clock of the first rank."""
    answer = torch.tensor([time.monotonic() - start < 60 * minutes], dtype=torch.int32)
    dist.broadcast(answer, 0)
    return bool(answer.item())


def compare(epoch: Epoch, counts: torch.Tensor, seen_orders: set[str], number: int) -> list[str]:
    """Return the problems of an epoch over all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, epoch)
    dist.all_reduce(counts)
    problems = []
    if len({one.n_steps for one in everyone}) > 1:
        problems.append(f"epoch {number}: steps {[one.n_steps for one in everyone]}")
    if int(counts.min()) < 1 or int(counts.sum()) - len(counts) != epoch.n_padded:
        problems.append(
            f"epoch {number}: {int((counts == 0).sum())} cells not seen, {int((counts > 1).sum())} more than once, "
            f"{epoch.n_padded} padded"
        )
    order = " ".join(one.digest for one in everyone)
    if order in seen_orders:
        problems.append(f"epoch {number} repeats another")
    seen_orders.add(order)
    return problems


def finish(epochs: list[Epoch], stalls: Stalls, problems: list[str], elapsed_s: float) -> None:
    """Combine the records of all ranks, and print the report on the first rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (epochs, {"n": stalls.n, "total_s": round(stalls.total_s, 1)}))
    if dist.get_rank():
        return
    ranks = []
    for rank, (its_epochs, its_stalls) in enumerate(everyone):
        quarter = max(1, len(its_epochs) // 4)
        # The first quarter is a warm-up of threads, compiled kernels and allocators.
        early, late = its_epochs[quarter : 2 * quarter] or its_epochs[:1], its_epochs[-quarter:]
        growth = statistics.median(e.anon_bytes for e in late) - statistics.median(e.anon_bytes for e in early)
        # The minimum over several epochs includes leaked files, but not files of ended workers, which are soon closed.
        files = min(e.n_files for e in early), min(e.n_files for e in late)
        ranks.append(
            {
                "stalls": its_stalls,
                "anon_mib": [round(its_epochs[0].anon_bytes / MIB), round(its_epochs[-1].anon_bytes / MIB)],
                "growth_mib": round(growth / MIB, 1),
                "files": files,
            }
        )
        if len(its_epochs) < _FEWEST_EPOCHS:
            continue
        if growth > _FLAT_BYTES:
            problems.append(f"rank {rank} holds {growth / MIB:,.0f} MiB more at the end")
        if files[1] > files[0]:
            problems.append(f"rank {rank} has {files[1]} files open at the end, and had {files[0]}")
    report = {
        "minutes": round(elapsed_s / 60, 2),
        "n_epochs": len(epochs),
        "n_steps": sum(epoch.n_steps for epoch in epochs),
        "ranks": ranks,
        "last": dataclasses.asdict(epochs[-1]),
        "problems": problems,
        "is_ok": not problems,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(not main()["is_ok"])
