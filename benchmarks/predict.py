#!/usr/bin/env python
"""Measure the cost and the memory of writing predictions for all cells.

    python benchmarks/predict.py --cells 100000 --out benchmarks/results/predict

The program computes a linear embedding of 64 dimensions for all cells of an atlas, in batches of 1,024.
`dasksc.predict` writes it to a new store; a plain loop discards the output of the model. Both take turns after an
unmeasured round and must compute the same values. Rates are medians over rounds. In separate processes, the program
then measures the peak of anonymous memory beyond the memory after the first batch: for a quarter of the cells, for all
cells, and for all cells in a control group with a memory limit that includes the page cache, as in jobs of Slurm and
Kubernetes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _atlas import add_options, atlas
from _machine import drop_from_cache, read_through, rss_anon_bytes
from _reports import add_out, write_report
from dask.utils import parse_bytes
from memory import peak_of_rss_anon

import dasksc
from tests.support.cgroups import Cgroup, NoCgroupError, memory_cgroup

WIDTH = 64
TARGET = 0.9


class Embedding(torch.nn.Module):
    """Linear map of dense or sparse batches."""

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(n_genes, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.layout == torch.sparse_csr:
            return batch @ self.linear.weight.T + self.linear.bias
        return self.linear(batch)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--layouts", nargs="+", default=["dense", "csr"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", default="1GiB", help="memory limit of the control group")
    parser.add_argument("--memory-only", type=Path, help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.memory_only is not None:
        print(json.dumps(memory_of(options.memory_only, options.batch, options.layouts[0])))
        return {}

    path = atlas(options)
    read_through(path)
    n_obs = dasksc.open(path, obs=[], names=False).n_obs
    report: dict[str, Any] = {"n_rows": n_obs, "batch": options.batch, "files": options.files, "width": WIDTH}
    report["cells_per_s"], report["rounds"] = {}, {}
    print("| layout | loop alone, cells/s | predict, cells/s | share of the loop |\n| --- | ---: | ---: | ---: |")
    for layout in options.layouts:
        rates = in_turns(path, options.batch, layout, options.rounds)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        report["cells_per_s"][layout], report["rounds"][layout] = medians, rates
        share = medians["predict"] / medians["loop"]
        print(f"| {layout} | {medians['loop']:,.0f} | {medians['predict']:,.0f} | {share:.1%} |")
    report["least_share"] = min(rate["predict"] / rate["loop"] for rate in report["cells_per_s"].values())
    report["memory"] = peaks(options, path, n_obs)
    print("| cells | limit | peak, MiB | projected, MiB |\n| ---: | --- | ---: | ---: |")
    for one in report["memory"]:
        peak, projected = one["peak_bytes"] / 2**20, one["projected_bytes"] / 2**20
        print(f"| {one['n_obs']:,} | {one['limit'] or 'none'} | {peak:.0f} | {projected:.0f} |")
    report["load"] = os.getloadavg()[0]
    print(f"target: {TARGET:.0%} of the loop; {'reached' if report['least_share'] >= TARGET else 'missed'}")
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def dataset_of(path: Path, batch: int, layout: Any) -> dasksc.scDataset:
    return dasksc.scDataset(path, dasksc.Streaming(), batch, layout=layout, rank=0, world_size=1)


def in_turns(path: Path, batch: int, layout: str, n_rounds: int) -> dict[str, list[float]]:
    """Return the cells per second of the loop and of `dasksc.predict` in each round."""
    rates: dict[str, list[float]] = {"loop": [], "predict": []}
    dataset = dataset_of(path, batch, layout)
    model = Embedding(dasksc.open(path, obs=[], names=False).n_vars)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for i in range(-1, n_rounds):
            begun = time.perf_counter()
            last, n_rows = loop(model, dataset)
            loop_s = time.perf_counter() - begun
            out = Path(folder) / "emb.zarr"
            begun = time.perf_counter()
            dasksc.predict(model, dataset, out)
            predict_s = time.perf_counter() - begun
            attached = dasksc.open(path, attach={"obsm/X_emb": out}).obsm["X_emb"]
            if not np.array_equal(attached[-len(last) :].compute(), last):
                raise SystemExit("the predictions differ from those of the loop")
            shutil.rmtree(out)
            if i >= 0:
                rates["loop"].append(n_rows / loop_s)
                rates["predict"].append(n_rows / predict_s)
    return rates


def loop(model: torch.nn.Module, dataset: dasksc.scDataset) -> tuple[np.ndarray, int]:
    """Run the model on all cells; return its output for the last batch, and the number of cells."""
    n_rows, last = 0, np.empty(0)
    with torch.inference_mode():
        for batch in dataset:
            last = model(batch).numpy()
            n_rows += len(last)
    return last, n_rows


def peaks(options: argparse.Namespace, path: Path, n_obs: int) -> list[dict[str, Any]]:
    """Return peaks of anonymous memory for a quarter of the cells, all cells, and all cells in a control group."""
    few = argparse.Namespace(**{**vars(options), "cells": n_obs // 4, "atlas": None})
    found = [peak_of(atlas(few), options), peak_of(path, options)]
    try:
        with memory_cgroup(parse_bytes(options.limit)) as group:
            drop_from_cache(path)  # Pages read by another process are not charged to the group.
            found.append(peak_of(path, options, group))
            if group.n_killed():
                raise SystemExit(f"the kernel killed a process with a memory limit of {options.limit}")
    except NoCgroupError as error:
        print(f"without a control group: {error}")
    return found


def peak_of(path: Path, options: argparse.Namespace, group: Cgroup | None = None) -> dict[str, Any]:
    """Return the result of `memory_of` in a separate process, optionally in a control group."""
    command = [sys.executable, __file__, "--memory-only", str(path), "--batch", str(options.batch)]
    done = subprocess.run(
        [*command, "--layouts", options.layouts[0]],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=None if group is None else group.enter,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"limit": None if group is None else options.limit}


def memory_of(path: Path, batch: int, layout: str) -> dict[str, Any]:
    """Return the peak of anonymous memory beyond the memory after the first batch, and its projection."""
    dataset = dataset_of(path, batch, layout)
    model = Embedding(dasksc.open(path, obs=[], names=False).n_vars)
    with torch.inference_mode():
        model(next(iter(dataset)))  # Compiles kernels.
    before = rss_anon_bytes()
    with peak_of_rss_anon() as found, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        report = dasksc.predict(model, dataset, Path(folder) / "emb.zarr")
    return {"n_obs": report.n_obs, "peak_bytes": max(found) - before, "projected_bytes": dataset.projected_bytes}


if __name__ == "__main__":
    main()
