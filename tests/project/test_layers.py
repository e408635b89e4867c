"""Layers of the package and the imports that each may make; docs/architecture.md gives the reasons."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dasksc
from tests.support.programs import ROOT

pytestmark = pytest.mark.core

PACKAGE = Path(dasksc.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Subpackages and modules of the package, lowest layer first. Each imports only from those before it.
ROOMS = [
    "errors",
    "platforms",
    "config",
    "displays",
    "_compat",  # adapters to private names of other libraries
    "kernels",
    "multiindexable",
    "sampling",
    "planning",
    "storage",
    "memory",
    "pushdown",
    "atlas",
    "executor",
    "batches",
    "transforms",
    "loader",
    "summaries",
    "inspection",
    "datasets",
    "output",
    "conversion",
    "inference",
    "dashboard",
    "integrations",
    "dataset",  # modules that users import by these names
    "experimental",
    "tokens",
    "train",
    "cli",  # entry point of all programs
    "__main__",
    "__init__",
]
ON_TOP = ROOMS[ROOMS.index("conversion") :]  # programs that use the public names

# Subpackages that may import a library at import time, and those that may import it only inside a function.
LIBRARIES = {
    "torch": (
        {"batches", "transforms", "loader", "inference", "integrations", "train"},
        {"planning", "multiindexable", "cli"},
    ),
    "h5py": ({"storage", "atlas", "inspection", "conversion", "inference", "datasets"}, set()),
    "zarr": ({"storage", "atlas", "inspection", "conversion", "inference", "datasets"}, {"cli"}),
    "numcodecs": ({"storage", "output"}, set()),
    "anndata": (
        {"atlas", "loader", "summaries", "inspection", "output", "conversion", "inference", "datasets", "cli"},
        {"transforms", "multiindexable"},
    ),
    "numba": ({"kernels"}, set()),
    "distributed": ({"dashboard"}, {"atlas", "executor", "loader", "inspection", "conversion"}),
    "dask": (
        {
            *("config", "memory", "pushdown", "atlas", "executor", "batches"),
            *("loader", "summaries", "inspection", "output", "conversion", "inference", "dashboard", "cli"),
        },
        set(),
    ),
}
# Distribution names of libraries that differ from their import names.
PIP_NAMES = {
    "backports": "backports.zstd",
    "google_crc32c": "google-crc32c",
    "distributed": "dask",  # dask[distributed]
    "yaml": "pyyaml",
    "scdataset": "scDataset",
    "scvi": "scvi-tools",
    "skmisc": "scikit-misc",
}
# Optional libraries, which the package imports on demand, and the extra that installs each.
IN_EXTRAS = {
    "lightning": "lightning",
    "matplotlib": "train",
    "obstore": "remote",
    "prometheus_client": "dashboard",
    "pydantic": "train",
    "scdataset": "bench",
    "scvi": "scvi",
    "skmisc": "hvg",
    "tqdm": "demo",
    "transformers": "transformers",
}
# Optional libraries without an extra, which are used only if the user has installed them.
USERS_OWN = {"annbatch", "bionemo", "hdf5plugin", "pytorch_lightning"}
# Subpackages that are imported only on request.
OPTIONAL_ROOMS = {"train", "integrations"}
# This folder is used only with a Client, so it may import the dependencies of a Client.
DISTRIBUTED_ONLY = "executor/cluster/"


class Import(NamedTuple):
    """Imported module: ``dasksc.pushdown``, ``torch``, ...

    `when` is "load" (when the file is imported), "call" (inside a function) or "types" (only for
    annotations).
    """

    file: str
    line: int
    name: str
    when: str

    @property
    def room(self) -> str:
        return Path(self.file).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"dasksc/{self.file}:{self.line} imports {self.name}"


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Yield every import in a file of the package."""

    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, when)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"dasksc/{file}:{node.lineno}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module == "dasksc" else str(node.module)
                yield Import(file, node.lineno, name, when)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, "types")
            for child in node.orelse:
                yield from walk(child, when)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, "call" if inside else when)

    yield from walk(ast.parse(source), "load")


def package_files() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def wrong_arrows(files: dict[str, str]) -> list[str]:
    """Return the imports in which a subpackage imports a higher one."""
    rooms = {Path(file).parts[0].removesuffix(".py") for file in files}
    wrong = []
    for arrow in (i for file, source in files.items() for i in imports_of(source, file)):
        if arrow.name.split(".")[0] != "dasksc":
            continue
        parts = arrow.name.split(".")
        target = parts[1] if len(parts) > 1 and parts[1] in rooms else "__init__"
        allowed = target == "__init__" if arrow.room in ON_TOP[:-1] else False
        if not allowed and ROOMS.index(target) > ROOMS.index(arrow.room):
            wrong.append(str(arrow))
    return wrong


def wrong_libraries(files: dict[str, str]) -> list[str]:
    """Return the imports of a library in subpackages that may not use it."""
    wrong = []
    for arrow in (i for file, source in files.items() for i in imports_of(source, file)):
        library = arrow.name.split(".")[0]
        if arrow.room == "_compat":
            # A module of _compat imports only the library after which it is named; test_compat.py checks which of these
            # modules may do so at import time.
            if library in LIBRARIES and library != Path(arrow.file).stem:
                wrong.append(f"{arrow} ({arrow.when})")
            continue
        if library not in LIBRARIES or arrow.when == "types" or arrow.room == "__init__":
            continue
        always, when_called = LIBRARIES[library]
        fine = arrow.room in always or (arrow.when == "call" and arrow.room in when_called)
        if not fine and not (library == "distributed" and arrow.file.startswith(DISTRIBUTED_ONLY)):
            wrong.append(f"{arrow} ({arrow.when})")
    return wrong


def modules(files: dict[str, str]) -> dict[str, str]:
    """Return the source of each module by its name."""
    return {
        ".".join(["dasksc", *Path(file).with_suffix("").parts]).removesuffix(".__init__"): source
        for file, source in files.items()
    }


def module_arrows(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, at import time or later."""
    sources = modules(files)
    arrows: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    deeper = f"{node.module}.{alias.name}"
                    arrows[name].add(deeper if deeper in sources else str(node.module))
            elif isinstance(node, ast.Import):
                arrows[name] |= {alias.name for alias in node.names}
        # Public names come from the top-level package, which imports their modules on first access.
        arrows[name] = {target for target in arrows[name] if target in sources} - {"dasksc", name}
    return arrows


def circles(files: dict[str, str]) -> list[str]:
    """Return cycles of imports between modules."""
    try:
        list(TopologicalSorter(module_arrows(files)).static_order())
    except CycleError as circle:
        return [" <- ".join(circle.args[1])]
    return []


def private_names_of_others(files: dict[str, str]) -> list[str]:
    """Return the uses of names with a leading underscore that belong to a module of another package."""
    sources = modules(files)
    wrong = []
    for file, source in files.items():
        package = Path(file).parts[0].removesuffix(".py")
        imported: dict[str, str] = {}
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "dasksc":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported[alias.asname or alias.name] = full
                    is_private = alias.name.startswith("_") and not alias.name.endswith("__")
                    if is_private and full not in sources and full.split(".")[1] != package:
                        wrong.append(f"dasksc/{file}:{node.lineno} imports {full}")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            full = imported.get(node.value.id, "")
            is_private = node.attr.startswith("_") and not node.attr.endswith("__")
            if is_private and full and full.split(".")[1] != package:
                wrong.append(f"dasksc/{file}:{node.lineno} uses {full}.{node.attr}")
    return wrong


def test_no_modules_import_each_other_in_a_circle():
    assert circles(package_files()) == []


def test_no_package_uses_private_names_of_another():
    assert private_names_of_others(package_files()) == []


def test_no_module_has_the_name_of_a_function_of_its_package():
    """Importing a module ``dasksc.convert`` would replace the function ``dasksc.convert``."""
    names = modules(package_files())
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    assert {"dasksc", "dasksc.conversion"} <= packages
    for package in packages:
        module = importlib.import_module(package)
        functions = {name for name in getattr(module, "__all__", ()) if inspect.isfunction(getattr(module, name))}
        assert not functions & {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == package}


def test_circles_and_private_names_are_found():
    assert circles({"a.py": "import dasksc.b", "b.py": "def f():\n    from dasksc.a import x"})
    assert not circles({"a.py": "from dasksc.b import x", "b.py": ""})
    assert private_names_of_others({"a.py": "from dasksc.b import _x"})
    assert private_names_of_others({"a.py": "from dasksc import b\nb._x()"})
    assert not private_names_of_others({"a/c.py": "from dasksc.a.b import _x"})


def test_every_module_has_a_layer():
    rooms = {Path(file).parts[0].removesuffix(".py") for file in package_files()}
    assert rooms <= set(ROOMS), f"give these a place in ROOMS: {sorted(rooms - set(ROOMS))}"


def test_no_import_points_upward():
    assert wrong_arrows(package_files()) == []


def test_libraries_are_imported_only_where_they_belong():
    assert wrong_libraries(package_files()) == []


def undeclared(files: dict[str, str], project: dict[str, Any]) -> list[str]:
    """Return the imports of libraries that neither a dependency nor the matching extra declares."""

    def names(lines: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(line).name) for line in lines}

    needed, extras = names(project["dependencies"]), project["optional-dependencies"]
    wrong = []
    for arrow in (i for file, source in files.items() for i in imports_of(source, file)):
        library = arrow.name.split(".")[0]
        name = canonicalize_name(PIP_NAMES.get(library, library))
        if library in sys.stdlib_module_names | {"dasksc", "compression"} or name in needed or arrow.when == "types":
            continue
        is_late = arrow.when == "call" or arrow.room in OPTIONAL_ROOMS
        is_brought = library in IN_EXTRAS and name in names(extras[IN_EXTRAS[library]])
        if not (is_late and (is_brought or library in USERS_OWN)):
            wrong.append(f"{arrow} ({arrow.when})")
    return wrong


def test_every_library_that_is_imported_is_declared():
    assert undeclared(package_files(), PROJECT) == []


def test_every_dependency_is_imported():
    libraries = {i.name.split(".")[0] for file, source in package_files().items() for i in imports_of(source, file)}
    imported = {canonicalize_name(PIP_NAMES.get(library, library)) for library in libraries}
    assert {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]} <= imported


def decorators(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", []):
            yield node.lineno, ast.unparse(decorator)


def test_compiled_functions_live_in_kernels():
    for file, source in package_files().items():
        if not file.startswith("kernels/"):
            for line, decorator in decorators(source):
                assert not re.search(r"jit|vectorize|stencil|\bkernel\b", decorator), f"dasksc/{file}:{line}"


def test_kernels_are_serial_and_release_the_gil():
    files = {file: source for file, source in package_files().items() if file.startswith("kernels/")}
    how = files.pop("kernels/compiled.py")
    assert "njit(nogil=True)" in how
    assert "parallel" not in how
    for file, source in files.items():
        for line, decorator in decorators(source):
            assert decorator in {"kernel", "intrinsic"}, f"dasksc/{file}:{line}: @{decorator}"


@pytest.mark.parametrize(
    "source",
    [
        "import dasksc.loader",
        "import dasksc",
        "from dasksc import pushdown",
        "from dasksc import scDataset",
        "from dasksc.executor.tasks import FetchMatrices",
        "def later():\n    from dasksc.planning.plan import EpochPlan",
        "if TYPE_CHECKING:\n    from dasksc.planning.plan import EpochPlan",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_written(source):
    files = {"sampling.py": source} | {f"{room}.py": "" for room in ROOMS if room != "sampling"}
    files["executor/tasks.py"] = files.pop("executor.py")
    assert len(wrong_arrows(files)) == 1
    (arrow,) = wrong_arrows(files)
    assert arrow.startswith("dasksc/sampling.py:")


def test_an_undeclared_library_is_found():
    declared = {"dependencies": ["pyyaml>=6"], "optional-dependencies": PROJECT["optional-dependencies"]}
    assert not undeclared({"planning/plan.py": "import yaml"}, declared)
    assert undeclared({"planning/plan.py": "import toolz"}, declared)
    # A library of an extra may be imported only inside functions, and only if it is listed with that extra.
    assert undeclared({"planning/plan.py": "import tqdm"}, declared)
    assert not undeclared({"planning/plan.py": "def f():\n    import tqdm"}, declared)
    assert undeclared({"planning/plan.py": "def f():\n    import bokeh"}, declared)
    without = declared | {"optional-dependencies": {"demo": []}}
    assert undeclared({"planning/plan.py": "def f():\n    import tqdm"}, without)
    assert undeclared({"planning/plan.py": "import psutil"}, declared)
    assert undeclared({"planning/plan.py": "def f():\n    import psutil"}, declared)
    assert not undeclared({"train/config.py": "import pydantic"}, declared)
    assert not undeclared({"planning/plan.py": "if TYPE_CHECKING:\n    import toolz"}, declared)


def test_a_misplaced_library_is_found():
    assert wrong_libraries({"planning/plan.py": "import torch"})
    assert wrong_libraries({"sampling/draws.py": "def f():\n    import torch"})
    assert wrong_libraries({"planning/ranks.py": "import torch.distributed as dist"})
    assert not wrong_libraries({"planning/ranks.py": "def f():\n    import torch.distributed as dist"})
    assert wrong_libraries({"executor/local.py": "import distributed"})
    assert wrong_libraries({"_compat/dask.py": "def f():\n    import torch"})
    assert not wrong_libraries({"_compat/dask.py": "import dask"})
    assert not wrong_libraries({"executor/cluster/runner.py": "import distributed"})
    assert wrong_libraries({"batches/batch.py": "from numba import njit"})
