"""Tests that all names in the pages of docs/ exist."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest

import dasksc.errors
from tests.support.programs import BLOCK, ROOT

pytestmark = pytest.mark.programs

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
# docs/tutorials/record.py runs the tutorial that needs a memory limit, and the site shows the output that the script
# recorded.
RECORDS = {page: page.parent / "recorded" / f"{page.stem}.txt" for page in TUTORIALS}
RECORDED = [page for page, record in RECORDS.items() if record.exists()]


def files_of(page):
    """Return the files that a page names or links to."""
    text = page.read_text()
    named = re.findall(r"`((?:dasksc|tests|benchmarks|examples)/[\w./]*)`", text)
    return [ROOT / name for name in named] + [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_or_links_is_there(page):
    assert not [str(path) for path in files_of(page) if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_of_a_page_can_be_imported(page):
    for name in sorted(set(re.findall(r"`(dasksc(?:\.\w+)+)`", page.read_text()))):
        if name.startswith("dasksc.integrations.lightning"):
            pytest.importorskip("lightning")
        module, found = name, []
        while True:
            try:
                value = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, last = module.rpartition(".")
                found.insert(0, last)
        for part in found:
            value = getattr(value, part)


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = set(re.findall(r"^   dasksc\.(\w+)$", text, re.MULTILINE)) | set(dasksc.errors.__all__)
    assert set(dasksc.__all__) - listed == {"datasets", "experimental", "readers", "tokens", "transforms"}


def test_every_page_is_in_the_table_of_contents_of_the_site():
    listed = set(re.findall(r"^([a-z][\w/-]*)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    assert pages - {"index"} == listed, "give each a line in a toctree of docs/index.md"


@pytest.mark.parametrize("page", RECORDED, ids=lambda page: page.name)
def test_a_recorded_tutorial_has_the_programs_of_its_record_and_shows_all_of_their_output(page):
    text = page.read_text()
    record = re.findall(
        r"^--- block (\d+)\n(.*?\n)--- output \1\n(.*?)(?=^--- )", RECORDS[page].read_text(), re.MULTILINE | re.DOTALL
    )
    programs = [block[2] for block in BLOCK.finditer(text) if block[1] in ("bash", "python")]
    assert programs == [program for _, program, _ in record], "run make tutorials-record"
    numbers = re.findall(r'^:start-after: "--- output (\d+)"\n:end-before: "--- (?:block|end)', text, re.MULTILINE)
    assert numbers == [number for number, _, output in record if output.strip()]
    assert numbers
    pictures = {path.name for path in RECORDS[page].parent.glob(f"{page.stem}-*.png")}
    assert pictures == set(re.findall(r"\]\(recorded/(\S+\.png)\)", text))
