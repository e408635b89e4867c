"""A converted atlas holds every cell of the input once, whatever happened on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from click.testing import CliRunner
from data import FORMATS, dense, make_adata, write_store
from distributed import Client
from numpy.typing import NDArray

import dasksc
from dasksc import cli, conversion
from dasksc.conversion import scanning, shards, staging, writing
from dasksc.conversion.workplace import Workplace
from dasksc.errors import CorruptDataError, InputError, MissingKeyError, StorageError

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "programs" / "convert_kills.py"


def read(path: Path) -> ad.AnnData:
    """The store as plain AnnData reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path)


def order_of(written: ad.AnnData, source: ad.AnnData) -> NDArray[np.int64]:
    """Which row of the source each row is: each once."""
    order = source.obs_names.get_indexer(written.obs_names)
    assert sorted(order) == list(range(source.n_obs))
    return order


def same(written: ad.AnnData, source: ad.AnnData) -> None:
    """All that is written is the source's, in the order of `written`."""
    order = order_of(written, source)
    assert np.array_equal(dense(written.X), dense(source.X)[order])
    for name, layer in source.layers.items():
        if name is not None:
            assert np.array_equal(dense(written.layers[name]), dense(layer)[order]), name
    assert set(written.obsm) == set(source.obsm)
    for name, array in source.obsm.items():
        if isinstance(array, pd.DataFrame):
            pd.testing.assert_frame_equal(written.obsm[name], array.iloc[order], check_dtype=False)
        else:
            assert np.array_equal(dense(written.obsm[name]), dense(array)[order]), name
    pd.testing.assert_frame_equal(
        written.obs.astype(object), source.obs.iloc[order].astype(object), check_dtype=False, check_categorical=False
    )
    for name in source.obs:
        if isinstance(source.obs[name].dtype, pd.CategoricalDtype):
            assert list(written.obs[name].cat.categories) == list(source.obs[name].cat.categories)
            assert written.obs[name].cat.ordered == source.obs[name].cat.ordered
    pd.testing.assert_frame_equal(written.var, source.var, check_dtype=False)
    assert set(written.varm) == set(source.varm)
    assert dict(written.uns) == dict(source.uns)


@pytest.fixture
def small_parts(monkeypatch):
    """Chunks, shards and tasks so small that a few cells make many."""
    monkeypatch.setattr(writing, "_CHUNK_VALUES", 64)
    monkeypatch.setattr(writing, "_INDPTR_CHUNK", 8)
    monkeypatch.setattr(writing, "_DENSE_CHUNK_BYTES", 200)
    monkeypatch.setattr(conversion, "_SCAN_ROWS", 7)
    monkeypatch.setattr(conversion, "_PIECE_VALUES", 40)
    # Of the loss of power no test knows, and each call waits for the disk.
    monkeypatch.setattr(shards, "sync", lambda file: None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.usefixtures("small_parts")
def test_every_cell_is_there_once_with_all_that_belongs_to_it(tmp_path, format, layout):
    source = make_adata(60, 17, layout=layout)
    path = write_store(source, tmp_path, format)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    report = dasksc.convert(path, tmp_path / "out.zarr", verify=True)
    assert (report.n_obs, report.n_vars, report.is_verified) == (60, 17, True)
    assert report.left_out == ("obsp/neighbours",)
    written = read(tmp_path / "out.zarr")
    same(written, source)
    assert not np.array_equal(order_of(written, source), np.arange(60))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([path.name, "out.zarr"])
    assert {file: file.read_bytes() for file in before} == before
    opened = dasksc.open(tmp_path / "out.zarr")
    assert np.array_equal(dense(opened.X.compute()), dense(written.X))
    assert np.array_equal(dense(opened.layers["scaled"].compute()), dense(written.layers["scaled"]))


def test_the_order_is_of_the_seed_and_no_two_seeds_agree(tmp_path):
    source = make_adata(60, 17)
    orders = []
    for i, seed in enumerate([0, 0, 1]):
        dasksc.convert(source, tmp_path / f"{i}.zarr", seed=seed)
        orders.append(order_of(read(tmp_path / f"{i}.zarr"), source).tolist())
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_cells_stay_where_they_are_if_asked_for(tmp_path):
    source = make_adata(60, 17)
    dasksc.convert(source, tmp_path / "out.zarr", order="keep", verify=True)
    assert order_of(read(tmp_path / "out.zarr"), source).tolist() == list(range(60))


@pytest.mark.parametrize("order", ["keep", "shuffle"])
def test_groups_are_together_in_the_order_of_their_categories(tmp_path, order):
    source = make_adata(60, 17)
    dasksc.convert(source, tmp_path / "out.zarr", order=order, group_by="cell_type_missing")
    written = read(tmp_path / "out.zarr")
    codes = written.obs["cell_type_missing"].cat.codes.to_numpy()
    n_missing = int((codes < 0).sum())
    assert n_missing > 0
    assert (codes[-n_missing:] == -1).all()
    assert (np.diff(codes[:-n_missing]) >= 0).all()
    positions = order_of(written, source)
    steps = np.diff(positions)[np.diff(codes) == 0]
    assert (steps > 0).all() == (order == "keep")
    same(written, source)


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.usefixtures("small_parts")
def test_a_shuffle_by_way_of_runs_is_the_same_shuffle(tmp_path, monkeypatch, layout, compression):
    source = make_adata(60, 17, layout=layout)
    path = tmp_path / "atlas.h5ad"
    source.write_h5ad(path, compression=compression)
    dasksc.convert(source, tmp_path / "direct.zarr", seed=3)
    monkeypatch.setattr(conversion, "_needs_runs", lambda matrix: True)
    runs = []
    monkeypatch.setattr(staging.Staging, "staged", _recording(staging.Staging.staged, runs))
    dasksc.convert(path, tmp_path / "runs.zarr", seed=3, memory_limit="2kB", verify=True)
    assert min(len(matrix._parts) for matrix in runs) > 3
    assert contents(tmp_path / "direct.zarr") == contents(tmp_path / "runs.zarr")
    same(read(tmp_path / "runs.zarr"), source)


def _recording(function: Any, results: list[Any]) -> Any:
    def call(*args: Any) -> Any:
        results.append(function(*args))
        return results[-1]

    return call


def contents(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


def test_compressed_files_go_by_way_of_runs_and_mapped_ones_do_not(tmp_path):
    source = make_adata(60, 17)
    for compression, expected in (("gzip", True), (None, False)):
        source.write_h5ad(tmp_path / "atlas.h5ad", compression=compression)
        matrix = conversion._matrices(dasksc.open(tmp_path / "atlas.h5ad"))["X"]
        assert conversion._needs_runs(matrix) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1, 255], dtype=np.float32), "uint8"),
        (np.array([1, 256], dtype=np.float64), "uint16"),
        (np.array([1, 65_536], dtype=np.int64), "uint32"),
        (np.array([1, 2**24], dtype=np.float32), "float32"),
        (np.array([1, 2**32], dtype=np.int64), "int64"),
        (np.array([1, -1], dtype=np.int32), "int32"),
        (np.array([1, 0.5], dtype=np.float32), "float32"),
        (np.array([1, np.nan], dtype=np.float32), "float32"),
        (np.array([1, np.inf], dtype=np.float64), "float64"),
        (np.array([1, -0.0], dtype=np.float32), "float32"),
        (np.array([1, 3], dtype=np.int8), "int8"),
        (np.array([True, True]), "bool"),
    ],
)
def test_values_take_the_narrowest_type_of_counts_that_holds_all_of_them(tmp_path, values, expected):
    X = sp.csr_matrix((values, np.array([0, 2]), np.array([0, 1, 1, 2])), shape=(3, 4))
    source = ad.AnnData(X=X, obs=pd.DataFrame(index=list("abc")), var=pd.DataFrame(index=list("wxyz")))
    report = dasksc.convert(source, tmp_path / "out.zarr", order="keep", verify=True)
    assert report.types == {"X": expected}
    written = zarr.open_group(tmp_path / "out.zarr", mode="r")["X"]
    assert written["data"].dtype == expected
    assert written["indices"].dtype == np.uint16
    stored = np.asarray(written["data"][:])
    assert np.array_equal(stored.astype(values.dtype), values, equal_nan=values.dtype.kind == "f")
    if values.dtype.kind == "f":
        assert np.array_equal(np.signbit(stored), np.signbit(values))


@pytest.mark.usefixtures("small_parts")
def test_types_are_kept_if_asked_for_and_scipy_may_then_work_in_place(tmp_path):
    source = make_adata(60, 17)
    source.X.data[3] = 0
    report = dasksc.convert(source, tmp_path / "out.zarr", narrow=False, verify=True)
    assert report.types["X"] == "float32"
    assert report.types["layers/counts"] == "int32"
    written = read(tmp_path / "out.zarr")
    assert {written.X.indices.dtype, written.X.indptr.dtype} == {np.dtype(np.int32)}
    same(written, source)
    written.X.eliminate_zeros()
    assert written.X.nnz == source.X.nnz - 1


def test_more_than_65536_genes_keep_wide_column_numbers(tmp_path):
    X = sp.csr_matrix(([1.0, 2.0], ([0, 1], [0, 65_536])), shape=(2, 65_537))
    obs, var = pd.DataFrame(index=["a", "b"]), pd.DataFrame(index=[f"g{i}" for i in range(65_537)])
    dasksc.convert(ad.AnnData(X=X, obs=obs, var=var), tmp_path / "out.zarr", order="keep", verify=True)
    assert zarr.open_array(tmp_path / "out.zarr" / "X" / "indices").dtype == np.int32
    assert (read(tmp_path / "out.zarr").X != X).nnz == 0


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (4, 5)])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_atlases_without_cells_genes_or_values_come_out_as_they_are(tmp_path, shape, layout):
    X: Any = np.zeros(shape, dtype=np.float32)
    obs = pd.DataFrame(index=[f"c{i}" for i in range(shape[0])])
    var = pd.DataFrame(index=[f"g{i}" for i in range(shape[1])])
    source = ad.AnnData(X=sp.csr_matrix(X) if layout == "csr" else X, obs=obs, var=var)
    dasksc.convert(source, tmp_path / "out.zarr", verify=True)
    written = read(tmp_path / "out.zarr")
    assert written.shape == shape
    assert np.array_equal(dense(written.X), X)


def test_raw_comes_too_and_an_atlas_may_lack_x(tmp_path):
    source = make_adata(30, 17)
    source.raw = source.copy()
    source.X = None
    dasksc.convert(source, tmp_path / "out.zarr", verify=True)
    written = read(tmp_path / "out.zarr")
    assert written.X is None
    order = order_of(written, source)
    assert np.array_equal(dense(written.raw.X), dense(source.raw.X)[order])
    assert list(written.raw.var_names) == list(source.raw.var_names)


@pytest.mark.filterwarnings("ignore:.*is of several types")
def test_several_inputs_become_one(tmp_path):
    parts = [make_adata(30, 17), make_adata(20, 11)]
    parts[1].obs_names = [f"other{i}" for i in range(20)]
    for i, part in enumerate(parts):
        del part.obsm["table"]
        part.write_h5ad(tmp_path / f"part{i}.h5ad")
    dasksc.convert(str(tmp_path / "part*.h5ad"), tmp_path / "out.zarr", join="outer", label="of", verify=True)
    written = read(tmp_path / "out.zarr")
    expected = ad.concat(parts, join="outer", label="of", keys=["part0", "part1"])
    order = order_of(written, expected)
    assert np.array_equal(dense(written.X), dense(expected.X)[order])
    assert list(written.obs["of"]) == list(expected.obs["of"].iloc[order])


def test_lazy_array_code_is_computed_on_the_way(tmp_path):
    import dask.array as da

    source = make_adata(30, 17)
    path = write_store(source, tmp_path, "h5ad")
    opened = dasksc.open(path)
    opened.X = da.log1p(opened.X)
    report = dasksc.convert(opened, tmp_path / "out.zarr", verify=True)
    assert report.types["X"] == "float32"
    written = read(tmp_path / "out.zarr")
    assert np.array_equal(dense(written.X), np.log1p(dense(source.X))[order_of(written, source)])


def test_it_runs_on_a_cluster(tmp_path):
    source = make_adata(60, 17)
    path = write_store(source, tmp_path, "h5ad")
    dasksc.convert(path, tmp_path / "threads.zarr", scheduler="threads")
    with Client(processes=False, dashboard_address=None, n_workers=2, threads_per_worker=1):
        dasksc.convert(path, tmp_path / "cluster.zarr", verify=True)
    assert contents(tmp_path / "threads.zarr") == contents(tmp_path / "cluster.zarr")
    dasksc.convert(path, tmp_path / "here.zarr", scheduler="synchronous")
    assert contents(tmp_path / "threads.zarr") == contents(tmp_path / "here.zarr")


# --- What goes wrong --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gzipped(tmp_path_factory):
    path = tmp_path_factory.mktemp("input") / "atlas.h5ad"
    source = make_adata(600, 40)
    small = ad.AnnData(X=source.X, obs=source.obs[["cell_type", "float32"]], var=source.var[[]])
    small.obsm["X_pca"] = source.obsm["X_pca"]
    small.write_h5ad(path, compression="gzip")
    return path


@pytest.mark.parametrize("how", ["steps", "moments"])
def test_a_killed_conversion_goes_on_to_the_same_store(tmp_path, gzipped, how):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(gzipped), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["n_kills"] >= 20
    stores = sorted(tmp_path.glob("*.zarr"))
    whole = contents(stores[0])
    assert [store.name for store in stores if contents(store) != whole] == []
    # A kill after the last step may leave the lock of a conversion that is done.
    assert [file for folder in tmp_path.glob("*.partial") for file in os.listdir(folder) if file != "lock"] == []
    same(read(stores[-1]), ad.read_h5ad(gzipped))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 192 KiB, and what gives it another size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> subprocess.CompletedProcess[str]:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    if shutil.which("mount") is None:
        pytest.skip("there is no mount to make a small file system with")
    if (done := mount("size=192k")).returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    try:
        yield folder, lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.usefixtures("small_parts")
def test_a_disk_that_is_full_is_told_and_what_is_written_is_kept(small_disk, gzipped, tmp_path):
    disk, resize = small_disk
    before = gzipped.read_bytes()
    out = disk / "out.zarr"
    with pytest.raises(StorageError, match="no space is left for .*out.zarr: about .* more will be needed") as told:
        dasksc.convert(gzipped, out)
    assert told.value.errno == errno.ENOSPC
    assert "run the same again to go on" in str(told.value)
    assert shutil.disk_usage(disk).free < 2**14
    assert gzipped.read_bytes() == before
    assert not out.exists()
    for place in (disk / "out.zarr.partial", disk / "out.zarr.partial" / "store"):
        with pytest.raises(StorageError):
            dasksc.open(place)
    assert resize("64m").returncode == 0
    dasksc.convert(gzipped, out, verify=True)
    dasksc.convert(gzipped, tmp_path / "elsewhere.zarr")
    assert contents(out) == contents(tmp_path / "elsewhere.zarr")
    assert os.listdir(disk) == ["out.zarr"]


@pytest.mark.usefixtures("small_parts")
def test_what_is_written_is_not_written_again(tmp_path, gzipped, monkeypatch):
    written: list[Path] = []
    write_chunk = shards.ShardWriter._write_chunk

    def full(self: shards.ShardWriter) -> None:
        if len(written) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(self._path)
        write_chunk(self)

    before = gzipped.read_bytes()
    monkeypatch.setattr(shards.ShardWriter, "_write_chunk", full)
    with pytest.raises(StorageError, match="no space is left for .*out.zarr: about .* more will be needed") as told:
        dasksc.convert(gzipped, tmp_path / "out.zarr")
    assert told.value.errno == errno.ENOSPC
    assert "run the same again to go on" in str(told.value)
    assert gzipped.read_bytes() == before
    assert not (tmp_path / "out.zarr").exists()
    with pytest.raises(StorageError):
        dasksc.open(tmp_path / "out.zarr.partial" / "store")
    there = {path for path in written if path.exists()}
    assert there
    again: list[Path] = []
    monkeypatch.setattr(shards.ShardWriter, "_write_chunk", lambda self: (again.append(self._path), write_chunk(self)))
    dasksc.convert(gzipped, tmp_path / "out.zarr", verify=True)
    assert not there & set(again)
    same(read(tmp_path / "out.zarr"), ad.read_h5ad(gzipped))


def test_ctrl_c_says_that_it_can_go_on(tmp_path, gzipped, monkeypatch):
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "write_tables", interrupted)
        shown = CliRunner().invoke(cli.group, ["convert", str(gzipped), str(tmp_path / "out.zarr")])
    assert shown.exit_code == 130
    assert "out.zarr.partial; the same again goes on with it" in shown.stderr
    shown = CliRunner().invoke(cli.group, ["convert", str(gzipped), str(tmp_path / "out.zarr")])
    assert shown.exit_code == 0
    same(read(tmp_path / "out.zarr"), ad.read_h5ad(gzipped))


def test_of_two_processes_one_is_refused_until_the_other_is_gone(tmp_path, gzipped):
    program = (
        "import sys, time; from pathlib import Path; from dasksc.conversion.workplace import Workplace\n"
        "with Workplace(Path(sys.argv[1])).locked():\n    print('locked', flush=True); time.sleep(60)"
    )
    target = tmp_path / "out.zarr"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(target)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(StorageError, match=f"out.zarr is being written by process {other.pid} on"):
            dasksc.convert(gzipped, target)
        other.send_signal(signal.SIGKILL)
    dasksc.convert(gzipped, target)
    same(read(target), ad.read_h5ad(gzipped))


def test_nothing_is_overwritten_unasked(tmp_path, gzipped):
    target = tmp_path / "out.zarr"
    dasksc.convert(gzipped, target, order="keep")
    with pytest.raises(InputError, match="out.zarr exists. Give another target, or overwrite=True"):
        dasksc.convert(gzipped, target)
    assert os.listdir(tmp_path) == ["out.zarr"]
    dasksc.convert(gzipped, target, overwrite=True)
    assert order_of(read(target), ad.read_h5ad(gzipped)).tolist() != list(range(600))
    folder = tmp_path / "notes"
    folder.mkdir()
    with pytest.raises(InputError, match="is no Zarr store, and is not overwritten"):
        dasksc.convert(gzipped, folder, overwrite=True)
    assert folder.exists()


def test_another_unfinished_conversion_is_neither_mixed_in_nor_dropped_unasked(tmp_path, gzipped, monkeypatch):
    target = tmp_path / "out.zarr"
    with monkeypatch.context() as patched:
        patched.setattr(conversion, "write_tables", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dasksc.convert(gzipped, target, seed=1)
    with pytest.raises(InputError, match="unfinished conversion that differs from this one in seed"):
        dasksc.convert(gzipped, target, seed=2)
    dasksc.convert(gzipped, target, seed=2, overwrite=True, verify=True)
    dasksc.convert(gzipped, tmp_path / "straight.zarr", seed=2)
    assert contents(target) == contents(tmp_path / "straight.zarr")


def test_an_input_that_changed_meanwhile_is_not_gone_on_with(tmp_path, monkeypatch):
    source = make_adata(60, 17)
    path = write_store(source, tmp_path, "h5ad")
    with monkeypatch.context() as patched:
        patched.setattr(conversion, "write_tables", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dasksc.convert(path, tmp_path / "out.zarr")
    make_adata(60, 17, dtype=np.int32).write_h5ad(path)
    with pytest.raises(InputError, match="differs from this one in inputs"):
        dasksc.convert(path, tmp_path / "out.zarr")


def test_a_target_may_not_be_an_input(tmp_path):
    path = write_store(make_adata(), tmp_path, "zarr3")
    for target in (path, path / "sub.zarr"):
        with pytest.raises(InputError, match="is, or lies in, the input"):
            dasksc.convert(path, target, overwrite=True)


def test_what_cannot_be_used_is_refused_before_anything_is_written(tmp_path):
    path = write_store(make_adata(), tmp_path, "h5ad")
    with pytest.raises(InputError, match="order='sorted' is neither"):
        dasksc.convert(path, tmp_path / "out.zarr", order="sorted")
    with pytest.raises(MissingKeyError, match="obs has no column 'cluster' to group by"):
        dasksc.convert(path, tmp_path / "out.zarr", group_by="cluster")
    with pytest.raises(InputError, match="'s3://bucket/out.zarr' is a URL"):
        dasksc.convert(path, "s3://bucket/out.zarr")
    with pytest.raises(StorageError, match="atlas.h5ad/out.zarr cannot be written: .*Not a directory"):
        dasksc.convert(path, path / "out.zarr")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["indices", "data"])
def test_verifying_finds_a_value_that_went_wrong(tmp_path, name, monkeypatch):
    append = shards.ShardWriter.append

    def wrong(self: shards.ShardWriter, rows: NDArray[Any]) -> None:
        if self._path.parent.parent.name == name and self._path.parents[2].name == "X":
            rows = rows.copy()
            rows[11] += 1
        append(self, rows)

    monkeypatch.setattr(shards.ShardWriter, "append", wrong)
    with pytest.raises(CorruptDataError, match="row [0-9]+ has (sum|checksum) .*, but the row of the input that it is"):
        dasksc.convert(make_adata(60, 17), tmp_path / "out.zarr", verify=True)
    assert not (tmp_path / "out.zarr").exists()


def test_verifying_finds_rows_in_the_wrong_place_and_a_table_that_went_wrong(tmp_path, monkeypatch):
    from dasksc.conversion import tables

    source = make_adata(60, 17)
    elements = tables._elements

    def shifted(adata: ad.AnnData, order: NDArray[np.int64]) -> Any:
        return elements(adata, np.roll(order, 1))

    monkeypatch.setattr(tables, "_elements", shifted)
    with pytest.raises(CorruptDataError, match="obs differs from the input's in cell_type, .* the names of the cells"):
        dasksc.convert(source, tmp_path / "out.zarr", verify=True)


# --- Its parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32", "int64", "float64", "bool", "float16"])
@pytest.mark.parametrize("shape", [(103,), (40, 3)])
def test_shards_are_read_by_zarr_python(tmp_path, dtype, shape):
    values = (np.arange(np.prod(shape)) % 7).astype(dtype).reshape(shape)
    array = shards.ShardedArray(shape=shape, dtype=np.dtype(dtype), chunk_rows=5, shard_rows=15)
    for k in range(array.n_shards):
        start, stop = array.rows(k)
        with shards.ShardWriter(array, tmp_path / "a", k) as to:
            for i in range(start, stop, 4):
                to.append(values[i : min(i + 4, stop)])
    array.write_metadata(tmp_path / "a", {"encoding-type": "array"})
    written = zarr.open_array(tmp_path / "a", mode="r")
    assert (written.chunks, written.shards) == ((5, *shape[1:]), (15, *shape[1:]))
    assert np.array_equal(written[:], values)


def test_a_shard_that_lacks_rows_does_not_appear(tmp_path):
    array = shards.ShardedArray(shape=(10,), dtype=np.dtype("u1"), chunk_rows=5, shard_rows=10)
    with pytest.raises(ValueError, match="3 rows are missing"), shards.ShardWriter(array, tmp_path, 0) as to:
        to.append(np.zeros(7))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_digests_tell_rows_apart_and_not_the_types_or_order_they_are_held_in():
    def digest(row: dict[int, float], dtype: str) -> tuple[int, float]:
        from dasksc.storage import as_matrix

        values = np.array(list(row.values())).astype(dtype)
        matrix = sp.csr_matrix((values, np.array(list(row)), [0, len(row)]), shape=(1, 9))
        (found,) = scanning.described(as_matrix(matrix, "m").fetch(np.array([0])), np.array([0]))
        return int(found["digest"]), float(found["sum"])

    one = digest({1: 3, 5: 200}, "float32")
    assert one == digest({5: 200, 1: 3}, "uint8") == digest({1: 3, 5: 200}, "int64")
    assert one[1] == 203
    others = [{1: 200, 5: 3}, {2: 3, 5: 200}, {1: 3}, {1: 3, 5: 200, 6: 0}, {1: 4, 5: 199}, {1: 3, 5: 200.5}]
    digests = {digest(other, "float64")[0] for other in [{1: 3, 5: 200}, *others]}
    assert len(digests) == 1 + len(others)


def test_the_lock_is_taken_anew_when_its_folder_is_gone(tmp_path):
    place = Workplace(tmp_path / "out.zarr")
    with place.locked():
        place.remove()
        with place.locked():
            pass


# --- The command ------------------------------------------------------------------------------------


def test_the_command_converts_and_reports_as_json(tmp_path):
    source = make_adata(60, 17)
    path = write_store(source, tmp_path, "h5ad")
    target = tmp_path / "out.zarr"
    shown = CliRunner().invoke(cli.group, ["convert", str(path), str(target), "--verify", "--json", "--no-progress"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert (report["n_obs"], report["n_vars"], report["is_verified"]) == (60, 17, True)
    assert report["n_bytes"] == sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    same(read(target), source)


def test_the_command_shows_progress_and_says_what_it_left_out(tmp_path):
    pytest.importorskip("tqdm")
    path = write_store(make_adata(60, 17), tmp_path, "h5ad")
    shown = CliRunner().invoke(cli.group, ["convert", str(path), str(tmp_path / "out.zarr"), "--progress"])
    assert shown.exit_code == 0, shown.output
    assert "writing" in shown.stderr
    assert "100%" in shown.stderr
    assert "60 cells x 17 genes" in shown.stdout
    assert "left out: obsp/neighbours" in shown.stdout


MEMORY_PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
import dasksc
from _machine import rss_anon_bytes

tiny, source, folder, limit = *map(Path, sys.argv[1:4]), int(sys.argv[4])
dasksc.convert(tiny, folder / "tiny.zarr", verify=True)
before = rss_anon_bytes()
peak, stop = before, threading.Event()

def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, rss_anon_bytes())

thread = threading.Thread(target=watch)
thread.start()
dasksc.convert(source, folder / "out.zarr", verify=True, memory_limit=limit)
stop.set()
thread.join()
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory from mapped pages")
def test_memory_stays_within_the_limit_whatever_the_size_of_the_input(tmp_path):
    limit = 40_000_000
    X = sp.random(6_000, 3_000, density=0.4, format="csr", dtype=np.float32, random_state=0)
    names = np.arange(6_000).astype(str)
    source = ad.AnnData(X=X, obs=pd.DataFrame(index=names), var=pd.DataFrame(index=names[:3_000]))
    source.write_h5ad(tmp_path / "atlas.h5ad", compression="gzip", compression_opts=1)
    source[:100].write_h5ad(tmp_path / "tiny.h5ad", compression="gzip")
    paths = [tmp_path / "tiny.h5ad", tmp_path / "atlas.h5ad", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, *map(str, paths), str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
    )
    assert done.returncode == 0, done.stderr
    n_bytes = X.nnz * 8
    # The interpreter and the tables take a little as well; what is not bounded would hold the matrix.
    assert int(done.stdout.splitlines()[-1]) < limit * 1.25 < n_bytes
