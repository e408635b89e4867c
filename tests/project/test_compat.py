"""Private names of other libraries: only ``dasksc/_compat`` uses them, and a missing one causes an error or warning."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dasksc
from dasksc._compat import unsupported
from dasksc._compat.torch import check_training
from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, optional

pytestmark = pytest.mark.core

PACKAGE = Path(dasksc.__file__).parent

# Modules without an underscore whose names are not documented.
INTERNAL = {
    *("dask.array.chunk", "dask.array.core", "dask.array.optimization", "dask.array.slicing", "dask.blockwise"),
    *("dask.core", "dask.local", "dask.optimization"),
    *("distributed.client", "distributed.comm", "distributed.core", "distributed.dashboard", "distributed.http"),
    *("distributed.scheduler", "distributed.utils", "distributed.worker"),
    *("jax.interpreters", "numba.core", "zarr.core"),
    *("torch.distributed.checkpoint.api", "torch.distributed.checkpoint.filesystem"),
    *("torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint.state_dict_saver"),
    *("torch.distributed.distributed_c10d", "torch.distributed.elastic.multiprocessing.api"),
    *("torch.utils.data.dataloader",),
}

# Private or undocumented attributes of objects of other libraries.
ATTRIBUTES = {
    *("_oidx", "_vidx"),  # AnnData
    *("_cached_dict", "_meta", "io_deps", "new_axes", "output_indices"),  # Dask
    *("_instances", "_scheduler_identity", "_start_arg", "asyncio_loop", "get_connection_args", "get_process_memory"),
    *("http_application", "http_server", "memory_manager", "memory_pause_fraction"),
    *("memory_spill_fraction", "memory_target_fraction", "task_metadata", "total_nthreads", "worker_plugins"),
    *("_fetch_range", "_get_kwargs_from_urls", "_parent", "_strip_protocol"),  # fsspec
    *("global_state",),  # JAX
    *("_cache_path", "_impl"),  # numba
    *("_has_canonical_format", "_has_sorted_indices"),  # SciPy
    *("_get_default_store", "distributed_c10d", "auto_collation"),  # PyTorch
    *("codec_config",),  # zarr-python
}
# Private attributes that exist in dasksc and in other libraries: allowed only on `self` and `cls`, as attributes of
# dasksc's own classes.
NOT_ON_OTHERS = {"_cache"}
# Remote methods of the scheduler that a Client can call.
QUESTIONS = {"get_metadata", "identity", "processing", "who_has"}
# Prefixes of modules whose private names may occur as strings.
MODULES_IN_TEXT = ("dask.", "scanpy._", "torch.distributed.distributed_c10d", "jax._src")

# Modules of _compat that import their library on first use.
LATE = {"anndata", "distributed", "fsspec", "jax", "scanpy", "torch"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_foreign(module: str) -> bool:
    library = module.split(".")[0]
    return library != "dasksc" and library not in sys.stdlib_module_names


def is_internal(module: str) -> bool:
    return any(map(is_private, module.split("."))) or any(f"{module}.".startswith(f"{one}.") for one in INTERNAL)


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every use of another library's private names in a file."""
    tree = ast.parse(source)
    foreign: dict[str, str] = {}  # what the names in the file refer to
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    root = alias.name.split(".")[0]
                    foreign[alias.asname or root] = alias.name if alias.asname else root
                    if is_internal(alias.name):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and is_foreign(str(node.module)):
            for alias in node.names:
                foreign[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_internal(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of, rest = root_and_rest(node)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            asks = isinstance(node.value, ast.Attribute | ast.Name) and ast.unparse(node.value).split(".")[-1]
            if (
                node.attr in ATTRIBUTES
                or (of in foreign and is_internal(f"{foreign[of]}.{rest}"))
                or (node.attr in NOT_ON_OTHERS and not own)
                or (asks == "scheduler" and node.attr in QUESTIONS)
            ):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            text = node.value
            if text in ATTRIBUTES or (text.startswith(MODULES_IN_TEXT) and is_internal(text)):
                yield node.lineno, repr(text)


def root_and_rest(node: ast.expr) -> tuple[str, str]:
    """Return the name at the start of a chain of attributes, or an empty string, and the attributes."""
    rest: list[str] = []
    while isinstance(node, ast.Attribute):
        rest.insert(0, node.attr)
        node = node.value
    return node.id if isinstance(node, ast.Name) else "", ".".join(rest)


def test_private_names_of_other_libraries_are_used_in_compat_only():
    wrong = [
        f"dasksc/{path.relative_to(PACKAGE)}:{line} uses {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "_compat"
        for line, what in private_uses(path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "from dask._task_spec import Task",
        "from dask import _task_spec",
        "def f():\n    import zarr.core.buffer",
        "from zarr.codecs._v2 import V2Codec",
        "from torch.utils.data.dataloader import default_collate",
        "from dask.array import chunk",
        "import torch.distributed as dist\ndist._get()",
        "import dask.array as da\nda.core.getter",
        "from numba import njit\nnjit._x",
        "import torch\ntorch.nn._x",
        "rows = adata._oidx",
        "meta = array._meta",
        "dispatcher._cache = 1",
        "setattr(block, '_has_canonical_format', True)",
        "async def f(client):\n    await client.scheduler.identity()",
        "async def f(self):\n    await self._client.scheduler.who_has(keys=[])",
        "async def f(scheduler):\n    await scheduler.identity(n_workers=0)",
        "modules['jax._src.distributed']",
        "NAMES = ('dask.array.core', '_concatenate2')",
    ],
)
def test_private_uses_are_found(source):
    assert list(private_uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "from dask.task_spec import Task",
        "from dasksc._compat.dask import chunk",
        "from zarr.abc.buffer import Buffer",
        "import numpy as np\nnp.__version__",
        "import os\nos._exit(1)",
        "class A:\n    def f(self):\n        return self._cache, self._private",
        "window.scheduler.kind, client.scheduler.address",
        '"""Says what _oidx is."""',
    ],
)
def test_uses_of_public_names_are_not_found(source):
    assert not list(private_uses(source))


def test_compat_imports_optional_libraries_only_on_use():
    names = sorted(f"dasksc._compat.{name}" for name in LATE)
    program = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\nprint(sorted(sys.modules))"
    loaded = ast.literal_eval(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.decode()
    )
    assert not {"dask", "distributed", "torch", "anndata", "zarr", "numba", "fsspec", "jax", "scanpy"} & set(loaded)


def test_a_missing_attribute_names_the_version():
    with pytest.raises(UnsupportedVersionError, match=r"^dask \d.* has no .*unsupported.gone, which dasksc needs"):
        attribute(unsupported, "gone", library="dask")
    assert attribute(unsupported, "logger", library="dask") is unsupported.logger


def test_an_error_inside_a_property_is_not_a_missing_attribute():
    class Mistaken:
        @property
        def value(self) -> object:
            return None.nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="nothing"):
        attribute(Mistaken(), "value", library="dask")


def test_a_missing_name_names_the_version():
    with pytest.raises(UnsupportedVersionError, match=r"^dask \d.*no_such_module"), needed("dask"):
        import dask.no_such_module  # noqa: F401
    with pytest.raises(UnsupportedVersionError, match=r"^dask \d.*no_such_name"), needed("dask"):
        from dask.base import no_such_name  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needed("dask"):
        import no_such_library
    with pytest.raises(ModuleNotFoundError), needed("no_such_library"):
        import no_such_library  # noqa: F401


def test_names_that_are_imported_late():
    get = late_names("dask", "here", {"tokenize": ("dask.base", "tokenize"), "gone": ("dask.base", "gone")})
    assert get("tokenize").__name__ == "tokenize"
    with pytest.raises(UnsupportedVersionError, match="gone"):
        get("gone")
    with pytest.raises(AttributeError, match="'here' has no attribute 'other'"):
        get("other")


def test_what_is_optional_is_missed_once(caplog, monkeypatch):
    monkeypatch.setattr(unsupported, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="dasksc.compat"):
        for _ in range(2):
            assert optional("dask", "dask.array.core", "gone", without="it is slow") is None
        assert optional("dask", "dask.array.gone", "gone", without="it is slow") is None
    assert [record.getMessage().endswith("it is slow.") for record in caplog.records] == [True, True]
    assert "dask.array.core.gone" in caplog.text


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git", "2.13.0+cpu", "3.0.0"])
def test_training_is_refused_with_a_torch_in_which_it_is_wrong(version: str) -> None:
    check_training(version)
    for old in ("2.8.0", "2.6.0+cu124", "1.13.1"):
        with pytest.raises(UnsupportedVersionError, match="working FSDP checkpoints .fixed in torch 2.9"):
            check_training(old)
