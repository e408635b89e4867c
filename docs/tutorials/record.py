"""Run the programs of recorded tutorials, and write their output to docs/tutorials/recorded/.

    make tutorials-record
    python docs/tutorials/record.py larger_than_memory

The output is recorded in advance and included in the site, because the build of the site cannot limit memory. A record
holds the blocks of its page next to their output, and tests/project/test_docs.py compares them with the page.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded"
sys.path.insert(0, str(ROOT))

import dasksc  # noqa: E402
from tests.support.programs import BLOCK  # noqa: E402

MEMORY_LIMIT = 2**30


def main() -> None:
    """Record the tutorials named on the command line, or all of `RECORDERS` if none is named."""
    for name in sys.argv[1:] or RECORDERS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = RECORDERS[name](name)
        write(name, outputs)
        print(f"recorded {name}")


def blocks_of(name: str) -> list[tuple[str, str]]:
    """Return the language and the text of each code block that a reader of the page runs."""
    found = [(block[1], block[2]) for block in BLOCK.finditer((HERE / f"{name}.md").read_text())]
    return [(language, text) for language, text in found if language in ("bash", "python")]


def write(name: str, outputs: list[str]) -> None:
    """Write the blocks of a page and their outputs, numbered from 1."""
    lines = [
        f"dasksc {dasksc.__version__}, Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores",
    ]
    for number, ((_, block), output) in enumerate(zip(blocks_of(name), outputs, strict=True), start=1):
        lines += [f"--- block {number}", block.rstrip("\n"), f"--- output {number}", output.rstrip("\n")]
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.txt").write_text("\n".join([*lines, "--- end", ""]))


def larger_than_memory(name: str) -> list[str]:
    """Run the commands of the page in a control group; save each Python block to the file named in its first line."""
    from tests.support.cgroups import memory_cgroup

    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": search, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    outputs = []
    with memory_cgroup(MEMORY_LIMIT) as group:
        for language, block in blocks_of(name):
            if language == "python":
                Path(block.split()[1]).write_text(block)
                outputs.append("")
                continue
            forget_files()
            done = subprocess.run(
                ["bash", "-c", block],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                preexec_fn=group.enter,
                check=True,
            )
            output = done.stdout.replace(f"{Path.cwd()}{os.sep}", "")  # the folder has another name in each run
            outputs.append(re.sub(r"^bash: line \d+: +\d+ Killed .*$", "Killed", output, flags=re.MULTILINE))
            print(done.stdout, flush=True)
        assert group.n_killed() == 1, "only the program that reads the atlas whole is ended by the kernel"
    return outputs


def forget_files() -> None:
    """Drop files from the page cache, since pages cached outside the control group do not count toward its limit."""
    os.sync()
    for path in Path().glob("*.h5ad"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


RECORDERS = {"larger_than_memory": larger_than_memory}

if __name__ == "__main__":
    main()
