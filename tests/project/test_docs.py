"""Tests that all names in the pages of docs/ exist."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import posixpath
import re

import pytest
import yaml

import dasksc.errors
from tests.support.programs import BLOCK, ROOT

pytestmark = pytest.mark.programs

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
# docs/tutorials/record.py runs the tutorials that need a memory limit or a browser, and the site shows the output that
# the script recorded.
RECORDS = {page: page.parent / "recorded" / f"{page.stem}.txt" for page in TUTORIALS}
RECORDED = [page for page, record in RECORDS.items() if record.exists()]


def files_of(page):
    """Return the files that a page names or links to."""
    text = page.read_text()
    named = re.findall(r"`((?:dasksc|tests|benchmarks|examples)/[\w./]*)`", text)
    return [ROOT / name for name in named] + [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]


def test_there_are_pages():
    assert sum(len(files_of(page)) for page in PAGES) > 200
    assert ROOT / "docs" / "architecture.md" in PAGES
    assert ROOT / "docs" / "tutorials" / "classifier.md" in TUTORIALS


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
    assert set(dasksc.__all__) - listed == {"datasets", "experimental", "tokens", "transforms"}


def test_every_page_is_in_the_table_of_contents_of_the_site():
    listed = set(re.findall(r"^([a-z][\w/-]*)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES}
    assert pages - {"index"} == listed, "give each a line in a toctree of docs/index.md"


def test_every_figure_in_the_tables_of_the_benchmarks_is_in_the_log():
    tables = re.findall(r"^\|.*", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    number = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w])")
    log = set(number.findall((ROOT / "benchmarks" / "README.md").read_text()))
    figures = {figure for row in tables for figure in number.findall(row)}
    assert len(figures) > 50
    assert figures <= log


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_caption_of_the_chart_has_the_settings_of_its_results(page):
    text = " ".join((ROOT / page).read_text().split())
    results = json.loads((ROOT / "benchmarks" / "results" / "h5ad-dense.json").read_text())
    assert f"{results['n_rows']:,} cells x {results['n_vars']:,} genes" in text
    assert results["block"] == results["batch"]
    assert f"batches of {results['batch']} rows, blocks of {results['block']} neighboring rows" in text
    assert f"fetches (reads) of {results['fetch']:,} rows" in text
    assert (results["machine"]["cpus"], results["rounds"]) == (2, 5)
    assert "two cores. Bars show medians and lines show ranges over five rounds" in text


@pytest.mark.parametrize("page", [page for page in TUTORIALS if page not in RECORDED], ids=lambda page: page.name)
def test_every_other_tutorial_is_a_notebook_that_the_site_executes(page):
    _, header, text = page.read_text().split("---\n", 2)
    assert yaml.safe_load(header)["file_format"] == "mystnb"
    languages = re.findall(r"^```(\S+)", text, re.MULTILINE)
    assert "{code-cell}" in languages
    assert "python" not in languages, "a block that is never run; make it a {code-cell}"


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


def test_the_list_of_subpackages_is_complete():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "dasksc").iterdir() if path.suffix == ".py" and path.stem[:2] != "__"}
    rooms |= {f"{path.name}/" for path in (ROOT / "dasksc").iterdir() if (path / "__init__.py").exists()}
    assert not {room for room in rooms if f"dasksc/{room}`" not in text}


@pytest.fixture
def inventories():
    spec = importlib.util.spec_from_file_location("inventories", ROOT / "docs" / "inventories.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_other_libraries_that_the_site_links_exist(inventories):
    names = [
        name
        for _, entries in inventories.LIBRARIES.values()
        for _, listed, _ in entries
        for name in listed.split()
        if not hasattr(builtins, name)
    ]
    assert set(inventories.ALIASES.values()) <= set(names)
    for name in names:
        parts = name.split(".")
        if parts[0] == "scanpy":
            pytest.importorskip("scanpy")
        for i in range(len(parts), 0, -1):  # the longest part of the name that is a module
            try:
                value = importlib.import_module(".".join(parts[:i]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[i:]:
            value = getattr(value, part)


def test_sphinx_finds_the_names_in_the_inventories(inventories, tmp_path):
    inventory = pytest.importorskip("sphinx.util.inventory")
    address, path = inventories.write(tmp_path)["anndata"]
    with open(path, "rb") as file:
        read = inventory.InventoryFile.load(file, address, posixpath.join)
    uri = read["py:class"]["anndata.AnnData"].uri
    assert uri == "https://anndata.readthedocs.io/en/stable/generated/anndata.AnnData.html#anndata.AnnData"
