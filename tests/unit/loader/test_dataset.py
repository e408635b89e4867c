"""Values that a data set yields, in every layout, from every collection, on every scheduler."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import os
import pickle
import threading
import weakref
from itertools import islice

import anndata as ad
import cloudpickle
import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

import dasksc
from dasksc import BlockShuffling, FetchError, InputError, Streaming, scDataset
from dasksc._compat import without_collection
from tests.support.data import dense, make_adata, write_store

pytestmark = pytest.mark.core

N_OBS = 203


@pytest.fixture(scope="module")
def adata():
    return make_adata(N_OBS)


@pytest.fixture(scope="module")
def path(adata, tmp_path_factory):
    return write_store(adata, tmp_path_factory.mktemp("atlas"), "h5ad")


def dataset(data, **options) -> scDataset:
    options = {"strategy": BlockShuffling(4), "batch_size": 16, "fetch_factor": 3, "seed": 1, **options}
    return scDataset(data, **options)


# Pairwise combinations of format, storage of matrices and layout of batches.
@pytest.mark.parametrize(
    ("format", "stored", "layout"),
    [
        ("h5ad", "csr", "dense"),
        ("h5ad", "dense", "csr"),
        ("zarr2", "csr", "csr"),
        ("zarr2", "dense", "dense"),
        ("zarr3", "csr", "dense"),
        ("zarr3", "dense", "csr"),
    ],
)
def test_every_batch_holds_the_rows_its_index_names(tmp_path, format, stored, layout):
    adata = make_adata(N_OBS, layout=stored, has_everything=True)
    one = dataset(
        write_store(adata, tmp_path, format),
        layout=layout,
        obs=["cell_type", "cell_type_missing", "flag", "text", "float32", "int64"],
        layers=["counts", "scaled"],
        obsm=["X_pca", "sparse"],
    )
    seen = []
    for batch in one:
        rows = batch.index.numpy()
        seen += rows.tolist()
        is_csr = layout == "csr"
        for tensor, expected in [
            (batch.X, adata.X),
            (batch.layers["counts"], adata.layers["counts"]),
            (batch.layers["scaled"], adata.layers["scaled"]),
        ]:
            assert tensor.dtype == torch.float32
            assert (tensor.layout == torch.sparse_csr) is is_csr
            values = tensor.to_dense() if is_csr else tensor
            np.testing.assert_array_equal(values.numpy(), dense(expected)[rows].astype(np.float32))
        for name in ("X_pca", "sparse"):
            np.testing.assert_array_equal(batch.obsm[name].numpy(), dense(adata.obsm[name])[rows])
        for name in ("cell_type", "cell_type_missing"):
            assert batch.obs[name].dtype == torch.int64
            assert batch.obs[name].tolist() == adata.obs[name].cat.codes.to_numpy()[rows].tolist()
        assert batch.obs["flag"].dtype == torch.bool
        for name in ("flag", "float32", "int64"):
            assert batch.obs[name].tolist() == adata.obs[name].to_numpy()[rows].tolist()
        labels = one.categories["text"]
        assert [labels[code] for code in batch.obs["text"].tolist()] == adata.obs["text"].iloc[rows].tolist()
    assert sorted(seen) == list(range(N_OBS))
    assert one.categories["cell_type"] == list(adata.obs["cell_type"].cat.categories)
    assert (adata.obs["cell_type_missing"].cat.codes == -1).any()


@pytest.mark.parametrize("kind", ["category", "object"])
def test_labels_of_another_data_set_have_its_codes_and_others_minus_one(kind, caplog):
    obs = pd.DataFrame({"label": ["a", "c", None, "b", "a"]}, index=list("vwxyz"), dtype=kind)
    adata = ad.AnnData(X=np.eye(5, dtype=np.float32), obs=obs)
    options = {"obs": ["label"], "seed": 0}
    data = scDataset(adata, Streaming(), 5, **options, categories={"label": ["b", "a", "d"]})
    assert next(iter(data)).obs["label"].tolist() == [1, -1, -1, 0, 1]
    assert data.categories["label"] == ["b", "a", "d"]
    assert "'c'" in caplog.text
    with pytest.raises(InputError, match="other"):
        scDataset(adata, Streaming(), 5, **options, categories={"other": ["a"]})
    with pytest.raises(InputError, match="label"):
        scDataset(adata, Streaming(), 5, **options, categories={"label": ["a", "a"]})


@pytest.mark.parametrize(
    "source",
    [
        lambda adata, path: adata,
        lambda adata, path: path,
        lambda adata, path: str(path),
        lambda adata, path: dasksc.open(path),
        lambda adata, path: ad.read_h5ad(path, backed="r"),
        lambda adata, path: dasksc.open(path).X,
        lambda adata, path: da.from_array(adata.X.toarray(), chunks=(50, 17)),
        lambda adata, path: adata[adata.obs_names],
    ],
    ids=["in memory", "path", "string", "opened", "backed", "our Dask array", "any Dask array", "view"],
)
def test_every_kind_of_collection_gives_the_same_batches(adata, path, source):
    expected = [adata.X[rows].toarray() for rows in _batch_rows(dataset(path))]
    batches = list(dataset(source(adata, path)))
    assert all(type(batch) is torch.Tensor for batch in batches)
    assert len(batches) == len(expected)
    for batch, values in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(batch.numpy(), values)


def _batch_rows(one: scDataset) -> list[np.ndarray]:
    plan = one.plan(0)
    return [plan.batch_rows(i) for i in range(plan.n_batches)]


@pytest.mark.parametrize(
    ("genes", "layout"),
    [
        (["gene3", "gene0", "gene16"], "csr"),
        (np.array([3, 0, 16]), "dense"),
        (np.arange(17) % 3 == 1, "csr"),
        (slice(2, 9), "dense"),
    ],
    ids=["names", "positions", "mask", "slice"],
)
def test_genes_keeps_columns_in_the_order_asked_for(adata, path, genes, layout):
    kept = {"gene3": [3, 0, 16]}.get(genes[0]) if isinstance(genes, list) else np.arange(17)[genes]
    one = dataset(path, genes=genes, layout=layout, layers=["scaled"])
    for batch in one:
        rows = batch.index.numpy()
        for tensor, expected in ((batch.X, adata.X), (batch.layers["scaled"], adata.layers["scaled"])):
            np.testing.assert_array_equal(tensor.to_dense().numpy(), dense(expected)[rows][:, kept].astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), (torch.float16, torch.float16), (">i4", torch.int32)]
)
def test_dtype_is_that_of_the_values(adata, path, dtype, expected):
    for layout in ("dense", "csr"):
        batch = next(iter(dataset(path, dtype=dtype, layout=layout, strategy=Streaming())))
        assert batch.dtype == expected
        stored = adata.X[:16].toarray().astype(torch.empty(0, dtype=expected).numpy().dtype)
        np.testing.assert_array_equal(batch.to_dense().numpy(), stored)


def test_batches_that_are_kept_keep_their_values(adata, path):
    one = dataset(path, batch_size=4, fetch_factor=2)
    rows = _batch_rows(one)
    kept, views, arrays = [], [], []
    for i, batch in enumerate(one):
        (kept, views, arrays)[i % 3].append((rows[i], (batch, batch[1:], batch.numpy())[i % 3]))
        del batch
    gc.collect()
    for which, values in [*kept, *((w[1:], v) for w, v in views), *arrays]:
        np.testing.assert_array_equal(np.asarray(values), adata.X[which].toarray())


def test_hooks_run_in_order_and_one_at_a_time(path):
    running, calls = threading.Lock(), []

    def hook(name, function):
        def call(*arguments):
            assert running.acquire(blocking=False), "two hooks at once"
            try:
                calls.append(name)
                return function(*arguments)
            finally:
                running.release()

        return call

    one = dataset(
        path,
        fetch_callback=hook("fetch_callback", lambda data, rows: (np.diff(rows) >= 0).all() and data[rows]),
        fetch_transform=hook("fetch_transform", lambda adata: adata.X.toarray()),
        batch_callback=hook("batch_callback", lambda values, positions: values[positions]),
        batch_transform=hook("batch_transform", torch.from_numpy),
        prefetch=3,
    )
    batches = list(one)
    assert sum(map(len, batches)) == N_OBS
    assert calls[:2] == ["fetch_callback", "fetch_transform"]
    assert calls.count("fetch_callback") == calls.count("fetch_transform") == one.plan(0).n_fetches
    assert calls.count("batch_callback") == calls.count("batch_transform") == len(one)


def test_an_error_in_a_fetch_reaches_the_loop_with_file_fetch_and_rows(path):
    def broken(data, rows):
        if 150 in rows:
            raise ZeroDivisionError("mine")
        return data[rows].X.toarray()

    one = dataset(path, strategy=Streaming(), fetch_callback=broken)
    before: list[object] = []
    with pytest.raises(FetchError, match="epoch.*48.*144") as caught:
        before.extend(one)
    assert len(before) == 9  # all batches of the preceding fetches
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("hook", ["batch_callback", "batch_transform"])
def test_a_hook_that_raises_is_reported_with_its_batch_and_rows(hook):
    def broken(batch, positions=None):
        batch = batch if positions is None else batch[positions]
        if 77 in batch:
            raise ZeroDivisionError("mine")
        return batch

    one = scDataset(np.arange(100), BlockShuffling(4), 8, 2, seed=0, **{hook: broken})
    wrong = next(i for i in range(len(one)) if 77 in one.plan(0).batch_rows(i).tolist())
    rows = ", ".join(map(str, one.plan(0).batch_rows(wrong)))
    with pytest.raises(ZeroDivisionError) as caught:
        list(one)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"in batch {wrong} of 13 (epoch 0, rank 0 of 1), rows {rows}" in message


def test_an_error_keeps_no_batch_alive():
    seen = []

    def broken(batch):
        seen.append(weakref.ref(batch))
        raise ZeroDivisionError

    with without_collection():
        with contextlib.suppress(ZeroDivisionError):
            list(scDataset(ad.AnnData(np.eye(9)), transform=broken, seed=0))
        assert [one() for one in seen] == [None]


def test_after_a_hook_has_raised_the_data_set_goes_on_with_the_next_epoch():
    fails = [True]

    def sometimes(batch):
        if fails[0] and 50 in batch:
            raise ZeroDivisionError("mine")
        return batch

    one = scDataset(np.arange(100), BlockShuffling(4), 8, 2, seed=0, batch_transform=sometimes)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        list(one)
    assert set(threading.enumerate()) <= before
    fails[0] = False
    assert sorted(np.concatenate(list(one)).tolist()) == list(range(100))
    assert one.stats()["epoch"] == 1


@pytest.mark.parametrize("how", ["break", "close", "exception", "drop"])
def test_however_the_loop_ends_no_thread_stays(path, how):
    before = set(threading.enumerate())
    one = dataset(path, batch_size=2, fetch_factor=2, scheduler="threads")
    iterator = iter(one)
    next(iterator)
    if how == "break":
        for _ in one:
            break
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            sum(len(batch) // 0 for batch in one)
    iterator.close()
    del iterator
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_the_end_of_an_epoch_is_logged_but_not_that_of_one_left_early(caplog):
    caplog.set_level("INFO", "dasksc.loader")
    one = scDataset(np.arange(103), BlockShuffling(4), 5, 2, seed=3)
    assert len(list(islice(one, 2))) == 2
    assert one.stats()["n_rows"] == 10
    list(one)
    (line,) = [message for message in caplog.messages if message.startswith("epoch ")]
    assert line.startswith("epoch 1, rank 0 of 1: 103 rows in 21 batches, 0 padded, 0 dropped")


def test_progress_shows_a_bar_that_counts_batches(path, capfd):
    one = dataset(path, progress=True)
    list(one)
    text = capfd.readouterr().err
    assert "epoch 0" in text
    assert "13/13" in text
    stats = one.stats()
    assert text.rstrip().endswith(f"{stats['rows_per_s']:,.0f} cells/s, waited {stats['wait_share']:.0%}]")


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_to_dask_is_the_epoch_as_an_array_of_its_fetches(path, layout):
    one = dataset(path, layout=layout, genes=["gene2", "gene5"], rank=1, world_size=2)
    array = one.to_dask()
    assert array.shape == (one.plan(0).n_rank_rows, 2)
    assert array.chunks[0] == (48, 48, 6)
    computed = array.compute()
    assert sp.issparse(computed) is (layout == "csr")
    expected = np.concatenate([batch.to_dense().numpy() for batch in one])
    np.testing.assert_array_equal(dense(computed), expected)
    assert array.dtype == expected.dtype


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_to_dask_of_no_rows_is_an_empty_array(path, layout):
    one = dasksc.scDataset(path, dasksc.Streaming(indices=[]), layout=layout)
    assert one.to_dask().compute().shape == (0, one.to_dask().shape[1])


def test_nothing_of_x_is_read_before_the_first_batch_and_then_only_its_fetch(path, monkeypatch):
    from dasksc.storage.matrices import CSRMatrix

    fetches = []
    fetch = CSRMatrix.fetch

    def recorded(self, rows):
        fetches.append((self.label, len(rows)))
        return fetch(self, rows)

    monkeypatch.setattr(CSRMatrix, "fetch", recorded)
    adata = dasksc.open(path)
    one = scDataset(adata, BlockShuffling(4), batch_size=16, fetch_factor=3, seed=1, scheduler="synchronous")
    assert len(one) == 13
    assert fetches == []
    iterator = iter(one)
    next(iterator)
    assert fetches == [(f"{path}:/X", 48)]
    list(islice(iterator, 2))
    assert len(fetches) == 1
    next(iterator)
    assert len(fetches) == 2
    iterator.close()


def test_a_world_that_changes_after_it_was_settled_is_an_error(path, monkeypatch):
    one = dataset(path)
    assert len(one) == 13
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(dasksc.InputError, match="rank 0 of 1"):
        next(iter(one))


def test_looking_changes_nothing(path, monkeypatch):
    looks = [
        repr,
        str,
        hash,
        vars,
        dir,
        pickle.dumps,
        cloudpickle.dumps,
        copy.copy,
        copy.deepcopy,
        torch.utils.data.DataLoader,
        dasksc.check,
        lambda one: one == one,
        lambda one: one.state_dict(),
        lambda one: one.stats(),
        lambda one: one.plan().n_batches,
        lambda one: one.collection.obs,
        lambda one: one.to_dask(),
        lambda one: dasksc.diversity(one, "cell_type"),
        lambda one: one.load_state_dict(one.state_dict()),
        lambda one: [getattr(one, name) for name in dir(one)],  # as a debugger does
    ]
    looked, other = (dataset(path, obs=["cell_type"]) for _ in range(2))
    copies = [copied(looked) for copied in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))]
    for look in looks:
        look(looked)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for one in (looked, other, *copies):
        assert (one.rank, one.world_size, len(one)) == (1, 2, 7)
        assert one.state_dict() == other.state_dict()
    expected = [batch.index.tolist() for batch in other]
    for one in (looked, *copies):
        one.set_epoch(0)  # copies share the epoch counter
        assert [batch.index.tolist() for batch in one] == expected


def test_a_mapped_file_that_changes_after_it_was_fetched_ends_the_epoch(adata, tmp_path):
    path = write_store(adata, tmp_path, "h5ad")
    with dask.config.set({"dasksc.batches-ahead": 2}):
        batches = iter(dataset(path, fetch_factor=13, scheduler="synchronous", mmap=True))
        next(batches)
        os.utime(path)
        with pytest.raises(dasksc.CorruptDataError, match=f"{path.name} was replaced or changed"):
            list(batches)


def test_an_atlas_is_opened_again_as_it_was(adata, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [write_store(one, tmp_path, "h5ad", name).name for one, name in ((adata, "a"), (adata[:9], "b"))]
    of_list, of_one, of_pattern = (dataset(data) for data in (given, given[0], "*.h5ad"))
    given.reverse()
    write_store(adata, tmp_path, "h5ad", "c")
    monkeypatch.chdir("/")
    assert list(of_list.collection.obs_names) == [*adata.obs_names, *adata.obs_names[:9]]
    assert list(of_one.collection.obs_names) == list(adata.obs_names)
    with pytest.raises(dasksc.CorruptDataError, match="have 415 cells now, but 212"):
        of_pattern.collection.obs  # noqa: B018
    os.utime(tmp_path / "a.h5ad")
    for read in (lambda: list(of_one.collection.name_pieces()), lambda: of_list.collection.column("flag")):
        with pytest.raises(dasksc.CorruptDataError, match=r"a\.h5ad"):
            read()


@pytest.mark.parametrize("module", ["accelerate.data_loader", "transformers.trainer_pt_utils"])
def test_wrappers_that_share_the_batches_once_more_are_refused(path, module):
    shard = pytest.importorskip(module).IterableDatasetShard
    options = {"batch_size": 1, "num_processes": 2, "process_index": 0}
    with pytest.raises(dasksc.InputError, match="world_size=1"):
        next(iter(shard(dasksc.scDataset(path, batch_size=8, rank=0, world_size=2, seed=0), **options)))
    whole = dasksc.scDataset(path, dasksc.Streaming(), 8, rank=0, world_size=1)
    assert torch.equal(next(iter(shard(whole, **options))), next(iter(whole)))


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_loader_that_sends_the_batches_of_rank_0_to_other_ranks_is_refused(path, n_workers):
    module = pytest.importorskip("accelerate.data_loader")
    options = {"batch_size": None, "num_workers": n_workers}
    options |= {"multiprocessing_context": "spawn"} if n_workers else {}
    for world_size in (2, 1):
        one = dasksc.scDataset(path, batch_size=8, rank=0, world_size=world_size, seed=0)
        loader = module.DataLoaderDispatcher(one, **options)
        if world_size == 1:
            assert len(next(iter(loader))) == 8
        else:
            with pytest.raises(dasksc.InputError, match="world_size=1"):
                next(iter(loader))


def test_a_dataloader_that_would_stack_batches_is_refused(path):
    one = dataset(path, obs=["cell_type"])
    for data in (one, dataset(path)):
        for options in ({}, {"batch_size": 4}):
            with pytest.raises(dasksc.InputError, match="DataLoader.*batch_size=None"):
                next(iter(torch.utils.data.DataLoader(data, **options)))
    undone = torch.utils.data.DataLoader(one, collate_fn=operator.itemgetter(0))
    assert next(iter(undone)).X.shape[0] == 16


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "batch_transform", "transform"])
def test_arguments_of_a_data_set_cannot_be_changed(path, name):
    one = dataset(path)
    with pytest.raises(AttributeError, match=name):
        setattr(one, name, getattr(one, name))
