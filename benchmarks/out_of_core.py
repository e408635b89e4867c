#!/usr/bin/env python
"""How fast is an epoch where memory is short, and how much does it read from the disk?

    python benchmarks/out_of_core.py --cells 200000
    python benchmarks/out_of_core.py --files gzip --limits 1GiB

Loaders run in control groups with a memory limit, as the jobs of Slurm and Kubernetes do: there the page cache counts
as the memory of processes does. The page cache is emptied before every measurement, since pages that another process
has read are not charged to a group. Each limit is compared with the same loader without one, cold, in turns in one run.
Every measurement is an epoch; peers, which are slower, get some seconds of one.
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
import h5py
import numpy as np
from _atlas import add_options, atlas
from _harness import Contender, ContenderError, Together
from _reports import add_out, write_report
from dask.utils import parse_bytes

import dasksc
from tests.support.cgroups import NoCgroupError, memory_cgroup

HERE = Path(__file__).resolve().parent
PAGE = 4096


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the command line says; return what was written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--limits", nargs="+", default=["1GiB", "2GiB"], help="memory limits of control groups")
    parser.add_argument("--layouts", nargs="+", choices=["csr", "dense"], default=["csr", "dense"])
    parser.add_argument("--converted", action="store_true", help="read the store that dasksc makes of the atlas")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share a limit, each of one core if several")
    parser.add_argument("--ways", nargs="+", choices=["auto", "mapped", "read"], default=["auto"])
    parser.add_argument("--no-peer", action="store_true", help="leave scDataset out")
    parser.add_argument("--rounds", type=int, default=3)
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
    """Return the store that dasksc makes of a file, made now if it is not there yet."""
    store = path.with_name(f"{path.stem}-converted.zarr")
    if not store.exists():
        dasksc.convert(path, store)
    return store


def rows_of(options: argparse.Namespace, path: Path, layout: str) -> list[dict[str, Any]]:
    """Measure one layout without a limit and with each."""
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
    with contextlib.ExitStack() as groups:
        runners: dict[str, Any] = {}
        killed = {}
        for limit in [None, *options.limits]:
            names = [("dasksc threads", way) for way in options.ways]
            if limit is not None and not options.no_peer and not options.converted:
                names.append(("scDataset", None))
            for name, way in names:
                label = " ".join(filter(None, (name.split()[0], None if way in ("auto", None) else way, limit)))
                enter = None
                if limit is not None:
                    try:
                        group = groups.enter_context(memory_cgroup(parse_bytes(limit)))
                    except NoCgroupError as error:
                        return [{"layout": layout, "label": label, "skipped": str(error)}]
                    enter, killed[label] = group.enter, group.n_killed
                one = spec | ({} if way is None else {"mmap": mmap[way]})
                start = partial(Contender, name, python=sys.executable, script=HERE / "_contenders.py", enter=enter)
                ranks = [
                    partial(start, spec=one | rank, label=label, log=logs / f"{label.replace(' ', '-')}-{i}.log")
                    for i, rank in enumerate(rank_specs(options.ranks))
                ]
                runners[label] = ranks
        measured: dict[str, list[dict[str, Any]]] = {label: [] for label in runners}
        for i in range(options.rounds):
            labels = list(runners)
            for label in labels[i % len(labels) :] + labels[: i % len(labels)]:
                seconds = options.peer_seconds if label.startswith("scDataset") else 0
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
    wanted = wanted_bytes_per_row(options, path)
    for row in rows:
        row["wanted_bytes_per_row"] = wanted
    return rows


def rank_specs(n_ranks: int) -> list[dict[str, Any]]:
    """Return what each rank's spec has beyond the others'."""
    if n_ranks == 1:
        return [{}]
    return [{"cores": [rank], "rank": rank, "world_size": n_ranks} for rank in range(n_ranks)]


def wanted_bytes_per_row(options: argparse.Namespace, path: Path) -> float | None:
    """Return the bytes of whole pages in which the rows of an epoch's fetches lie, per row; None if compressed."""
    if options.files != "h5ad" or options.converted:
        return None
    with h5py.File(path) as file:
        indptr = file["X/indptr"][:]
        places = [(file[f"X/{name}"].id.get_offset(), file[f"X/{name}"].dtype.itemsize) for name in ("indices", "data")]
        if any(offset is None for offset, _ in places):
            places = [(0, itemsize) for _, itemsize in places]  # in chunks, uncompressed: as good as one run
    dataset = dasksc.scDataset(
        path, dasksc.BlockShuffling(options.block), options.batch, options.fetch // options.batch, seed=0,
        rank=0, world_size=1,
    )  # fmt: skip
    plan = dataset.plan(0)
    n_bytes = n_rows = 0
    for k in range(plan.n_fetches):
        rows = np.unique(plan.fetch(k).rows)
        n_rows += len(rows)
        for offset, itemsize in places:
            first = (offset + indptr[rows] * itemsize) // PAGE
            last = -(-(offset + indptr[rows + 1] * itemsize) // PAGE)
            # A page that two neighbours share is read once.
            n_bytes += int((last - np.maximum(first, np.concatenate(([0], last[:-1])))).sum()) * PAGE
    return n_bytes / n_rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows, as Markdown; ratios are of medians."""
    lines = [
        "| layout | loader and limit | cells/s (of rounds) | of the rate without a limit | KiB read a cell (wanted) |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    base = {
        (row["layout"], " ".join(word for word in row["label"].split() if not word.endswith("iB"))): row
        for row in rows
        if not row["label"].endswith("iB")
    }
    for row in rows:
        if "skipped" in row:
            lines.append(f"| {row['layout']} | {row['label']} | skipped: {row['skipped']} | | |")
            continue
        key = row["layout"], " ".join(word for word in row["label"].split() if not word.endswith("iB"))
        rates = row["rows_per_s"]
        median = statistics.median(rates)
        share = f"{median / statistics.median(base[key]['rows_per_s']):.2f}" if key in base else ""
        wanted = row["wanted_bytes_per_row"]
        lines.append(
            f"| {row['layout']} | {row['label']}{', KILLED' if row['n_killed'] else ''} "
            f"| {median:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | {share} "
            f"| {row['read_bytes_per_row'] / 1024:.1f}{'' if wanted is None else f' ({wanted / 1024:.1f})'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
