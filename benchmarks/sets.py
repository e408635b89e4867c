#!/usr/bin/env python
"""Measure the cost of planning and reading sets of cells with matched controls.

    python benchmarks/sets.py --cells 200000 --out benchmarks/results/sets
    python benchmarks/sets.py --plan-rows 100000000 --out benchmarks/results/sets

*Planning*: the program binds `CellSets` to the codes of `--plan-rows` cells with 20,000 perturbations in 50 contexts,
sorted by condition and unsorted, each in a new process. It reports the seconds for construction, the seconds to the
first fetch, and the peak of resident memory beyond the codes, in bytes per cell.

*Reading*: the program measures the rows per second, including controls, of sets of 64 with controls. It reads a screen
sorted by condition, and compares the rate with `BlockShuffling` in blocks of 8 and the same number of rows per batch.
It then reads the same screen unsorted, and compares the rate with `BlockShuffling` of single rows. Finally, it applies
`Downsample(0.5)` to the targets and controls of the sorted screen, and compares the rate with that of unchanged sets.
Contenders take turns after an unmeasured round, rates are medians over rounds, and the files are in the page cache.
Cold files, clusters and several ranks are not measured.

*Peers*: ``--cell-load-python`` and ``--annbatch-python`` are interpreters with these libraries. Peers take turns in
separate processes. cell-load loads sets of 64 with controls as consecutive rows of the sorted file, in two DataLoader
workers, as it recommends. annbatch loads batches of one class from its own store of that file. The counterpart of
annbatch is `CellSets` of one class without controls, from the file. It reads runs of 64 rows, as annbatch does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anndata
import numpy as np
import pandas as pd
from _atlas import add_options, atlas
from _harness import Contender, compete, measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc

N_PERTURBATIONS, N_CONTEXTS = 20_000, 50
SET_SIZE, BATCH, FETCH_ROWS = 64, 512, 16_384
CONTROL = {"gene": "control"}
BY = ["context", "gene"]

# Targets: maxima in seconds or bytes per cell, and minimum ratios of rates: of sets to blocks (sorted, unsorted), of
# downsampled to unchanged sets, and of dasksc to a peer (cell-load, annbatch).
TARGETS = {
    "construct_s sorted": 2.0,
    "construct_s unsorted": 6.0,
    "first_fetch_s": 0.01,
    "bytes_per_cell": 12.0,
    "sorted": 0.7,
    "unsorted": 0.8,
    "Downsample": 0.75,
    "cell-load": 10,
    "annbatch": 1.5,
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.set_defaults(genes=2_000)
    parser.add_argument("--plan-rows", type=int, default=10**8, help="number of cells in the plans (0: skip planning)")
    parser.add_argument("--groups", type=int, default=100, help="number of perturbations in the screen to read")
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense", help="layout of the batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a measurement in seconds")
    for peer in ("cell-load", "annbatch"):
        parser.add_argument(f"--{peer}-python", help=f"Python interpreter that has {peer} installed")
    parser.add_argument("--child", choices=["sorted", "unsorted"], help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(planned(options.plan_rows, is_sorted=options.child == "sorted")))
        return {}
    plans = {}
    for order in ("sorted", "unsorted") if options.plan_rows else ():
        command = [sys.executable, __file__, "--child", order, "--plan-rows", str(options.plan_rows)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
        plans[order] = json.loads(done.stdout.splitlines()[-1])
    report = {
        "plan_rows": options.plan_rows,
        "n_groups": N_PERTURBATIONS * N_CONTEXTS,
        "plans": plans,
        **rates_of(options),
        "peers": peers_of(options),
        "set_size": SET_SIZE,
        "batch": BATCH,
        "fetch_rows": FETCH_ROWS,
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
    }
    print(table_of(report))
    write_report(options.out, report)
    return report


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


# --- Planning ---------------------------------------------------------------------------------------


def codes_of(n: int, *, is_sorted: bool) -> dict[str, pd.Categorical]:
    """Return the context and the perturbation of each cell, with a twentieth of the cells as controls."""
    rng = np.random.default_rng(0)
    context = rng.integers(0, N_CONTEXTS, n, dtype=np.int8)
    gene = rng.integers(0, N_PERTURBATIONS, n, dtype=np.int16)
    gene[rng.random(n, dtype=np.float32) < 0.05] = 0
    if is_sorted:
        context.sort()
        bounds = np.searchsorted(context, np.arange(N_CONTEXTS + 1))
        for start, stop in pairwise(bounds):
            gene[start:stop].sort()
    names = ["control", *(f"P{i}" for i in range(1, N_PERTURBATIONS))]
    return {
        "context": pd.Categorical.from_codes(context, categories=[f"C{i}" for i in range(N_CONTEXTS)]),
        "gene": pd.Categorical.from_codes(gene, categories=names),
    }


def memory_bytes(what: str) -> int:
    """Return a memory figure of this process in bytes, by its name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


def planned(n: int, *, is_sorted: bool) -> dict[str, float]:
    """Measure binding `CellSets` to codes, and planning a fetch."""

    def plan_of(columns: Any, n_obs: int) -> Any:
        strategy = dasksc.CellSets(BY, SET_SIZE, control=CONTROL, unmatched="drop")
        return dasksc.EpochPlan(sampler=strategy.bind(n_obs, columns.__getitem__), batch_size=BATCH, fetch_factor=16)

    for kind in (True, False):  # Compile kernels before the clock starts.
        plan_of(codes_of(50_000, is_sorted=kind), 50_000).fetch(0)
    columns = codes_of(n, is_sorted=is_sorted)
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    plan = plan_of(columns, n)
    constructed = time.perf_counter()
    plan.fetch(0)
    first = time.perf_counter()
    kept = memory_bytes("VmRSS")
    times = []
    for k in range(1, 30):
        begun = time.perf_counter()
        plan.fetch(k)
        times.append(time.perf_counter() - begun)
    return {
        "construct_s": constructed - start,
        "first_fetch_s": first - constructed,
        "fetch_s": statistics.median(times),
        "bytes_per_cell": (memory_bytes("VmHWM") - before) / n,
        "kept_bytes_per_cell": (kept - before) / n,
    }


# --- Reading ----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Shape of a batch, for `measure`."""

    shape: tuple[int]


def screens(options: argparse.Namespace) -> dict[str, Path]:
    """Return the paths of two files of the same screen: unsorted, and sorted by condition."""
    plain = atlas(options)
    paths = {order: plain.with_name(f"{plain.stem}-screen-{order}.h5ad") for order in ("unsorted", "sorted")}
    if not all(path.exists() for path in paths.values()):
        adata = anndata.read_h5ad(plain)
        rng = np.random.default_rng(0)
        genes = np.array(["control", *(f"P{i:03d}" for i in range(1, options.groups))])
        drawn = rng.integers(0, options.groups, adata.n_obs)
        adata.obs["gene"] = pd.Categorical(genes[np.where(rng.random(adata.n_obs) < 0.1, 0, drawn)])
        adata.obs["context"] = pd.Categorical(rng.choice([f"C{i}" for i in range(4)], adata.n_obs))
        adata.obs["condition"] = (adata.obs.context.astype(str) + " " + adata.obs.gene.astype(str)).astype("category")
        adata.write_h5ad(paths["unsorted"])
        order = adata.obs.sort_values(BY, kind="stable").index
        adata[order].copy().write_h5ad(paths["sorted"])
    return paths


def rates_of(options: argparse.Namespace) -> dict[str, Any]:
    """Measure reading for all contenders alternately."""
    paths = screens(options)
    for path in paths.values():
        read_through(path)

    def epoch_of(order: str, strategy: Any, batch_size: int, transform: Any = None) -> Callable[[], Iterator[Rows]]:
        dataset = dasksc.scDataset(
            paths[order],
            strategy,
            batch_size=batch_size,
            fetch_factor=FETCH_ROWS // BATCH,
            layout=options.layout,
            obs=["gene"],
            transform=transform,
            rank=0,
            world_size=1,
            seed=0,
        )
        if isinstance(strategy, dasksc.CellSets):
            return lambda: (Rows((len(batch.index) + len(batch.control.index),)) for batch in dataset)
        return lambda: (Rows((len(batch.index),)) for batch in dataset)

    sets = dasksc.CellSets(BY, SET_SIZE, control=CONTROL)
    contenders = {
        "sorted": epoch_of("sorted", sets, BATCH // 2),
        "sorted, BlockShuffling(8)": epoch_of("sorted", dasksc.BlockShuffling(8), BATCH),
        "unsorted": epoch_of("unsorted", sets, BATCH // 2),
        "unsorted, BlockShuffling(1)": epoch_of("unsorted", dasksc.BlockShuffling(1), BATCH),
        "Downsample": epoch_of("sorted", sets, BATCH // 2, dasksc.transforms.Downsample(0.5)),
    }
    references = {
        "sorted": "sorted, BlockShuffling(8)",
        "unsorted": "unsorted, BlockShuffling(1)",
        "Downsample": "sorted",
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, options.rounds):
        for name, epoch in contenders.items():
            found = measure(epoch, seconds=options.seconds, fetch_rows=FETCH_ROWS, consume=None)
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                rates[name].append(found.rows_per_s)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "rows_per_s": medians,
        "runs": rates,
        "ratios": {
            name: statistics.median(a / b for a, b in zip(rates[name], rates[reference], strict=True))
            for name, reference in references.items()
        },
    }


def peers_of(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the sets per second of dasksc and of the peers whose interpreters are given."""
    path = screens(options)["sorted"]
    logs = options.work / "logs"
    logs.mkdir(exist_ok=True)
    common = {"set_size": SET_SIZE, "batch": BATCH // 2, "fetch": FETCH_ROWS // 2, "work": str(options.work)}
    common |= {"path": str(path), "weights": "cells", "block": 8, "workers": 2, "by": BY, "control": CONTROL}
    pairs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    if options.cell_load_python:
        pairs["cell-load"] = options.cell_load_python, common, common
    if options.annbatch_python:
        store = options.work / f"{path.stem}-annbatch"
        ours = common | {"by": "condition", "control": None, "block": SET_SIZE, "batch": SET_SIZE}
        if not store.exists():
            spec = json.dumps(ours | {"annbatch_path": str(store)})
            script = Path(__file__).with_name("_set_contenders.py")
            subprocess.run([options.annbatch_python, str(script), "write annbatch store", spec], check=True)
        pairs["annbatch"] = options.annbatch_python, ours, ours | {"path": str(store)}
    found = {}
    for peer, (python, ours, theirs) in pairs.items():
        starts = [
            partial(
                Contender,
                name,
                python=interpreter,
                script=Path(__file__).with_name("_set_contenders.py"),
                spec=spec,
                log=logs / f"sets-{peer}-{name}.log",
            )
            for name, interpreter, spec in (("dasksc", sys.executable, ours), (peer, python, theirs))
        ]
        results = compete(starts, rounds=options.rounds, seconds=options.seconds, warm_up_s=2.0)
        rates = {one.name: statistics.median(one.produced) / SET_SIZE for one in results}
        found[peer] = rates | {"ratio": rates["dasksc"] / rates[peer]}
    return found


def table_of(report: dict[str, Any]) -> str:
    """Format the figures and their targets as a table."""
    lines = ["| | measured | target |", "| --- | ---: | ---: |"]
    for order, plan in report["plans"].items():
        limits = TARGETS[f"construct_s {order}"], 1e3 * TARGETS["first_fetch_s"]
        lines += [
            f"| construct, {order} | {plan['construct_s']:.2f} s | {limits[0]:.0f} s |",
            f"| first fetch, {order} | {1e3 * plan['first_fetch_s']:.1f} ms | {limits[1]:.0f} ms |",
            f"| later fetches, {order} | {plan['fetch_s'] * 1e3:.1f} ms | |",
            f"| peak memory, {order} | {plan['bytes_per_cell']:.1f} B per cell | {TARGETS['bytes_per_cell']:.0f} B |",
        ]
    for name, ratio in report["ratios"].items():
        label = "downsampled / unchanged sets" if name == "Downsample" else f"sets / blocks, {name}"
        lines.append(f"| rows/s of {label} | {ratio:.2f} | {TARGETS[name]} |")
    for peer, rates in report["peers"].items():
        target = TARGETS[peer]
        lines.append(
            f"| {rates['dasksc']:,.0f} sets/s / {peer} ({rates[peer]:,.0f}) | {rates['ratio']:.1f} | {target} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
