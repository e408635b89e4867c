"""Guides, the page of commands, README.md and other pages: their blocks run, and print the output shown."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import guides
from tests.support.commands import run_command
from tests.support.guides import comparable
from tests.support.programs import ROOT, blocks, ended, run

pytestmark = pytest.mark.programs

GUIDES = [page for page in guides.PAGES if blocks(page, "python")]
# docs/tutorials/record.py runs the recorded tutorial.
ELSEWHERE = (*guides.PAGES, ROOT / "docs" / "get_started.md", ROOT / "docs" / "tutorials" / "larger_than_memory.md")
OTHERS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if blocks(page, "python") and page not in ELSEWHERE]


def shown(page: Path) -> str:
    """Return the output that a page shows."""
    return "".join(block[2] for block in blocks(page, "text"))


@pytest.fixture(scope="session")
def installed(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the installed wheel in `site` and the files of the guides in `demo`, once per session."""
    shared = shared_folder / "guides"
    if not shared.exists():
        own = tmp_path_factory.mktemp("wheel")
        site = guides.install_wheel(own)
        done = guides.run_with(site, guides.DEMO.split(), own)
        assert done.returncode == 0, done.stderr
        done = guides.run_with(site, ["python", "-c", "import dasksc; print(dasksc.__file__)"], own)
        assert done.stdout.strip() == str(site / "dasksc" / "__init__.py")
        try:
            os.rename(own, shared)
        except OSError:  # another pytest worker was first
            assert shared.exists()
    return shared


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_prints_what_it_shows(page, installed, tmp_path):
    missing = guides.missing_of(page.read_text())
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    printed = guides.printed_by(page, tmp_path, installed / "site", installed / "demo")
    assert comparable(printed) == comparable(shown(page)), printed


PAGE = ROOT / "docs" / "reference" / "cli.md"
# Sizes, rates and losses depend on the machine.
MEASURED = {"suggest", "train", "embed"}


def printed_by(*arguments: str) -> str:
    if arguments[0] == "check":  # reports the memory of its process
        return run([sys.executable, "-m", "dasksc", *arguments])
    return run_command(*arguments).stdout


def test_commands_print_what_the_page_shows(tmp_path):
    (tmp_path / "classifier.yaml").write_text(blocks(PAGE, "yaml")[0][2])
    differing, names = [], []
    with contextlib.chdir(tmp_path):
        for block in blocks(PAGE, "console"):
            line, _, documented = block[2].partition("\n")
            name, *arguments = shlex.split(line.removeprefix("$ dasksc "))
            printed = printed_by(name, *arguments).replace(str(tmp_path), "/data")
            if name not in MEASURED and comparable(printed) != comparable(documented):
                differing.append(f"{line}\n{printed}")
            names.append(name)
    assert len(names) == 8
    assert not differing, "\n".join(differing)


def printed_by_python_of(page: Path, folder: Path, atlas: Path) -> str:
    """Run the Python blocks of a page as one program in a folder with a copy of an atlas; return its output."""
    shutil.copyfile(atlas, folder / "atlas.h5ad")
    program = folder / f"{page.stem}.py"
    program.write_text(guides.program_of(page.read_text(), has_commands=False))
    done = ended([sys.executable, program.name], cwd=folder, is_preloaded=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/get_started.md"])
def test_programs_make_their_own_data_and_print_what_the_page_shows(page, tmp_path, atlas_of):
    printed = printed_by_python_of(ROOT / page, tmp_path, atlas_of(2_000, 300))
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses[-1] < losses[0] / 1.5
    masked = [re.sub(r"(?:loss|value) [\d.]+|[\d.]+%", "", text) for text in (printed, shown(ROOT / page))]
    assert comparable(masked[0]) == comparable(masked[1])


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_programs_of_other_pages_run_too(page, tmp_path, atlas_of):
    prints = any("print(" in block[2] for block in blocks(page, "python"))
    assert bool(printed_by_python_of(page, tmp_path, atlas_of(2_000, 300))) == prints
