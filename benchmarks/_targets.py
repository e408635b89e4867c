"""What dasksc is to reach, row by row: which file, in which way, against whom, and what the machine allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _machine
import numpy as np
from _harness import Contender, Result, Together, compete, median_and_spread

Start = Callable[..., Contender]
Spec = dict[str, Any]

OURS = "dasksc threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that a row compares.

    Parameters
    ----------
    name
        A contender.
    spec
        What its spec has beyond the row's.
    ranks
        Specs of ranks that measure at the same moment, if it is several.
    """

    name: str
    spec: Spec = field(default_factory=dict)
    ranks: tuple[Spec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing to reach.

    Parameters
    ----------
    name
        What to call it.
    files, layout, block, cold
        What is read, and how; cold: the page cache is emptied before each measurement.
    ours, theirs
        Whose rates are divided.
    at_least, stretch
        What the ratio is to be.
    limit
        What the machine allows: see `limit_of`.
    """

    name: str
    files: str
    layout: str
    block: int = 64
    cold: bool = False
    ours: Side = Side(name=OURS)
    theirs: Side
    at_least: float
    stretch: float | None = None
    limit: str


ONE_CORE = Side(name=OURS, spec={"cores": [0]})
TWO_RANKS = Side(name=OURS, ranks=tuple({"cores": [rank], "rank": rank, "world_size": 2} for rank in range(2)))
SCDATASET, ANNBATCH = Side(name="scDataset"), Side(name="annbatch own store")
NO_DASK = Side(name="dasksc without Dask")
WITH_2_GIB = Side(name=OURS, spec={"memory_limit": "2GiB"})

ROWS = [
    Row(name="h5ad", files="h5ad", layout="dense", theirs=SCDATASET, at_least=8, stretch=10, limit="fill"),
    Row(name="h5ad, CSR", files="h5ad", layout="csr", theirs=SCDATASET, at_least=12, stretch=17, limit="copy"),
    Row(name="h5ad, cold", files="h5ad", layout="dense", cold=True, theirs=SCDATASET, at_least=4, limit="disk"),
    Row(name="h5ad, block 1", files="h5ad", layout="dense", block=1, theirs=SCDATASET, at_least=8, limit="fill"),
    Row(name="gzip", files="gzip", layout="dense", theirs=SCDATASET, at_least=5, limit="decode"),
    Row(name="sharded", files="annbatch", layout="dense", theirs=ANNBATCH, at_least=2.5, stretch=3, limit="decode"),
    Row(name="sharded, CSR", files="annbatch", layout="csr", theirs=ANNBATCH, at_least=1.5, stretch=2, limit="decode"),
    Row(
        name="AnnData's Zarr, CSR",
        files="zarr",
        layout="csr",
        theirs=Side(name="annbatch AnnData zarr"),
        at_least=1.5,
        limit="decode",
    ),
    Row(
        name="AnnData's Zarr, CSR, fetches to fill 2 GiB",
        files="zarr",
        layout="csr",
        ours=WITH_2_GIB,
        theirs=Side(name="annbatch AnnData zarr"),
        at_least=2.5,
        limit="decode",
    ),
    Row(name="Dask on gzip", files="gzip", layout="dense", theirs=NO_DASK, at_least=0.95, limit="decode"),
    Row(name="Dask on sharded", files="annbatch", layout="csr", theirs=NO_DASK, at_least=0.95, limit="decode"),
    *(
        Row(name=name + f", {what}", files=files, layout=layout, ours=ours, theirs=theirs, at_least=least, limit=limit)
        for what, ours, theirs, least in (
            ("two cores to one", Side(name=OURS), ONE_CORE, 1.6),
            ("two ranks to one", TWO_RANKS, Side(name=OURS), 0.9),
        )
        for name, files, layout, limit in (
            ("h5ad", "h5ad", "dense", "fill"),
            ("h5ad, CSR", "h5ad", "csr", "copy"),
            ("gzip", "gzip", "dense", "decode"),
        )
    ),
]


def run(
    rows: Sequence[Row],
    *,
    spec_of: Callable[[Row], Spec],
    start: Start,
    missing: Callable[[Row], str | None],
    rounds: int,
    seconds: float,
    warm_up_s: float,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure row after row.

    Parameters
    ----------
    rows
        Which.
    spec_of
        The task of a row.
    start
        Starts a contender: ``start(name, spec=, label=, drop=)``.
    missing
        What a row lacks to be measured here, if anything.
    rounds, seconds, warm_up_s
        As for `compete`.
    """
    reports = []
    for row in rows:
        why = missing(row)
        if why is not None:
            say(f"{row.name}: skipped, {why}")
            reports.append({"name": row.name, "skipped": why})
            continue
        spec = spec_of(row)
        path = Path(spec["path"])
        _machine.read_through(path)
        drop = partial(_machine.drop_from_cache, path) if row.cold else None
        labels = [f"{side.name}{'' if i else ' (measured)'}" for i, side in enumerate((row.ours, row.theirs))]
        starts = [
            partial(_start, side, spec=spec | side.spec, start=start, label=label, drop=drop)
            for side, label in zip((row.ours, row.theirs), labels, strict=True)
        ]
        say(f"--- {row.name}")
        results = {
            result.name: result
            for result in compete(starts, rounds=rounds, seconds=seconds, warm_up_s=warm_up_s, say=say)
        }
        if set(results) != set(labels):
            reports.append({"name": row.name, "skipped": "a contender failed"})
            continue
        reports.append(_report(row, spec, *(results[label] for label in labels)))
        say(line(reports[-1]))
    return reports


def _start(side: Side, *, spec: Spec, start: Start, label: str, drop: Callable[[], Any] | None) -> Contender | Together:
    if not side.ranks:
        return start(side.name, spec=spec, label=label, drop=drop)
    ranks = [partial(start, side.name, spec=spec | rank, label=f"{label} {rank['rank']}") for rank in side.ranks]
    return Together(label, ranks)


def _report(row: Row, spec: Spec, ours: Result, theirs: Result) -> dict[str, Any]:
    produced, consumed = (
        {one.name: median_and_spread(getattr(one, kind))[0] for one in (ours, theirs)}
        for kind in ("produced", "consumed")
    )
    # A loader of others gets the better of its two figures; against ourselves, like is compared with like.
    theirs_best = (
        produced[theirs.name] if theirs.name.startswith("dasksc") else max(produced[theirs.name], consumed[theirs.name])
    )
    limit, made_of = limit_of(row.limit, spec)
    ratio = produced[ours.name] / theirs_best
    return {
        "name": row.name,
        "ours": produced[ours.name],
        "theirs": theirs_best,
        "peer": row.theirs.name,
        "ratio": ratio,
        "at_least": row.at_least,
        "stretch": row.stretch,
        "met": ratio >= row.at_least,
        "consumed": consumed[ours.name],
        "consumed_ratio": consumed[ours.name] / consumed[theirs.name],
        "limit": limit,
        "limit_is": made_of,
        "share": None if limit is None else produced[ours.name] / limit,
        "rounds": {one.name: {"produced": one.produced, "consumed": one.consumed} for one in (ours, theirs)},
    }


# --- What the machine allows --------------------------------------------------------------------------


def limit_of(kind: str, spec: Spec) -> tuple[float | None, str]:
    """Measure how many cells a second the machine could do at best; also say what that is made of.

    ``fill``: writing dense batches into memory that is used again, on every core. ``copy``: copying the CSR
    bytes of a cell, on every core. ``disk``: reading the stored bytes past the page cache. ``decode``:
    decoding each stored chunk once, all of it wanted, on every core.
    """
    n_threads = len(os.sched_getaffinity(0))
    stored = spec["nnz"] / spec["n_rows"] * 8
    if kind == "fill":
        # One being used, one ready and one being filled for each core: more than their own caches hold.
        buffers = [np.empty((spec["batch"], spec["n_vars"]), dtype=np.float32) for _ in range(3 * n_threads)]
        rate = _machine.rate_on_threads(_cycle([partial(_fill, buffer) for buffer in buffers]), n_threads=n_threads)
        return rate / (4 * spec["n_vars"]), "filling dense batches"
    if kind == "copy":
        source = np.ones(1 << 28, dtype=np.uint8)
        rate = _machine.rate_on_threads(partial(_copy, source, int(stored * spec["batch"])), n_threads=n_threads)
        return rate / stored, "copying the values and columns"
    if kind == "disk":
        rate = _machine.disk_bytes_per_s(Path(spec["path"]))
        return None if rate is None else rate / stored, "reading them from the disk"
    return decode_limit(spec, n_threads), "decoding each chunk once"


def _cycle(works: list[Callable[[], int]]) -> Callable[[], int]:
    import itertools

    turns = itertools.cycle(works)
    return lambda: next(turns)()


def _fill(buffer: np.ndarray) -> int:
    buffer.fill(0)
    return buffer.nbytes


def _copy(source: np.ndarray, n_bytes: int) -> int:
    start = int(np.random.default_rng().integers(0, len(source) - n_bytes))
    source[start : start + n_bytes].copy()
    return n_bytes


def decode_limit(spec: Spec, n_threads: int, n_chunks: int = 64) -> float:
    """Cells a second if every stored chunk is decoded once, by the codecs that dasksc uses."""
    from dasksc.storage import open_matrix

    matrix: Any = open_matrix(spec["path"], "X")
    seconds_per_cell = 0.0
    for array in (matrix._data, matrix._indices):
        length = array._chunk_shape[0]
        numbers = np.unique(np.linspace(0, max(array.shape[0] // length - 1, 0), n_chunks).astype(np.int64))
        stored = [(bytes(data), skipped) for data, skipped in array._source.read(numbers)]
        turns = _cycle([partial(_decode, array, data, skipped) for data, skipped in stored])
        rate = _machine.rate_on_threads(turns, n_threads=n_threads)
        seconds_per_cell += spec["nnz"] / spec["n_rows"] * array.dtype.itemsize / rate
    return 1 / seconds_per_cell


def _decode(array: Any, data: bytes, skipped: int) -> int:
    length = array._chunk_shape[0]
    return int(array._chain.decode(data, shape=(length, 1), skipped=skipped, rows=(0, length)).nbytes)


# --- Telling it ---------------------------------------------------------------------------------------


def line(report: dict[str, Any]) -> str:
    """One row of the table."""
    if "skipped" in report:
        return f"| {report['name']} | skipped: {report['skipped']} | | | | | | |"
    wanted = f"{report['at_least']:g}" + (f" (stretch {report['stretch']:g})" if report["stretch"] else "")
    limit = "" if report["limit"] is None else f"{report['limit']:,.0f}: {report['limit_is']}"
    share = "" if report["share"] is None else f"{report['share']:.0%}"
    return (
        f"| {report['name']} | {report['ours']:,.0f} | {report['theirs']:,.0f} ({report['peer']}) "
        f"| {report['ratio']:.2f} | {wanted} | {'met' if report['met'] else 'MISSED'} "
        f"| {report['consumed_ratio']:.2f} | {limit} | {share} |"
    )


def table(reports: Sequence[dict[str, Any]]) -> str:
    """All rows, as Markdown."""
    return "\n".join(
        [
            "| what | ours, cells/s | theirs | ratio | wanted | | consumed ratio | the machine allows | share |",
            "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
            *map(line, reports),
        ]
    )


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each ratio as a share of what was wanted."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    measured = [report for report in reports if "ratio" in report][::-1]
    if not measured:
        return
    figure, axes = plt.subplots(figsize=(8, 1 + 0.34 * len(measured)), layout="constrained")
    for i, report in enumerate(measured):
        share = report["ratio"] / report["at_least"]
        axes.barh(i, share, height=0.6, color="#1f5a99" if report["met"] else "#b5452c")
        if report["stretch"]:
            axes.plot([report["stretch"] / report["at_least"]] * 2, [i - 0.3, i + 0.3], color="black", lw=1)
        axes.text(share, i, f"  {report['ratio']:.2f} of {report['at_least']:g}", va="center", fontsize=8)
    axes.axvline(1, color="black", lw=1, ls="--")
    axes.set_yticks(range(len(measured)), [report["name"] for report in measured], fontsize=8)
    axes.set_xlim(0, 1.25 * max(report["ratio"] / report["at_least"] for report in measured))
    axes.set_xlabel("ratio reached / ratio wanted (short lines: stretch)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
