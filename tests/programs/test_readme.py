"""README.md and the pages of the site, whose programs run and whose commands and links exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support import guides
from tests.support.guides import comparable
from tests.support.programs import ROOT, blocks, run_page

pytestmark = pytest.mark.programs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(2_000, 300)


def shown(page: Path) -> str:
    """Return the output that a page shows."""
    return "".join(block[2] for block in blocks(page, "text"))


@pytest.mark.parametrize("page", ["README.md", "docs/get_started.md"])
def test_programs_make_their_own_data_and_print_what_the_page_shows(page, tmp_path, atlas):
    done = run_page(ROOT / page, tmp_path, atlas)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] / 1.5
    masked = [re.sub(r"(?:loss|value) [\d.]+|[\d.]+%", "", text) for text in (done.stdout, shown(ROOT / page))]
    assert comparable(masked[0]) == comparable(masked[1])


def test_the_first_command_of_the_readme_installs_dasksc_into_an_empty_environment(tmp_path):
    command = shlex.split(blocks(ROOT / "README.md", "bash")[0][2])
    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    # The constraints keep the CPU build of torch, where one is found, and pip's cache has the packages of CI.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}:/usr/bin:/bin", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    environment |= {"PIP_NO_COMPILE": "1"}
    for words, folder in ((command, ROOT), (["dasksc", "demo-data", "demo"], tmp_path)):
        done = subprocess.run(
            [programs / words[0], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "demo" / "atlas.h5ad").is_file()
    shutil.rmtree(tmp_path / "empty")  # more than a gigabyte


# test_guides.py runs the guides, and docs/tutorials/record.py the recorded tutorial.
RECORDED = ("larger_than_memory",)
ELSEWHERE = ("get_started", *RECORDED)
OTHERS = [page for page in PAGES if page not in guides.PAGES]
RUN = [page for page in OTHERS[1:] if blocks(page, "python") and page.stem not in ELSEWHERE]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_programs_of_other_pages_run_too(page, tmp_path, atlas):
    prints = any("print(" in block[2] for block in blocks(page, "python"))
    assert bool(run_page(page, tmp_path, atlas).stdout) == prints
