"""Data sent between a rank and its Dask workers, and the check that both see the same files."""

from __future__ import annotations

import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import dask.array as da
import distributed
import numpy as np
import pytest
import scipy.sparse as sp
from dask.sizeof import sizeof
from distributed.protocol import deserialize, serialize

import dasksc
from dasksc.errors import InputError
from dasksc.executor.cluster import file_visibility, plugin
from dasksc.executor.schedulers import resolve_scheduler
from dasksc.executor.tasks import FetchedMatrices, FetchMatrices
from dasksc.executor.window import Window
from dasksc.storage import as_matrix, join, open_matrix
from tests.support.data import make_adata, make_values, write_store

pytestmark = pytest.mark.programs

ROWS = np.arange(5, 45, dtype=np.int64)


@pytest.fixture
def client(two_process_client: distributed.Client) -> distributed.Client:
    return two_process_client


def same_rows(one: Any, other: Any) -> None:
    assert (one.shape, one.dtype, one.layout, one.label) == (other.shape, other.dtype, other.layout, other.label)
    np.testing.assert_array_equal(one.rows, other.rows)
    order = np.random.default_rng(0).permutation(one.shape[0])
    out, expected = np.empty((2, *one.shape), dtype=np.float64)
    one.gather(order, out=out)
    other.gather(order, out=expected)
    np.testing.assert_array_equal(out, expected)


def address(array: Any) -> int:
    return np.frombuffer(array, dtype=np.uint8).__array_interface__["data"][0]


# Blocks


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_a_block_holds_the_same_rows_and_is_made_once(layout: Any, dtype: Any) -> None:
    fetched = as_matrix(make_values(60, 17, layout=layout, dtype=dtype), "m").fetch(ROWS)
    compact = fetched.compact()
    assert compact.compact() is compact
    same_rows(compact, fetched)


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_dasks_serializer_sends_and_receives_a_block_without_copies(layout: Any) -> None:
    fetched = as_matrix(make_values(60, 17, layout=layout), "m").fetch(ROWS).compact()
    header, frames = serialize(FetchedMatrices({"X": fetched, "layers/a": fetched}))
    assert header["serializer"] == "dask"
    sent = {address(frame) for frame in frames}
    arrays = [fetched.rows, *fetched.block] if layout == "csr" else [fetched.rows, fetched.block]
    assert sent == {address(array.reshape(-1).view(np.uint8)) for array in arrays}
    arrived = [bytearray(frame) for frame in frames]
    back = deserialize(header, arrived).parts["X"]
    same_rows(back, fetched)
    assert back.compact() is back
    block = back.block[2] if layout == "csr" else back.block.reshape(-1)
    assert address(block.view(np.uint8)) in {address(frame) for frame in arrived}


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_blocks_that_are_not_compact_are_sent_too(layout: Any) -> None:
    fetched = as_matrix(make_values(60, 17, layout=layout), "m").fetch(ROWS)
    same_rows(deserialize(*serialize(fetched)), fetched)
    same_rows(pickle.loads(pickle.dumps(fetched)), fetched)


@pytest.mark.parametrize(
    ("n_vars", "expected"), [(2**16, np.uint16), (2**16 + 1, np.int32)], ids=["fits two bytes", "does not"]
)
def test_column_numbers_take_two_bytes_where_that_is_enough(n_vars: int, expected: Any) -> None:
    values = np.zeros((4, n_vars), dtype=np.float32)
    values[1, [0, n_vars - 1]] = 7.5
    compact = as_matrix(sp.csr_matrix(values), "m").fetch(np.arange(4)).compact()
    assert compact.block[1].dtype == expected
    assert compact.block[2].dtype == np.float32
    assert compact.block[1].max() == n_vars - 1


# Each data type with each width in which its counts can be sent. The largest counts lie on both sides of the limits of
# one byte and two bytes.
@pytest.mark.parametrize(
    ("dtype", "largest", "expected"),
    [
        (np.float32, 255, np.uint8),
        (np.float32, 256, np.uint16),
        (np.float32, 65_535, np.uint16),
        (np.float32, 65_536, None),
        (np.float64, 255, np.uint8),
        (np.float64, 65_535, np.uint16),
        (np.float64, 65_536, None),
        (np.int64, 255, np.uint8),
        (np.int64, 256, np.uint16),
        (np.int64, 65_536, None),
        (np.uint16, 255, np.uint8),
        (np.uint16, 65_535, np.uint16),
    ],
)
def test_counts_take_one_or_two_bytes_and_come_back_in_their_type(dtype: Any, largest: int, expected: Any) -> None:
    values = np.tile(np.array([[0, 1, 2, 77, largest]], dtype=dtype), (4, 1))
    fetched = as_matrix(sp.csr_matrix(values), "m").fetch(np.arange(4))
    compact = deserialize(*serialize(fetched.compact()))
    assert compact.block[2].dtype == (dtype if expected is None else expected)
    assert compact.dtype == dtype
    same_rows(compact, fetched)
    assert compact.gather_csr(np.arange(4))[2].dtype == dtype


@pytest.mark.parametrize("odd", [0.5, -1, -0.0, np.nan, np.inf])
def test_values_that_are_no_counts_travel_as_they_are(odd: float) -> None:
    values = sp.csr_matrix(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32))
    values.data[3] = odd
    fetched = as_matrix(values, "m").fetch(np.arange(2))
    compact = fetched.compact()
    assert compact.block[2].tobytes() == values.data.tobytes()
    dense = np.empty((2, 3), dtype=np.float32)
    compact.gather(np.arange(2), out=dense)
    assert dense.tobytes() == values.toarray().tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, ">f4"])
def test_duplicate_counts_are_summed_after_compaction_as_before(dtype: Any) -> None:
    twice = sp.csr_matrix((np.array([200, 200, 3], dtype=np.float32), [1, 1, 2], [0, 3]), shape=(1, 5))
    fetched = as_matrix(twice, "m").fetch(np.arange(1))
    compact = fetched.compact()
    assert compact.block[2].dtype == np.uint8
    for one in (fetched, compact):
        out = np.zeros((1, 5), dtype)
        if dtype is np.uint8:
            with pytest.raises(InputError, match="holds 400.*'uint8' cannot hold"):
                one.gather(np.arange(1), out=out)
        else:
            one.gather(np.arange(1), out=out)
            np.testing.assert_array_equal(out, [[0, 400, 3, 0, 0]])


def test_parts_of_a_fetch_may_hold_counts_of_other_widths() -> None:
    values = np.ones((6, 5), dtype=np.float32)
    values[4, 2] = 1_000
    values[5, 1] = 0.5
    matrix = as_matrix(sp.csr_matrix(values), "m")
    parts = [matrix.fetch(np.arange(i, i + 2)) for i in (0, 2, 4)]
    compact = [part.compact() for part in parts]
    assert [part.block[2].dtype for part in compact] == [np.uint8, np.uint8, np.float32]
    same_rows(join(compact), join(parts))


def test_a_block_weighs_what_it_holds_and_a_mapped_fetch_nothing(tmp_path: Path) -> None:
    path = write_store(make_adata(n_obs=200, n_vars=300), tmp_path, "h5ad")
    fetched = open_matrix(str(path), "X").fetch(np.arange(200))
    compact = fetched.compact()
    _, indices, data = compact.block
    assert sizeof(compact) == compact.nbytes == indices.nbytes + data.nbytes
    assert sizeof((0.5, FetchedMatrices({"X": compact}))) >= compact.nbytes
    assert sizeof(fetched) == fetched.nbytes < compact.nbytes / 10


def test_empty_fetches_travel() -> None:
    fetched = as_matrix(make_values(60, 17), "m").fetch(np.arange(0)).compact()
    same_rows(deserialize(*serialize(fetched)), fetched)


def test_workers_hold_and_send_narrow_csr_and_the_rank_makes_it_dense(
    client: distributed.Client, tmp_path: Path
) -> None:
    adata = make_adata(n_obs=400, n_vars=250, dtype=np.float32)
    path = write_store(adata, tmp_path, "h5ad")
    arrived: list[FetchedMatrices] = []
    loaded = plugin.transport._load_matrices
    headers: list[dict[str, Any]] = []

    def load(header: dict[str, Any], frames: Any) -> FetchedMatrices:
        headers.append(header)
        arrived.append(loaded(header, frames))
        return arrived[-1]

    distributed.protocol.dask_deserialize.register(FetchedMatrices)(load)
    try:
        options = {"batch_size": 50, "fetch_factor": 2, "seed": 0}
        dataset = dasksc.scDataset(path, dasksc.BlockShuffling(5), scheduler=client, **options)
        batches = list(dataset)
    finally:
        distributed.protocol.dask_deserialize.register(FetchedMatrices)(loaded)
    assert len(arrived) == 4
    for fetched in arrived:
        indptr, indices, data = fetched.parts["X"].block
        assert (indices.dtype, data.dtype) == (np.uint16, np.float32)
        assert fetched.nbytes == 6 * len(data) < 100 * 250 * 4 / 2
        assert len(indptr) == 101
    expected = dasksc.scDataset(path, dasksc.BlockShuffling(5), scheduler="synchronous", **options)
    for batch, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch.numpy(), other.numpy())
    # No block is pickled, neither by the workers nor by the rank: all headers name the serializer family dask.
    assert all(part["serializer"] == "dask" for header in headers for part in header["headers"])


def test_a_memory_bound_counts_what_workers_send_not_what_is_mapped(client: distributed.Client, tmp_path: Path) -> None:
    path = write_store(make_adata(n_obs=2000, n_vars=300), tmp_path, "h5ad")

    def needed(scheduler: Any) -> int:
        dataset = dasksc.scDataset(
            path, dasksc.Streaming(), batch_size=200, fetch_factor=5, prefetch=2, scheduler=scheduler, seed=0
        )
        return dataset.projected_bytes

    stored = 2000 * 300 * 0.3 * 8
    assert needed(client) - needed("threads") > stored


# Tasks


@pytest.mark.parametrize("value", [None, 0, False, (), "text"])
def test_whatever_a_task_returns_is_its_result(client: distributed.Client, value: Any) -> None:
    window = Window(Returning(value), range(5), name="returning", depth=3, scheduler=resolve_scheduler(client))
    with window:
        assert [result for _, result in window] == [value] * 5


def test_tasks_with_small_results_run_concurrently_on_a_worker() -> None:
    with (
        # Over TCP, even within this process, tasks and results are serialized as for a worker process.
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        Window(Meeting(), range(5), name="meeting", depth=4, scheduler=resolve_scheduler(client)) as window,
    ):
        assert [result for _, result in window] == [None, 1, 1, 1, 1]


class Meeting:
    """Task that waits until a second task runs at the same time; task 0 does not wait."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.barrier = threading.Barrier(2, timeout=8)  # below the 10 s after which a fetch starts despite low memory

    def __call__(self, k: int) -> int | None:
        if k == 0:
            return None
        assert self.barrier is not None
        self.barrier.wait()
        return 1


class Returning:
    """Task that returns a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, k: int) -> Any:
        return self.value


# Files


def files_of(*matrices: Any) -> set[str]:
    _, files = file_visibility.pickle_with_files(FetchMatrices({str(i): matrix for i, matrix in enumerate(matrices)}))
    return {file.identity.path for file in files}


@pytest.mark.parametrize("format", ["h5ad", "zarr2", "zarr3"])
def test_the_files_behind_a_task_are_found(tmp_path: Path, format: str) -> None:
    path = write_store(make_adata(), tmp_path, format)
    found = files_of(open_matrix(str(path), "X"))
    assert found
    assert all(Path(one).is_absolute() for one in found)
    assert all(str(path) in one for one in found)


def test_the_files_behind_array_code_and_joined_files_are_found(tmp_path: Path) -> None:
    one = write_store(make_adata(), tmp_path, "h5ad", "one")
    two = write_store(make_adata(), tmp_path, "h5ad", "two")
    arrays = [dasksc.open(path).X for path in (one, two)]
    matrix = dasksc.pushdown.matrix_of(da.log1p(da.concatenate(arrays)))
    assert files_of(matrix) == {str(one), str(two)}
    pickled, _ = file_visibility.pickle_with_files(FetchMatrices({"X": matrix}))
    assert pickle.loads(pickled).matrices["X"].shape == (120, 17)


def test_a_relative_path_means_the_same_file_to_workers(
    client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(make_adata(), tmp_path, "h5ad")
    monkeypatch.chdir(tmp_path)
    dataset = dasksc.scDataset("atlas.h5ad", dasksc.Streaming(), batch_size=10, scheduler=client, seed=0)
    assert len(list(dataset)) == 6


def test_a_fingerprint_says_how_a_file_differs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100_000)
    mine = file_visibility.Fingerprint.of(str(path))
    assert file_visibility.describe_mismatch([mine, mine]) is None
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.utime(path, ns=(0, 0))
    assert "a different modification time" in str(file_visibility.describe_mismatch([mine]))
    path.write_bytes(b"a" * 99_999 + b"b")
    os.utime(path, ns=times)
    assert "a different file" in str(file_visibility.describe_mismatch([mine]))
    path.unlink()
    assert f"does not see {path} (No such file or directory)" in str(file_visibility.describe_mismatch([mine]))


def hide(path: str) -> None:
    """Hide `path` from this process."""
    from dasksc.executor.cluster import file_visibility

    of = file_visibility.Fingerprint.of

    def hidden(requested: str) -> Any:
        if requested == path:
            raise FileNotFoundError(2, "No such file or directory", path)
        return of(requested)

    file_visibility.Fingerprint.of = hidden
    file_visibility.Fingerprint._of = of


def show() -> None:
    """Make all paths visible to this process again."""
    from dasksc.executor.cluster import file_visibility

    if hasattr(file_visibility.Fingerprint, "_of"):
        file_visibility.Fingerprint.of = file_visibility.Fingerprint._of
        del file_visibility.Fingerprint._of


def test_a_worker_that_joins_and_does_not_see_the_file_is_named(tmp_path: Path) -> None:
    path = write_store(make_adata(n_obs=1200), tmp_path, "h5ad")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        data = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, fetch_factor=1, prefetch=2, scheduler=client)
        batches = iter(data)
        next(batches)
        hide(str(path))  # from this process and workers that join; the first worker has already checked
        try:
            cluster.scale(2)
            client.wait_for_workers(2, timeout=60)
            (joined,) = [address for address, one in client.scheduler_info()["workers"].items() if one["name"] != 0]
            with pytest.raises(dasksc.FetchError, match=f"{re.escape(joined)} does not see"):
                list(batches)
        finally:
            show()


def test_results_come_straight_from_the_workers(
    client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def through_the_scheduler(**_: Any) -> None:
        raise AssertionError("the scheduler was asked for a result")

    monkeypatch.setattr(client.scheduler, "gather", through_the_scheduler, raising=False)
    path = write_store(make_adata(n_obs=600), tmp_path, "h5ad")
    data = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, fetch_factor=4, scheduler=client)
    assert sum(len(batch) for batch in data) == 600


def test_a_worker_that_does_not_see_the_file_is_named_before_the_first_fetch(
    client: distributed.Client, tmp_path: Path
) -> None:
    path = write_store(make_adata(), tmp_path, "h5ad")
    blind, sighted = client.scheduler_info()["workers"]
    client.run(hide, str(path), workers=[blind])
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, scheduler=client, seed=0)
    try:
        with pytest.raises(dasksc.StorageError, match="1 of 2 workers") as caught:
            next(iter(dataset))
    finally:
        client.run(show)
    assert blind in str(caught.value)
    assert sighted not in str(caught.value)
    assert f"does not see {path}" in str(caught.value)
    assert len(list(dataset)) == 6


def test_workers_are_asked_once(client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(make_adata(), tmp_path, "h5ad")
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, scheduler=client, seed=0)
    list(dataset)
    monkeypatch.setattr(client, "run", None)
    assert len(list(dataset)) == 6
