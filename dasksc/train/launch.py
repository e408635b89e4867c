"""Starting the ranks of a training, or finding those that a launcher has started."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dasksc import DaskscError, InputError, World, errors
from dasksc.planning.ranks import LAUNCHERS
from dasksc.platforms import cpus_of_process
from dasksc.train.config import Training

__all__ = [
    "as_rank",
    "launch",
    "local_rank_of",
    "n_nodes_of",
    "node_of",
    "node_rank_of",
    "processes_to_start",
    "rendezvous",
]

_PORTS = range(20_000, 30_000)

# Set in the ranks that `launch` starts, for which it tells why they fail.
_LAUNCHED = "DASKSC_TRAIN_LAUNCHED"
# A rank that lost another lets that one end first: the launcher looks for ranks that ended every 0.1 s and then ends
# the others.
_GRACE_S = 3.0
# What a rank records where another was not there; gloo's have no type.
_LOST_ANOTHER = re.compile(r"Dist\w*Error:|RuntimeError: .*gloo/", re.DOTALL)


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
        With exit code 1, if ranks failed and it was told why.
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
    with _failures_in_a_line(), _telling_causes(n_processes * node_rank, is_quiet=not max_restarts) as folder:
        _torchrun([*options, f"--log-dir={folder}", "--module", "dasksc", *arguments])


def _torchrun(options: list[str]) -> None:
    from torch.distributed import run

    # Not main, which takes the failures of ranks for its own, and says that it has no file to record them in.
    run.run(run.parse_args(options))  # type: ignore[no-untyped-call]


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
def _telling_causes(first_rank: int, *, is_quiet: bool) -> Iterator[str]:
    """Tell why ranks fail, the same error once for each start; yield the folder for the files of `record`.

    Parameters
    ----------
    first_rank
        Of this node.
    is_quiet
        Whether to leave out what torch's launcher logs of ranks that failed.
    """
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    told: set[tuple[str, str]] = set()

    def passes(record: logging.LogRecord) -> bool:
        has_failed = str(record.msg).startswith("failed (exitcode")
        if has_failed:  # before ranks are started again
            _tell(Path(folder), told, first_rank=first_rank)
        return not is_quiet or not (has_failed or str(record.msg).startswith("Sending process"))

    with tempfile.TemporaryDirectory(prefix="dasksc-") as folder:
        logger.addFilter(passes)
        os.environ[_LAUNCHED] = "1"
        try:
            yield folder
        finally:
            del os.environ[_LAUNCHED]
            logger.removeFilter(passes)
            _tell(Path(folder), told, first_rank=first_rank)


def _tell(folder: Path, told: set[tuple[str, str]], *, first_rank: int) -> None:
    """Print why ranks failed that is not among what was `told`; an error of dasksc as a line, others with traceback."""
    for attempt in sorted(folder.glob("*/attempt_*")):
        causes = {}
        for file in attempt.glob("*/error.json"):
            with contextlib.suppress(ValueError):  # a rank that was killed while it wrote
                causes[int(file.parent.name)] = json.loads(file.read_text())
        of_itself = {rank: cause for rank, cause in causes.items() if not _LOST_ANOTHER.match(_said(cause))}
        for rank, cause in sorted((of_itself or causes).items()):
            name, _, text = _said(cause).partition(": ")
            if isinstance(getattr(errors, name, None), type):
                key, text = text, f"dasksc: {text}\n"
            else:
                trace = cause["message"]["extraInfo"]["py_callstack"]
                # Messages of the same error name devices and addresses that differ; those of frames are indented.
                key = "".join([name, *(line for line in trace.splitlines() if line.startswith(" "))])
                text = f"dasksc: rank {first_rank + rank} failed:\n{trace}"
            if (attempt.name, key) not in told and name != "BrokenPipeError":
                told.add((attempt.name, key))
                sys.stderr.write(text)
                sys.stderr.flush()


def _said(cause: Mapping[str, dict[str, str]]) -> str:
    return cause["message"]["message"]


def as_rank(run: Callable[[], None]) -> None:
    """Run what a rank does, and record why it fails where a launcher of torch's asks for it.

    Raises
    ------
    SystemExit
        With exit code 1, instead of an error that `launch` tells, once for all its ranks. Ranks that were started
        otherwise raise their errors as they are.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        # Without the file it would turn on Python's fault handler all the same.
        (record(run) if os.environ.get("TORCHELASTIC_ERROR_FILE") else run)()
    except BrokenPipeError:
        raise  # a reader that has gone, which click knows
    except Exception as error:
        if _LAUNCHED not in os.environ:
            raise
        if _LOST_ANOTHER.match(f"{type(error).__name__}: {error}"):
            time.sleep(_GRACE_S)
        raise SystemExit(1) from error


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
