"""Programs in docs/guides/trainers.md, for each installed library."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from dasksc.datasets import demo_data
from tests.support.programs import ROOT, blocks, run

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "guides" / "trainers.md"
LIBRARIES = ("torch", "torchdata", "lightning", "accelerate", "transformers")


def programs() -> list[str]:
    return [block[2] for block in blocks(PAGE, "python")]


def library_of(program: str) -> str:
    (library,) = {name for name in LIBRARIES if re.search(rf"^(from|import) {name}\b", program, re.MULTILINE)} - {
        "torch"
    }
    return library


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    demo_data(folder / "demo")
    return folder


def run_text(program: str, name: str, folder: Path) -> None:
    (folder / name).write_text(program)
    run([sys.executable, "-W", "ignore", name], cwd=folder, is_preloaded=True)


def test_every_library_of_the_page_has_a_program():
    _, plain, *rest = programs()
    assert "from torch.utils.data" in plain
    assert set(map(library_of, rest)) == set(LIBRARIES[1:])


@pytest.mark.parametrize("library", LIBRARIES)
def test_its_programs_run(library, folder):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    common, plain, *rest = programs()
    of_library = [plain] if library == "torch" else [one for one in rest if library_of(one) == library]
    run_text("".join([common, *of_library]), f"{library}_program.py", folder)
