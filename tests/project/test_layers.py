"""Structure of the package that `lint-imports` does not check; the layers are contracts in pyproject.toml."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import dasksc

pytestmark = pytest.mark.core

PACKAGE = Path(dasksc.__file__).parent


def decorators(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each decorator in the files that match a pattern."""
    for path in sorted(PACKAGE.glob(folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", ast.unparse(decorator)


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("dasksc", cache_dir=None)
    # Public names come from the top-level package, which imports their modules on first access.
    arrows = {name: graph.find_modules_directly_imported_by(name) - {"dasksc"} for name in graph.modules - {"dasksc"}}
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows) > 100


def test_compiled_functions_live_in_kernels():
    compiled = [place for place, text in decorators("**/*.py") if re.search(r"jit|vectorize|stencil|\bkernel\b", text)]
    assert compiled
    assert [place for place in compiled if not place.startswith("kernels/")] == []


def test_kernels_are_serial_and_release_the_gil():
    how = (PACKAGE / "kernels" / "compiled.py").read_text()
    assert "njit(nogil=True)" in how
    assert "parallel" not in how
    found = [text for place, text in decorators("kernels/*.py") if not place.startswith("kernels/compiled.py")]
    assert set(found) <= {"kernel", "intrinsic"}
