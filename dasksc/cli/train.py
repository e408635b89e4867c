"""``dasksc train``: training from a YAML file."""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from typing import Any

import click

from dasksc import InputError, World

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc train --config classifier.yaml
  dasksc train --config classifier.yaml --nproc 2 --set training.max_steps=100
  torchrun --nproc-per-node 8 -m dasksc train --config fsdp.yaml
  srun dasksc train --config fsdp.yaml --set training.resume_from=auto
  srun --ntasks-per-node 1 dasksc train --config fsdp.yaml --nproc auto
  dasksc train --config fsdp.yaml --nnodes 2 --node-rank 0 --master-addr node0
"""


@click.command(epilog=_EXAMPLES)
@click.option("--config", "path", required=True, metavar="FILE", help="YAML file; see the YAML schema in the docs.")
@click.option("--set", "changes", multiple=True, metavar="A.B=C", help="Replace a value of the file; repeatable.")
@click.option("--nproc", metavar="N|auto", help="Processes of this node (default: num_gpus / nodes).")
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Nodes of the run (default: num_nodes).")
@click.option("--node-rank", type=click.IntRange(0), metavar="N", help="Rank of this node (default: from srun).")
@click.option("--master-addr", metavar="HOST", help="First node (default: MASTER_ADDR or Slurm).")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Free port of the first node.",
)
@click.option("--max-restarts", type=click.IntRange(0), default=0, metavar="N", help="Restarts after a failure.")
@click.option("--check", is_flag=True, help="Check the file; print it with all defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; all else on stderr.")
def command(
    path: str,
    changes: tuple[str, ...],
    nproc: str | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
    check: bool,
    as_json: bool,
) -> None:
    """Train a model on an atlas from a YAML file.

    Training runs in one process, or in several with DDP or FSDP. Without a launcher, the command starts the processes
    that --nproc or training.num_gpus request. Under torchrun, srun or mpirun, it is one of the processes that the
    launcher started.

    In the options below, num_gpus and num_nodes are keys of the section `training`. --master-port defaults to
    MASTER_PORT if it is set, else to a port derived from the Slurm job, else to 29500.
    """
    try:
        import_module("dasksc.train.config")
    except ModuleNotFoundError as error:
        if error.name not in ("pydantic", "yaml"):
            raise
        raise InputError("dasksc train needs pydantic and PyYAML: pip install 'dasksc[train]'") from error
    from dasksc.train import config_checks

    config = config_checks.load_config(path, changes=changes, with_paths=not check)
    if check:
        click.echo(json.dumps(config.model_dump(), indent=None if as_json else 2))
        return
    from dasksc.train.launch import as_rank, launch, node_of, node_rank_of, processes_to_start

    n_processes = processes_to_start(config.training, nproc=nproc, nnodes=nnodes)
    n_nodes = nnodes or config.training.num_nodes or node_of(os.environ)[0]
    this_node = node_rank_of(node_rank, n_nodes, os.environ) if n_processes or node_rank is not None else 0
    if n_processes:
        from dasksc.train.loggers import check_loggers
        from dasksc.train.parallel import strategy_of

        # Check here, before the ranks start, for errors that all ranks would raise. With --nproc auto, nodes may have
        # different numbers of GPUs, so only the ranks know the world size.
        check_loggers(config.training.loggers)
        if nproc != "auto" or n_nodes == 1:
            strategy_of(config.training, n_processes * n_nodes, n_nodes)
        arguments: list[Any] = ["train", "--config", path, *(part for change in changes for part in ("--set", change))]
        launch(
            [*arguments, *(["--json"] if as_json else [])],
            n_processes=n_processes,
            n_nodes=n_nodes,
            node_rank=this_node,
            address=master_addr,
            port=master_port,
            max_restarts=max_restarts,
        )
        return

    def run() -> None:
        from dasksc.train.loop import fit

        is_first = World.detect().rank == 0
        level = logging.INFO if is_first else logging.WARNING
        logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
        report = fit(config, say=lambda line: click.echo(line, err=as_json))
        if is_first:
            click.echo(json.dumps(report.to_dict()) if as_json else f"\n{report}")

    as_rank(run)
