#!/usr/bin/env python
"""Compare conversion to a shuffled store, and loading from it, with annbatch.

    python benchmarks/convert.py --cells 200000 --peer-python ~/envs/annbatch/bin/python

Each library converts the same h5ad file with its defaults, alternately and in separate processes: dasksc with
`convert`, annbatch with ``add_adatas``, which also shuffles. Each library then loads from its own store. Without
``--peer-python``, only dasksc is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _machine
from _atlas import add_options, atlas
from _harness import Contender, compete, median_and_spread
from _reports import add_out, write_report
from compare import table_shape

HERE = Path(__file__).resolve().parent
WRITERS = {"dasksc": "write converted store", "annbatch": "write annbatch store"}
LOADERS = {"dasksc": "dasksc threads", "annbatch": "annbatch own store"}
# Targets of the ratios of rates (dasksc / annbatch), or of costs (annbatch / dasksc).
TARGETS = {"time": 2.0, "peak memory": 2.0, "size": 1 / 0.8, "loading csr": 2.0, "loading dense": 3.0}
_SAMPLES_S = 0.02


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, print a table, and write and return the report."""
    options = read_options(arguments)
    source = atlas(options)
    _machine.read_through(source)
    n_rows, n_vars, _ = table_shape(source)
    spec = {
        "h5ad_path": str(source),
        "n_rows": n_rows,
        "converted_path": str(options.work / "converted.zarr"),
        "annbatch_path": str(options.work / "converted-annbatch.zarr"),
    }
    names = ["dasksc"] + ["annbatch"] * (options.peer_python is not None)
    try:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for i in range(options.rounds):
            for name in names:
                done = write(name, spec, options)
                runs[name].append(done)
                print(
                    f"round {i + 1}/{options.rounds}  {name:9s} {done['elapsed_s']:6.1f} s, peak "
                    f"{done['anon_bytes'] / 1e6:,.0f} MB (with mapped files {done['rss_bytes'] / 1e6:,.0f} MB)"
                )
        stores = {name: Path(spec[key]) for name, key in zip(names, ("converted_path", "annbatch_path"), strict=False)}
        report = {
            "n_rows": n_rows,
            "n_vars": n_vars,
            "rounds": options.rounds,
            "runs": runs,
            "size": {name: _machine.size_bytes(store) for name, store in stores.items()},
            "loading": {layout: loading(layout, stores, options) for layout in ("csr", "dense")},
        }
    finally:
        for key in ("converted_path", "annbatch_path"):
            shutil.rmtree(spec[key], ignore_errors=True)
    report["rows"] = rows_of(report)
    print("\n" + table(report["rows"]))
    write_report(options.out, report)
    return report


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum duration of a measurement of loading")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before the first round of loading")
    parser.add_argument("--block", type=int, default=64, help="rows of a block")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--fetch", type=int, default=16_384, help="rows of a fetch")
    parser.add_argument("--peer-python", help="interpreter that has annbatch (and zarrs) installed")
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.peer_python is not None and atlas(options).suffix != ".h5ad":
        parser.error("annbatch is measured with an .h5ad")
    return options


def write(name: str, spec: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Run one conversion in a child process; return its duration and its sampled peaks of memory."""
    shutil.rmtree(spec["converted_path" if name == "dasksc" else "annbatch_path"], ignore_errors=True)
    python = sys.executable if name == "dasksc" else options.peer_python
    log = options.work / f"write-{name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, str(HERE / "_contenders.py"), WRITERS[name], json.dumps(spec)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        peaks = {"anon_bytes": 0, "rss_bytes": 0}
        while process.poll() is None:
            for key, value in memory_of(process.pid).items():
                peaks[key] = max(peaks[key], value)
            time.sleep(_SAMPLES_S)
    printed = process.communicate()[0].splitlines()
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{log.read_text()[-3000:]}")
    return {**json.loads(printed[-1]), **peaks}


def memory_of(pid: int) -> dict[str, int]:
    """Return the current memory of a process: anonymous, and including mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    if "RssAnon" not in found:
        return {}
    return {"anon_bytes": found["RssAnon"], "rss_bytes": found["VmRSS"]}


def loading(layout: str, stores: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Measure loading of each library from its own store; return produced and consumed cells per second."""
    base = {"layout": layout, **{key: getattr(options, key) for key in ("block", "batch", "fetch")}}
    results = compete(
        [
            partial(
                Contender,
                LOADERS[name],
                python=sys.executable if name == "dasksc" else options.peer_python,
                script=HERE / "_contenders.py",
                spec={**base, "path": str(store), "annbatch_path": str(store)},
                log=options.work / f"load-{name}.log",
                label=name,
            )
            for name, store in stores.items()
        ],
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
    )
    return {
        result.name: {kind: median_and_spread(getattr(result, kind))[0] for kind in ("produced", "consumed")}
        for result in results
    }


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements row by row, with ratios to annbatch; a ratio above 1 means dasksc is better."""

    def median(name: str, key: str) -> float | None:
        found = [run[key] for run in report["runs"].get(name, [])]
        return statistics.median(found) if found else None

    def loaded(name: str, layout: str) -> float | None:
        rates = report["loading"][layout].get(name)
        # For annbatch, the better of its two rates counts.
        return None if rates is None else rates["produced"] if name == "dasksc" else max(rates.values())

    measured = {
        "time": ("s", *(median(name, "elapsed_s") for name in WRITERS)),
        "peak memory": ("bytes", *(median(name, "anon_bytes") for name in WRITERS)),
        "size": ("bytes", *(report["size"].get(name) for name in WRITERS)),
        "loading csr": ("cells/s", *(loaded(name, "csr") for name in WRITERS)),
        "loading dense": ("cells/s", *(loaded(name, "dense") for name in WRITERS)),
    }
    rows = []
    for what, (unit, ours, theirs) in measured.items():
        row = {"what": what, "unit": unit, "ours": ours, "theirs": theirs, "target": TARGETS[what]}
        if ours and theirs:
            row["ratio"] = ours / theirs if unit == "cells/s" else theirs / ours
            row["met"] = row["ratio"] >= row["target"]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    lines = ["| measure | dasksc | annbatch | ratio | target | |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        ratio, met = (f"{row['ratio']:.2f}", "met" if row["met"] else "MISSED") if "ratio" in row else ("", "")
        texts = [_shown(row[side], row["unit"]) for side in ("ours", "theirs")]
        lines.append(f"| {row['what']} | {' | '.join(texts)} | {ratio} | {row['target']:.2f} | {met} |")
    return "\n".join(lines)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return {"s": f"{value:.1f} s", "bytes": f"{value / 1e6:,.0f} MB", "cells/s": f"{value:,.0f} cells/s"}[unit]


if __name__ == "__main__":
    main()
