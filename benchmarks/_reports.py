"""Reports of the benchmarks: a JSON file and a figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import machine

Draw = Callable[[dict[str, Any], Path], None]


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option of `write_report`."""
    parser.add_argument("--out", type=Path, help="path of the .json report and the .png figure, without the suffix")


def write_report(out: Path | None, report: dict[str, Any], draw: Draw | None = None) -> None:
    """Write a report with the machine to ``out.json``, and a figure to ``out.png``, unless `out` is None."""
    if out is None:
        return
    report = {"machine": machine()} | report
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if draw is not None:
        draw(report, out.with_suffix(".png"))
