#!/usr/bin/env python
"""Measure the throughput of joined files, subsets of genes, other formats, and many small files.

    python benchmarks/files.py --cells 100000

The program compares the cells per second of four pairs:

- four files with different genes in different orders, joined by "outer", and the same cells and genes in one file;
- 2,000 genes and all genes, in dense batches;
- a 10x file with the compression of Cell Ranger, and the same counts in a gzip-compressed h5ad file;
- a zipped Zarr store and the same store in a directory.

It also measures the time to open many small files, and the number of simultaneously open files after opening and in
an epoch. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import scipy.sparse as sp
from _atlas import add_options, atlas
from _harness import HERE, Contender, compete, median_and_spread
from _reports import add_out, write_report

import dasksc

N_PARTS = 4
SOME_GENES = 2_000
JOINED, GENES, OPEN_S, HANDLES = 0.85, 1.3, 10.0, 150
FORMATS = 0.9
# Storage options of the arrays that Cell Ranger writes.
CELL_RANGER: dict[str, Any] = {"chunks": (80_000,), "maxshape": (None,), "compression": 4, "shuffle": True}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--layouts", nargs="+", choices=["dense", "csr"], default=["dense", "csr"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of work before the first round")
    add_out(parser)
    parser.add_argument("--small-files", type=int, default=1_000, help="number of small files to open")
    options = parser.parse_args(arguments)

    path = atlas(options)
    parts, whole = in_parts(path, options.work)
    formats = in_formats(path, options.work)
    n_vars = dasksc.open(path, obs=[]).n_vars
    some = np.linspace(0, n_vars - 1, min(SOME_GENES, n_vars // 10)).astype(int).tolist()
    report: dict[str, Any] = {
        "joined": {
            layout: ratio(options, layout, {"parts": {"path": parts, "join": "outer"}, "whole": {"path": str(whole)}})
            for layout in options.layouts
        },
        "genes": ratio(options, "dense", {"some": {"path": str(path), "genes": some}, "all": {"path": str(path)}}),
        "formats": {
            layout: {
                first: ratio(options, layout, {name: {"path": formats[name]} for name in (first, second)})
                for first, second in (("10x", "h5ad"), ("zipped", "directory"))
            }
            for layout in options.layouts
        },
        "opening": opening(options.small_files),
    }
    found = report["opening"]
    for layout, one in report["joined"].items():
        print(f"{N_PARTS} files joined against one, {layout}: {one['ratio']:.2f} (target: at least {JOINED})")
    print(f"{len(some):,} genes against all {n_vars:,}: {report['genes']['ratio']:.2f} (target: at least {GENES})")
    for layout, pairs in report["formats"].items():
        for name, one in pairs.items():
            against = list(one["cells_per_s"])[1]
            print(f"{name} against {against}, {layout}: {one['ratio']:.2f} (target: at least {FORMATS})")
    print(
        f"{found['n_files']:,} files: opened in {found['open_s']:.1f} s (target: {OPEN_S:.0f} s), {found['handles']} "
        f"files kept open, {found['handles_in_epoch']} in an epoch (target: {HANDLES})"
    )
    report["is_ok"] = (
        min(one["ratio"] for one in report["joined"].values()) >= JOINED
        and report["genes"]["ratio"] >= GENES
        and min(one["ratio"] for pairs in report["formats"].values() for one in pairs.values()) >= FORMATS
        and found["open_s"] <= OPEN_S
        and max(found["handles"], found["handles_in_epoch"]) <= HANDLES
    )
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def in_parts(path: Path, work: Path) -> tuple[list[str], Path]:
    """Write four files with different genes of an atlas in different orders, and one file of their outer join."""
    folder = work / f"parts-of-{path.name}"
    parts = [folder / f"part{i}.h5ad" for i in range(N_PARTS)]
    whole = folder / "whole.h5ad"
    if not whole.exists():
        folder.mkdir(parents=True, exist_ok=True)
        adata = anndata.read_h5ad(path) if path.suffix == ".h5ad" else anndata.read_zarr(path)
        bare = anndata.AnnData(X=adata.X, obs=adata.obs[[]], var=adata.var[[]])
        numbers = np.random.default_rng(0)
        every = []
        for i, rows in enumerate(np.array_split(np.arange(adata.n_obs), N_PARTS)):
            genes = numbers.permutation(np.flatnonzero(np.arange(adata.n_vars) % (2 * N_PARTS) != i))
            part = bare[rows, genes].copy()
            part.X.sort_indices()
            part.write_h5ad(parts[i])
            every.append(part)
        anndata.concat(every, join="outer").write_h5ad(whole)
    return [str(part) for part in parts], whole


def in_formats(path: Path, work: Path) -> dict[str, str]:
    """Write the counts as 10x and gzip-compressed h5ad files, and the atlas as a plain and a zipped Zarr store."""
    folder = work / f"formats-of-{path.name}"
    found = {
        "10x": folder / "counts.h5",
        "h5ad": folder / "counts.h5ad",
        "directory": folder / "atlas.zarr",
        "zipped": folder / "atlas.zarr.zip",
    }
    if not found["zipped"].exists():
        folder.mkdir(parents=True, exist_ok=True)
        adata = anndata.read_h5ad(path) if path.suffix == ".h5ad" else anndata.read_zarr(path)
        counts = sp.csr_matrix(adata.X)
        counts.data = np.ceil(counts.data)
        anndata.AnnData(X=counts, obs=adata.obs[[]], var=adata.var[[]]).write_h5ad(found["h5ad"], compression="gzip")
        with h5py.File(found["10x"], "w") as file:
            group = file.create_group("matrix")
            for name, dtype in (("data", np.int32), ("indices", np.int64), ("indptr", np.int64)):
                group.create_dataset(name, data=getattr(counts, name).astype(dtype), **CELL_RANGER)
            group["shape"] = np.array(counts.shape[::-1], dtype=np.int32)
            group["barcodes"] = adata.obs_names.to_numpy().astype("S")
            names = adata.var_names.to_numpy().astype("S")
            kinds = np.full(len(names), b"Gene Expression")
            for name, values in {"name": names, "id": names, "feature_type": kinds}.items():
                group[f"features/{name}"] = values
        dasksc.convert(path, found["directory"], order="keep", overwrite=True)
        with zipfile.ZipFile(found["zipped"], "w") as archive:
            for one in sorted(found["directory"].rglob("*")):
                if one.is_file():
                    archive.write(one, one.relative_to(found["directory"]))
    return {name: str(one) for name, one in found.items()}


def ratio(options: argparse.Namespace, layout: str, specs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the cells per second of two contenders, and their ratio (first / second)."""
    options.work.mkdir(parents=True, exist_ok=True)

    def starts(label: str, spec: dict[str, Any]) -> Callable[[], Contender]:
        spec = {"layout": layout, "block": options.block, "batch": options.batch, "fetch": options.fetch} | spec
        return lambda: Contender(
            "dasksc threads",
            python=sys.executable,
            script=HERE / "_contenders.py",
            spec=spec,
            log=options.work / f"files-{label}.log",
            label=label,
        )

    results = compete(
        [starts(label, spec) for label, spec in specs.items()],
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
        say=lambda line: print(line, file=sys.stderr),
    )
    rates = {result.name: median_and_spread(result.produced) for result in results}
    consumed = {result.name: median_and_spread(result.consumed)[0] for result in results}
    first, second = specs
    return {
        "cells_per_s": {name: rate for name, (rate, _) in rates.items()},
        "spread": {name: spread for name, (_, spread) in rates.items()},
        "ratio": rates[first][0] / rates[second][0],
        "consumed_ratio": consumed[first] / consumed[second],
    }


def opening(n_files: int) -> dict[str, Any]:
    """Measure opening many small files, and reading an epoch of them."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i:05}.h5ad" for i in range(n_files)]
        for i, path in enumerate(paths):
            few = sp.random(20, 50, density=0.2, format="csr", dtype=np.float32, random_state=i)
            adata = anndata.AnnData(X=few)
            adata.obs_names = [f"{i}-{j}" for j in range(20)]
            adata.write_h5ad(path)
        before = n_handles()
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            opened = dasksc.open([str(path) for path in paths])
        open_s = time.perf_counter() - start
        handles = n_handles() - before
        dataset = dasksc.scDataset(opened, dasksc.BlockShuffling(4), 32, rank=0, world_size=1, seed=0)
        most = 0
        start = time.perf_counter()
        for _ in dataset:
            most = max(most, n_handles() - before)
        epoch_s = time.perf_counter() - start
    return {
        "n_files": n_files,
        "open_s": open_s,
        "epoch_s": epoch_s,
        "handles": handles,
        "handles_in_epoch": most,
    }


def n_handles() -> int:
    """Return the number of files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    sys.exit(not main()["is_ok"])
