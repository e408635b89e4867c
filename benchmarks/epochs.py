#!/usr/bin/env python
"""Compare the throughput of short and long epochs.

    python benchmarks/epochs.py --cells 600000

Starting and finishing take a larger share of a short epoch than of a long one. The program measures the cells per
second of whole epochs over a subset of a store, and over the whole store. By default, the store is a compressed store
written by `dasksc.convert`. One subset, the first cells, represents a smaller store. The other consists of blocks
spread over the whole store, which share as few chunks as the blocks of the long epoch. The first epoch of each process
compiles kernels, opens files and allocates memory, and is reported separately. The exit status is 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _atlas import add_options, atlas
from _harness import HERE, Contender, compete
from _machine import read_through
from _reports import add_out, write_report
from compare import table_shape

import dasksc

TARGET = 0.85


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=600_000)
    parser.add_argument("--short", type=int, default=60_000, help="cells of a short epoch")
    parser.add_argument("--as-is", action="store_true", help="read the atlas instead of a converted store")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--layouts", nargs="+", choices=["dense", "csr"], default=["csr", "dense"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="minimum duration of a measurement, which covers whole epochs"
    )
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of work before the first round")
    add_out(parser)
    options = parser.parse_args(arguments)

    path = atlas(options) if options.as_is else converted(options)
    read_through(path)
    report: dict[str, Any] = {layout: compared(layout, path, options) for layout in options.layouts}
    print(table(report))
    report["is_ok"] = all(min(found["ratios"].values()) >= TARGET for found in report.values())
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def converted(options: argparse.Namespace) -> Path:
    """Return the path of the converted store, and convert the atlas first if it does not exist."""
    source = atlas(options)
    path = options.work / f"{source.stem}-converted.zarr"
    if not path.exists():
        dasksc.convert(source, path)
    return path


def compared(layout: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of short and long epochs, and the median over rounds of their ratios."""
    spec = {key: getattr(options, key) for key in ("block", "batch", "fetch")}
    spec |= {"layout": layout, "path": str(path), "whole_epochs": True}
    results = compete(
        [
            partial(
                Contender,
                "dasksc threads",
                python=sys.executable,
                script=HERE / "_contenders.py",
                spec=spec | {"rows": rows},
                log=options.work / f"epochs-{label}.log",
                label=label,
            )
            for label, rows in epochs(table_shape(path)[0], options).items()
        ],
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
        say=lambda line: print(line, file=sys.stderr),
    )
    rates = {result.name: result.produced for result in results}
    by_round = {
        name: [short / long for short, long in zip(rates[name], rates["long"], strict=True)]
        for name in rates
        if name != "long"
    }
    return {
        "cells_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "consumed_cells_per_s": {result.name: statistics.median(result.consumed) for result in results},
        "first_epoch_cells_per_s": {result.name: result.cold_start["first_epoch_rows_per_s"] for result in results},
        "ratios": {name: statistics.median(found) for name, found in by_round.items()},
        "ratios_by_round": by_round,
    }


def epochs(n_rows: int, options: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Return the runs of rows of each kind of epoch, as starts and stops."""
    n_blocks = options.short // options.block
    apart = n_rows // n_blocks
    return {
        "first": [(0, options.short)],
        "spread": [(start, start + options.block) for start in range(0, n_blocks * apart, apart)],
        "long": [(0, n_rows)],
    }


def table(report: dict[str, Any]) -> str:
    """Format the rates as a Markdown table."""
    lines = [
        "| epoch | cells/s | ratio to long (range of rounds) | consumed, cells/s | first epoch, cells/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for layout, found in report.items():
        for name, rate in found["cells_per_s"].items():
            by_round = found["ratios_by_round"].get(name)
            beside = f"{found['ratios'][name]:.2f} ({min(by_round):.2f} to {max(by_round):.2f})" if by_round else ""
            consumed, first = found["consumed_cells_per_s"][name], found["first_epoch_cells_per_s"][name]
            lines.append(f"| {layout}, {name} | {rate:,.0f} | {beside} | {consumed:,.0f} | {first:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(not main()["is_ok"])
