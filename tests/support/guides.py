"""Documentation guides as programs: their code blocks, run in an empty folder, and the output of each block.

``python -m tests.support.guides PAGE ...`` runs pages and writes the output of their blocks into them.

A page runs from top to bottom in one Python process:

- ```` ```python ```` blocks form one program. A block whose first line is a comment with the name of a file
  (``# train.py``) is written to this file instead of being run, as are blocks in other languages.
- ```` ```bash ```` blocks have one command per line: ``dasksc``, ``python``, ``torchrun``. ``pip install`` names the
  extras of the page and is not run. Commands that need a cluster or a cloud appear in ```` ```console ```` blocks.
- A ```` ```text ```` block after a block that is run shows its output. The numbers in it are compared, except for
  machine-dependent values (`comparable`).
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.programs import ROOT, ended, run

# Pages in other folders whose blocks run as well.
ELSEWHERE = ("concepts/memory.md", "reference/formats.md")
PAGES = [*sorted((ROOT / "docs" / "guides").glob("*.md")), *(ROOT / "docs" / page for page in ELSEWHERE)]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\n")
TEXT = re.compile(r"\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
MARK = "\x00block {}\x00"
DEMO = "dasksc demo-data demo"
HOME = "/path/to"  # folder of the reader, as shown in pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Code block of a page, with the offsets of its start and end and the output shown below it."""

    language: str
    code: str
    start: int
    end: int
    shown: str | None

    @property
    def file(self) -> str | None:
        """Name of the file that this block is written to, or None."""
        named = FILE.match(self.code)
        return named[1] if named else None

    @property
    def runs(self) -> bool:
        """True if the block is run, rather than written to a file or only displayed."""
        return self.language == "bash" or (self.language == "python" and self.file is None)

    @property
    def commands(self) -> list[str]:
        """Commands of the block, without comments and ``pip install``, with continued lines joined."""
        lines = [line.split("  #")[0].rstrip() for line in self.code.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith(("#", "pip install "))]


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page; each includes the text block of its output."""
    found = []
    for match in FENCE.finditer(text):
        below = TEXT.match(text, match.end())
        output = below[1] if below else None
        found.append(Block(language=match[1], code=match[2], start=match.start(), end=match.end(), shown=output))
    owned = {block.end + 1 for block in found if block.runs and block.shown is not None}
    return [block for block in found if block.start not in owned]


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
def _run(mark, *commands):
    print(mark, end="", flush=True)
    for command in commands:
        if preloaded.can_run(command):
            status = preloaded.call(shlex.split(command), cwd=os.getcwd(), environment=os.environ)
        else:
            status = subprocess.run(command, shell=True).returncode
        if status:
            raise SystemExit(f"{command}: exit status {status}")
"""


def program_of(text: str, blocks: list[Block]) -> str:
    """Return a page as a program that prints a mark before each block.

    Line numbers are those of the page, so that tracebacks refer to it.
    """
    lines = [""] * (text.count("\n") + 1)
    for number, block in enumerate(blocks):
        if block.runs:
            first = text.count("\n", 0, block.start)
            commands = block.commands if block.language == "bash" else []
            lines[first] = f"_run({', '.join(map(repr, [MARK.format(number), *commands]))})"
            if block.language == "python":
                code = block.code.split("\n")
                lines[first + 1 : first + 1 + len(code)] = code
    return f"exec({PRELUDE!r}); " + "\n".join(lines).lstrip(" ")


def outputs_of(page: Path, folder: Path, site: Path, demo: Path) -> dict[int, str]:
    """Run a page in a folder; return the output of each block, by its number in `blocks_of`.

    `demo` is a folder with the files that the first command writes. They are copied, and that command does not run.
    """
    text = page.read_text()
    blocks = blocks_of(text)
    assert any(DEMO in block.commands for block in blocks[:1]), f"{page.name} begins with: {DEMO}"
    shutil.copytree(demo, folder / "demo")
    for block in blocks:
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.code)
    program = folder / f"_{page.stem}.py"
    program.write_text(program_of(text, blocks).replace(f", {DEMO!r}", ""))
    done = run_with(site, [sys.executable, "-u", program.name], folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "Warning" not in done.stderr, done.stderr
    parts = re.split(MARK.format(r"(\d+)"), done.stdout)
    outputs = (part.replace(str(folder), HOME) for part in parts[2::2])
    return {int(number): output for number, output in zip(parts[1::2], outputs, strict=True)}


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
    """Return the sorted numbers of an output, without those that depend on the machine; its words are free.

    Numbers are sorted since lines of several ranks arrive in any order.
    """
    fixed = re.sub("|".join(MACHINE), "", output, flags=re.MULTILINE)
    return sorted(re.findall(NUMBER, fixed)) if output.strip() else ["nothing"]


def shows(block: Block) -> bool:
    """Return True if a page shows the output of a block; pages omit the output of the first command, `DEMO`."""
    return block.runs and block.commands != [DEMO]


def differences(page: Path, outputs: dict[int, str]) -> Iterator[str]:
    """Yield the differences between a page and the output of its blocks."""
    text = page.read_text()
    for number, block in enumerate(blocks_of(text)):
        if block.language == "text":
            yield f"{page.name}:{text.count(chr(10), 0, block.start) + 1}: text that no block above prints"
        elif shows(block) and comparable(outputs[number]) != comparable(block.shown or ""):
            line = text.count("\n", 0, block.start) + 1
            yield f"{page.name}:{line}: the block prints\n{outputs[number]}\nand the page shows\n{block.shown}"


def record(page: Path, outputs: dict[int, str]) -> None:
    """Write the output of blocks into their page where the page differs."""
    text = page.read_text()
    for number, block in reversed([*enumerate(blocks_of(text))]):
        if not shows(block) or comparable(outputs[number]) == comparable(block.shown or ""):
            continue
        below = TEXT.match(text, block.end) if block.shown is not None else None
        end = below.end() if below else block.end
        output = outputs[number].rstrip()
        text = text[: block.end] + (f"\n```text\n{output}\n```\n" if output else "") + text[end:]
    page.write_text(text)


def main() -> None:
    """Run the pages named on the command line, and write the output of their blocks into them."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = install_wheel(folder)
        assert run_with(site, DEMO.split(), folder).returncode == 0
        for path in sys.argv[1:]:
            (folder / Path(path).stem).mkdir()
            record(Path(path), outputs_of(Path(path), folder / Path(path).stem, site, folder / "demo"))


if __name__ == "__main__":
    main()
