"""Pages of docs/, and docstrings: their names exist, their lists are complete, and examples print the output shown."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dasksc.datasets
import dasksc.errors
from tests.support.programs import BLOCK, ROOT, blocks

pytestmark = pytest.mark.programs

PAGES = sorted((ROOT / "docs").rglob("*.md"))
REFERENCE = ROOT / "docs" / "reference"
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
        pkgutil.resolve_name(name)


def test_the_reference_has_every_public_name():
    text = (REFERENCE / "api.md").read_text()
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


MODULES = (
    *("dasksc", "dasksc.datasets", "dasksc.tokens", "dasksc.transforms", "dasksc.experimental"),
    *("dasksc.train", "dasksc.train.models", "dasksc.integrations.data_module"),
)


def public_things(module_name: str) -> dict[str, Any]:
    """Return the public functions and classes of a module, except exceptions, by name."""
    module = importlib.import_module(module_name)
    things = {name: getattr(module, name) for name in module.__all__}
    return {
        name: thing
        for name, thing in things.items()
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception))
    }


def has_example(text: str | None) -> bool:
    """Return True if a docstring ends with a section of examples that contains code."""
    _, heading, code = inspect.cleandoc(text or "").rpartition("Examples\n--------\n")
    return bool(heading) and ">>> " in code


def failures_of(code: str, name: str) -> str:
    """Run the examples of a docstring or page in the working directory; return the doctest reports of failures.

    ``dasksc`` is imported. ``...`` in an output stands for any text. Messages of exceptions are not compared.
    """
    test = doctest.DocTestParser().get_doctest(code, {"dasksc": dasksc}, name, None, 0)
    assert test.examples, name
    reports: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(test, out=reports.append)
    return "".join(reports)


@contextlib.contextmanager
def demo_folder(demo: Path, folder: Path) -> Iterator[None]:
    """Make `folder` the working directory, with links to the files in `demo`."""
    shutil.copytree(demo, folder, copy_function=os.link)
    with contextlib.chdir(folder):
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "demo"
    dasksc.datasets.demo_data(folder)
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_examples_that_print_what_they_show(module, demo, tmp_path):
    things, reports = public_things(module), ""
    assert things
    for name, thing in things.items():
        assert has_example(thing.__doc__), name
        if module == "dasksc.experimental" or (module == "dasksc.transforms" and name in dasksc.__all__):
            continue  # same name as in dasksc
        with demo_folder(demo, tmp_path / name):
            reports += failures_of(thing.__doc__, f"{module}.{name}")
    assert not reports, reports


TRAINERS = {
    "lightning": ("dasksc.integrations.lightning", "scDataModule"),
    "scvi": ("dasksc.integrations.scvi", "SCVIDataModule"),
    "transformers": ("dasksc.integrations.transformers", "scTrainer"),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", TRAINERS)
def test_examples_of_names_that_need_a_trainer_print_what_they_show(library, demo, tmp_path):
    pytest.importorskip(library)
    module, name = TRAINERS[library]
    thing = getattr(importlib.import_module(module), name)
    assert has_example(thing.__doc__)
    with demo_folder(demo, tmp_path / name):
        assert not failures_of(thing.__doc__, name)


def test_options_of_a_data_set_are_those_of_its_signature():
    options = set(inspect.signature(dasksc.scDataset).parameters)
    module = set(inspect.signature(public_things("dasksc.integrations.data_module")["DataModule"]).parameters)
    assert options - module == {"strategy", "rank", "world_size"}
    predict = inspect.signature(dasksc.predict).parameters
    unused = {"strategy", "filter", "drop_last", "equal_ranks", "label_key", "seed", "return_index", "data_collection"}
    unused |= {"expand"}  # "auto"
    assert options - set(predict) == unused
    assert predict["batch_size"].default == 1024


def test_every_key_of_the_configuration_is_listed_with_its_default():
    keys = yaml.safe_load((ROOT / "dasksc" / "dasksc.yaml").read_text())["dasksc"]
    text = (REFERENCE / "configuration.md").read_text().partition("## Keys")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == set(keys)
    for key, default in keys.items():
        _, documented, variable, meaning = rows[key].split(" | ")
        assert documented == f"`{yaml.safe_dump(default).splitlines()[0]}`"
        assert variable == f"`DASK_DASKSC__{key.upper().replace('-', '_')}`"
        assert len(meaning) > 10


def test_examples_of_errors_raise_them(demo, tmp_path):
    with demo_folder(demo, tmp_path / "work"):
        reports = [
            failures_of(block[2], f"errors.md, example {number}")
            for number, block in enumerate(blocks(REFERENCE / "errors.md", "pycon"))
        ]
    assert len(reports) >= 9
    assert not "".join(reports), "".join(reports)
