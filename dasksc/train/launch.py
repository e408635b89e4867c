"""Starting the ranks of a training, or finding those that a launcher has started."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence

import torch

from dasksc import InputError, World
from dasksc.train.config import Training

__all__ = ["launch", "node_of", "processes_to_start", "rendezvous"]

_PORTS = range(20_000, 30_000)


def processes_to_start(
    training: Training, *, nproc: str | None, nnodes: int | None, environment: Mapping[str, str] | None = None
) -> int:
    """Return how many processes this one is to start on its node; 0: it is itself a rank of the run.

    Parameters
    ----------
    training
        The section of the configuration. Its ``num_gpus`` is the default, divided by the nodes.
    nproc
        What the command line says: a number, or ``auto`` for one for each GPU (without GPUs, for each core).
    nnodes
        Nodes of the run.
    environment
        Default: that of the process.

    Raises
    ------
    InputError
        If these do not fit each other, or a launcher has started the processes already.
    """
    environment = os.environ if environment is None else environment
    n_nodes = nnodes or training.num_nodes or 1
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    # srun may start one task on each node, for it to start the ranks there.
    is_node = nproc is not None and node_of(environment)[0] > 1
    if by_torchrun or (World.detect().world_size > 1 and not is_node):
        if nproc is not None:
            raise InputError(f"--nproc {nproc} under a launcher, which has started the processes already; leave it out")
        return 0
    if nproc is None:
        n_gpus = training.num_gpus or n_nodes
        if n_gpus % n_nodes:
            raise InputError(f"training.num_gpus={n_gpus} is the total, and does not divide by {n_nodes} nodes")
        n = 1 if training.strategy in ("single", "dp") else n_gpus // n_nodes
        return 0 if n == n_nodes == 1 else n
    if nproc == "auto":
        return torch.cuda.device_count() or len(os.sched_getaffinity(0))
    if not nproc.isdigit() or int(nproc) < 1:
        raise InputError(f"--nproc {nproc} must be a number of processes, or auto")
    return int(nproc)


def launch(
    arguments: Sequence[str],
    *,
    n_processes: int,
    n_nodes: int = 1,
    node_rank: int = 0,
    address: str | None = None,
    port: int | None = None,
    max_restarts: int = 0,
) -> None:
    """Run ``dasksc`` with some arguments in several processes, through torch's elastic launcher.

    Parameters
    ----------
    arguments
        Of the command.
    n_processes
        On this node.
    n_nodes, node_rank
        Nodes of the run, and which of them this is.
    address, port
        Where the first node is reached; needed where there are several.
    max_restarts
        How often all are started again when one fails.

    Raises
    ------
    InputError
        If the address is missing.
    """
    from torch.distributed import run

    options = [f"--nproc-per-node={n_processes}", f"--max-restarts={max_restarts}"]
    if n_nodes == 1:
        options += ["--standalone"]
        # By default one store serves all attempts, and gloo then dials ranks of those before.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    else:
        found = rendezvous(os.environ, n_nodes) if address is None else {"MASTER_ADDR": address}
        options += [
            *(f"--nnodes={n_nodes}", f"--node-rank={node_rank}", f"--master-addr={found['MASTER_ADDR']}"),
            f"--master-port={port or found.get('MASTER_PORT') or 29500}",
        ]
    run.main([*options, "--module", "dasksc", *arguments])


def node_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return how many nodes a step of Slurm with one task on each has, and which this is; else 1 and 0."""
    n_nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    if n_nodes != environment.get("SLURM_STEP_NUM_TASKS"):
        return 1, 0
    return int(n_nodes), int(environment.get("SLURM_NODEID", 0))


def rendezvous(environment: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the address and port at which the ranks meet.

    Those that are set win. Slurm tells the first node of a job, and Open MPI's ranks of a single node meet on it; the
    port follows from the number of the job, the same on all ranks.

    Parameters
    ----------
    environment
        Of the process.
    world_size
        Processes that meet, for messages.

    Raises
    ------
    InputError
        If neither is known.
    """
    found = {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes and "SLURM_JOB_ID" in environment:
        job = f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
        found = {"MASTER_ADDR": first_node(nodes), "MASTER_PORT": _port(job)} | found
    elif "OMPI_COMM_WORLD_SIZE" in environment and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment.get(
        "OMPI_COMM_WORLD_SIZE"
    ):
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(job)} | found
    if len(found) < 2:
        raise InputError(
            f"nothing says where the {world_size} ranks of this run meet. Set MASTER_ADDR to the name of the first "
            "node and MASTER_PORT to a free port of it, start with torchrun or srun, or use --nproc"
        )
    return found


def first_node(nodes: str) -> str:
    """Return the first of Slurm's list of nodes: of ``gpu[003-007,12],login`` it is gpu003."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\]([^,]*))?", nodes)
    if match is None or not match[0]:
        raise InputError(f"{nodes!r} is no list of nodes")
    prefix, numbers, suffix = match[1], match[2], match[3]
    if numbers is None:
        return prefix
    return prefix + re.split("[-,]", numbers)[0] + (suffix or "")


def _port(job: str) -> str:
    return str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)])
