"""Documentation guides, whose blocks run in an empty folder with the wheel and print the output shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import guides, preloaded

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
    outputs = guides.outputs_of(page, tmp_path, installed / "site", installed / "demo")
    assert not "\n".join(guides.differences(page, outputs))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_runs_its_commands(page):
    blocks = guides.blocks_of(page.read_text())
    commands = [command for block in blocks if block.language == "bash" for command in block.commands]
    assert commands[0] == guides.DEMO
    assert {command.split()[0] for command in commands} <= set(preloaded.PROGRAMS)
