#!/usr/bin/env python
"""Measure atlases of thousands of files: opening them with and without a catalogue, joins, and epochs.

    python benchmarks/catalogue.py --files 10000 --rounds 1
    python benchmarks/catalogue.py --files 200 --out catalogue.json

A few distinct files of 200 cells are written, and copied under other names; entries of the largest table are hard
links. The program prints the target of each measurement and, with 10,000 files or more, whether it
is met. Memory is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

import dasksc

_TARGET_FILES = 10_000
_N_OBS, _N_VARS, _N_VALUES, _N_DISTINCT = 200, 2_000, 50, 50


def written(folder: Path, name: str, n_files: int, *, n_lists: int = 1, link: bool = False) -> list[str]:
    """Write `n_files` files with `n_lists` distinct lists of genes, of which `_N_DISTINCT` differ in content."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(n_files):
        path = folder / f"{name}{number:06d}.h5ad"
        if number < _N_DISTINCT:
            x = sp.random(_N_OBS, _N_VARS, density=_N_VALUES / _N_VARS, format="csr", rng=rng, dtype=np.float32)
            obs = pd.DataFrame({"cell_type": pd.Categorical(rng.choice(list("ABCD"), _N_OBS))})
            obs.index = [f"{number}-{i}" for i in range(_N_OBS)]
            first = 10 * (number % n_lists)
            var = pd.DataFrame(index=[f"GENE{first + i}" for i in range(_N_VARS)])
            anndata.AnnData(X=x, obs=obs, var=var).write_h5ad(path)
        else:
            (os.link if link else shutil.copyfile)(paths[number % _N_DISTINCT], path)
        paths.append(str(path))
    return paths


def dataset(data: Any) -> Any:
    options = {"obs": ["cell_type"], "layout": "csr", "seed": 0, "rank": 0, "world_size": 1}
    return dasksc.scDataset(data, dasksc.BlockShuffling(16), 64, **options)


def first_batch(data: Any) -> None:
    next(iter(dataset(data)))


def seconds(work: Callable[[], Any]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def measured(
    folder: Path, n_files: int, n_joined: int, n_epoch: int, n_entries: int
) -> Iterator[tuple[str, float, float]]:
    """Yield the name, result and target of each measurement; targets are seconds, or cells per second if negative."""
    paths = written(folder, "part", n_files)
    first_batch(paths[:2])
    yield f"{n_files} files, first batch", seconds(lambda: first_batch(paths)), 30
    catalog = str(folder / "all.catalog")
    yield f"{n_files} files, index", seconds(lambda: dasksc.index(paths, catalog)), 30
    yield f"{n_files} files, first batch from the catalogue", seconds(lambda: first_batch(catalog)), 2
    lists = written(folder, "list", n_joined, n_lists=50)
    yield f"{n_joined} files, 50 lists of genes, outer join", seconds(lambda: dasksc.open(lists, join="outer")), 10
    warm = dataset(paths[:n_epoch])
    for _ in warm:
        pass
    n_cells = n_epoch * _N_OBS
    yield f"epoch over {n_epoch} files, cells/s", -n_cells / seconds(lambda: [None for _ in warm]), -200_000
    links = written(folder, "link", n_entries, link=True)
    table = pd.DataFrame({"path": links, "tissue": np.where(np.arange(n_entries) % 100, "other", "lung")})

    def filtered() -> None:
        atlas = dasksc.open(table, files="path", where="tissue == 'lung'", obs=["cell_type"], names=False)
        next(iter(dataset(atlas)))

    yield f"{n_entries} entries, hard links, 99% filtered out, first batch", seconds(filtered), 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results: dict[str, list[float]] = {}
    targets: dict[str, float] = {}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            sizes = given.files, max(50, given.files // 10), max(50, given.files // 5), 10 * given.files
            for name, value, target in measured(Path(folder), *sizes):
                results.setdefault(name, []).append(value)
                targets[name] = target
    medians = {name: statistics.median(values) for name, values in results.items()}
    for name, value in medians.items():
        verdict = "met" if value <= targets[name] else "missed"
        verdict = verdict if given.files >= _TARGET_FILES else f"(for {_TARGET_FILES} files)"
        print(f"{name:70} {abs(value):12,.2f}   target {abs(targets[name]):10,.0f}   {verdict}")
    if given.out:
        given.out.write_text(json.dumps({"medians": medians, "targets": targets}, indent=1))


if __name__ == "__main__":
    main()
