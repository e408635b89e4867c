"""Pages of the reference: complete lists of keys, classes and commands, and examples with the output shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import dasksc.datasets
import dasksc.errors
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


def test_every_key_of_the_configuration_is_listed_with_its_default():
    keys = yaml.safe_load((ROOT / "dasksc" / "dasksc.yaml").read_text())["dasksc"]
    rows = {row[0]: row for row in tables_of(REFERENCE / "configuration.md")["Keys"]}
    assert set(rows) == {f"`{key}`" for key in keys}
    for key, default in keys.items():
        _, _, documented, variable, meaning = rows[f"`{key}`"]
        assert documented == f"`{yaml.safe_dump(default).splitlines()[0]}`"
        assert variable == f"`DASK_DASKSC__{key.upper().replace('-', '_')}`"
        assert len(meaning) > 10


def test_examples_of_errors_raise_them(tmp_path):
    dasksc.datasets.demo_data(tmp_path / "demo")
    with examples.demo_folder(tmp_path / "demo", tmp_path / "work"):
        reports = [
            examples.failures_of(block[2], f"errors.md, example {number}")
            for number, block in enumerate(blocks(REFERENCE / "errors.md", "pycon"))
        ]
    assert len(reports) >= 9
    assert not "".join(reports), "".join(reports)
