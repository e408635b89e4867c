"""What benchmarks leave behind: a report as JSON, and its picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import machine

Draw = Callable[[dict[str, Any], Path], None]


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add what `write_report` takes from a command line."""
    parser.add_argument("--out", type=Path, help="where to write .json (and .png, if there is one), without the ending")


def write_report(out: Path | None, report: dict[str, Any], draw: Draw | None = None) -> None:
    """Write a report, and what it was measured on, to ``out.json`` and ``out.png``; nothing if `out` is None."""
    if out is None:
        return
    report = {"machine": machine()} | report
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if draw is not None:
        draw(report, out.with_suffix(".png"))
