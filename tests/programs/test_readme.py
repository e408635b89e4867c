"""README.md does what it says: its programs run, its commands and links exist."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.programs import ROOT, blocks, run_page

pytestmark = pytest.mark.programs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(2_000, 300)


def test_its_programs_run_from_top_to_bottom(tmp_path, atlas):
    done = run_page(ROOT / "README.md", tmp_path, atlas)
    assert "sparse_csr torch.Size([64, 100])" in done.stdout
    assert "watch at http" in done.stdout


def test_the_programs_of_the_page_on_clusters_run(tmp_path, atlas):
    done = run_page(ROOT / "docs" / "guides" / "cluster.md", tmp_path, atlas)
    assert "scheduler at tcp://127.0.0.1:" in done.stdout
    assert "2000 rows\n31 batches left" in done.stdout
    assert "<html" in (tmp_path / "epoch.html").read_text()


# Pages with tests of their own: trainers.md runs library by library where each is installed, and the others read files
# that their tests make. docs/tutorials/record.py runs the recorded ones.
RECORDED = ("watch", "larger_than_memory")
ELSEWHERE = ("trainers", "watching", "cluster", "atlases", "remote", "perturbations", *RECORDED)
RUN = [page for page in PAGES[1:] if blocks(page, "python") and page.stem not in ELSEWHERE]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_programs_of_other_pages_run_too(page, tmp_path, atlas):
    assert run_page(page, tmp_path, atlas).stdout


def test_the_programs_on_watching_run_and_show_figures(tmp_path, atlas):
    done = run_page(ROOT / "docs" / "guides" / "watching.md", tmp_path, atlas)
    assert "cells/s, waited" in done.stderr  # the progress bar
    assert re.search(r"^4 fetches took", done.stdout, re.MULTILINE)
    assert re.search(r"watch at http://\S+/loader$", done.stdout, re.MULTILINE)
    assert (tmp_path / "epoch.html").stat().st_size > 10_000
    if importlib.util.find_spec("prometheus_client") is not None:
        assert 'dasksc_loader_wait_share{dataset="atlas"' in done.stdout


def test_the_ten_lines_are_ten():
    (program, *_) = blocks(ROOT / "README.md", "python")
    imports, rest = program[2].split("\n\n")
    assert all(line.startswith("import ") for line in imports.splitlines())
    assert len(rest.splitlines()) == 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_in_every_page_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block[2])


def shell_lines() -> list[str]:
    return [
        line.split("#")[0].strip()
        for page in PAGES
        if page.stem not in RECORDED
        for block in blocks(page, "bash")
        for line in block[2].splitlines()
        if line.split("#")[0].strip()
    ]


@pytest.mark.parametrize("line", shell_lines())
def test_shell_commands_name_what_is_there(line):
    words = shlex.split(line)
    assert words[0] in {"make", "pip", "conda", "torchrun", "python", "git", "cd", "dask", "dasksc", "srun", "openssl"}
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    if words[0] == "torchrun":
        assert shutil.which("torchrun") or (Path(sys.executable).parent / "torchrun").exists()
    for word in words:
        if word.endswith((".py", ".yml", ".toml")):
            assert (ROOT / word).is_file(), word
        if match := re.fullmatch(r"\.\[([\w,]+)\]", word):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(match[1].split(",")) <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_options_it_names_exist():
    helped = subprocess.run(
        [sys.executable, ROOT / "examples" / "make_atlas.py", "--help"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = re.findall(r"make_atlas\.py ([^`]*)`", (ROOT / "README.md").read_text())
    assert options
    for option in re.findall(r"--\w+", " ".join(options)):
        assert option in helped
