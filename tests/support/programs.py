"""Programs in separate processes: commands, ranks under torchrun, and the Python blocks of a page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
# Ranks use gloo because a machine may have fewer GPUs than ranks.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TIMEOUT_S = 600  # only a program that hangs takes this long
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def ended(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **changes: object,
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion, on CPUs unless an environment is given; `changes` add environment variables."""
    # Unbuffered, Python writes a line and its end separately, so the lines of several ranks would mix.
    given = (
        {**os.environ, **NO_GPU, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""} if environment is None else environment
    )
    given = {**given, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    given |= {name: str(value) for name, value in changes.items()}
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def run(command: Sequence[object], **options: object) -> str:
    """Run a command as `ended` does; fail if it fails; return its output."""
    done = ended(command, **options)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def torchrun(n_ranks: int, program: str, *arguments: object, **changes: object) -> str:
    """Run one of `PROGRAMS` under torchrun to completion, on CPUs; return its output."""
    command = [*TORCHRUN, "--standalone", f"--nproc_per_node={n_ranks}", PROGRAMS / program, *arguments]
    return run(command, **changes)


def blocks(page: Path, language: str) -> list[re.Match[str]]:
    """Return the code blocks of a page in one language."""
    return [block for block in BLOCK.finditer(page.read_text()) if block[1] == language]


def run_page(page: Path, folder: Path, atlas: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python blocks of a page as one program, from top to bottom, in a folder with a copy of an atlas."""
    shutil.copyfile(atlas, folder / "atlas.h5ad")
    text = page.read_text()
    lines = re.sub(r"[^\n]", "", text).split("\n")  # padding lines keep the line numbers of the page in tracebacks
    assert blocks(page, "python")
    for block in blocks(page, "python"):
        first = text.count("\n", 0, block.start(2))
        code = block[2].split("\n")
        lines[first : first + len(code)] = code
    program = folder / f"{page.stem}.py"
    program.write_text("\n".join(lines))
    done = ended([sys.executable, program.name], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done
