"""`dasksc bench`: the loaders that are installed, on the user's own file."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dasksc import InputError, StorageError
from dasksc.cli._loaders import LOADERS, is_installed
from dasksc.cli._shared import StorageOptions, aligned, data_of, data_options, print_json
from dasksc.storage import is_url, shown

__all__ = ["command"]

_START_S = 300

_EXAMPLES = """
\b
Examples:
  dasksc bench atlas.h5ad
  dasksc bench atlas.h5ad --layout csr --loader dasksc --loader scDataset --plot rates.png
  dasksc bench atlas.zarr --block-size 1 --rounds 5 --json
"""


def _plot_of(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse what cannot be drawn before anything is measured."""
    if path is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise click.BadParameter(f"there is no folder {folder}; make it, or give another", context, option)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written; give a place that can be", context, option)
    # Without an ending matplotlib writes what it would by its own default.
    ending, known = Path(path).suffix.lower().removeprefix("."), sorted(Figure().canvas.get_supported_filetypes())
    if ending and ending not in known:
        raise click.BadParameter(f"{path} ends in none of {', '.join(f'.{one}' for one in known)}", context, option)
    return path


@click.command(epilog=_EXAMPLES)
@data_options
@click.option("--layout", type=click.Choice(["dense", "csr"]), default="dense", show_default=True, help="Of batches.")
@click.option("--block-size", type=click.IntRange(1), default=64, show_default=True, help="Rows that stay together.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Rows of a batch.")
@click.option("--fetch-size", type=click.IntRange(1), default=16_384, show_default=True, help="Rows read at once.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True, help="Of each.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of which medians are taken.")
@click.option(
    "--loader", "loaders", multiple=True, type=click.Choice(list(LOADERS)), help="Only these.  [default: all there are]"
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    metavar="PNG",
    callback=_plot_of,
    help="Draw the rates, as .png, .svg, .pdf (needs matplotlib).",
)
def command(
    paths: tuple[str, ...],
    join: str,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    layout: str,
    block_size: int,
    batch_size: int,
    fetch_size: int,
    seconds: float,
    rounds: int,
    loaders: tuple[str, ...],
    plot: str | None,
) -> None:
    """Measure how fast the loaders that are installed read your own atlas, in cells a second.

    Each runs in a process of its own, in turns. Only loading is measured, from the first batch on, files being in the
    page cache as they are. What cannot read these files says so.
    """
    fetch_size = max(fetch_size // batch_size, 1) * batch_size
    read = [os.path.abspath(path) if os.path.exists(path) else path for path in paths]
    asked = {
        "paths": data_of(read),
        "join": join,
        "layout": layout,
        "block": block_size,
        "batch": batch_size,
        "fetch": fetch_size,
        "seconds": seconds,
    }
    spec = {**asked, "storage_options": storage_options, "cache": cache}
    names = [name for name in loaders or LOADERS if is_installed(name)]
    results: dict[str, dict[str, Any]] = {name: {"name": name, "rates": []} for name in names}
    for number in range(rounds):
        for name in names:
            result = results[name]
            if "not_measured" in result:
                continue
            click.echo(f"round {number + 1} of {rounds}: {name}", err=True)
            answer = _measured(name, spec)
            if "error" in answer:
                result["not_measured"] = answer["error"]
            else:
                result["rates"].append(answer["rows_per_s"])
                result.setdefault("first_batch_s", answer["first_batch_s"])
    for name in loaders or LOADERS:
        if name not in results:
            results[name] = {"name": name, "rates": [], "not_measured": "it is not installed"}
    for result in results.values():
        result["rows_per_s"] = statistics.median(result["rates"]) if result["rates"] else None
    ranked = sorted(results.values(), key=lambda one: -(one["rows_per_s"] or 0))
    if not any(result["rates"] for result in ranked):
        raise InputError(
            "nothing was measured: " + "; ".join(f"{one['name']}: {one['not_measured']}" for one in ranked)
        )
    if as_json:
        named = [shown(path) if is_url(path) else path for path in read]
        # Without storage options, which may be secrets.
        print_json({**asked, "paths": data_of(named), "results": ranked})
    else:
        click.echo(_table(ranked))
    if plot is not None:
        _draw(ranked, Path(plot), asked)


def _measured(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    limit_s = _START_S + 10 * spec["seconds"]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "dasksc.cli._loaders", name, json.dumps(spec)],
            capture_output=True,
            text=True,
            check=False,
            # The child finds what this process has found, wherever it was started.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {limit_s:g} s"}
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or [f"it ended with {run.returncode}"]
        return {"error": last[0]}
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def _table(ranked: Sequence[dict[str, Any]]) -> str:
    best = ranked[0]["rows_per_s"]
    rows = [["loader", "cells/s", "of the fastest", "first batch"]]
    for one in ranked:
        if one["rows_per_s"] is None:
            rows.append([one["name"], "-", "", one["not_measured"]])
        else:
            share = f"{one['rows_per_s'] / best:.0%}"
            rows.append([one["name"], f"{one['rows_per_s']:,.0f}", share, f"{one['first_batch_s']:.1f} s"])
    return aligned(rows, right=(1, 2))


def _draw(ranked: Sequence[dict[str, Any]], path: Path, spec: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    measured = [one for one in reversed(ranked) if one["rows_per_s"] is not None]
    figure = Figure(figsize=(6, 1 + 0.4 * len(measured)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([one["name"] for one in measured], [one["rows_per_s"] for one in measured])
    axes.bar_label(bars, labels=[f"{one['rows_per_s']:,.0f}" for one in measured], padding=3)
    axes.margins(x=0.15)
    axes.set_xlabel(f"cells/s, {spec['layout']}, blocks of {spec['block']}, batches of {spec['batch']}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
