"""Programs in separate processes: commands, and ranks under torchrun; and the code blocks of a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support import preloaded

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
# Ranks use gloo because a machine may have fewer GPUs than ranks.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TIMEOUT_S = 600  # only a program that hangs takes this long
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def _server() -> tuple[str, object]:
    """Start a server of preloaded processes, which ends with this process; return its address."""
    folder = tempfile.TemporaryDirectory(dir="/tmp")  # paths of sockets are short
    path = Path(folder.name) / "socket"
    return str(path), (folder, preloaded.serve_on(path))


def ended(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    is_preloaded: bool = False,
    **changes: object,
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion, on CPUs unless an environment is given; `changes` add environment variables.

    If `is_preloaded` is True, the processes of Python programs start with the dependencies of dasksc imported.
    """
    # Unbuffered, Python writes a line and its end separately, so the lines of several ranks would mix.
    given = (
        {**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""} if environment is None else environment
    )
    given = {**given, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    given |= {name: str(value) for name, value in changes.items()}
    if is_preloaded:
        given[preloaded.ADDRESS] = _server()[0]
        return preloaded.ended(command, cwd=cwd or Path.cwd(), environment=given, timeout_s=TIMEOUT_S)
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def run(command: Sequence[object], **options: object) -> str:
    """Run a command as `ended` does; fail if it fails; return its output."""
    done = ended(command, **options)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def torchrun(n_ranks: int, program: str, *arguments: object, **changes: object) -> str:
    """Run one of `PROGRAMS` under torchrun to completion, on CPUs; return its output."""
    command = [*TORCHRUN, "--standalone", f"--nproc_per_node={n_ranks}", PROGRAMS / program, *arguments]
    return run(command, is_preloaded=True, **changes)


def blocks(page: Path, language: str) -> list[re.Match[str]]:
    """Return the code blocks of a page in one language."""
    return [block for block in BLOCK.finditer(page.read_text()) if block[1] == language]
