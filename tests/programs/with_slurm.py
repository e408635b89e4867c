"""Run a command on a temporary one-node Slurm cluster.

    python with_slurm.py srun -n 2 hostname

The cluster writes to a temporary folder only and uses free ports. Its node is called localhost, since the name of a
machine need not resolve to an address. The program needs root and the Debian packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "srun")
N_TASKS = 4
MEMORY_OF_TASK = 2_000  # MB; Slurm accounts for requests but does not enforce them

CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first_job}
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={n_tasks} RealMemory={memory} State=UNKNOWN
DefMemPerCPU={memory_of_task}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES State=UP
"""


def missing() -> list[str]:
    """Return the names of missing programs, and "root" if this process does not run as root."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return absent if os.geteuid() == 0 else [*absent, "root"]


def free_ports(n: int) -> list[int]:
    """Return ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def daemon(*command: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Keep a program running; terminate it on exit."""
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start the cluster; yield the environment variables for its commands."""
    # The folder is in the system's temporary directory because the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as running:
        folder = Path(name)
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
        environment = os.environ | {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        controller_port, node_port = free_ports(2)
        host = socket.gethostname().split(".")[0]
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                folder=folder,
                # Job scripts derive ports from their job numbers.
                first_job=secrets.randbelow(10_000) + 1,
                controller_port=controller_port,
                node_port=node_port,
                n_tasks=N_TASKS,
                memory=N_TASKS * MEMORY_OF_TASK,
                memory_of_task=MEMORY_OF_TASK,
            )
        )
        munged = [f"--{kind}={folder}/munge.{kind.split('-')[0]}" for kind in ("socket", "key-file", "pid-file")]
        munged += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--foreground", "--force"]
        commands = [["munged", *munged], ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "localhost"]]
        for command in commands:
            program = shutil.which(command[0], path=path) or command[0]
            log = folder / f"{command[0]}.output"
            running.enter_context(daemon(program, *command[1:], log=log, environment=environment))
            if command[0] == "munged":
                wait_until(lambda: (folder / "munge.socket").exists(), folder)
        wait_until(lambda: state_of_nodes(environment) == "idle", folder)
        try:
            yield environment
        finally:
            end_jobs(environment)


def state_of_nodes(environment: dict[str, str]) -> str:
    """Return the state of the nodes, which is empty until the controller answers."""
    command = ["sinfo", "--noheader", "--format=%t"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def end_jobs(environment: dict[str, str]) -> None:
    """Cancel the running jobs, which would outlive the cluster."""
    end = time.monotonic() + 20
    while (
        time.monotonic() < end
        and subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, check=False).stdout
    ):
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, check=False)
        time.sleep(0.5)


def wait_until(ready: Callable[[], bool], folder: Path, timeout_s: float = 60) -> None:
    """Wait for a daemon; include the daemons' output in the error if it does not start."""
    end = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > end:
            output = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.output")))
            raise TimeoutError(f"Slurm did not come up in {timeout_s:.0f} s.\n{output}")
        time.sleep(0.1)


def main() -> int:
    """Run the command given on the command line; return its exit status."""
    with cluster() as environment:
        return subprocess.run(sys.argv[1:], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
