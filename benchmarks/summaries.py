#!/usr/bin/env python
"""What do statistics and highly variable genes of an atlas cost, beside reading it and beside scanpy in memory?

    python benchmarks/summaries.py --cells 50000 --out benchmarks/results/summaries

Seconds, the median over rounds that go through all in turn; the round before them is not measured. Sums of genes are
added up in the plain way of each CSR batch of `Streaming`. scanpy is given the whole matrix in memory, which reading
takes before its clock runs. Memory is the peak of RssAnon beyond what the process held before, of all cells and of half
of them; scanpy on the lazy atlas is tried once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import anndata
import numpy as np
from _atlas import add_options, atlas
from _machine import read_through, rss_anon_bytes
from _reports import add_out, write_report
from memory import peak_of_rss_anon

import dasksc


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the command line says; write and return what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=50_000)
    parser.add_argument("--top", type=int, default=2_000, help="genes to find")
    parser.add_argument("--batches", default="plate", help="obs column of batches; empty for none")
    parser.add_argument("--by", default="cell_type", help="obs column of groups")
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    options = parser.parse_args(arguments)

    warnings.simplefilter("ignore")  # of scanpy
    path = atlas(options)
    read_through(path)
    lazy = dasksc.open(path)
    found: dict[str, Any] = {}
    whole = anndata.read_h5ad(path)
    contenders: dict[str, Callable[[], Any]] = {
        "sums of batches": lambda: sums_of(lazy),
        "statistics": lambda: dasksc.statistics(path),
        f"statistics by {options.by}": lambda: dasksc.statistics(path, by=options.by),
        "seurat_v3": lambda: genes(path, options),
        "seurat_v3, scanpy in memory": functools.partial(of_scanpy, whole, options),
        "pearson_residuals": lambda: dasksc.highly_variable_genes(path, options.top, "pearson_residuals"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, options.rounds):
        for name, work in contenders.items():
            start = time.perf_counter()
            result = work()
            if i >= 0:  # the round before fills caches and compiles
                seconds[name].append(time.perf_counter() - start)
            found[name] = result
    np.testing.assert_allclose(found["statistics"].genes["sum"], found["sums of batches"], rtol=1e-6)
    ours, theirs = (found[name]["highly_variable"] for name in ("seurat_v3", "seurat_v3, scanpy in memory"))
    n_differ = int((ours.to_numpy() != theirs.to_numpy()).sum()) // 2
    contenders.clear()  # which hold the matrix in memory
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print("| | seconds | of sums of batches |\n| --- | ---: | ---: |")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} | {median / medians['sums of batches']:.2f} |")
    lazy.obs["half"] = np.arange(options.cells) < options.cells // 2
    peaks = {
        "statistics": {
            "half": peak(lambda: dasksc.statistics(lazy, filter="half")),
            "all": peak(lambda: dasksc.statistics(lazy)),
        },
        "seurat_v3": {
            "half": peak(lambda: genes(lazy, options, filter="half")),
            "all": peak(lambda: genes(lazy, options)),
        },
    }
    for name, of in peaks.items():
        half, all_ = of["half"] / 2**20, of["all"] / 2**20
        print(f"{name}: {half:.0f} MiB of anonymous memory for half of the cells, {all_:.0f} for all")
    print(f"genes that scanpy does not choose: {n_differ} of {options.top}; {of_lazy(lazy, options)}")
    report = {
        **{name: getattr(options, name) for name in ("cells", "genes", "top", "rounds")},
        "seconds": medians,
        "peak_bytes": peaks,
        "n_differ": n_differ,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def sums_of(adata: Any) -> Any:
    """Add up the values of each gene, of CSR batches of an epoch in storage order."""
    sums = np.zeros(adata.n_vars)
    for X in dasksc.scDataset(adata, dasksc.Streaming(), 512, 16, layout="csr", rank=0, world_size=1):
        sums += np.bincount(X.col_indices().numpy(), weights=X.values().numpy(), minlength=adata.n_vars)
    return sums


def genes(adata: Any, options: argparse.Namespace, **more: Any) -> Any:
    """Find highly variable genes of counts in batches."""
    return dasksc.highly_variable_genes(adata, options.top, "seurat_v3", options.batches or None, **more)


def of_scanpy(adata: Any, options: argparse.Namespace) -> Any:
    """Let scanpy find them."""
    import scanpy

    return scanpy.pp.highly_variable_genes(
        adata, n_top_genes=options.top, flavor="seurat_v3", batch_key=options.batches or None, inplace=False
    )


def of_lazy(adata: Any, options: argparse.Namespace) -> str:
    """Say how long scanpy takes on the lazy atlas, or why it does not."""
    start = time.perf_counter()
    try:
        of_scanpy(adata, options)
    except Exception as error:
        return f"scanpy on the lazy atlas fails: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return f"scanpy on the lazy atlas: {time.perf_counter() - start:.1f} s"


def peak(work: Callable[[], Any]) -> int:
    """Return by how much anonymous memory grows while something is done."""
    work()
    start = rss_anon_bytes()
    with peak_of_rss_anon() as peaks:
        work()
    return max(0, max(peaks) - start)


if __name__ == "__main__":
    main()
