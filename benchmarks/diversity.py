#!/usr/bin/env python
"""Measure the mixing of batches and the throughput for several block sizes and fetch factors.

    python benchmarks/diversity.py --cells 200000 --out benchmarks/results/diversity

For each block size and fetch factor, the program reports the label entropy of batches, the entropy of ideal random
batches, and the cells per second delivered to the loop. Entropies are computed from the plan. Each rate is a median
over rounds, each of which measures all sizes one after the other. The first fetches of a round are not measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _atlas import add_options, atlas
from _harness import measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--column", default="cell_type", help="obs column with the labels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--fetch-factors", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--layout", choices=["dense", "csr"], default="dense")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of a measurement in seconds")
    add_out(parser)
    options = parser.parse_args(arguments)

    path = atlas(options)
    read_through(path)
    adata = dasksc.open(path)
    sizes = [(factor, block) for factor in options.fetch_factors for block in options.blocks]
    datasets = [
        dasksc.scDataset(
            adata,
            dasksc.BlockShuffling(block_size=block),
            batch_size=options.batch,
            fetch_factor=factor,
            layout=options.layout,
            obs=[options.column],
            rank=0,
            world_size=1,
            seed=0,
        )
        for factor, block in sizes
    ]
    rates: list[list[float]] = [[] for _ in sizes]
    for i in range(-1, options.rounds):
        for (factor, _), dataset, found in zip(sizes, datasets, rates, strict=True):
            rate = rows_per_s(dataset, fetch_rows=factor * options.batch, seconds=options.seconds)
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                found.append(rate)
    rows = []
    print("fetch factor  block   entropy ± spread   of ideal     cells/s")
    for (factor, block), dataset, found in zip(sizes, datasets, rates, strict=True):
        mixed = dasksc.diversity(dataset, options.column)
        row = {
            "fetch_factor": factor,
            "block_size": block,
            "entropy": mixed.mean,
            "spread": mixed.spread,
            "ideal_entropy": mixed.ideal_mean,
            "share": mixed.share,
            "rows_per_s": statistics.median(found),
            "rounds": found,
        }
        rows.append(row)
        print(
            f"{factor:>12}{block:>7}{mixed.mean:>10.3f} ± {mixed.spread:.3f}{mixed.share:>11.1%}"
            f"{row['rows_per_s']:>12,.0f}"
        )
    report = {
        "n_rows": adata.n_obs,
        "n_vars": adata.n_vars,
        "files": options.files,
        "layout": options.layout,
        "column": options.column,
        "batch": options.batch,
        "load": os.getloadavg()[0],
        "results": rows,
    }
    write_report(options.out, report, draw)
    return report


def rows_per_s(dataset: Any, *, fetch_rows: int, seconds: float) -> float:
    """Return the cells per second delivered to an empty loop, counted in whole fetches."""
    return measure(lambda: map(_tensor, iter(dataset)), seconds=seconds, fetch_rows=fetch_rows, consume=None).rows_per_s


def _tensor(batch: Any) -> Any:
    return batch.X


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw entropy and throughput against block size, with a line for each fetch factor."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")

    figure, (mixing, speed) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    rows = report["results"]
    factors = sorted({row["fetch_factor"] for row in rows})
    for i, factor in enumerate(factors):
        colour = plt.get_cmap("viridis")(0.8 * i / max(len(factors) - 1, 1))
        line = sorted((row for row in rows if row["fetch_factor"] == factor), key=lambda row: row["block_size"])
        blocks = [row["block_size"] for row in line]
        label = f"{factor} ({factor * report['batch']:,} cells)"
        means, spreads = ([row[name] for row in line] for name in ("entropy", "spread"))
        mixing.errorbar(blocks, means, spreads, marker="o", ms=4, lw=1.5, elinewidth=0.7, capsize=2, color=colour)
        rates = [row["rows_per_s"] for row in line]
        speed.plot(blocks, rates, marker="o", ms=4, color=colour, label=label)
    mixing.axhline(rows[0]["ideal_entropy"], color="0.5", lw=1, ls="--")
    mixing.annotate(
        "ideal random batches", (1, 1), xycoords="axes fraction", ha="right", va="bottom", color="0.4", fontsize=8
    )
    mixing.set_ylabel(f"entropy of {report['column']} in a batch, bits")
    mixing.set_ylim(bottom=0)
    speed.set_ylabel("cells per second")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    speed.legend(title="fetch factor", frameon=False, fontsize=8, title_fontsize=8)
    ticks = sorted({row["block_size"] for row in rows})
    for axes in (mixing, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("block size, rows")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report['n_rows']:,} cells x {report['n_vars']:,} genes sorted by {report['column']}, {report['files']}, "
        f"{report['layout']} batches of {report['batch']}",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
