"""Documentation guides as programs: their code blocks, run in an empty folder, and their output.

A page runs from top to bottom in one Python process:

- ```` ```python ```` blocks form one program. A block whose first line is a comment with the name of a file
  (``# train.py``) is written to this file instead of being run, as are blocks in other languages.
- ```` ```bash ```` blocks have one command per line: ``dasksc``, ``python``, ``torchrun``. ``pip install`` names the
  extras of the page and is not run. Commands that need a cluster or a cloud appear in ```` ```console ```` blocks.
- ```` ```text ```` blocks show the output of the blocks above. The numbers in them are compared, except for
  machine-dependent values (`comparable`).
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.support.programs import BLOCK, ROOT, ended, run

# Pages in other folders whose blocks run as well.
ELSEWHERE = ("concepts/memory.md", "reference/formats.md")
PAGES = [*sorted((ROOT / "docs" / "guides").glob("*.md")), *(ROOT / "docs" / page for page in ELSEWHERE)]
FILE = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\n")
DEMO = "dasksc demo-data demo"
HOME = "/path/to"  # folder of the reader, as shown in pages


def commands_of(code: str) -> list[str]:
    """Return the commands of a block, without comments and ``pip install``, with continued lines joined."""
    lines = [line.split("  #")[0].rstrip() for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "pip install "))]


# Modules whose names differ from those of their packages.
MODULES = {"scikit-misc": "skmisc", "scvi-tools": "scvi"}


def missing_of(text: str) -> list[str]:
    """Return the packages, including those of the extras, that a page installs and that are missing here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed: list[str] = []
    for line in re.findall(r"^pip install (.*)$", text, re.MULTILINE):
        for word in shlex.split(line, comments=True):
            named = re.fullmatch(r"dasksc\[([\w,]+)\]", word)
            needed += [one for extra in named[1].split(",") for one in extras[extra]] if named else [word]
    modules = (re.split(r"[\[<>=]", name)[0] for name in needed)
    return [name for name in modules if importlib.util.find_spec(MODULES.get(name, name).replace("-", "_")) is None]


def install_wheel(folder: Path) -> Path:
    """Build the wheel and install it into a separate folder, without its dependencies."""
    run([sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", ROOT], cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    run([*install, folder / "site", wheel], cwd=folder)
    # The kernels compiled in the repository are valid for the same sources in any folder.
    compiled = Path("dasksc", "kernels", "__pycache__")
    (folder / "site" / compiled).mkdir(exist_ok=True)
    for file in (ROOT / compiled).glob("*.nbc"):
        shutil.copy(file, folder / "site" / compiled)
    return folder / "site"


def run_with(site: Path, command: list[object], folder: Path) -> Any:
    """Run a command to completion with the package at `site`, and without the repository."""
    programs = f"{site / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return ended(command, cwd=folder, is_preloaded=True, PYTHONPATH=str(site), PATH=programs)


PRELUDE = """\
import os, shlex, subprocess
from tests.support import preloaded
def _run(*commands):
    for command in commands:
        if preloaded.can_run(command):
            status = preloaded.call(shlex.split(command), cwd=os.getcwd(), environment=os.environ)
        else:
            status = subprocess.run(command, shell=True).returncode
        if status:
            raise SystemExit(f"{command}: exit status {status}")
"""


def program_of(text: str, *, has_commands: bool = True) -> str:
    """Return a page as a program, whose line numbers are those of the page, so that tracebacks refer to it."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start())
        if block[1] == "bash" and has_commands:
            lines[first] = f"_run({', '.join(repr(one) for one in commands_of(block[2]) if one != DEMO)})"
        elif block[1] == "python" and not FILE.match(block[2]):
            code = block[2].split("\n")
            lines[first + 1 : first + 1 + len(code)] = code
    return f"exec({PRELUDE!r}); " + "\n".join(lines).lstrip(" ")


def write_files(text: str, folder: Path) -> None:
    """Write the files of a page into a folder."""
    for block in BLOCK.finditer(text):
        if named := FILE.match(block[2]):
            (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / named[1]).write_text(block[2])


def printed_by(page: Path, folder: Path, site: Path, demo: Path) -> str:
    """Run a page in a folder; return its output."""
    # `demo` is a folder with the files that the first command writes. They are copied, and that command does not run.
    text = page.read_text()
    first = BLOCK.search(text)
    assert first
    assert DEMO in commands_of(first[2]), f"{page.name} begins with: {DEMO}"
    shutil.copytree(demo, folder / "demo")
    write_files(text, folder)
    program = folder / f"_{page.stem}.py"
    program.write_text(program_of(text))
    done = run_with(site, [sys.executable, "-u", program.name], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "Warning" not in done.stderr, done.stderr
    return str(done.stdout.replace(str(folder), HOME))


NUMBER = r"\d[\d,]*(?:\.\d+)?"
# Values that depend on the machine: durations, rates, memory, loopback addresses, shares of time, processes.
MACHINE = (
    rf"{NUMBER} ?(?:[num]?s|µs|min|h|seconds|[kKMGT]?i?B|bytes)(?:/s)?(?![\w])",
    rf"{NUMBER} (?:(?:cells|rows|batches|steps)/s|(?:(?:cells|rows|batches|steps) )?(?:a|per) second)",
    r"(?<=127\.0\.0\.1:)\d+",
    r"(?<=waited )\d+%",
    rf"(?<=cells_per_s ){NUMBER}",
    r"(?<=wait_share )[\d.]+%",
    r"[\d.]+%(?= of the time)",
    r"(?<=pid )\d+",
    # Times of a training, sizes that `dasksc suggest` recommends, and the machine that it describes.
    r"^(?:elapsed_s|wait_share) +[\d.,]+",
    r"^ *(?:fetch_factor|block_size_\w+|estimated_memory_\w+|estimated_total_\w+|\w+_ram_gb|cpu_count) +[\d.,]+",
    r"(?:fetch_factor=\d+,|BlockShuffling\(block_size=\d+\),)$",
)


def comparable(output: str) -> list[str]:
    """Return the sorted numbers of an output, without those that depend on the machine; its words are free."""
    # Numbers are sorted since lines of several ranks arrive in any order.
    fixed = re.sub("|".join(MACHINE), "", output, flags=re.MULTILINE)
    return sorted(re.findall(NUMBER, fixed)) if output.strip() else ["nothing"]
