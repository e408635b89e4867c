"""``dasksc train``: training from a YAML file."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from dasksc.options import Parser
from dasksc.train.config import Config, add_sections

__all__ = ["add_arguments", "run"]


def add_arguments(parser: Parser) -> None:
    """Add an option for each key of a configuration."""
    add_sections(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Print the report as JSON, and all else on stderr.",
    )


def run(options: Mapping[str, Any]) -> None:
    """Train a model; each process that torchrun, srun or mpirun starts is one rank of the run."""
    config = Config.of_options(options)
    config.check_paths()
    from dasksc import World
    from dasksc.train.loop import fit

    as_json, is_first = "json" in options, World.detect().rank == 0
    level = logging.INFO if is_first else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
    report = fit(config, say=lambda line: print(line, file=sys.stderr if as_json else None, flush=True))
    if is_first:
        print(json.dumps(report.to_dict()) if as_json else f"\n{report}")
