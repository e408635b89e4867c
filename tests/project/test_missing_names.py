"""Private names that a version of a library lacks: each causes an error that states the name, or a single warning."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any

import dask.array as da
import numba.core.caching
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

import dasksc
from dasksc._compat import (
    anndata,
    dask,
    distributed,
    fsspec,
    jax,
    numcodecs,
    torch,
    unsupported,
)
from dasksc._compat import (
    numba as numba_,
)
from dasksc._compat.unsupported import UnsupportedVersionError
from dasksc.kernels import compiled
from dasksc.pushdown import gather_block, matrix_of, to_dask
from dasksc.pushdown.rowlocal import compiler
from dasksc.storage import as_matrix
from tests.support.data import dense, make_values

pytestmark = pytest.mark.core

COMPAT = Path(dasksc.__file__).parent / "_compat"


@pytest.fixture(autouse=True)
def _said_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(unsupported, "_warned", set())
    caplog.set_level(logging.WARNING, logger="dasksc.compat")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dasksc.compat"]


def executed(name: str) -> Any:
    """Execute a module of ``_compat`` again and return it."""
    spec = importlib.util.spec_from_file_location(f"anew_{name}", COMPAT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Attributes that adapters read: library, adapter, object, and the dotted path of each attribute from the object.


def worker() -> Stub:
    shares = dict.fromkeys(["memory_limit", *(f"memory_{of}_fraction" for of in ("spill", "pause", "target"))], 0.5)
    return Stub(memory_manager=Stub(**shares), monitor=Stub(get_process_memory=lambda: 1), plugins={})


class Prefixes:
    """Mapping that returns its only value for every key.

    The value is also the attribute `known`, so that a dotted path in `READ` can name it.
    """

    def __init__(self) -> None:
        self.known = Stub(states={"released": 0, "waiting": 0})

    def get(self, name: str) -> Stub:
        return self.known


def scheduler() -> Stub:
    async def unregister_worker_plugin(comm: Any, name: str) -> None: ...

    return Stub(
        total_nthreads=2,
        worker_plugins={},
        unregister_worker_plugin=unregister_worker_plugin,
        handlers={},
        task_metadata={},
        task_prefixes=Prefixes(),
        http_application=Stub(add_handlers=lambda *_: None),
        http_server=Stub(address="127.0.0.1", port=1),
    )


def taken_back(scheduler: Any) -> None:
    async def run() -> None:
        await distributed.unregister_plugin(scheduler, "name")

    asyncio.run(run())


class Fetcher(_IterableDatasetFetcher):
    def __init__(self) -> None:
        self.auto_collation, self.collate_fn = True, None


def layer() -> Stub:
    return Stub(task=0, output_indices=(), new_axes={}, indices=(), io_deps={})


READ: list[tuple[str, Callable[[Any], Any], Callable[[], Any], list[str]]] = [
    ("anndata", anndata.selected_rows_and_columns, lambda: Stub(_oidx=0, _vidx=0), ["_oidx", "_vidx"]),
    ("dask", dask.meta_of, lambda: Stub(_meta=0), ["_meta"]),
    ("dask", dask.blockwise_task, layer, ["task"]),
    ("dask", dask.output_indices, layer, ["output_indices"]),
    ("dask", dask.new_axes, layer, ["new_axes"]),
    ("dask", dask.blockwise_inputs, layer, ["indices"]),
    ("dask", dask.block_locations, layer, ["io_deps"]),
    ("distributed", distributed.clients_of_process, lambda: Stub(Client=Stub(_instances=[])), ["Client._instances"]),
    ("distributed", distributed.given_address, lambda: Stub(_start_arg="tcp://"), ["_start_arg"]),
    ("distributed", distributed.event_loop, lambda: Stub(loop=Stub(asyncio_loop=0)), ["loop", "loop.asyncio_loop"]),
    (
        "distributed",
        distributed.memory_thresholds,
        worker,
        [
            "memory_manager",
            "memory_manager.memory_limit",
            "memory_manager.memory_spill_fraction",
            "memory_manager.memory_pause_fraction",
            "memory_manager.memory_target_fraction",
        ],
    ),
    ("distributed", distributed.process_memory, worker, ["monitor", "monitor.get_process_memory"]),
    ("distributed", lambda worker: distributed.task_plugin_of(worker, "name"), worker, ["plugins"]),
    ("distributed", distributed.n_threads_of, scheduler, ["total_nthreads"]),
    ("distributed", distributed.worker_plugin_names, scheduler, ["worker_plugins"]),
    ("distributed", taken_back, scheduler, ["unregister_worker_plugin"]),
    ("distributed", lambda it: distributed.add_operation(it, "name", print), scheduler, ["handlers"]),
    ("distributed", lambda it: distributed.announce(it, "name"), scheduler, ["task_metadata"]),
    (
        "distributed",
        lambda it: distributed.add_to_progress_panel(it, "name", n_released=1, n_waiting=2),
        scheduler,
        ["task_prefixes", "task_prefixes.known.states"],
    ),
    ("distributed", lambda it: distributed.add_pages(it, []), scheduler, ["http_application"]),
    ("distributed", distributed.http_address, scheduler, ["http_server.address", "http_server.port"]),
    (
        "distributed",
        lambda security: distributed.ssl_contexts(security, ["client"]),
        lambda: Stub(get_connection_args=lambda role: {"ssl_context": None}),
        ["get_connection_args"],
    ),
    ("fsspec", lambda kind: fsspec.path_in(kind, "s3://a"), lambda: Stub(_strip_protocol=str), ["_strip_protocol"]),
    (
        "fsspec",
        lambda kind: fsspec.options_in_url(kind, "s3://a"),
        lambda: Stub(_get_kwargs_from_urls=lambda url: {}),
        ["_get_kwargs_from_urls"],
    ),
    ("fsspec", lambda system: fsspec.parent_of(system, "a/b"), lambda: Stub(_parent=str), ["_parent"]),
    (
        "fsspec",
        lambda file: fsspec.range_of(file, 0, 1),
        lambda: Stub(_fetch_range=lambda start, stop: b"a"),
        ["_fetch_range"],
    ),
    (
        "numba",
        numba_.cache_location,
        lambda: Stub(_cache_path="folder", _impl=Stub(filename_base="name")),
        ["_cache_path", "_impl", "_impl.filename_base"],
    ),
    (
        "torch",
        torch.default_store,
        lambda: Stub(distributed_c10d=Stub(_get_default_store=lambda: 0)),
        ["distributed_c10d", "distributed_c10d._get_default_store"],
    ),
    ("torch", torch.is_stacking_fetcher, Fetcher, ["auto_collation", "collate_fn"]),
]


@pytest.mark.parametrize(
    ("library", "adapter", "owner", "path"),
    [pytest.param(*case, path, id=f"{case[0]}-{path}") for *case, paths in READ for path in paths],
)
def test_a_missing_attribute_raises(
    library: str, adapter: Callable[[Any], Any], owner: Callable[[], Any], path: str
) -> None:
    adapter(owner())
    lacking = holder = owner()
    *above, name = path.split(".")
    for part in above:
        holder = getattr(holder, part)
    delattr(holder, name)
    with pytest.raises(UnsupportedVersionError, match=rf"^{library} \d.* has no \w+\.{name}, which dasksc needs"):
        adapter(lacking)


# Names that are looked up in a module: source module, name, and the call that looks it up.
IMPORTED: list[tuple[str, str, Callable[[], Any]]] = [
    ("dask._task_spec", "convert_legacy_graph", lambda: executed("dask")),
    ("dask.core", "toposort", lambda: executed("dask")),
    ("dask.local", "get_sync", lambda: executed("dask")),
    ("dask.utils", "ensure_dict", lambda: executed("dask")),
    ("dask.blockwise", "Blockwise", lambda: dask.Blockwise),
    ("dask.array", "chunk", lambda: dask.chunk),
    ("distributed.comm", "CommClosedError", lambda: distributed.CommClosedError),
    ("distributed.client", "FutureCancelledError", lambda: distributed.FutureCancelledError),
    ("distributed.http.utils", "RequestHandler", lambda: distributed.RequestHandler),
    ("distributed.utils", "ensure_ip", lambda: distributed.ensure_ip),
    ("distributed.scheduler", "heartbeat_interval", lambda: distributed.heartbeat_interval),
    ("torch.utils.data", "default_collate", lambda: torch.is_stacking_fetcher(None)),
    ("torch.utils.data._utils.fetch", "_IterableDatasetFetcher", lambda: torch.is_stacking_fetcher(None)),
]


@pytest.mark.parametrize(("module", "name", "look_up"), IMPORTED, ids=lambda value: value if type(value) is str else "")
def test_a_missing_name_of_a_module_raises(
    module: str, name: str, look_up: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up()
    monkeypatch.delattr(importlib.import_module(module), name)
    library = module.partition(".")[0]
    with pytest.raises(UnsupportedVersionError, match=rf"^{library} \d.* has no .*\b{name}\b.*, which dasksc needs"):
        look_up()


def test_active_callbacks_raise_without_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dask.active_callbacks() == []
    monkeypatch.delattr(dask.Callback, "active")
    with pytest.raises(UnsupportedVersionError, match=r"^dask \d.* has no Callback.active"):
        dask.active_callbacks()


def test_page_names_need_the_list_or_no_dashboard_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    source = pytest.importorskip("distributed.dashboard.scheduler")
    monkeypatch.setattr(source, "template_variables", lambda scheduler: {"pages": ["status"]})
    assert distributed.page_names(None) == ["status"]
    monkeypatch.delattr(source, "template_variables")
    with pytest.raises(UnsupportedVersionError, match=r"^distributed \d.*template_variables"):
        distributed.page_names(None)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.delitem(sys.modules, "distributed.dashboard.scheduler")
    for name in [name for name in sys.modules if name.startswith("distributed.dashboard.")]:
        monkeypatch.delitem(sys.modules, name)
    assert distributed.page_names(None) == []


def test_an_index_of_a_shuffle_is_one_of_a_pair() -> None:
    assert dask.shuffled_index(("wrapped", [2, 0])) == [2, 0]
    for other in ([2, 0], ([2, 0],)):
        with pytest.raises(UnsupportedVersionError, match=r"^dask \d.* has no shuffle task of the expected format"):
            dask.shuffled_index(other)


def test_jax_needs_the_module_and_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.distributed", Stub(global_state="state", __name__="distributed"))
    assert jax.distributed_state() == "state"
    monkeypatch.setitem(sys.modules, "jax._src.distributed", Stub(__name__="distributed"))
    with pytest.raises(UnsupportedVersionError, match=r"^jax .* has no distributed.global_state"):
        jax.distributed_state()
    monkeypatch.delitem(sys.modules, "jax._src.distributed")
    with pytest.raises(UnsupportedVersionError, match=r"^jax .* has no module jax._src.distributed"):
        jax.distributed_state()


# Requests that a server answers with None if it does not support them.
REQUESTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("identity", distributed.workers_of),
    ("processing", lambda client: distributed.processing(client, [])),
    ("who_has", lambda client: distributed.holders(client, "key")),
    ("get_metadata", lambda client: distributed.metadata(client, "key", default=False)),
]


@pytest.mark.parametrize(("operation", "request_of"), REQUESTS, ids=[operation for operation, _ in REQUESTS])
def test_a_request_that_a_scheduler_does_not_know_raises(
    operation: str,
    request_of: Callable[[Any], Any],
    in_process_cluster: Any,
    in_process_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert in_process_client.sync(request_of, in_process_client) is not None
    monkeypatch.delitem(in_process_cluster.scheduler.handlers, operation)
    with pytest.raises(UnsupportedVersionError, match=rf"^distributed \d.* has no operation '{operation}'"):
        in_process_client.sync(request_of, in_process_client)


def test_a_request_that_a_worker_does_not_know_raises(
    in_process_cluster: Any, in_process_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = in_process_cluster.workers.values()
    assert in_process_client.sync(distributed.worker_identity, in_process_client, worker.address)["id"] == worker.id
    monkeypatch.delitem(worker.handlers, "identity")
    with pytest.raises(UnsupportedVersionError, match=r"^distributed \d.* has no operation 'identity'"):
        in_process_client.sync(distributed.worker_identity, in_process_client, worker.address)


# Names used only for speed: source module, name, and the call that looks it up.
FAST: list[tuple[str, str, Callable[[], tuple[Any, ...]]]] = [
    ("dask.array.core", "getter", dask.getters),
    ("dask.array.core", "getter_inline", dask.getters),
    ("dask.array.core", "getter_nofancy", dask.getters),
    ("dask.array._shuffle", "_getitem", dask.shuffle_functions),
    ("dask.array._shuffle", "concatenate_arrays", dask.shuffle_functions),
    ("dask.array.core", "concatenate_shaped", dask.concatenation_functions),
]
SELECTIONS: list[Callable[[da.Array], da.Array]] = [
    lambda x: da.log1p(x[5:50]),
    lambda x: x[::-3],
    lambda x: x[:, 2:9][10:],
    lambda x: da.log1p(x[np.array([3, 50, 2, 40, 3] * 5)]),
    lambda x: da.concatenate([x[:13], da.log1p(x[20:])]),
    lambda x: da.log1p(x).rechunk((7, 17)),
]


@pytest.mark.parametrize("gone", [False, True], ids=["name", "module"])
@pytest.mark.parametrize(("module", "name", "look_up"), FAST, ids=[name for _, name, _ in FAST])
def test_a_missing_name_used_for_speed_is_reported_once_and_rows_stay_right(
    module: str,
    name: str,
    look_up: Callable[[], tuple[Any, ...]],
    gone: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    complete = look_up()
    with monkeypatch.context() as patch:
        if gone:
            patch.setitem(sys.modules, module, None)
        else:
            patch.delattr(importlib.import_module(module), name)
        found = look_up()
        look_up()
        getters, shuffle = dask.getters(), dask.shuffle_functions()
        concatenation = dask.concatenation_functions()
    assert [one for one in complete if one not in found] == (
        [*complete] if gone else [getattr(importlib.import_module(module), name)]
    )
    messages = [message for message in warnings_in(caplog) if name in message or gone]
    assert len(messages) == len({*messages})
    assert f"dask {importlib.metadata.version('dask')} has no " in messages[0]
    assert f"{module}{'' if gone else '.' + name}" in messages[0]
    assert messages[0].endswith("Until then, Dask operations that select or shuffle rows are computed on whole chunks.")
    monkeypatch.setattr(compiler, "GETITEMS", (*compiler.GETITEMS[:2], *getters))
    monkeypatch.setattr(compiler, "CONCATENATE", concatenation)
    for at, function in zip(("shuffle_getitem", "concatenate_arrays"), shuffle, strict=True):
        monkeypatch.setattr(compiler, at, function)
    for layout in ("csr", "dense"):
        for select in SELECTIONS:
            array = select(to_dask(as_matrix(make_values(60, 17, layout=layout), "X"), chunk_rows=13))
            values, rows = dense(array.compute(scheduler="synchronous")), np.array([0, 3, 4, 11])
            block = gather_block(matrix_of(array).fetch(rows), np.arange(len(rows)))
            np.testing.assert_allclose(dense(block), values[rows], rtol=1e-6)


def test_without_anndatas_types_of_columns_tables_are_joined_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = [pd.DataFrame({"a": pd.Categorical([value])}) for value in "bc"]
    unified = anndata.unified_dtypes(tables)
    assert unified is not None
    assert [[*table["a"].cat.categories] for table in unified] == [["b", "c"], ["b", "c"]]
    monkeypatch.delattr("anndata._core.merge.unify_dtypes")
    assert anndata.unified_dtypes(tables) is None
    assert anndata.unified_dtypes(tables) is None
    (warning,) = warnings_in(caplog)
    assert "has no anndata._core.merge.unify_dtypes, which dasksc needs" in warning
    assert "takes 8 more bytes of memory per cell" in warning


def test_without_numbas_cache_kernels_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert executed("numba").can_cache()
    monkeypatch.delattr(numba.core.caching, "FunctionCache")
    assert not executed("numba").can_cache()
    executed("numba")
    (warning,) = warnings_in(caplog)
    assert "has no numba.core.caching.FunctionCache" in warning
    assert warning.endswith("Until then, kernels are compiled again in every process.")
    monkeypatch.setattr(compiled, "can_cache", lambda: False)
    assert compiled.kernel(lambda n: n + 1)(1) == 2


@pytest.mark.parametrize("name", ["_cache", "_cache_path", "_impl", "filename_base"])
def test_kernels_whose_cache_has_another_form_are_compiled_anew(name: str, caplog: pytest.LogCaptureFixture) -> None:
    locator = Stub(filename_base="name")
    cache = Stub(_cache_path="folder", _impl=locator)
    dispatcher = Stub(_cache=None)
    numba_.set_cache(dispatcher, lambda: numba_.cache_location(cache))
    assert dispatcher._cache == ("folder", "name")
    for owner in (dispatcher, cache, locator):
        vars(owner).pop(name, None)
    before = vars(dispatcher).get("_cache")
    for _ in range(2):
        numba_.set_cache(dispatcher, lambda: numba_.cache_location(cache))
    assert vars(dispatcher).get("_cache") == before
    (warning,) = warnings_in(caplog)
    assert f".{name}, which dasksc needs" in warning
    assert warning.endswith("Until then, kernels are compiled again in every process.")


@pytest.mark.skipif(sys.platform == "win32", reason="its wheels do not export the function")
def test_without_bloscs_function_chunks_are_decoded_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numcodecs.ctypes, "CDLL", lambda path: Stub())
    assert numcodecs.blosc_getitem_address() is None
    assert numcodecs.blosc_getitem_address() is None
    (warning,) = warnings_in(caplog)
    assert "has no function blosc_getitem in numcodecs.blosc" in warning
    assert warning.endswith("Until then, Blosc chunks are decoded whole.")


@pytest.mark.parametrize("name", ["_has_sorted_indices", "_has_canonical_format"])
def test_without_scipys_flags_column_numbers_are_looked_at_each_time(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(sp.csr_matrix):
        """Matrix that keeps an attribute under another name, as another version of SciPy may."""

        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__("other" if attribute == name else attribute, value)

    executed("scipy")
    assert warnings_in(caplog) == []
    monkeypatch.setattr(sp, "csr_matrix", Other)
    for _ in range(2):
        copy = executed("scipy").copy_flags
    (warning,) = warnings_in(caplog)
    assert f"has no csr_matrix.{name}, which dasksc needs" in warning
    assert warning.endswith("Until then, every Dask operation on sparse X checks all column indices.")
    copy(Other((1, 1)), to := sp.csr_array((1, 1)))
    assert name not in vars(to)


def test_without_its_threads_a_client_is_taken_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    assert distributed.known_n_threads(Stub(_scheduler_identity={"total_threads": 3})) == 3
    for _ in range(2):
        assert distributed.known_n_threads(Stub()) == 0
    (warning,) = warnings_in(caplog)
    assert "._scheduler_identity, which dasksc needs" in warning
    assert warning.endswith("Until then, the number of fetches in flight does not adapt to the number of workers.")


# Adapters used only to display progress and statistics: the place of use, and the consequence in the warning.
SHOWN = [
    ("dasksc.executor.local.active_callbacks", "Dask's profilers and progress bars see no fetches"),
    ("dasksc.executor.reporting.event_loop", "the loader page of the Dask dashboard shows nothing"),
    ("dasksc.executor.reporting.metadata", "the loader page of the Dask dashboard shows nothing"),
]


def lacking(*_: Any, **__: Any) -> Any:
    raise UnsupportedVersionError("dask", "such name")


@pytest.mark.parametrize(("place", "consequence"), SHOWN, ids=[place for place, _ in SHOWN])
def test_batches_stay_the_same_without_what_shows_figures(
    place: str,
    consequence: str,
    stores: Path,
    in_process_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    atlas = dasksc.open(stores / "csr.h5ad")

    def batches() -> list[NDArray[Any]]:
        scheduler = "threads" if "local" in place else in_process_client
        dataset = dasksc.scDataset(atlas, dasksc.BlockShuffling(), 16, scheduler=scheduler, seed=0)
        return [dense(batch) for _ in range(2) for batch in dataset]

    expected = batches()
    monkeypatch.setattr("dasksc.executor.reporting._RECHECK_S", 0.0)
    monkeypatch.setattr("dasksc.executor.reporting._states", weakref.WeakKeyDictionary())
    monkeypatch.setattr(place, lacking)
    assert warnings_in(caplog) == []
    for batch, same in zip(batches(), expected, strict=True):
        np.testing.assert_array_equal(batch, same)
    (warning,) = warnings_in(caplog)
    assert warning.endswith(f"Until then, {consequence}.")


@pytest.mark.parametrize("name", ["http_application", "handlers", "task_metadata"])
def test_a_scheduler_starts_without_the_loader_page(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("bokeh")
    from dasksc.dashboard import dask_setup

    of_another_version = scheduler()
    of_another_version.add_plugin = lambda *_, **__: None
    of_another_version.plugins = {}
    delattr(of_another_version, name)
    for _ in range(2):
        dask_setup(of_another_version)
    (warning,) = warnings_in(caplog)
    assert f".{name}, which dasksc needs" in warning
    assert warning.endswith("Until then, there is no loader page.")


def names_read(source: str) -> Iterator[str]:
    """Yield the library names that a module of ``_compat`` looks up, each of which may be missing."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "needed(" in ast.unparse(node.items[0]):
            for one in node.body:
                assert isinstance(one, ast.ImportFrom)
                yield from (alias.name for alias in one.names)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "late_names":
            yield from (pair[1] for pair in ast.literal_eval(node.args[2]).values())
        if called in ("attribute", "_get", "optional"):
            name = node.args[2 if called == "optional" else 1]
            if isinstance(name, ast.Constant):
                yield name.value
                continue
            (function,) = [one for one in functions if node in [*ast.walk(one)]]
            if function.name != "_get":
                items = [item for one in ast.walk(function) if isinstance(one, ast.Tuple) for item in one.elts]
                yield from (item.value for item in items if isinstance(getattr(item, "value", None), str))
        if called == "_answer":
            yield node.args[1].value


def test_every_name_is_missing_in_some_test() -> None:
    missed = {(library, path.split(".")[-1]) for library, *_, paths in READ for path in paths}
    missed |= {(module.partition(".")[0], name) for module, name, _ in (*IMPORTED, *FAST)}
    missed |= {("distributed", operation) for operation, _ in REQUESTS}
    # Names covered by tests that are not parametrized.
    missed |= {("dask", "active"), ("distributed", "template_variables"), ("distributed", "_scheduler_identity")}
    missed |= {("jax", "global_state"), ("numba", "FunctionCache"), ("numba", "_cache"), ("anndata", "unify_dtypes")}
    modules = [path for path in COMPAT.glob("*.py") if path.name != "unsupported.py"]
    assert {(path.stem, name) for path in modules for name in names_read(path.read_text())} == missed
