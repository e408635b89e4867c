#!/usr/bin/env python
"""Compare the throughput of loaders on one atlas.

    python benchmarks/compare.py --cells 200000 --peer-python ~/envs/annbatch/bin/python
    python benchmarks/compare.py --targets --peer-python ~/envs/annbatch/bin/python

Each contender runs in a separate process with the same block, batch and fetch size. Each round measures
two rates of each contender: *produced* (batches are discarded) and *consumed* (every value of every batch
is summed). The page cache is warm. Rates exclude compilation, and the cold start is reported separately.
With ``--targets``, the program measures a pair of contenders for each row of `_targets.ROWS` instead, and
reports the target of the ratio and the upper bound set by the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _machine
import _targets
from _atlas import add_options, atlas
from _contenders import CONTENDERS
from _harness import Contender, Result, compete, median_and_spread
from _reports import add_out, write_report

HERE = Path(__file__).resolve().parent
BASELINE = "scDataset"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare loaders with the options of the command line, and write and return the report."""
    options = main_options(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.targets:
        return targets(options)
    spec = prepare(options)
    chosen = options.contenders or [name for name in CONTENDERS if runs(name, options)]
    for path in {spec["path"], *(spec[key] for key in ("zarr_path", "annbatch_path") if spec.get(key))}:
        _machine.read_through(Path(path))

    logs = options.work / "logs"
    logs.mkdir(exist_ok=True)
    results = compete(
        [
            partial(
                Contender,
                name,
                python=interpreter(name, options),
                script=HERE / "_contenders.py",
                spec=spec,
                log=logs / f"{name.replace(' ', '-')}.log",
            )
            for name in chosen
        ],
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
    )
    report = {
        "files": options.files,
        **{key: spec[key] for key in ("n_rows", "n_vars", "layout", "block", "batch", "fetch")},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "limits": limits(spec),
        "results": [summary(result) for result in results],
    }
    print(table(report))
    write_report(options.out, report, draw)
    return report


def targets(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows of `_targets.ROWS`, all or those given by the options."""
    rows = [row for row in _targets.ROWS if not options.rows or row.name in options.rows]
    logs = options.work / "logs"
    logs.mkdir(exist_ok=True)
    task = prepare(options)

    def missing(row: _targets.Row) -> str | None:
        names = {row.files, row.theirs.name.split()[0]}
        if "annbatch" in names and options.peer_python is None:
            return "requires --peer-python with annbatch"
        if "scDataset" in names and importlib.util.find_spec("scdataset") is None:
            return "scDataset is not installed"
        n_cores = max(row.ours.n_cores, row.theirs.n_cores)
        n_there = len(os.sched_getaffinity(0))
        return f"requires {n_cores} cores, and {n_there} are available" if n_there < n_cores else None

    def spec_of(row: _targets.Row) -> dict[str, Any]:
        own_store = row.files == "annbatch"
        path = Path(task["annbatch_path"]) / "dataset_0" if own_store else atlas(options, row.files)
        paths = {"path": str(path), "zarr_path": str(path)}
        return task | paths | {key: getattr(row, key) for key in ("layout", "block", "cold")}

    def start(name: str, *, spec: dict[str, Any], label: str, drop: Any = None) -> Contender:
        return Contender(
            name,
            python=interpreter(name, options),
            script=HERE / "_contenders.py",
            spec=spec,
            log=logs / f"{re.sub('[^A-Za-z0-9]+', '-', label)}.log",
            label=label,
            drop=drop,
        )

    def limit_of(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(HERE / "_limits.py"), kind, json.dumps(spec)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        return json.loads(done.stdout.splitlines()[-1])

    reports = _targets.run(
        rows,
        spec_of=spec_of,
        start=start,
        missing=missing,
        limit_of=limit_of,
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
    )
    report = {
        **{key: task[key] for key in ("n_rows", "n_vars", "batch", "fetch")},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows": reports,
    }
    print("\n" + _targets.table(reports))
    write_report(options.out, report, _targets.draw)
    return report


def interpreter(name: str, options: argparse.Namespace) -> str:
    """Return the Python interpreter of a contender."""
    return options.peer_python if name.startswith("annbatch") else sys.executable


def main_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense", help="layout of the batches")
    parser.add_argument("--block", type=int, default=64, help="rows of a block")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")
    parser.add_argument("--fetch", type=int, default=16_384, help="rows of a fetch (shuffle buffer)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, help="minimum duration of a measurement (default: 3, with --targets 2)"
    )
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before the first round")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--peer-python", help="interpreter that has annbatch (and zarrs) installed")
    parser.add_argument("--targets", action="store_true", help="measure the performance targets, row by row")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[row.name for row in _targets.ROWS],
        metavar="NAME",
        help=f"rows to measure with --targets, some of: {', '.join(row.name for row in _targets.ROWS)}",
    )
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 2.0 if options.targets else 3.0
    if options.fetch % options.batch or options.fetch % options.block:
        parser.error(f"--fetch {options.fetch} must be a multiple of --batch and of --block")
    return options


def runs(name: str, options: argparse.Namespace) -> bool:
    """Return True if a contender takes part by default."""
    if name.startswith("annbatch"):
        return options.peer_python is not None
    if name.startswith("scDataset") and importlib.util.find_spec("scdataset") is None:
        return False
    return options.layout == "dense" or name not in {"scDataset per fetch", "AnnLoader"}


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Write the files that the contenders read, unless they exist, and return the spec."""
    path = atlas(options)
    spec = {
        "path": str(path),
        **{key: getattr(options, key) for key in ("layout", "block", "batch", "fetch")},
    }
    spec["n_rows"], spec["n_vars"], spec["nnz"] = table_shape(path)
    if options.peer_python is not None:
        if options.atlas is None:
            spec["zarr_path"] = str(atlas(options, "zarr"))
        elif path.suffix == ".zarr":
            spec["zarr_path"] = str(path)
        h5ad = path if path.suffix == ".h5ad" else atlas(options, "h5ad")
        own = options.work / f"{h5ad.stem}-{h5ad.stat().st_mtime_ns:x}-annbatch.zarr"
        spec |= {"h5ad_path": str(h5ad), "annbatch_path": str(own)}
        if not own.exists():
            print(f"writing {own}")
            partial_path = own.with_name("partial-" + own.name)
            writing = json.dumps({**spec, "annbatch_path": str(partial_path)})
            subprocess.run(
                [options.peer_python, str(HERE / "_contenders.py"), "write annbatch store", writing],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            partial_path.rename(own)
    return spec


def table_shape(path: Path) -> tuple[int, int, int]:
    """Return the numbers of cells, genes and stored values of an atlas."""
    import h5py
    import zarr

    store = zarr.open_group(path, mode="r") if path.suffix == ".zarr" else h5py.File(path, "r")
    is_dense = "shape" not in store["X"].attrs
    n_rows, n_vars = (int(length) for length in (store["X"].shape if is_dense else store["X"].attrs["shape"]))
    return n_rows, n_vars, n_rows * n_vars if is_dense else store["X/data"].shape[0]


def limits(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the upper bounds set by memory and disk, in cells per second."""
    yielded = spec["n_vars"] * 4 if spec["layout"] == "dense" else spec["nnz"] / spec["n_rows"] * 8
    stored = _machine.size_bytes(Path(spec["path"])) / spec["n_rows"]
    memcpy = _machine.memcpy_bytes_per_s()
    disk = _machine.disk_bytes_per_s(Path(spec["path"]))
    return {
        "yielded_bytes_per_cell": yielded,
        "stored_bytes_per_cell": stored,
        "memcpy_bytes_per_s": memcpy,
        "memcpy_cells_per_s": memcpy / yielded,
        "disk_bytes_per_s": disk,
        "disk_cells_per_s": None if disk is None else disk / stored,
    }


def summary(result: Result) -> dict[str, Any]:
    produced, produced_spread = median_and_spread(result.produced)
    consumed, consumed_spread = median_and_spread(result.consumed)
    return {
        "name": result.name,
        "produced": produced,
        "produced_spread": produced_spread,
        "consumed": consumed,
        "consumed_spread": consumed_spread,
        "cores": median_and_spread(result.cores)[0],
        "cold_start": result.cold_start,
        "rounds": {"produced": result.produced, "consumed": result.consumed},
    }


def table(report: dict[str, Any]) -> str:
    """Format the report as a Markdown table, with ratios to `BASELINE` and the upper bounds set by the machine."""
    results, limit = report["results"], report["limits"]
    against = next((result["consumed"] for result in results if result["name"] == BASELINE), None)
    lines = [
        f"{report['n_rows']:,} cells x {report['n_vars']:,} genes, {report['files']}, {report['layout']} "
        f"batches of {report['batch']}, blocks of {report['block']}, fetches of {report['fetch']:,}; "
        f"median of {report['rounds']} rounds, ± half the range",
        "",
        f"| loader | produced, cells/s | consumed, cells/s | consumed / {BASELINE} | cores | cold start, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in sorted(results, key=lambda result: -result["consumed"]):
        ratio = "" if against is None else f"{result['consumed'] / against:.1f}"
        lines.append(
            f"| {result['name']} | {_rate(result, 'produced')} | {_rate(result, 'consumed')} | {ratio} "
            f"| {result['cores']:.1f} | {result['cold_start']['total_s']:.1f} |"
        )
    lines += [
        "",
        f"One thread copies {limit['memcpy_bytes_per_s'] / 1e9:.1f} GB/s: {limit['memcpy_cells_per_s']:,.0f} "
        f"cells/s of {limit['yielded_bytes_per_cell']:,.0f} bytes each as yielded.",
    ]
    if limit["disk_bytes_per_s"] is not None:
        lines.append(
            f"The disk reads {limit['disk_bytes_per_s'] / 1e9:.1f} GB/s: {limit['disk_cells_per_s']:,.0f} "
            f"cells/s of {limit['stored_bytes_per_cell']:,.0f} bytes as stored. The loaders read from the page cache."
        )
    return "\n".join(lines)


def _rate(result: dict[str, Any], kind: str) -> str:
    return f"{result[kind]:,.0f} ± {result[kind + '_spread']:.0%}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the consumed rates as bars with their ranges over rounds."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")

    results = sorted(report["results"], key=lambda result: result["consumed"])
    names = [result["name"] for result in results]
    figure, axes = plt.subplots(figsize=(7, 0.9 + 0.36 * len(names)), layout="constrained")
    for offset, kind, colour in ((0.2, "produced", "#b8c9dc"), (-0.2, "consumed", "#1f5a99")):
        rates = [result[kind] for result in results]
        low = [rate - min(result["rounds"][kind]) for rate, result in zip(rates, results, strict=True)]
        high = [max(result["rounds"][kind]) - rate for rate, result in zip(rates, results, strict=True)]
        axes.barh(
            [i + offset for i in range(len(names))],
            rates,
            height=0.4,
            color=colour,
            label=kind,
            xerr=(low, high),
            error_kw={"lw": 0.8, "capsize": 2},
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("cells per second")
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(
        f"{report['n_rows']:,} cells x {report['n_vars']:,} genes, {report['files']}, {report['layout']}; "
        f"block {report['block']}, batch {report['batch']}, fetch {report['fetch']:,}",
        fontsize=9,
        loc="left",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
