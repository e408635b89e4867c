#!/usr/bin/env python
"""Measure the time and memory of opening an atlas, from its path to the first batch.

    python benchmarks/opening.py --cells 10000000
    python benchmarks/opening.py --cells 100000000 --rounds 1

The atlas has names, obs columns and row offsets for the full number of cells. X is nearly empty, so only costs that
grow with the number of cells are measured. Each measurement runs in a new process, after imports and after the same
work on a small atlas, which compiles the kernels. Memory is the peak of anonymous memory (RssAnon) beyond the memory at
that point. Contenders run alternately, and the program reports medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
from _machine import read_through
from _reports import add_out, write_report
from memory import compile_kernels, peak_of_rss_anon

MIB = 2**20
_WRITTEN_AT_ONCE = 10**6
_N_VARS = 2_000
_CELLS_PER_VALUE = 100

Work = Callable[[str], Any]


def first_batch(path: str | list[str], strategy: Any, **options: Any) -> Any:
    import dasksc

    return next(iter(dasksc.scDataset(path, strategy, 64, 16, rank=0, world_size=1, seed=0, **options)))


def class_balanced(path: str) -> Any:
    import dasksc

    return first_batch(path, dasksc.ClassBalancedSampling(label_key="cell_type"), obs=["cell_type"])


def block_shuffling(path: str) -> Any:
    import dasksc

    return first_batch(path, dasksc.BlockShuffling(64))


def filtered(path: str) -> Any:
    import dasksc

    return first_batch(path, dasksc.BlockShuffling(64), filter="n_counts > 500")


def opened(path: str) -> Any:
    import dasksc

    return dasksc.open(path)


def opened_without_names(path: str) -> Any:
    import dasksc

    return dasksc.open(path, names=False)


def read_lazy(path: str) -> Any:
    import anndata

    return anndata.experimental.read_lazy(path)


def read_backed(path: str) -> Any:
    import anndata

    return anndata.read_h5ad(path, backed="r")


def split(path: str) -> Any:
    import dasksc

    return dasksc.split(path, fractions=(0.9, 0.1), stratify="cell_type")


def described(path: str) -> Any:
    import dasksc

    return dasksc.describe(path, seconds=0)


def checked(path: str) -> Any:
    import dasksc

    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(64), 64, 16, rank=0, world_size=1, obs=["cell_type"])
    return dasksc.check(dataset)


def class_balanced_of_two(path: str) -> Any:
    import dasksc

    return first_batch([path, path], dasksc.ClassBalancedSampling(label_key="cell_type"), obs=["cell_type"])


def resumed(path: str) -> Any:
    """Stop an epoch after some batches, and resume it in a second dataset with a different batch size."""
    import dasksc

    left = dasksc.scDataset(path, dasksc.BlockShuffling(64), 64, 16, rank=0, world_size=1, seed=0)
    batches = iter(left)
    for _ in range(5):
        next(batches)
    state = left.state_dict()
    batches.close()
    resumed = dasksc.scDataset(path, dasksc.BlockShuffling(64), 128, 16, rank=0, world_size=1, seed=0)
    resumed.load_state_dict(state)
    return next(iter(resumed))


def converted(path: str) -> Any:
    import dasksc

    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        return dasksc.convert(path, Path(folder) / "atlas.zarr", progress=False)


WORKS: dict[str, Work] = {
    "class-balanced batch": class_balanced,
    "block-shuffled batch": block_shuffling,
    "batch of filtered rows": filtered,
    "split": split,
    "describe": described,
    "check": checked,
    "class-balanced batch of the file joined with itself": class_balanced_of_two,
    "resume in other batches": resumed,
    "convert": converted,
    "dasksc.open": opened,
    "dasksc.open(names=False)": opened_without_names,
    "anndata read_h5ad(backed='r')": read_backed,
    "anndata read_lazy": read_lazy,
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=10**7)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dasksc-benchmarks")
    add_out(parser)
    options = parser.parse_args(arguments)
    path = options.work / f"names-{options.cells}.h5ad"
    if not path.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}")
        write_atlas(path.with_suffix(".part"), options.cells)
        path.with_suffix(".part").rename(path)
    read_through(path)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in options.works}
    lacking: dict[str, str] = {}
    for i in range(options.rounds):
        for name in options.works[i % len(options.works) :] + options.works[: i % len(options.works)]:
            done = subprocess.run([sys.executable, __file__, "--one", name, str(path)], capture_output=True, text=True)
            if done.returncode:
                lacking[name] = done.stderr.strip().splitlines()[-1] if done.stderr else str(done.returncode)
                continue
            measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = [
        {"work": name, "seconds": [one["s"] for one in found], "bytes": [one["bytes"] for one in found]}
        if found
        else {"work": name, "skipped": lacking[name]}
        for name, found in measured.items()
    ]
    report = {"cells": options.cells, "rows": rows}
    print(f"| {options.cells:,} cells | s (range of rounds) | MiB | bytes per cell |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        if "skipped" in row:
            print(f"| {row['work']} | skipped: {row['skipped']} | | |")
            continue
        seconds, n_bytes = row["seconds"], statistics.median(row["bytes"])
        print(
            f"| {row['work']} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {n_bytes / MIB:,.0f} | {n_bytes / options.cells:.1f} |"
        )
    write_report(options.out, report)
    return report


def write_atlas(path: Path, n_cells: int) -> None:
    """Write an h5ad file with a nearly empty X, with a million cells in memory at a time."""
    n_values = n_cells // _CELLS_PER_VALUE
    with h5py.File(path, "w") as file:
        _encode(file, "anndata", "0.1.0")
        X = file.create_group("X")
        _encode(X, "csr_matrix", "0.1.0")
        X.attrs["shape"] = np.array([n_cells, _N_VARS])
        indptr = X.create_dataset("indptr", (n_cells + 1,), dtype=np.int64)
        X["indices"] = (np.arange(n_values) % _N_VARS).astype(np.int32)
        X["data"] = np.ones(n_values, dtype=np.float32)
        obs = file.create_group("obs")
        _encode(obs, "dataframe", "0.2.0")
        obs.attrs["_index"], obs.attrs["column-order"] = "_index", np.array(["cell_type", "n_counts"], dtype=object)
        names = obs.create_dataset("_index", (n_cells,), dtype=h5py.string_dtype())
        _encode(names, "string-array", "0.2.0")
        types = obs.create_group("cell_type")
        _encode(types, "categorical", "0.2.0")
        types.attrs["ordered"] = False
        codes = types.create_dataset("codes", (n_cells,), dtype=np.int8)
        _encode(codes, "array", "0.2.0")
        types["categories"] = np.array([f"type {i}" for i in range(50)], dtype=object)
        _encode(types["categories"], "string-array", "0.2.0")
        counts = obs.create_dataset("n_counts", (n_cells,), dtype=np.float32)
        _encode(counts, "array", "0.2.0")
        rng = np.random.default_rng(0)
        for start in range(0, n_cells, _WRITTEN_AT_ONCE):
            here = slice(start, min(start + _WRITTEN_AT_ONCE, n_cells))
            rows = np.arange(here.start, here.stop)
            names[here] = [f"AAACCTGAG{row:09d}-1" for row in rows]
            codes[here] = (50 * rng.random(len(rows)) ** 2).astype(np.int8)
            counts[here] = rng.integers(0, 1000, len(rows)).astype(np.float32)
            indptr[here.start + 1 : here.stop + 1] = np.minimum((rows + 1) // _CELLS_PER_VALUE, n_values)
        var = file.create_group("var")
        _encode(var, "dataframe", "0.2.0")
        var.attrs["_index"], var.attrs["column-order"] = "_index", np.array([], dtype=np.float64)
        var["_index"] = np.array([f"gene {i}" for i in range(_N_VARS)], dtype=object)
        _encode(var["_index"], "string-array", "0.2.0")


def _encode(item: Any, kind: str, version: str) -> None:
    item.attrs["encoding-type"], item.attrs["encoding-version"] = kind, version


def one(name: str, path: str) -> None:
    """Do one task in this process, and print its duration and its peak of memory."""
    import anndata.experimental  # noqa: F401
    import torch  # noqa: F401

    compile_kernels(layout="dense")
    small = Path(path).with_name("names-1000.h5ad")
    if not small.exists():
        write_atlas(small, 1000)
    WORKS[name](str(small))
    with peak_of_rss_anon() as peak:
        before, start = peak[0], perf_counter()
        result = WORKS[name](path)
        elapsed = perf_counter() - start
    del result
    print(json.dumps({"s": elapsed, "bytes": peak[0] - before}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:4])
    else:
        main()
