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
