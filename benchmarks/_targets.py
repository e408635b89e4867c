"""Performance targets of dasksc: pairs of loaders on one file, their measurement, and its report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _machine
from _harness import Contender, Result, Together, compete

Spec = dict[str, Any]
Start = Callable[..., Contender]
KINDS = ("produced", "consumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two contenders of a row.

    Parameters
    ----------
    label
        Name in the report.
    name
        Name of the contender.
    spec
        Additions to the spec of the row.
    ranks
        Additions to the spec of each rank, for several ranks that measure simultaneously.
    """

    label: str
    name: str = "dasksc threads"
    spec: Spec = field(default_factory=dict)
    ranks: tuple[Spec, ...] = ()

    @property
    def is_peer(self) -> bool:
        """True if the contender is another library."""
        return not self.name.startswith("dasksc")

    @property
    def n_cores(self) -> int:
        """Number of cores that the specs require."""
        return 1 + max((core for spec in (self.spec, *self.ranks) for core in spec.get("cores", [0])), default=0)


DASKSC = Side(label="dasksc")
WITHIN_2_GIB = Side(label="dasksc, fetches chosen", spec={"memory_limit": "2GiB"})
WITHOUT_DASK = Side(label="without Dask", name="dasksc without Dask")
ONE_CORE = Side(label="one core", spec={"cores": [0]})
TWO_CORES = Side(label="dasksc on two cores", spec={"cores": [0, 1]})
TWO_RANKS = Side(
    label="dasksc, two ranks of one core",
    ranks=tuple({"cores": [rank], "rank": rank, "world_size": 2} for rank in range(2)),
)
ONE_RANK = Side(label="one rank of two cores", spec={"cores": [0, 1]})
SCDATASET = Side(label="scDataset", name="scDataset")
OWN_STORE = Side(label="annbatch", name="annbatch own store")
ANNDATA_ZARR = Side(label="annbatch", name="annbatch AnnData zarr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Target for one pair of contenders: produced cells per second of `ours`, divided by the rate of `theirs`.

    Parameters
    ----------
    name
        Name in the report.
    files
        ``"h5ad"``, ``"gzip"``, ``"zarr"`` or ``"shards"`` (as AnnData writes it), or ``"annbatch"`` (its own store).
    layout
        Layout of the batches, ``"dense"`` or ``"csr"``.
    block
        Number of contiguous rows in a block.
    cold
        True to empty the page cache before each measurement.
    ours, theirs
        Contenders.
    at_least, stretch
        Target of the ratio, and a more ambitious one.
    """

    name: str
    files: str
    layout: str
    block: int = 64
    cold: bool = False
    ours: Side = DASKSC
    theirs: Side
    at_least: float
    stretch: float | None = None

    @property
    def limits(self) -> tuple[str, ...]:
        """Operations that bound the rate, keys of `_limits.LIMITS`."""
        if self.cold:
            return ("disk",)
        gathering = "fill" if self.layout == "dense" else "copy"
        if self.files == "h5ad":
            return (gathering,)
        return ("decode fetch" if self.files == "shards" else "decode", gathering)


ROWS = [
    Row(name="h5ad dense", files="h5ad", layout="dense", theirs=SCDATASET, at_least=8, stretch=10),
    Row(name="h5ad csr", files="h5ad", layout="csr", theirs=SCDATASET, at_least=12, stretch=17),
    Row(name="h5ad cold", files="h5ad", layout="dense", cold=True, theirs=SCDATASET, at_least=4),
    Row(name="h5ad block 1", files="h5ad", layout="dense", block=1, theirs=SCDATASET, at_least=8),
    Row(name="gzip dense", files="gzip", layout="dense", theirs=SCDATASET, at_least=5),
    Row(name="sharded dense", files="annbatch", layout="dense", theirs=OWN_STORE, at_least=2.5, stretch=3),
    Row(name="sharded csr", files="annbatch", layout="csr", theirs=OWN_STORE, at_least=1.5, stretch=2),
    Row(name="zarr csr", files="zarr", layout="csr", theirs=ANNDATA_ZARR, at_least=1.5),
    *(
        Row(name=f"shards {layout}", files="shards", layout=layout, theirs=ANNDATA_ZARR, at_least=2)
        for layout in ("dense", "csr")
    ),
    Row(name="zarr csr 2GiB", files="zarr", layout="csr", ours=WITHIN_2_GIB, theirs=ANNDATA_ZARR, at_least=2.5),
    Row(name="dask gzip", files="gzip", layout="dense", theirs=WITHOUT_DASK, at_least=0.95),
    Row(name="dask sharded", files="annbatch", layout="csr", theirs=WITHOUT_DASK, at_least=0.95),
    *(
        Row(name=f"{kind} {files} {layout}", files=files, layout=layout, ours=ours, theirs=theirs, at_least=at_least)
        for kind, ours, theirs, at_least in (("cores", TWO_CORES, ONE_CORE, 1.6), ("ranks", TWO_RANKS, ONE_RANK, 0.9))
        for files, layout in (("h5ad", "dense"), ("h5ad", "csr"), ("gzip", "dense"))
    ),
]


def run(
    rows: Sequence[Row],
    *,
    spec_of: Callable[[Row], Spec],
    start: Start,
    missing: Callable[[Row], str | None],
    limit_of: Callable[[str, Spec], dict[str, Any]],
    rounds: int,
    seconds: float,
    warm_up_s: float,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure row after row, with only the two contenders of the current row alive.

    Parameters
    ----------
    rows
        Rows to measure.
    spec_of
        Function that returns the spec of a row; called only if nothing is missing.
    start
        Function that starts a contender: ``start(name, spec=, label=, drop=)``.
    missing
        Function that returns the reason why a row cannot be measured here, or None.
    limit_of
        Function that measures an upper bound of the machine, given a key of `_limits.LIMITS` and a spec.
    rounds, seconds, warm_up_s
        See `_harness.compete`.
    """
    reports = []
    for row in rows:
        say(f"--- {row.name}")
        why = missing(row)
        if why is not None:
            reports.append({"name": row.name, "not_measured": f"skipped: {why}"})
            say(why)
            continue
        spec = spec_of(row)
        path = Path(spec["path"])
        _machine.read_through(path)
        drop = partial(_machine.drop_from_cache, path) if row.cold else None
        sides = (row.ours, row.theirs)
        results = compete(
            [partial(_start, side, spec=spec | side.spec, start=start, drop=drop) for side in sides],
            rounds=rounds,
            seconds=seconds,
            warm_up_s=warm_up_s,
            say=say,
        )
        by_label = {result.name: result for result in results}
        lost = [side.label for side in sides if side.label not in by_label]
        if lost:
            reports.append({"name": row.name, "not_measured": f"FAILED: {' and '.join(lost)} ended early"})
            continue
        limits = {kind: limit_of(kind, spec) for kind in row.limits}
        reports.append(report_of(row, by_label[row.ours.label], by_label[row.theirs.label], limits))
        say(_line(reports[-1]))
    return reports


def _start(side: Side, *, spec: Spec, start: Start, drop: Callable[[], Any] | None) -> Contender | Together:
    if not side.ranks:
        return start(side.name, spec=spec, label=side.label, drop=drop)
    ranks = [
        partial(start, side.name, spec=spec | rank, label=f"{side.label} {i}") for i, rank in enumerate(side.ranks)
    ]
    return Together(side.label, ranks)


def report_of(row: Row, ours: Result, theirs: Result, limits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the rates of a row with its target.

    For another library, the higher of its two rates counts. If the reference is dasksc, its *produced* rate counts.
    """
    rates = {
        who: {kind: statistics.median(getattr(result, kind)) for kind in KINDS}
        for who, result in (("ours", ours), ("theirs", theirs))
    }
    credited = max(KINDS, key=lambda kind: rates["theirs"][kind]) if row.theirs.is_peer else "produced"
    ratio = rates["ours"]["produced"] / rates["theirs"][credited]
    by_round = [mine / other for mine, other in zip(ours.produced, getattr(theirs, credited), strict=True)]
    limit_rates = [limit["cells_per_s"] for limit in limits.values()]
    # The same cores do these operations one after the other, so their times per cell add up.
    allowed = 1 / sum(1 / rate for rate in limit_rates) if limit_rates and None not in limit_rates else None
    return {
        "name": row.name,
        "ours": ours.name,
        "theirs": theirs.name,
        "ours_cells_per_s": rates["ours"]["produced"],
        "theirs_cells_per_s": rates["theirs"][credited],
        "theirs_credited": credited,
        "ratio": ratio,
        "ratio_range": [min(by_round), max(by_round)],
        "consumed_ratio": rates["ours"]["consumed"] / rates["theirs"]["consumed"],
        "at_least": row.at_least,
        "stretch": row.stretch,
        "met": ratio >= row.at_least,
        "limit_cells_per_s": allowed,
        "share_of_limit": None if allowed is None else rates["ours"]["produced"] / allowed,
        "limits": limits,
        "sides": {
            who: {
                "fetch": result.cold_start.get("fetch"),
                "cold_start_s": result.cold_start["total_s"],
                "produced": result.produced,
                "consumed": result.consumed,
                "cores": result.cores,
                "dropped": sorted(set(result.dropped)),
                "cached_share": result.cached_share,
            }
            for who, result in (("ours", ours), ("theirs", theirs))
        },
    }


# --- Report -------------------------------------------------------------------------------------------


def _line(report: dict[str, Any]) -> str:
    """Format a report as one row of the table."""
    if "not_measured" in report:
        return f"| {report['name']} | {report['not_measured']} |" + " |" * 7
    target = f"{report['at_least']:g}" + (f" (stretch {report['stretch']:g})" if report["stretch"] else "")
    limit = ", then ".join(f"{one['is']} {_cells(one['cells_per_s'])}" for one in report["limits"].values())
    if len(report["limits"]) > 1:
        limit = f"{_cells(report['limit_cells_per_s'])}: {limit}"
    share = "" if report["share_of_limit"] is None else f"{report['share_of_limit']:.0%}"
    low, high = report["ratio_range"]
    return (
        f"| {report['name']} | {report['ours_cells_per_s']:,.0f} "
        f"| {report['theirs_cells_per_s']:,.0f} ({report['theirs']}, {report['theirs_credited']}) "
        f"| {report['ratio']:.2f} ({low:.2f} to {high:.2f}) | {target} | {'met' if report['met'] else 'MISSED'} "
        f"| {report['consumed_ratio']:.2f} | {limit} | {share} |"
    )


def _cells(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:,.0f}"


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Format all reports as a Markdown table."""
    lines = [
        "| row | dasksc, cells/s | reference, cells/s | ratio (range of rounds) | target | | ratio, both consumed "
        "| upper bound of the machine, cells/s | share of the bound |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | --- | ---: |",
        *map(_line, reports),
    ]
    for report in reports:
        sides = report.get("sides", {}).values()
        if any(side["dropped"] for side in sides):
            how = " or ".join(sorted({way for side in sides for way in side["dropped"]}))
            cached = max(share for side in sides for share in side["cached_share"])
            lines += ["", f"{report['name']}: dropped by {how}; at most {cached:.1%} of the atlas remained in memory."]
        chosen = {side["fetch"] for side in sides}
        if len(chosen) > 1:
            sizes = " and ".join(f"{side['fetch']:,}" for side in sides)
            lines += ["", f"{report['name']}: fetches of {sizes} cells."]
    n_met = sum(report.get("met", False) for report in reports)
    n_measured = sum("met" in report for report in reports)
    return "\n".join(
        [*lines, "", f"{n_met} of {n_measured} measured rows met, {len(reports) - n_measured} not measured."]
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw each ratio as a bar that starts at 1 (equal rates), with its target."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    plt.switch_backend("Agg")
    met, missed = "#1f5a99", "#b5452c"
    rows = [row for row in report["rows"] if "ratio" in row][::-1]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.34 * len(rows)), layout="constrained")
    for i, row in enumerate(rows):
        low, high = row["ratio_range"]
        colour = met if row["met"] else missed
        axes.barh(i, row["ratio"] - 1, left=1, height=0.56, color=colour)
        axes.plot([low, high], [i, i], color="black", lw=0.8)
        axes.plot([row["at_least"]] * 2, [i - 0.42, i + 0.42], color="black", lw=2)
        if row["stretch"]:
            axes.plot([row["stretch"]] * 2, [i - 0.42, i + 0.42], color="black", lw=1, ls=(0, (1.5, 1)))
        right = max(row["ratio"], high, row["at_least"], row["stretch"] or 0, 1)
        text = f"{row['ratio']:.3g}"
        if row["share_of_limit"] is not None:
            text += f"  ({row['share_of_limit']:.0%} of what the machine allows)"
        axes.annotate(text, (right, i), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    ends = [
        value for row in rows for value in (*row["ratio_range"], row["ratio"], row["at_least"], row["stretch"] or 1)
    ]
    axes.set_xscale("log")
    # Leave room for the text next to the longest bar.
    axes.set_xlim(min(0.8, 0.95 * min(ends)), max(ends) * (max(ends) / 0.8) ** 0.5)
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['name']}, to {row['theirs']}" for row in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("ratio of cells per second")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    legend = [
        Patch(color=met, label="met"),
        Patch(color=missed, label="missed"),
        Line2D([], [], color="black", lw=2, label="target"),
        Line2D([], [], color="black", lw=1, ls=(0, (1.5, 1)), label="stretch"),
        Line2D([], [], color="black", lw=0.8, label="range of rounds"),
    ]
    figure.legend(handles=legend, frameon=False, loc="outside lower center", ncols=len(legend), fontsize=8)
    axes.set_title(
        f"{report['n_rows']:,} cells x {report['n_vars']:,} genes, batches of {report['batch']}, fetches of "
        f"{report['fetch']:,}; {report['machine']['cpus']} cores; medians of {report['rounds']} rounds",
        fontsize=9,
        loc="left",
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
