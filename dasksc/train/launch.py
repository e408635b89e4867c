"""Start of the ranks of a training run, and detection of ranks started by a launcher."""

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
from dasksc.planning.ranks import LAUNCHERS, size_in
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

# Environment variable that is set in the ranks that `launch` starts, whose errors `launch` reports.
_LAUNCHED = "DASKSC_TRAIN_LAUNCHED"
# A rank that lost its connection to another rank waits before it ends, so that the other rank ends first. The launcher
# polls for ended ranks every 0.1 s and then terminates the others.
_GRACE_S = 3.0
# Error of a rank that lost its connection to another; the errors of gloo have no type of their own.
_CONNECTION_ERROR = re.compile(r"Dist\w*Error:|RuntimeError: .*gloo/", re.DOTALL)


def processes_to_start(
    training: Training, *, nproc: str | None, nnodes: int | None, environment: Mapping[str, str] | None = None
) -> int:
    """Return the number of processes to start on this node; 0 if this process is itself a rank of the run.

    Parameters
    ----------
    training
        ``training`` section of the configuration. If `nproc` is None, the number of processes is its ``num_gpus``
        divided by the number of nodes, or 1 for the strategies ``single`` and ``dp``.
    nproc
        Value of ``--nproc``: a number, or ``auto`` for one process per GPU (without GPUs, per core).
    nnodes
        Number of nodes of the run.
    environment
        Environment variables; default: those of this process.

    Raises
    ------
    InputError
        If the values are inconsistent, or if `nproc` is given although a launcher has already started the processes.
    """
    environment = os.environ if environment is None else environment
    wanted = nnodes or training.num_nodes
    n_nodes = wanted or 1
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    # srun may start one task per node, which then starts the ranks of that node.
    n_tasks = node_of(environment)[0]
    is_node = nproc is not None and n_tasks > 1
    if by_torchrun or (World.detect().world_size > 1 and not is_node):
        if nproc is not None:
            raise InputError(
                f"--nproc {nproc} cannot be used under a launcher, which starts the processes itself; leave it out"
            )
        return 0
    if is_node and wanted not in (None, n_tasks):
        name = "--nnodes" if nnodes else "training.num_nodes"
        raise InputError(
            f"{name}={wanted}, but srun started one task on each of {n_tasks} nodes; give {n_tasks}, or leave it out"
        )
    if nproc is None:
        n_gpus = training.num_gpus or n_nodes
        if n_gpus % n_nodes:
            raise InputError(
                f"training.num_gpus={n_gpus} is the total number of GPUs, which must be a multiple of the number of "
                f"nodes, {n_nodes}"
            )
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
    """Run ``dasksc`` with given arguments in several processes, using the elastic launcher of torch.

    Parameters
    ----------
    arguments
        Arguments of the command.
    n_processes
        Number of processes on this node.
    n_nodes, node_rank
        Number of nodes of the run, and rank of this node.
    address, port
        Address and port of the first node, for several nodes. They default to ``MASTER_ADDR`` and ``MASTER_PORT`` or,
        if these are not set, to values derived from Slurm. If `address` is given, but neither `port` nor
        ``MASTER_PORT``, the port is 29500. In a Slurm step that runs one task on each of several nodes, the port is
        derived from Slurm instead.
    max_restarts
        Number of times that all processes are restarted after a failure.

    Raises
    ------
    InputError
        If the address or port of the first node is unknown.
    DaskscError
        If a rank ended without reporting an error, for example because of a signal; or if this process received a
        signal to stop.
    SystemExit
        With exit code 1, if ranks failed and their errors have been reported.
    """
    options = [f"--nproc-per-node={n_processes}", f"--max-restarts={max_restarts}"]
    if n_nodes == 1:
        options += ["--standalone"]
        # By default, all attempts share one rendezvous `TCPStore`, and gloo connects to ranks of earlier attempts.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    else:
        given = dict(os.environ)
        if address is not None:
            given["MASTER_ADDR"] = address
            # Other nodes may be outside the Slurm job or in another step, and would derive another port.
            if node_of(os.environ)[0] == 1:
                given.setdefault("MASTER_PORT", "29500")
        if port is not None:
            given["MASTER_PORT"] = str(port)
        found = rendezvous(given, n_nodes)
        options += [
            *(f"--nnodes={n_nodes}", f"--node-rank={node_rank}", f"--master-addr={found['MASTER_ADDR']}"),
            f"--master-port={found['MASTER_PORT']}",
        ]
    with _short_failures(), _reporting_errors(n_processes * node_rank, is_quiet=not max_restarts) as folder:
        _torchrun([*options, f"--log-dir={folder}", "--module", "dasksc", *arguments])


def _torchrun(options: list[str]) -> None:
    from torch.distributed import run

    # `run.main` would also try to copy the error file of a failed rank to an error file of this process, and log an
    # error because this process has none.
    run.run(run.parse_args(options))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _short_failures() -> Iterator[None]:
    """Replace the traceback of the torch launcher, which shows only torch code, by the reasons why ranks ended."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        yield
    except ChildFailedError as error:
        exits = describe_exits({rank: failure.exitcode for rank, failure in error.failures.items()})
        if exits:
            raise DaskscError("; ".join(exits)) from None
        raise SystemExit(1) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise DaskscError(f"stopped by {error.sigval.name}") from None


def describe_exits(exit_codes: Mapping[int, int]) -> list[str]:
    """Describe the ranks that ended without reporting an error.

    Ranks with exit code 1 have reported an error. After a failure, the launcher ends the other ranks with SIGTERM.
    Ranks that ended by SIGTERM are included only if all failed ranks ended that way.

    Parameters
    ----------
    exit_codes
        Exit codes of the failed ranks, by rank; negative values are signals.
    """
    # The launcher sends SIGTERM to the remaining ranks when one has failed.
    by_themselves = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM} or exit_codes
    return [f"rank {rank} {_describe_exit(code)}" for rank, code in sorted(by_themselves.items()) if code != 1]


def _describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        name += " (if nobody sent this signal, the node ran out of memory: lower data.batch_size or data.fetch_factor)"
    return f"was killed by {name}"


@contextlib.contextmanager
def _reporting_errors(first_rank: int, *, is_quiet: bool) -> Iterator[str]:
    """Report the errors of ranks, each once per attempt, and yield the directory for the error files of the ranks.

    Parameters
    ----------
    first_rank
        First rank of this node.
    is_quiet
        If True, suppress the log messages of the torch launcher about failed ranks.
    """
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    reported: set[tuple[str, str]] = set()

    def passes(record: logging.LogRecord) -> bool:
        has_failed = str(record.msg).startswith("failed (exitcode")
        if has_failed:  # report before the ranks are restarted
            _report_errors(Path(folder), reported, first_rank=first_rank)
        return not is_quiet or not (has_failed or str(record.msg).startswith("Sending process"))

    with tempfile.TemporaryDirectory(prefix="dasksc-") as folder:
        logger.addFilter(passes)
        os.environ[_LAUNCHED] = "1"
        try:
            yield folder
        finally:
            del os.environ[_LAUNCHED]
            logger.removeFilter(passes)
            _report_errors(Path(folder), reported, first_rank=first_rank)


def _report_errors(folder: Path, reported: set[tuple[str, str]], *, first_rank: int) -> None:
    """Print each error that is not in `reported`: an error of dasksc as one line, any other with a traceback."""
    for attempt in sorted(folder.glob("*/attempt_*")):
        causes = {}
        for file in attempt.glob("*/error.json"):
            with contextlib.suppress(ValueError):  # the rank was killed while it wrote the file
                causes[int(file.parent.name)] = json.loads(file.read_text())
        original = {rank: cause for rank, cause in causes.items() if not _CONNECTION_ERROR.match(_error_text(cause))}
        for rank, cause in sorted((original or causes).items()):
            name, _, text = _error_text(cause).partition(": ")
            if isinstance(getattr(errors, name, None), type):
                key, text = text, f"dasksc: {text}\n"
            else:
                trace = cause["message"]["extraInfo"]["py_callstack"]
                # The same error may name different devices and addresses on different ranks, so duplicates are
                # recognized by the indented lines of the traceback.
                key = "".join([name, *(line for line in trace.splitlines() if line.startswith(" "))])
                text = f"dasksc: rank {first_rank + rank} failed:\n{trace}"
            if (attempt.name, key) not in reported and name != "BrokenPipeError":
                reported.add((attempt.name, key))
                sys.stderr.write(text)
                sys.stderr.flush()


def _error_text(cause: Mapping[str, dict[str, str]]) -> str:
    return cause["message"]["message"]


def as_rank(run: Callable[[], None]) -> None:
    """Run the function of a rank, and record its error if the torch launcher requests that.

    Raises
    ------
    SystemExit
        With exit code 1, in place of an error that `launch` reports once for all ranks. Ranks that `launch` did not
        start raise their errors unchanged.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        # Without a file, `record` would still enable the fault handler of Python.
        (record(run) if os.environ.get("TORCHELASTIC_ERROR_FILE") else run)()
    except BrokenPipeError:
        raise  # click handles a closed output pipe
    except Exception as error:
        if _LAUNCHED not in os.environ:
            raise
        if _CONNECTION_ERROR.match(f"{type(error).__name__}: {error}"):
            time.sleep(_GRACE_S)
        raise SystemExit(1) from error


def node_rank_of(given: int | None, n_nodes: int, environment: Mapping[str, str]) -> int:
    """Return the rank of this node.

    Parameters
    ----------
    given
        Node rank from the command line.
    n_nodes
        Number of nodes of the run.
    environment
        Environment variables of the process. If `given` is None and there are several nodes, the rank is ``GROUP_RANK``
        or, if that is not set, the node number in the Slurm step. Outside a step, it is the node number in the Slurm
        job. The step or job must have `n_nodes` nodes.

    Raises
    ------
    InputError
        If the rank is out of range or unknown. Without this error, every node would act as the first one and wait.
    """
    node = given if given is not None else 0 if n_nodes == 1 else _node_from_environment(n_nodes, environment)
    if node is None:
        raise InputError(
            f"the run has {n_nodes} nodes (--nnodes, training.num_nodes), but the rank of this node is unknown. Give "
            "--node-rank 0 on the first node, 1 on the next; start the run with srun, one task on each node; or use "
            "only this node: --nnodes 1 --set training.num_nodes=1"
        )
    if node >= n_nodes:
        raise InputError(
            f"node {node} is not one of the {n_nodes} node{'s' if n_nodes > 1 else ''} of this run, which are numbered "
            "from 0. Lower --node-rank, or raise --nnodes"
        )
    return node


def _node_from_environment(n_nodes: int, environment: Mapping[str, str]) -> int | None:
    if environment.get("GROUP_RANK", "").isdigit():
        return int(environment["GROUP_RANK"])
    # Node numbers of a Slurm step with fewer nodes than the run are ignored: every such step numbers its nodes from 0.
    n_numbered = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_JOB_NUM_NODES"))
    if n_numbered == str(n_nodes) and environment.get("SLURM_NODEID", "").isdigit():
        return int(environment["SLURM_NODEID"])
    return None


def node_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of nodes of a Slurm step with one task per node, and the rank of this node; else 1 and 0."""
    n_nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    if n_nodes != environment.get("SLURM_STEP_NUM_TASKS"):
        return 1, 0
    return int(n_nodes), int(environment.get("SLURM_NODEID", 0))


def local_rank_of(world: World, environment: Mapping[str, str]) -> int:
    """Return the rank of this process on its node.

    Nested launchers leave inconsistent variables: those of an sbatch script give local rank 0 to every rank that mpirun
    starts. The function therefore reads the local rank only from a launcher whose rank and world size agree with
    `world`.

    Parameters
    ----------
    world
        World as detected.
    environment
        Environment variables of the process.
    """
    here = (str(world.rank), str(world.world_size))
    for rank, size, local_rank in LAUNCHERS:
        agrees = rank in environment and size in environment and (environment[rank], size_in(environment, size)) == here
        if agrees and environment.get(local_rank, "").isdigit():
            return int(environment[local_rank])
    # `local_world_size` is 1 if the number of ranks on the node is unknown, and also for a rank that is alone on its
    # node. In both cases the global rank is returned. In the first case, it is right if all ranks are on one node. In
    # the second case, the rank may use any GPU.
    return world.rank % world.local_world_size if world.local_world_size > 1 else world.rank


def n_nodes_of(world: World, environment: Mapping[str, str]) -> int | None:
    """Return the number of nodes on which the ranks run, or None if the launcher does not report it to every rank.

    The number is not computed by division, since nodes may have different numbers of ranks.

    Parameters
    ----------
    world
        World as detected.
    environment
        Environment variables of the process.
    """
    if world.world_size == 1:
        return 1
    launcher = world.source.partition("/")[0]
    variable = {"RANK": "GROUP_WORLD_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_NODES"}.get(launcher, "")
    if environment.get(variable, "").isdigit():
        return int(environment[variable])
    is_one = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world.world_size)
    return 1 if launcher == "OMPI_COMM_WORLD_RANK" and is_one else None


def rendezvous(environment: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the address and port at which the ranks meet.

    ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence if they are set. Slurm provides the first node of a job. If all
    Open MPI ranks are on one node, they meet at its loopback address. The port is derived from the job id, so it is
    equal on all ranks. Under Open MPI, the Slurm step is not used, because it differs between ranks: mpirun starts the
    ranks on its own node outside any step, and those on other nodes in a separate step.

    Parameters
    ----------
    environment
        Environment variables of the process.
    world_size
        Number of processes that meet, for error messages.

    Raises
    ------
    InputError
        If the address or the port is unknown.
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
            f"the {world_size} ranks of this run do not know the address of the first node. Set MASTER_ADDR to its "
            "name and MASTER_PORT to a free port of it (with --nnodes: --master-addr, --master-port), start with "
            "torchrun or srun, or use --nproc"
        )
    return found


def first_node(nodes: str) -> str:
    """Return the first node of a Slurm node list, such as gpu003 for ``gpu[003-007,12],login``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\]([^,]*))?", nodes)
    if match is None or not match[0]:
        raise InputError(f"{nodes!r} is not a list of nodes, such as 'node[1-4]'")
    prefix, numbers, suffix = match[1], match[2], match[3]
    if numbers is None:
        return prefix
    return prefix + re.split("[-,]", numbers)[0] + (suffix or "")


def _port(job: str) -> str:
    return str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)])
