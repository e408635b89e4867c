"""Starting the ranks of a training, or finding those that a launcher has started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dasksc import DaskscError, InputError, World
from dasksc.planning.ranks import LAUNCHERS
from dasksc.platforms import cpus_of_process
from dasksc.train.config import Training

__all__ = [
    "launch",
    "local_rank_of",
    "n_nodes_of",
    "node_of",
    "node_rank_of",
    "processes_to_start",
    "rendezvous",
    "telling_once",
]

_PORTS = range(20_000, 30_000)

# Names the folder in which the ranks that `launch` has started note what they have told.
_TOLD = "DASKSC_TRAIN_TOLD"
# A rank that lost another leaves the telling to that one, or to the launcher, which looks for ranks that ended every
# 0.1 s and then ends the others.
_GRACE_S = 3.0


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
    wanted = nnodes or training.num_nodes
    n_nodes = wanted or 1
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    # srun may start one task on each node, for it to start the ranks there.
    n_tasks = node_of(environment)[0]
    is_node = nproc is not None and n_tasks > 1
    if by_torchrun or (World.detect().world_size > 1 and not is_node):
        if nproc is not None:
            raise InputError(f"--nproc {nproc} under a launcher, which has started the processes already; leave it out")
        return 0
    if is_node and wanted not in (None, n_tasks):
        name = "--nnodes" if nnodes else "training.num_nodes"
        raise InputError(
            f"{name}={wanted}, and srun has started this on {n_tasks} nodes; give {n_tasks}, or leave it out"
        )
    if nproc is None:
        n_gpus = training.num_gpus or n_nodes
        if n_gpus % n_nodes:
            raise InputError(f"training.num_gpus={n_gpus} is the total, and does not divide by {n_nodes} nodes")
        n = 1 if training.strategy in ("single", "dp") else n_gpus // n_nodes
        return 0 if n == n_nodes == 1 else n
    if nproc == "auto":
        return torch.cuda.device_count() or cpus_of_process()
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
        Where the first node is reached, if there are several. Default: ``MASTER_ADDR`` and ``MASTER_PORT``, each by
        itself, then what Slurm says; beside an address that is given, the port is 29500 unless one step of Slurm has
        all nodes.
    max_restarts
        How often all are started again when one fails.

    Raises
    ------
    InputError
        If nothing says where that is.
    DaskscError
        If a rank ended without telling why by itself, as by a signal; or if this process was told to stop.
    SystemExit
        With exit code 1, if ranks failed and have told why (`telling_once`).
    """
    options = [f"--nproc-per-node={n_processes}", f"--max-restarts={max_restarts}"]
    if n_nodes == 1:
        options += ["--standalone"]
        # By default one store serves all attempts, and gloo then dials ranks of those before.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    else:
        given = dict(os.environ)
        if address is not None:
            given["MASTER_ADDR"] = address
            if node_of(os.environ)[0] == 1:  # what starts the others may know of no job, or have another step
                given.setdefault("MASTER_PORT", "29500")
        if port is not None:
            given["MASTER_PORT"] = str(port)
        found = rendezvous(given, n_nodes)
        options += [
            *(f"--nnodes={n_nodes}", f"--node-rank={node_rank}", f"--master-addr={found['MASTER_ADDR']}"),
            f"--master-port={found['MASTER_PORT']}",
        ]
    with _failures_in_a_line(), _room_to_tell(), contextlib.nullcontext() if max_restarts else _quiet_launcher():
        _torchrun([*options, "--module", "dasksc", *arguments])


def _torchrun(options: list[str]) -> None:
    from torch.distributed import run

    run.main(options)


@contextlib.contextmanager
def _failures_in_a_line() -> Iterator[None]:
    """Replace the traceback of torch's launcher, which tells where it is in torch, by how the ranks ended."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        yield
    except ChildFailedError as error:
        deaths = deaths_of({rank: failure.exitcode for rank, failure in error.failures.items()})
        if deaths:
            raise DaskscError("; ".join(deaths)) from None
        raise SystemExit(1) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise DaskscError(f"stopped by {error.sigval.name}") from None


def deaths_of(exit_codes: Mapping[int, int]) -> list[str]:
    """Return how those ranks ended that have not told it: not by exit code 1, nor because the launcher ended them.

    Parameters
    ----------
    exit_codes
        Of the ranks that failed, by rank; negative: a signal.
    """
    # The launcher sends SIGTERM to the ranks that are left when one has failed.
    by_themselves = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM} or exit_codes
    return [f"rank {rank} {_death(code)}" for rank, code in sorted(by_themselves.items()) if code != 1]


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # of real time, which have no names
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        name += " (if nobody sent it, the memory of the node was full: lower data.batch_size or data.fetch_factor)"
    return f"was killed by {name}"


@contextlib.contextmanager
def _room_to_tell() -> Iterator[None]:
    """Make the folder for `telling_once` in the ranks."""
    with tempfile.TemporaryDirectory(prefix="dasksc-") as folder:
        os.environ[_TOLD] = folder
        try:
            yield
        finally:
            del os.environ[_TOLD]


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Leave out what torch's launcher logs of ranks that failed, which the ranks and `deaths_of` tell."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("failed (exitcode", "Sending process"))

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


@contextlib.contextmanager
def telling_once() -> Iterator[None]:
    """Tell why this rank fails, unless a rank that `launch` started beside it on this node has told the same.

    An error of dasksc is a line, any other its traceback. Ranks that were started otherwise raise their errors as they
    are.

    Raises
    ------
    SystemExit
        With exit code 1, instead of the error.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # a reader that has gone, which click knows
    except Exception as error:
        if _TOLD not in os.environ:
            raise
        _tell(error, Path(os.environ[_TOLD]), attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        raise SystemExit(1) from error


def _tell(error: Exception, folder: Path, *, attempt: str) -> None:
    if _lost_another(error):
        time.sleep(_GRACE_S)
        if any(folder.glob(f"{attempt}-*")):
            return
    if isinstance(error, DaskscError):
        key, text = str(error), f"dasksc: {error}\n"
    else:
        # Messages of the same error name devices and addresses that differ.
        key = type(error).__name__ + "".join(traceback.format_tb(error.__traceback__))
        text = "".join([f"dasksc: rank {World.detect().rank} failed:\n", *traceback.format_exception(error)])
    with contextlib.suppress(FileNotFoundError):  # the launcher has gone, and the folder with it
        try:
            (folder / f"{attempt}-{zlib.crc32(key.encode())}").touch(exist_ok=False)
        except FileExistsError:
            return
    sys.stderr.write(text)  # at once, for others may write too
    sys.stderr.flush()


def _lost_another(error: Exception) -> bool:
    """Whether an error only says that another rank was not there; gloo's have no type."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def node_rank_of(given: int | None, n_nodes: int, environment: Mapping[str, str]) -> int:
    """Return which of the nodes of a run this is.

    Parameters
    ----------
    given
        On the command line.
    n_nodes
        Of the run.
    environment
        Of the process; ``GROUP_RANK``, or Slurm's number in a step or job of as many nodes, is what else may tell.

    Raises
    ------
    InputError
        If there is no such node, or nothing tells: all nodes would take themselves for the first, and wait.
    """
    node = given if given is not None else 0 if n_nodes == 1 else _told_node(n_nodes, environment)
    if node is None:
        raise InputError(
            f"nothing says which of the {n_nodes} nodes of this run (--nnodes, training.num_nodes) this is. Give "
            f"--node-rank 0 on the first, 1 on the next; or start it with srun, one task on each node; or on this node "
            "alone: --nnodes 1 --set training.num_nodes=1"
        )
    if node >= n_nodes:
        raise InputError(
            f"node {node} is none of the {n_nodes} node{'s' if n_nodes > 1 else ''} of this run, which are numbered "
            "from 0. Lower --node-rank, or raise --nnodes"
        )
    return node


def _told_node(n_nodes: int, environment: Mapping[str, str]) -> int | None:
    if environment.get("GROUP_RANK", "").isdigit():
        return int(environment["GROUP_RANK"])
    # In a step of fewer nodes it is another number: each of several steps has a first node.
    n_numbered = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_JOB_NUM_NODES"))
    if n_numbered == str(n_nodes) and environment.get("SLURM_NODEID", "").isdigit():
        return int(environment["SLURM_NODEID"])
    return None


def node_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return how many nodes a step of Slurm with one task on each has, and which this is; else 1 and 0."""
    n_nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    if n_nodes != environment.get("SLURM_STEP_NUM_TASKS"):
        return 1, 0
    return int(n_nodes), int(environment.get("SLURM_NODEID", 0))


def local_rank_of(world: World, environment: Mapping[str, str]) -> int:
    """Return which of the ranks of its node this is.

    Launchers inside one another leave variables that differ: those of an sbatch script make every rank that mpirun
    starts the first of its node. So only a launcher that says of this rank what `world` says is asked.

    Parameters
    ----------
    world
        As detected.
    environment
        Of the process.
    """
    here = (str(world.rank), str(world.world_size))
    for rank, size, local_rank in LAUNCHERS:
        agrees = (environment.get(rank), environment.get(size)) == here
        if agrees and environment.get(local_rank, "").isdigit():
            return int(environment[local_rank])
    # A local size of 1 may also mean that it is not known; a rank that is alone may have any GPU.
    return world.rank % world.local_world_size if world.local_world_size > 1 else world.rank


def n_nodes_of(world: World, environment: Mapping[str, str]) -> int | None:
    """Return how many nodes the ranks are on, if all ranks know that and the same.

    Not by division: nodes may have unequally many.

    Parameters
    ----------
    world
        As detected.
    environment
        Of the process.
    """
    if world.world_size == 1:
        return 1
    launcher = world.source.partition("/")[0]
    known = {"RANK": "GROUP_WORLD_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_NODES"}.get(launcher, "")
    if environment.get(known, "").isdigit():
        return int(environment[known])
    is_one = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world.world_size)
    return 1 if launcher == "OMPI_COMM_WORLD_RANK" and is_one else None


def rendezvous(environment: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the address and port at which the ranks meet.

    Those that are set win. Slurm tells the first node of a job, and Open MPI's ranks of a single node meet on it; the
    port follows from the number of the job, the same on all ranks. Slurm's step is not asked under Open MPI, which
    starts ranks on other nodes in a step of its own, those here in none.

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
    slurm_job = environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST") if slurm_job else None
    if "OMPI_COMM_WORLD_SIZE" in environment:
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or slurm_job
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]:
            found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(job or str(os.getppid()))} | found
        elif nodes:
            found = {"MASTER_ADDR": first_node(nodes), "MASTER_PORT": _port(job)} | found
    elif slurm_job and (nodes := environment.get("SLURM_STEP_NODELIST") or nodes):
        job = f"{slurm_job}.{environment.get('SLURM_STEP_ID', '')}"
        found = {"MASTER_ADDR": first_node(nodes), "MASTER_PORT": _port(job)} | found
    if len(found) < 2:
        raise InputError(
            f"nothing says where the {world_size} ranks of this run meet. Set MASTER_ADDR to the name of the first "
            "node and MASTER_PORT to a free port of it (with --nnodes: --master-addr, --master-port), start with "
            "torchrun or srun, or use --nproc"
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
