"""Consistency of a release: one version, the citation, the conda recipe."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests.support.programs import ROOT

pytestmark = pytest.mark.core

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": ["pytorch"], "dask[array,distributed]": ["dask", "distributed"]}


def recipe():
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())


def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_all_files_have_the_version_of_the_project():
    assert recipe()["context"]["version"] == PROJECT["version"]
    assert citation()["version"] == PROJECT["version"]


def test_the_recipe_has_the_dependencies_of_the_project():
    expected = {f"python >={recipe()['context']['python_min']}"}
    assert expected == {f"python {PROJECT['requires-python']}"}
    for line in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w.\-\[\],]+?)(>=[\d.]+)(?:; .*)?", line).groups()
        expected |= {f"{conda} {bound}" for conda in CONDA_NAMES.get(name, [name])}
    run = {
        line.replace("${{ python_min }}", recipe()["context"]["python_min"]) for line in recipe()["requirements"]["run"]
    }
    assert run == expected
    commands = recipe()["build"]["python"]["entry_points"]
    assert commands == [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]


def test_the_recipe_is_one_for_rattler_build():
    rattler_build = pytest.importorskip("rattler_build")
    (variant,) = rattler_build.Stage0Recipe.from_file(ROOT / "recipe" / "recipe.yaml").render()
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": "dasksc", "version": PROJECT["version"]}
    assert rendered["build"]["noarch"] == "python"


def test_the_citation_has_what_its_format_asks_for():
    # The required keys and the allowed types of the Citation File Format 1.2.0.
    found = citation()
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    assert found["title"] == PROJECT["name"]
    assert found["license"] == PROJECT["license"]
    assert found["authors"] == [{"name": author["name"]} for author in PROJECT["authors"]]
    assert found["keywords"] == PROJECT["keywords"]
    assert set(found) == {
        *("cff-version", "message", "type", "title", "abstract", "authors", "version", "license", "keywords")
    }


def test_the_release_checklist_has_ten_lines():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Releasing\n")[2]
    assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == [str(i + 1) for i in range(10)]
