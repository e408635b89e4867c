"""Run the programs of recorded tutorials, and write their output and pictures to docs/tutorials/recorded/.

    make tutorials-record
    python docs/tutorials/record.py watch

The output is recorded in advance and included in the site, because the build of the site can neither limit memory nor
take screenshots of a dashboard. A record holds the blocks of its page next to their output, and
tests/project/test_docs.py compares them with the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded"
sys.path.insert(0, str(ROOT))

import dasksc  # noqa: E402
import dasksc.dashboard  # noqa: E402
from tests.support.programs import BLOCK  # noqa: E402

MEMORY_LIMIT = 2**30
# Disk requests per second: about as many as a busy network file system allows.
DISK_REQUESTS = 1_000
# For each picture: the page of the dashboard, the seconds between the start of the code block and the screenshot, and
# the seconds to wait until the plots of the page are drawn.
PICTURES = {"reading": ("loader", 15.0, 1.0), "healthy": ("loader", 6.0, 1.0), "status": ("status", 7.5, 4.5)}
WIDTH, HEIGHT = 1120, 860  # of the browser window, including its frame


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


def watch(name: str) -> list[str]:
    """Run the blocks of the page as one session, and take screenshots of the dashboard while they run."""
    text = (HERE / f"{name}.md").read_text()
    # A block is followed by its pictures.
    parts = re.split(r"^```python\n.*?^```$", text, flags=re.MULTILINE | re.DOTALL)[1:]
    outputs: list[str] = []
    session: dict[str, Any] = {"__name__": "session"}
    printed = io.StringIO()
    with (
        browser() as photograph,
        limited_disk(),
        ThreadPoolExecutor(1) as meanwhile,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        for (_, block), part in zip(blocks_of(name), parts, strict=True):
            begin = printed.tell()
            pictures = re.findall(r"\]\(recorded/watch-(\w+)\.png\)", part)
            taken = meanwhile.submit(photograph_all, photograph, session.get("client"), pictures)
            exec(compile(block, f"{name}.md", "exec"), session)
            taken.result()
            printed.seek(begin)
            outputs.append(last_states(printed.read()))
            print(outputs[-1], file=sys.__stdout__, flush=True)
    return outputs


def photograph_all(photograph: Callable[[str, Path, float], None], client: Any, pictures: list[str]) -> None:
    """Photograph pages of a Client's dashboard, each when its time has come."""
    begun = time.monotonic()
    for picture in pictures:
        page, begin_s, settle_s = PICTURES[picture]
        time.sleep(max(0.0, begun + begin_s - time.monotonic()))
        address = dasksc.dashboard.install(client).removesuffix("loader") + page
        photograph(address, RECORDED / f"watch-{picture}.png", settle_s)


def last_states(printed: str) -> str:
    """Return the text that a terminal finally shows, without the earlier states of progress bars."""
    return "\n".join(line.rsplit("\r", 1)[-1] for line in printed.split("\n"))


@contextlib.contextmanager
def limited_disk() -> Iterator[None]:
    """Limit the read requests per second of this process, with a control group of version 1."""
    root = Path("/sys/fs/cgroup/blkio")
    group = root / f"dasksc-{os.getpid()}"
    device = os.stat(".").st_dev
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {DISK_REQUESTS}"
        (group / "blkio.throttle.read_iops_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextlib.contextmanager
def browser() -> Iterator[Callable[[str, Path, float], None]]:
    """Open a browser; yield a function that writes the picture of a page."""
    from PIL import Image
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise SystemExit("no browser: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", f"window-size={WIDTH},{HEIGHT}"):
        options.add_argument(f"--{flag}")
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))

    def photograph(address: str, path: Path, settle_s: float) -> None:
        opened.get(address)
        time.sleep(settle_s)
        opened.save_screenshot(str(path))
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)

    try:
        yield photograph
    finally:
        opened.quit()


RECORDERS = {"larger_than_memory": larger_than_memory, "watch": watch}

if __name__ == "__main__":
    main()
