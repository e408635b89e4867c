"""Project: dependencies, constraints, the conda recipe, docstrings of public names, structure of the package."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dasksc
from tests.support.programs import ROOT

pytestmark = pytest.mark.core

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Names of packages in conda-forge that differ from those in PyPI.
CONDA_NAMES = {"torch": ["pytorch"], "matplotlib": ["matplotlib-base"], "build": ["python-build"]}
CONDA_NAMES["dask"] = ["dask", "distributed"]


# Extras in environment.yml.
USERS_EXTRAS = ("dashboard", "remote", "demo", "train")


def declared(wanted: Iterable[str] | None = None) -> dict[str, str]:
    """Return the bounds of every package that pyproject.toml requires, with the given extras or all extras."""
    # An extra may require a higher version than the core, but two extras must agree.
    extras = PYPROJECT["project"]["optional-dependencies"]
    chosen = extras if wanted is None else wanted
    core = {one.name: str(one.specifier) for one in map(Requirement, PYPROJECT["project"]["dependencies"])}
    bounds: dict[str, str] = {"python": PYPROJECT["project"]["requires-python"]}
    for requirement in map(Requirement, (line for extra in chosen for line in extras[extra])):
        if requirement.name == "dasksc":
            assert requirement.extras <= set(extras)
            continue
        bound = str(requirement.specifier)
        assert bounds.setdefault(requirement.name, bound) == bound, f"two bounds for {requirement.name}"
        if requirement.name in core:
            lowest = core[requirement.name].removeprefix(">=")
            assert Version(bound.removeprefix(">=")) > Version(lowest), f"the core asks for {requirement.name} too"
    return core | bounds


@pytest.mark.parametrize(
    ("file", "name", "extras"),
    [("environment.yml", "dasksc", USERS_EXTRAS), ("environment-dev.yml", "dasksc-dev", None)],
)
def test_conda_and_pip_ask_for_the_same_packages_and_bounds(file, name, extras):
    environment = yaml.safe_load((ROOT / file).read_text())
    assert environment["name"] == name
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *lines, from_pip = (line for line in environment["dependencies"] if line != "pip")
    assert from_pip["pip"].pop() == "--editable ."
    lines += from_pip["pip"]  # packages that conda-forge lacks
    conda = {match[1]: match[2] for match in (re.fullmatch(r"([\w.-]+)(.*)", line) for line in lines) if match}
    pip = {name: bound for ours, bound in declared(extras).items() for name in CONDA_NAMES.get(ours, [ours])}
    assert conda == pip


def test_the_extra_dev_has_everything():
    extras = PYPROJECT["project"]["optional-dependencies"]

    def contained(extra: str) -> set[str]:
        inner = {name for line in extras[extra] if line.startswith("dasksc[") for name in Requirement(line).extras}
        return {extra}.union(*map(contained, inner))

    assert contained("dev") == set(extras)


def test_every_dependency_has_a_lower_bound_and_a_version_ci_runs_on():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {}
    for requirement in (Requirement(line) for line in lines if not line.startswith("#")):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        assert "+" not in pin.version, "a build of one machine"
        pinned[canonicalize_name(requirement.name)] = pin.version
    for name, bound in declared().items():
        assert bound.startswith(">="), name
        if name != "python":
            assert Requirement(f"{name}{bound}").specifier.contains(pinned[canonicalize_name(name)]), name


def recipe():
    return yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())


def test_all_files_have_the_version_of_the_project():
    version = PYPROJECT["project"]["version"]
    assert dasksc.__version__ in {version, "0+unknown"}
    assert recipe()["context"]["version"] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_the_recipe_has_the_dependencies_of_the_project():
    lowest = recipe()["context"]["python_min"]
    expected = {f"python >={lowest}"}
    assert expected == {f"python {PYPROJECT['project']['requires-python']}"}
    for one in map(Requirement, PYPROJECT["project"]["dependencies"]):
        expected |= {f"{conda} {one.specifier}" for conda in CONDA_NAMES.get(one.name, [one.name])}
    run = {line.replace("${{ python_min }}", lowest) for line in recipe()["requirements"]["run"]}
    assert run == expected
    commands = recipe()["build"]["python"]["entry_points"]
    assert commands == [f"{name} = {target}" for name, target in PYPROJECT["project"]["scripts"].items()]


def test_files_contain_no_local_paths():
    parts = ("dasksc", "tests", "benchmarks", "examples", "docs", "recipe")
    listed = [*ROOT.glob("*"), *(path for part in parts for path in (ROOT / part).rglob("*"))]
    place = re.compile(r"/" + r"home/\w+/|/" + r"root/|/" + r"Users/\w+/|index" + r"-url\s*=")
    found = []
    for path in listed:
        if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".json", ""} and path.is_file():
            found += [f"{path}: {match[0]}" for match in place.finditer(path.read_text())]
    assert found == []


PUBLIC = (
    *("dasksc", "dasksc.datasets", "dasksc.readers", "dasksc.transforms", "dasksc.tokens", "dasksc.experimental"),
    "dasksc.train",
    "dasksc.integrations.data_module",
)


def public_names(module_name: str) -> Iterator[str]:
    """Yield the import names of the public functions and classes of a module, and of their methods and properties."""
    module = importlib.import_module(module_name)
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.ismodule(thing) or not callable(thing):
            continue
        yield f"{module_name}.{name}"
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    yield f"{module_name}.{name}.{member}"


# Parametrized by module, since listing the names of a module would import it in every pytest worker.
@pytest.mark.parametrize("module_name", PUBLIC)
def test_public_docstrings_follow_numpydoc(module_name):
    validate = pytest.importorskip("numpydoc.validate").validate
    found = {}
    for name in public_names(module_name):
        excluded = set(PYPROJECT["tool"]["numpydoc_validation"]["checks"]) - {"all"}
        module, _, owner = name.rpartition(".")[0].rpartition(".")
        if inspect.isclass(getattr(sys.modules.get(module), owner, None)):
            excluded |= {"PR01", "RT01"}  # a method with a one-line docstring needs no sections
        found[name] = [error for error in validate(name)["errors"] if error[0] not in excluded]
    assert found
    assert {name: errors for name, errors in found.items() if errors} == {}


# `lint-imports` checks the layers, which are contracts in pyproject.toml.
def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("dasksc", cache_dir=None)
    # Public names come from the top-level package, which imports their modules on first access.
    arrows = {name: graph.find_modules_directly_imported_by(name) - {"dasksc"} for name in graph.modules - {"dasksc"}}
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows) > 100
