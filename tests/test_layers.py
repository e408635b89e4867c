"""The rooms of the package: who may import whom. docs/architecture.md says why."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dasksc

pytestmark = pytest.mark.core

PACKAGE = Path(dasksc.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

# Lowest first: a room imports from rooms before it, never from one after it.
ROOMS = [
    "errors",
    "platforms",
    "config",
    "process_memory",
    "kernels",
    "multiindexable",
    "world",
    "epoch",
    "mixing",
    "sampling",
    "plan",
    "progress",
    "storage",
    "memory_model",
    "reading",
    "lazy",
    "concat",
    "parts",
    "collection",
    "modalities",
    "filtering",
    "splitting",
    "window",
    "ahead",
    "batch",
    "transforms",
    "tokens",
    "loader",
    "dataset",
    "dryrun",
    "description",
    "experimental",
    "conversion",
    "dashboard",
    "integrations",
    "train",
    "cli",  # the way in to all programs
    "__main__",
    "__init__",
]
ON_TOP = ROOMS[ROOMS.index("conversion") :]  # programs that use the public names

# Which rooms may import a library when they are imported, and which only inside a function.
LIBRARIES = {
    "torch": (
        {"batch", "transforms", "tokens", "loader", "integrations", "train"},
        {"world", "multiindexable", "cli"},
    ),
    "h5py": ({"storage", "collection", "description", "conversion"}, set()),
    "zarr": ({"storage", "collection", "description", "conversion"}, {"cli"}),
    "numcodecs": ({"storage", "conversion"}, set()),
    "anndata": (
        {"concat", "collection", "modalities", "filtering", "loader", "description", "conversion", "cli"},
        {"transforms", "multiindexable", "experimental"},
    ),
    "numba": ({"kernels"}, set()),
    "distributed": ({"dashboard"}, {"collection", "window", "loader", "experimental", "conversion"}),
    "dask": (
        {
            "config",
            "reading",
            "lazy",
            "concat",
            "collection",
            "modalities",
            "window",
            "batch",
            "loader",
            "dryrun",
            "description",
            "experimental",
            "conversion",
            "dashboard",
            "cli",
        },
        set(),
    ),
}
# What pip calls a library that is imported by another name.
PIP_NAMES = {
    "backports": "backports.zstd",
    "google_crc32c": "google-crc32c",
    "distributed": "dask",  # dask[distributed]
    "yaml": "pyyaml",
    "scdataset": "scDataset",
    "scvi": "scvi-tools",
}
# Libraries that the package does without until somebody asks for what needs them, and the extra that brings each.
IN_EXTRAS = {
    "lightning": "lightning",
    "matplotlib": "train",
    "obstore": "remote",
    "prometheus_client": "dashboard",
    "pydantic": "train",
    "scdataset": "bench",
    "scvi": "scvi",
    "tqdm": "demo",
    "transformers": "transformers",
}
# Those that no extra brings, since they are used only where the user has them.
USERS_OWN = {"annbatch", "bionemo", "hdf5plugin", "pytorch_lightning"}
# Rooms that are imported only by who asks for them.
OPTIONAL_ROOMS = {"train", "integrations"}
# Chosen only once a Client is there, so it may import what a Client needs.
DISTRIBUTED_ONLY = {"window/cluster.py", "window/blocks.py", "window/heartbeats.py", "window/start.py"}


class Import(NamedTuple):
    """One imported module: ``dasksc.lazy``, ``torch``, ...

    `when` is "load" (as the file is imported), "call" (inside a function) or "types" (only for
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
    """Every import in a file of the package."""

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
    """Imports that point from a room to one above it."""
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
    """Imports of a library from a room that should not know it."""
    wrong = []
    for arrow in (i for file, source in files.items() for i in imports_of(source, file)):
        library = arrow.name.split(".")[0]
        if library not in LIBRARIES or arrow.when == "types" or arrow.room == "__init__":
            continue
        always, when_called = LIBRARIES[library]
        fine = arrow.room in always or (arrow.when == "call" and arrow.room in when_called)
        if not fine and not (library == "distributed" and arrow.file in DISTRIBUTED_ONLY):
            wrong.append(f"{arrow} ({arrow.when})")
    return wrong


def test_every_module_has_a_room():
    rooms = {Path(file).parts[0].removesuffix(".py") for file in package_files()}
    assert rooms <= set(ROOMS), f"give these a place in ROOMS: {sorted(rooms - set(ROOMS))}"


def test_no_import_points_upward():
    assert wrong_arrows(package_files()) == []


def test_libraries_are_imported_only_where_they_belong():
    assert wrong_libraries(package_files()) == []


def undeclared(files: dict[str, str], project: dict[str, Any]) -> list[str]:
    """Imports of libraries that `pip install` with the extra they belong to need not bring."""

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
        "import dasksc.dataset",
        "import dasksc",
        "from dasksc import lazy",
        "from dasksc import scDataset",
        "from dasksc.window.tasks import FetchMatrices",
        "def later():\n    from dasksc.plan import EpochPlan",
        "if TYPE_CHECKING:\n    from dasksc.plan import EpochPlan",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_written(source):
    files = {"sampling.py": source} | {f"{room}.py": "" for room in ROOMS if room != "sampling"}
    files["window/tasks.py"] = files.pop("window.py")
    assert len(wrong_arrows(files)) == 1
    (arrow,) = wrong_arrows(files)
    assert arrow.startswith("dasksc/sampling.py:")


def test_an_undeclared_library_is_found():
    declared = {"dependencies": ["pyyaml>=6"], "optional-dependencies": PROJECT["optional-dependencies"]}
    assert not undeclared({"plan.py": "import yaml"}, declared)
    assert undeclared({"plan.py": "import toolz"}, declared)
    # An extra is no reason to import it without one, nor is another extra that has it.
    assert undeclared({"plan.py": "import tqdm"}, declared)
    assert not undeclared({"plan.py": "def f():\n    import tqdm"}, declared)
    assert undeclared({"plan.py": "def f():\n    import bokeh"}, declared)
    without = declared | {"optional-dependencies": {"demo": []}}
    assert undeclared({"plan.py": "def f():\n    import tqdm"}, without)
    assert undeclared({"plan.py": "import psutil"}, declared)
    assert undeclared({"plan.py": "def f():\n    import psutil"}, declared)
    assert not undeclared({"train/config.py": "import pydantic"}, declared)
    assert not undeclared({"plan.py": "if TYPE_CHECKING:\n    import toolz"}, declared)


def test_a_misplaced_library_is_found():
    assert wrong_libraries({"plan.py": "import torch"})
    assert wrong_libraries({"plan.py": "def f():\n    import torch"})
    assert wrong_libraries({"world.py": "import torch.distributed as dist"})
    assert not wrong_libraries({"world.py": "def f():\n    import torch.distributed as dist"})
    assert wrong_libraries({"window/local.py": "import distributed"})
    assert not wrong_libraries({"window/cluster.py": "import distributed"})
    assert wrong_libraries({"batch.py": "from numba import njit"})
