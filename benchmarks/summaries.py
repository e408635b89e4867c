#!/usr/bin/env python
"""Compare the speed of statistics and highly variable genes with that of reading the atlas, and with scanpy.

    python benchmarks/summaries.py --cells 50000 --out benchmarks/results/summaries

Contenders take turns after an unmeasured round, and times are medians over rounds, in seconds. *Sums of batches* adds
up the per-gene sums of the CSR batches of `Streaming`. scanpy receives the whole matrix in memory, and reading it is
not timed. Cells have random labels of ``--groups`` groups and ``--batches`` batches. scanpy and dasksc also run once on
``--lazy-cells`` cells of the lazy atlas. Memory is the growth of RssAnon to its peak, for half of the cells and for all
cells, with and without a control group of ``--limit``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
from _atlas import add_options, atlas
from _machine import read_through, rss_anon_bytes
from _reports import add_out, write_report
from dask.utils import parse_bytes
from memory import peak_of_rss_anon

import dasksc
from tests.support.cgroups import NoCgroupError, memory_cgroup

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=50_000)
    parser.add_argument("--top", type=int, default=2_000, help="number of highly variable genes to select")
    parser.add_argument("--batches", type=int, default=10, help="number of batch labels")
    parser.add_argument("--groups", type=int, default=50, help="number of group labels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lazy-cells", type=int, default=10_000, help="number of cells for scanpy on the lazy atlas")
    parser.add_argument("--limit", default="1GiB", help="memory limit of the control group")
    add_out(parser)
    options = parser.parse_args(arguments)

    warnings.simplefilter("ignore")  # of scanpy
    path = atlas(options)
    read_through(path)
    lazy = opened(path, options)
    found: dict[str, Any] = {}
    whole = anndata.read_h5ad(path)
    whole.obs = lazy.obs
    grouped = f"statistics, {options.groups} groups"
    contenders: dict[str, Callable[[], Any]] = {
        "sums of batches": lambda: sums_of(lazy),
        "statistics": lambda: dasksc.statistics(lazy),
        grouped: lambda: dasksc.statistics(lazy, by="group"),
        "seurat_v3": lambda: genes(lazy, options),
        "seurat_v3, scanpy in memory": functools.partial(of_scanpy, whole, options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, options.rounds):
        for name, work in contenders.items():
            start = time.perf_counter()
            result = work()
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                seconds[name].append(time.perf_counter() - start)
            found[name] = result
    np.testing.assert_allclose(found["statistics"].genes["sum"], found["sums of batches"], rtol=1e-6)
    ours, theirs = (found[name]["highly_variable"] for name in ("seurat_v3", "seurat_v3, scanpy in memory"))
    n_differ = int((ours.to_numpy() != theirs.to_numpy()).sum()) // 2
    contenders.clear()  # They reference the matrix in memory.
    del whole
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print("| | seconds | ratio to sums of batches |\n| --- | ---: | ---: |")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} ({min(seconds[name]):.2f} to {max(seconds[name]):.2f}) | ", end="")
        print(f"{ratio(seconds, name, 'sums of batches'):.2f} |")
    ratios = {
        "rate of statistics / rate of sums of batches": ratio(seconds, "sums of batches", "statistics"),
        f"time of {grouped} / time of sums of batches": ratio(seconds, grouped, "sums of batches"),
        "time of seurat_v3 / time of scanpy in memory": ratio(seconds, "seurat_v3", "seurat_v3, scanpy in memory"),
    }
    print(f"ratios, medians of rounds: {', '.join(f'{name} {value:.2f}' for name, value in ratios.items())}")
    of_lazy = beside_lazy(lazy, options)
    print(f"selected genes that scanpy does not select: {n_differ} of {options.top}; on the lazy atlas: {of_lazy}")
    peaks = {"no limit": peaks_of(path, options)} | limited_peaks(path, options)
    for limit, of in peaks.items():
        for name, one in of.items():
            sizes = ", ".join(f"{key} {n_bytes / 2**20:.0f}" for key, n_bytes in one.items())
            print(f"{limit}: {name}: MiB of anonymous memory: {sizes}")
    report = {
        **{name: getattr(options, name) for name in ("cells", "genes", "top", "groups", "batches", "rounds")},
        "seconds": medians,
        "rounds_s": seconds,
        "ratios": ratios,
        "lazily": of_lazy,
        "peak_bytes": peaks,
        "n_differ": n_differ,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def opened(path: Any, options: argparse.Namespace) -> anndata.AnnData:
    """Return the lazy atlas with columns for groups, batches, and one half of the cells."""
    lazy = dasksc.open(path)
    rng = np.random.default_rng(0)
    for name, n in (("group", options.groups), ("batch", options.batches)):
        codes = rng.integers(0, n, lazy.n_obs)
        lazy.obs[name] = pd.Categorical.from_codes(codes, [f"{name} {i}" for i in range(n)])
    lazy.obs["half"] = np.arange(lazy.n_obs) < lazy.n_obs // 2
    return lazy


def ratio(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Return the median over rounds of the ratio of the times of two contenders."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def sums_of(adata: Any) -> Any:
    """Return the per-gene sums of an epoch of CSR batches in storage order."""
    sums = np.zeros(adata.n_vars)
    for X in dasksc.scDataset(adata, dasksc.Streaming(), 512, 16, layout="csr", rank=0, world_size=1):
        sums += np.bincount(X.col_indices().numpy(), weights=X.values().numpy(), minlength=adata.n_vars)
    return sums


def genes(adata: Any, options: argparse.Namespace, **more: Any) -> Any:
    """Select highly variable genes with dasksc, with batch labels."""
    return dasksc.highly_variable_genes(adata, options.top, "seurat_v3", "batch", **more)


def of_scanpy(adata: Any, options: argparse.Namespace) -> Any:
    """Select highly variable genes with scanpy, with batch labels."""
    import scanpy

    return scanpy.pp.highly_variable_genes(
        adata, n_top_genes=options.top, flavor="seurat_v3", batch_key="batch", inplace=False
    )


def beside_lazy(lazy: anndata.AnnData, options: argparse.Namespace) -> dict[str, Any]:
    """Time dasksc and scanpy on a subset of the lazy atlas; return the seconds, or the error of scanpy."""
    part = lazy[: options.lazy_cells]
    found: dict[str, Any] = {"cells": part.n_obs}
    start = time.perf_counter()
    genes(part, options)
    found["dasksc_s"] = time.perf_counter() - start
    start = time.perf_counter()
    try:
        of_scanpy(part, options)
        found["scanpy_s"] = time.perf_counter() - start
    except Exception as error:
        found["scanpy_fails"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return found


def peaks_of(path: Any, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Return peaks of anonymous memory for half of the cells and for all cells, in bytes."""
    lazy = opened(path, options)
    work = {
        "statistics": functools.partial(dasksc.statistics, lazy),
        f"statistics, {options.groups} groups": functools.partial(dasksc.statistics, lazy, by="group"),
        "seurat_v3": functools.partial(genes, lazy, options),
    }
    return {name: {"half": peak(functools.partial(one, filter="half")), "all": peak(one)} for name, one in work.items()}


def limited_peaks(path: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return `peaks_of` in a process with limited memory; empty if a control group cannot be created."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_cgroup(parse_bytes(options.limit)))
        except NoCgroupError as error:
            print(f"no control group: {error}")
            return {}
        program = "import argparse, json, sys, summaries; options = argparse.Namespace(**json.loads(sys.argv[1])); "
        program += "print(json.dumps(summaries.peaks_of(options.path, options)))"
        settings = {name: getattr(options, name) for name in ("groups", "batches", "top")} | {"path": str(path)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, json.dumps(settings)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent)))},
            preexec_fn=group.enter,
        )
        return {options.limit: json.loads(done.stdout.splitlines()[-1])}


def peak(work: Callable[[], Any]) -> int:
    """Return the growth of anonymous memory to its peak during `work`, in bytes."""
    work()
    start = rss_anon_bytes()
    with peak_of_rss_anon() as peaks:
        work()
    return max(0, max(peaks) - start)


if __name__ == "__main__":
    main()
