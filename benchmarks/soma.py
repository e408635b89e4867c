#!/usr/bin/env python
"""Compare shuffled batches from a SOMA experiment with those of tiledbsoma-ml, and with a converted store.

    pip install 'dasksc[soma]' tiledbsoma-ml
    python benchmarks/soma.py --cells 200000

tiledbsoma writes the experiment from a synthetic atlas, with its defaults. Both loaders shuffle blocks of the same size
in fetches of the same size, and yield the same CSR batches; tiledbsoma-ml is also measured with the fetch that it
uses by default. Single fetches of the reader are compared with reads by tiledbsoma, which decodes whole tiles.
`dasksc.convert` makes the converted store.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _atlas import add_options, atlas
from _harness import HERE, Contender, compete, median_and_spread
from _reports import add_out, write_report

import dasksc
from dasksc.pushdown import matrix_of

TARGET = 5.0
_DEFAULT_FETCH = 65_536


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of work before the first round")
    add_out(parser)
    options = parser.parse_args(arguments)
    path, converted = experiment(options)
    report: dict[str, Any] = {"fetches": reader(path, options)}
    specs = [
        ("dasksc", "dasksc threads", path, options.fetch),
        ("tiledbsoma-ml", "tiledbsoma-ml", path, options.fetch),
        ("tiledbsoma-ml, default fetch", "tiledbsoma-ml", path, _DEFAULT_FETCH),
        ("dasksc, converted", "dasksc threads", converted, options.fetch),
    ]

    def start(label: str, name: str, path: Path, fetch: int) -> Contender:
        spec = {"path": str(path), "layout": "csr", "block": options.block, "batch": options.batch, "fetch": fetch}
        log = options.work / f"soma-{label}.log"
        return Contender(name, python=sys.executable, script=HERE / "_contenders.py", spec=spec, log=log, label=label)

    results = compete(
        [lambda spec=spec: start(*spec) for spec in specs],
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
    )
    rates = {result.name: median_and_spread(result.produced)[0] for result in results}
    report |= {"cells_per_s": rates, "ratio": rates["dasksc"] / max(rates[name] for name in rates if "-ml" in name)}
    for name, rate in rates.items():
        print(f"{name}: {rate:,.0f} cells/s")
    print(f"dasksc against the faster fetch of tiledbsoma-ml: {report['ratio']:.2f} (target: at least {TARGET:.0f})")
    write_report(options.out, report)
    return report


def experiment(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the paths of an experiment and of its conversion, and write them first if they do not exist."""
    import tiledbsoma.io

    path = options.work / f"atlas-{options.cells}x{options.genes}.soma"
    converted = path.with_suffix(".converted.zarr")
    if not path.exists():
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        tiledbsoma.io.from_h5ad(str(partial), str(atlas(options, "h5ad")), "RNA")
        partial.rename(path)
    if not converted.exists():
        begun = time.perf_counter()
        dasksc.convert(path, converted)
        print(f"converted in {time.perf_counter() - begun:.1f} s")
    return path, converted


def reader(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the median rates of fetches, in cells/s, of dasksc and of tiledbsoma alone, which bounds any loader."""
    import tiledbsoma

    matrix = matrix_of(dasksc.open(path, obs=[], names=False).X)
    array = tiledbsoma.open(str(path / "ms/RNA/X/data"))
    n_rows = min(options.fetch, matrix.shape[0])
    blocks = np.random.default_rng(0).permutation(matrix.shape[0] // options.block)[: n_rows // options.block]
    shuffled = (np.sort(blocks)[:, None] * options.block + np.arange(options.block)).ravel()
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "dasksc, in order": (n_rows, lambda: matrix.fetch(np.arange(n_rows))),
        "dasksc, blocks": (len(shuffled), lambda: matrix.fetch(shuffled)),
        "tiledbsoma, in order": (n_rows, lambda: list(array.read((slice(0, n_rows - 1),)).tables())),
        "tiledbsoma, blocks": (len(shuffled), lambda: list(array.read((shuffled,)).tables())),
    }
    matrix.fetch(shuffled[:1])  # compiles
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, (_, work) in works.items():
            begun = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - begun)
    rates = {name: n / statistics.median(taken[name]) for name, (n, _) in works.items()}
    for name, rate in rates.items():
        print(f"a fetch, {name}: {rate:,.0f} cells/s")
    return rates


if __name__ == "__main__":
    main()
