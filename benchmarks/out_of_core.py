#!/usr/bin/env python
"""Measure the throughput and the bytes read from disk of epochs in limited memory.

    python benchmarks/out_of_core.py --cells 200000
    python benchmarks/out_of_core.py --files gzip --limits 1GiB

Loaders run in control groups with a memory limit, as do jobs of Slurm and Kubernetes. The limit includes the page
cache. The page cache is emptied before each measurement, because pages read by another process are not charged to the
group. In each round, the program measures the loader with each limit and without a limit, one after the other. A
measurement is one epoch, or a few seconds of an epoch for the slower peers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _machine
from _atlas import add_options, atlas
from _harness import Contender, ContenderError, Together
from _ranges import page_ranges
from _reports import add_out, write_report
from dask.utils import parse_bytes

import dasksc
from tests.support.cgroups import NoCgroupError, memory_cgroup

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--limits", nargs="+", default=["1GiB", "2GiB"], help="memory limits of control groups")
    parser.add_argument("--layouts", nargs="+", choices=["csr", "dense"], default=["csr", "dense"])
    parser.add_argument("--converted", action="store_true", help="read a store converted by dasksc")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks that share a limit; several ranks have one core each"
    )
    parser.add_argument("--ways", nargs="+", choices=["auto", "mapped", "read"], default=["auto"])
    parser.add_argument(
        "--pread",
        type=int,
        nargs="*",
        default=[],
        help="also measure plain loops of pread with these numbers of threads",
    )
    parser.add_argument(
        "--dask-workers", action="store_true", help="set memory limits on two Dask workers, without control groups"
    )
    parser.add_argument("--no-peer", action="store_true", help="do not measure scDataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="duration of a measurement in seconds (default: one epoch)"
    )
    parser.add_argument("--peer-seconds", type=float, default=8.0)
    add_out(parser)
    options = parser.parse_args(arguments)
    path = atlas(options)
    if options.converted:
        path = converted(path)
    report: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}, "rows": []}
    for layout in options.layouts:
        report["rows"] += rows_of(options, path, layout)
    print(table(report["rows"]))
    write_report(options.out, report)
    return report


def converted(path: Path) -> Path:
    """Return the path of the store converted from a file, and convert the file first if it does not exist."""
    store = path.with_name(f"{path.stem}-converted.zarr")
    if not store.exists():
        dasksc.convert(path, store)
    return store


def rows_of(options: argparse.Namespace, path: Path, layout: str) -> list[dict[str, Any]]:
    """Measure one layout without a limit and with each limit."""
    spec = {
        "path": str(path),
        "layout": layout,
        "block": options.block,
        "batch": options.batch,
        "fetch": options.fetch,
        "cold": True,
    }
    logs = options.work / "logs"
    logs.mkdir(exist_ok=True)
    mmap = {"auto": "auto", "mapped": True, "read": False}
    rows = []
    if options.dask_workers:
        contenders = [("dasksc workers", limit, {"worker_memory": limit or 0}) for limit in [None, *options.limits]]
    else:
        contenders = [
            ("dasksc threads", limit, {"mmap": mmap[way]}) for limit in [None, *options.limits] for way in options.ways
        ]
        if not options.no_peer and not options.converted:
            contenders += [("scDataset", limit, {}) for limit in options.limits]
        contenders += [("pread", None, {"depth": depth}) for depth in options.pread]
    with contextlib.ExitStack() as groups:
        runners: dict[str, Any] = {}
        killed = {}
        for name, limit, more in contenders:
            way = next((way for way, value in mmap.items() if way != "auto" and more.get("mmap") is value), None)
            threads = f"{more['depth']} threads" if "depth" in more else None
            label = " ".join(filter(None, (name.removesuffix(" threads"), way, threads, limit)))
            enter = None
            if limit is not None and not options.dask_workers:
                try:
                    group = groups.enter_context(memory_cgroup(parse_bytes(limit)))
                except NoCgroupError as error:
                    return [{"layout": layout, "label": label, "skipped": str(error)}]
                enter, killed[label] = group.enter, group.n_killed
            start = partial(Contender, name, python=sys.executable, script=HERE / "_contenders.py", enter=enter)
            runners[label] = [
                partial(start, spec=spec | more | rank, label=label, log=logs / f"{label.replace(' ', '-')}-{i}.log")
                for i, rank in enumerate(rank_specs(options.ranks))
            ]
        measured: dict[str, list[dict[str, Any]]] = {label: [] for label in runners}
        for i in range(options.rounds):
            labels = list(runners)
            for label in labels[i % len(labels) :] + labels[: i % len(labels)]:
                seconds = options.peer_seconds if label.startswith("scDataset") else options.seconds
                _machine.drop_from_cache(path)
                try:
                    with Together(label, runners[label]) as running:
                        _machine.drop_from_cache(path)
                        answer = running.run(seconds=seconds, consume=False)
                except ContenderError as error:
                    print(f"{label}: {error}")
                    continue
                measured[label].append(answer)
                print(
                    f"round {i + 1}/{options.rounds}  {layout:5s} {label:24s} {answer['rows_per_s']:10,.0f} cells/s  "
                    f"{answer['read_bytes'] / max(answer['n_rows'], 1) / 1024:8.1f} KiB read a cell  "
                    f"{answer['cores']:.2f} cores",
                    flush=True,
                )
        for label, answers in measured.items():
            if answers:
                rows.append(
                    {
                        "layout": layout,
                        "label": label,
                        "rows_per_s": [answer["rows_per_s"] for answer in answers],
                        "read_bytes_per_row": statistics.median(a["read_bytes"] / a["n_rows"] for a in answers),
                        "n_killed": killed[label]() if label in killed else 0,
                    }
                )
            else:
                rows.append({"layout": layout, "label": label, "skipped": "ended early"})
    needed = needed_bytes_per_row(options, path)
    for row in rows:
        row["needed_bytes_per_row"] = needed
    return rows


def rank_specs(n_ranks: int) -> list[dict[str, Any]]:
    """Return the additions to the spec of each rank."""
    if n_ranks == 1:
        return [{}]
    return [{"cores": [rank], "rank": rank, "world_size": n_ranks} for rank in range(n_ranks)]


def needed_bytes_per_row(options: argparse.Namespace, path: Path) -> float | None:
    """Return the bytes per row of the whole pages that hold the rows of an epoch, or None for compressed files."""
    if options.files != "h5ad" or options.converted:
        return None
    dataset = dasksc.scDataset(
        path, dasksc.BlockShuffling(options.block), options.batch, options.fetch // options.batch, seed=0,
        rank=0, world_size=1,
    )  # fmt: skip
    n_bytes = n_rows = 0
    for n, starts, stops in page_ranges(path, dataset.plan(0)):
        n_rows += n
        n_bytes += int((stops - starts).sum())
    return n_bytes / n_rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format all rows as a Markdown table, with ratios of medians."""
    lines = [
        "| layout | loader and limit | cells/s (range of rounds) | ratio to no limit | ratio to the best pread "
        "| KiB read per cell (whole pages) |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    median = {
        (row["layout"], row["label"]): statistics.median(row["rows_per_s"]) for row in rows if "rows_per_s" in row
    }
    for row in rows:
        if "skipped" in row:
            lines.append(f"| {row['layout']} | {row['label']} | skipped: {row['skipped']} | | | |")
            continue
        rates, needed = row["rows_per_s"], row["needed_bytes_per_row"]
        mine = median[row["layout"], row["label"]]
        without = median.get((row["layout"], " ".join(w for w in row["label"].split() if not w.endswith("iB"))))
        best = max((rate for (_, label), rate in median.items() if label.startswith("pread")), default=None)
        lines.append(
            f"| {row['layout']} | {row['label']}{', KILLED' if row['n_killed'] else ''} "
            f"| {mine:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) "
            f"| {'' if without is None else f'{mine / without:.2f}'} | {'' if best is None else f'{mine / best:.2f}'} "
            f"| {row['read_bytes_per_row'] / 1024:.1f}{'' if needed is None else f' ({needed / 1024:.1f})'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
