"""Pages of the reference: complete lists of keys, classes and commands, and examples with the output shown."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dasksc.datasets
import dasksc.errors
from dasksc.cli import COMMANDS, prepared
from dasksc.train.sections import Fsdp, Predict, Scheduler, Validation
from tests.support import examples
from tests.support.programs import ROOT, blocks

pytestmark = pytest.mark.programs

REFERENCE = ROOT / "docs" / "reference"
CELL = re.compile(r"(?<!\\)\|")


def tables_of(page: Path) -> dict[str, list[list[str]]]:
    """Return the rows of the table below each heading of a page, as lists of cells."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("| "):
            found.setdefault(heading, []).append([cell.strip() for cell in CELL.split(line)[1:-1]])
    return {heading: rows[2:] for heading, rows in found.items()}  # without the header and the rule


@pytest.fixture
def docs_commands() -> Any:
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "commands.py")
    commands = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(commands)
    return commands


# --- YAML schema ----------------------------------------------------------------------------------------


def test_the_site_shows_every_key_of_the_sections_of_a_training(docs_commands):
    declared = re.findall(r"^```{keys} (.*)$", (REFERENCE / "yaml.md").read_text(), re.MULTILINE)
    tables = "\n".join(docs_commands.table_of(one.split()) for one in declared)
    for section in (Validation, Scheduler, Fsdp, Predict):
        for field in dataclasses.fields(section):
            assert f"| `{field.name}` | " in tables
    assert "| `min_num_params` | `1000000` | " in tables
    assert "| `out` | required | " in tables
    assert "| `by` | `null` | " in tables


# --- Configuration ----------------------------------------------------------------------------------------


def test_every_key_of_the_configuration_is_listed_with_its_default():
    keys = yaml.safe_load((ROOT / "dasksc" / "dasksc.yaml").read_text())["dasksc"]
    rows = {row[0]: row for row in tables_of(REFERENCE / "configuration.md")["Keys"]}
    assert set(rows) == {f"`{key}`" for key in keys}
    for key, default in keys.items():
        _, _, documented, variable, meaning = rows[f"`{key}`"]
        assert documented == f"`{yaml.safe_dump(default).splitlines()[0]}`"
        assert variable == f"`DASK_DASKSC__{key.upper().replace('-', '_')}`"
        assert len(meaning) > 10


# --- Errors -----------------------------------------------------------------------------------------------


def test_every_exception_has_a_section_and_an_example():
    text = (REFERENCE / "errors.md").read_text()
    for name in dasksc.errors.__all__:
        section = re.search(rf"^## {name}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
        assert section, name
        if name != "DaskscError":
            assert re.search(rf"^(?:dasksc\.errors\.)?{name}: .", section[1], re.MULTILINE), name
            assert "**What to do:**" in section[1], name


def test_examples_of_errors_raise_them(tmp_path):
    dasksc.datasets.demo_data(tmp_path / "demo")
    with examples.demo_folder(tmp_path / "demo", tmp_path / "work"):
        reports = [
            examples.failures_of(block[2], f"errors.md, example {number}")
            for number, block in enumerate(blocks(REFERENCE / "errors.md", "pycon"))
        ]
    assert len(reports) >= 9
    assert not "".join(reports), "".join(reports)


# --- Commands ---------------------------------------------------------------------------------------------


def test_every_command_has_its_options_and_an_example():
    text = (REFERENCE / "cli.md").read_text()
    sections = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(COMMANDS)
    for name in COMMANDS:
        assert f"```{{command}} {name}\n```" in sections[name], name
        assert re.search(rf"^(?:\$ )?dasksc {name} .*\n(?:```\n\n```text\n)?", sections[name], re.MULTILINE), name


def test_the_site_shows_every_option_of_a_command(docs_commands):
    for name in COMMANDS:
        text = docs_commands.help_of(name)
        assert text.startswith(f"```console\n$ dasksc {name}")
        options = {option for action in prepared(name)[0]._actions for option in action.option_strings}
        assert not [option for option in options if f"`{option}" not in text], name
