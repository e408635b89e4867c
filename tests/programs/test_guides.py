"""Guides and the page of commands: their blocks run in an empty folder and print the output shown."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import guides
from tests.support.commands import run_command
from tests.support.guides import comparable
from tests.support.programs import ROOT, blocks, run

pytestmark = pytest.mark.programs

PAGES = [page for page in guides.PAGES if "```python" in page.read_text()]


@pytest.fixture(scope="session")
def installed(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the installed wheel in `site` and the files of the guides in `demo`, once per session."""
    shared = shared_folder / "guides"
    if not shared.exists():
        own = tmp_path_factory.mktemp("wheel")
        site = guides.install_wheel(own)
        done = guides.run_with(site, guides.DEMO.split(), own)
        assert done.returncode == 0, done.stderr
        try:
            os.rename(own, shared)
        except OSError:  # another pytest worker was first
            assert shared.exists()
    return shared


def test_guides_run_with_the_wheel(installed, tmp_path):
    done = guides.run_with(installed / "site", ["python", "-c", "import dasksc, sys; print(dasksc.__file__)"], tmp_path)
    assert done.stdout.strip() == str(installed / "site" / "dasksc" / "__init__.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_prints_what_it_shows(page, installed, tmp_path):
    missing = guides.missing_of(page.read_text())
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    printed = guides.printed_by(page, tmp_path, installed / "site", installed / "demo")
    assert comparable(printed) == comparable("".join(block[2] for block in blocks(page, "text"))), printed


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
