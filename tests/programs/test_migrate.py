"""Rows of docs/guides/migrate.md, where the code on the right does the same as the code on the left."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.utils.data import DataLoader

import dasksc
from dasksc import BlockShuffling, CellSets, ClassBalancedSampling, Streaming, scDataset
from tests.support.data import make_adata, write_store
from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "guides" / "migrate.md"
N_OBS, BATCH = 240, 8

# Tests of each row, by heading and left column.
RUNS: dict[tuple[str, str], Callable[..., None]] = {}


def row(heading: str, *lefts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(test: Callable[..., None]) -> Callable[..., None]:
        for left in lefts:
            assert (heading, left) not in RUNS
            RUNS[heading, left] = test
        return test

    return register


def rows_of_page() -> set[tuple[str, str]]:
    found = set()
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.split("\n")[0].split(" (")[0].strip("`")
        lefts = re.findall(r"^\| (.+?) \| .* \|$", section, re.MULTILINE)
        found |= {(heading, left.replace("`", "")) for left in lefts if left not in ("other loader", "---")}
    return found


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    made = make_adata(N_OBS)
    made.obs["n_counts"] = np.arange(N_OBS, dtype=np.float32)
    return made


@pytest.fixture(scope="module")
def path(adata, tmp_path_factory) -> Path:
    return write_store(adata, tmp_path_factory.mktemp("migrate"), "h5ad")


class Watched:
    """Rows whose values are their row numbers, with a record of the reads."""

    def __init__(self, n: int = N_OBS) -> None:
        self.rows = np.arange(n)
        self.reads: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        self.reads.append(np.asarray(index))
        return self.rows[index]


def rows_in(dataset) -> list[int]:
    """Return the rows of an epoch from batches of any kind."""
    return [int(i) for batch in dataset for i in (batch.index if isinstance(batch, dasksc.Batch) else batch)]


def rows_per_fetch(*, block_size: int, fetch_factor: int, batch_size: int = BATCH) -> list[np.ndarray]:
    watched = Watched()
    dataset = scDataset(watched, BlockShuffling(block_size), batch_size=batch_size, fetch_factor=fetch_factor, seed=0)
    rows = rows_in(dataset)
    assert sorted(rows) == list(range(N_OBS)) != rows
    return watched.reads


def starts_of_runs(rows: np.ndarray, length: int) -> np.ndarray:
    """Return the starts of runs of `length` neighbors; fail unless `rows` consist of such runs."""
    runs = np.sort(rows).reshape(-1, length)
    assert (np.diff(runs, axis=1) == 1).all()
    return runs[:, 0]


def shares(**options) -> list[list[int]]:
    return [rows_in(scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, seed=0, rank=r, **options)) for r in range(2)]


# --- scDataset ----------------------------------------------------------------------------------------


@row("scDataset 0.3", "from scdataset import scDataset, BlockShuffling")
def test_the_import_is_what_changes():
    theirs = pytest.importorskip("scdataset")
    for library in (theirs, dasksc):
        dataset = library.scDataset(np.arange(N_OBS), library.BlockShuffling(block_size=4), BATCH, 2, True, seed=1)
        batches = [np.asarray(batch).tolist() for batch in dataset]
        assert [len(batch) for batch in batches] == [BATCH] * (N_OBS // BATCH)
        assert sorted(chain(*batches)) == list(range(N_OBS))
    assert set(theirs.__all__) <= set(dasksc.__all__)


@row("scDataset 0.3", "fetch_callback=f and the other hooks")
def test_hooks_are_given_the_same_things_in_the_same_order():
    libraries = [dasksc] + ([importlib.import_module("scdataset")] if importlib.util.find_spec("scdataset") else [])
    seen: dict[str, list] = {}
    for library in libraries:
        calls = seen[library.__name__] = []

        def hook(name, result, calls=calls):
            return lambda *given: (calls.append((name, [type(one).__name__ for one in given])), result(*given))[1]

        dataset = library.scDataset(
            np.arange(N_OBS),
            library.BlockShuffling(4),
            BATCH,
            2,
            fetch_callback=hook("fetch_callback", lambda data, rows: data[rows] * 2),
            fetch_transform=hook("fetch_transform", lambda data: data + 1),
            batch_callback=hook("batch_callback", lambda data, rows: data[rows]),
            batch_transform=hook("batch_transform", lambda batch: batch.tolist()),
            seed=0,
        )
        assert sorted(chain(*dataset)) == [2 * i + 1 for i in range(N_OBS)]
        assert len(calls) == N_OBS // 16 * 2 + N_OBS // 8 * 2
    assert len({tuple(map(str, sorted(map(str, calls)))) for calls in seen.values()}) == 1


@row("scDataset 0.3", "fetch_transform=fetch_transform_adata")
def test_batches_without_hooks_equal_those_of_fetch_transform_adata(path):
    options = {"strategy": BlockShuffling(4), "batch_size": BATCH, "seed": 0}
    hooked = scDataset(path, fetch_transform=dasksc.fetch_transform_adata, **options)
    for ours, theirs in zip(scDataset(path, **options), hooked, strict=True):
        assert torch.equal(ours, theirs)


@row("scDataset 0.3", 'fetch_transform=partial(adata_to_mindex, columns=["cell_type"])')
def test_obs_yields_the_codes_of_the_values_of_adata_to_mindex(path):
    options = {"strategy": BlockShuffling(4), "batch_size": BATCH, "seed": 0}
    hooked = scDataset(path, fetch_transform=partial(dasksc.adata_to_mindex, columns=["cell_type"]), **options)
    plain = scDataset(path, obs=["cell_type"], **options)
    for ours, theirs in zip(plain, hooked, strict=True):
        assert [plain.categories["cell_type"][code] for code in ours.obs["cell_type"]] == list(theirs["cell_type"])
        np.testing.assert_array_equal(ours.X, theirs["X"])


@row("scDataset 0.3", "DataLoader(dataset, batch_size=None, num_workers=4)")
@row("YAML trainers", "data.num_workers: 8")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_batches_do_not_depend_on_workers():
    made = [scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, 2, seed=0) for _ in range(2)]
    loader = DataLoader(made[0], batch_size=None, num_workers=2)
    assert sorted(batch.tolist() for batch in loader) == sorted(batch.tolist() for batch in made[1])


@row("scDataset 0.3", "rank=r, world_size=w")
@row("Loaders with `enable_distributed`", "enable_distributed=True, world_rank=r, world_size=w")
def test_ranks_are_given_or_found(monkeypatch):
    given = shares(world_size=2)
    assert sorted(given[0] + given[1]) == list(range(N_OBS))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert rows_in(scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, seed=0)) == given[rank]


@row("scDataset 0.3", "ClassBalancedSampling(labels=all_labels, indices=subset): frequencies among all rows")
def test_classes_are_balanced_among_all_rows_by_weights():
    all_labels = np.repeat([0, 1], [N_OBS - 24, 24])
    subset = np.r_[:10, N_OBS - 10 : N_OBS]
    weights = 1 / np.bincount(all_labels)[all_labels]

    def share(strategy):
        rows = np.concatenate(list(scDataset(np.arange(N_OBS), strategy, BATCH, seed=0)))
        return all_labels[rows].mean()

    ours = dasksc.BlockWeightedSampling(weights=weights, indices=subset, total_size=2000)
    assert share(ours) == pytest.approx(0.9, abs=0.03)
    assert share(ClassBalancedSampling(all_labels, indices=subset, total_size=2000)) == pytest.approx(0.5, abs=0.03)
    if importlib.util.find_spec("scdataset"):
        theirs = importlib.import_module("scdataset").ClassBalancedSampling(all_labels, indices=subset, total_size=2000)
        assert all_labels[theirs.get_indices(range(N_OBS), seed=0)].mean() == pytest.approx(0.9, abs=0.03)


@row("scDataset 0.3", "with DataLoader workers, every epoch has the same order")
def test_epochs_differ_with_workers_too():
    loader = DataLoader(scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, seed=0), batch_size=None, num_workers=1)
    assert rows_in(loader) != rows_in(loader)


# --- annbatch -----------------------------------------------------------------------------------------


def annbatch_loader(adata: ad.AnnData, **options):
    annbatch = pytest.importorskip("annbatch")
    loader = annbatch.Loader(preload_to_gpu=False, rng=np.random.default_rng(0), **options)
    return loader.add_adata(ad.AnnData(X=sp.csr_matrix(adata.X), obs=adata.obs[["cell_type"]]))


@row("annbatch 0.3", "Loader(chunk_size=c, preload_nchunks=n, batch_size=b, shuffle=True)")
def test_chunks_are_blocks_and_preloaded_chunks_are_fetches():
    c, n, b = 4, 6, BATCH
    for read in rows_per_fetch(block_size=c, fetch_factor=c * n // b):
        assert len(read) == c * n
        assert (starts_of_runs(read, c) % c == 0).all()


def test_annbatch_reads_as_many_runs_of_neighbours_for_these_settings(adata):
    c, n, b = 4, 6, BATCH
    loader = annbatch_loader(adata, chunk_size=c, preload_nchunks=n, batch_size=b, shuffle=True, return_index=True)
    rows = np.concatenate([np.asarray(batch["index"]) for batch in loader])
    for start in range(0, N_OBS, c * n):
        assert (starts_of_runs(rows[start : start + c * n], c) % c == 0).all()


@row("annbatch 0.3", "shuffle=False")
@row("AnnLoader", "shuffle=False")
def test_streaming_is_storage_order():
    assert rows_in(scDataset(np.arange(N_OBS), Streaming(), BATCH)) == list(range(N_OBS))


@row("annbatch 0.3", "drop_last=True")
def test_drop_last_drops_what_fills_no_batch(adata):
    dataset = scDataset(np.arange(N_OBS), BlockShuffling(4), 50, drop_last=True, seed=0)
    assert [len(batch) for batch in dataset] == [50] * 4


def test_annbatch_drops_as_many(adata):
    loader = annbatch_loader(adata, chunk_size=4, preload_nchunks=25, batch_size=50, shuffle=True, drop_last=True)
    assert [batch["X"].shape[0] for batch in loader] == [50] * 4


@row("annbatch 0.3", "loader.add_adata(one).add_adata(two)")
@row("YAML trainers", "data.paths: [a.h5ad, b.h5ad]")
def test_several_are_opened_as_one(path, adata):
    both = dasksc.open([path, path], index_unique="-")
    assert both.n_obs == 2 * N_OBS
    batches = list(scDataset(both, Streaming(), N_OBS))
    for batch in batches:
        np.testing.assert_array_equal(batch, adata.X.toarray())


@row("annbatch 0.3", "DatasetCollection(path) and use_collection")
def test_a_collection_is_opened_as_one(adata, tmp_path):
    for i in range(2):
        write_store(adata, tmp_path / "collection.zarr", "v2", name=f"dataset_{i}")
    folder = tmp_path / "collection.zarr"
    for i in range(2):
        (folder / f"dataset_{i}.v2.zarr").rename(folder / f"dataset_{i}")
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    assert dasksc.open(folder, index_unique="-").n_obs == 2 * N_OBS


@row("annbatch 0.3", 'batch["X"] sparse, to="torch"')
def test_sparse_batches_are_csr_tensors(path, adata):
    (batch,) = scDataset(path, Streaming(), N_OBS, layout="csr")
    assert batch.layout == torch.sparse_csr
    np.testing.assert_array_equal(batch.to_dense(), adata.X.toarray())


@row("annbatch 0.3", 'batch["obs"], a table')
@row("annbatch 0.3", "return_index=True")
@row("AnnLoader", 'batch.X, batch.obs["n_counts"]')
@row("AnnLoader", "an encoder for strings in convert=")
def test_obs_are_tensors_beside_x_and_row_numbers(path, adata):
    (numbered,) = scDataset(path, Streaming(), N_OBS, return_index=True)
    assert numbered.index.tolist() == list(range(N_OBS))
    dataset = scDataset(path, BlockShuffling(4), BATCH, obs=["n_counts", "cell_type"], seed=0)
    for batch in dataset:
        np.testing.assert_array_equal(batch.X, adata.X.toarray()[batch.index])
        np.testing.assert_array_equal(batch.obs["n_counts"], adata.obs["n_counts"].to_numpy()[batch.index])
        labels = [dataset.categories["cell_type"][code] for code in batch.obs["cell_type"]]
        assert labels == adata.obs["cell_type"].to_numpy()[batch.index].tolist()


@row("annbatch 0.3", 'DistributedSampler(RandomSampler(...), dist_info="torch")')
def test_ranks_share_every_epoch_and_none_owns_a_shard():
    first = shares(world_size=2)
    assert sorted(first[0] + first[1]) == list(range(N_OBS))
    second = scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, seed=0, rank=0, world_size=2)
    second.set_epoch(1)
    assert set(rows_in(second)) != set(first[0])


@row("annbatch 0.3", "ClassSampler, a batch of one class")
def test_a_batch_is_of_one_class(path, adata):
    dataset = scDataset(
        path, CellSets("cell_type", set_size=100, weights="groups", n_sets=30), 100, obs=["cell_type"], seed=0
    )
    classes = [set(batch.obs["cell_type"].tolist()) for batch in dataset]
    assert all(len(one) == 1 for one in classes)
    assert len(set.union(*classes)) == 3


@row("annbatch 0.3", "WeightedClassSampler")
def test_classes_are_drawn_equally_often(path, adata):
    strategy = ClassBalancedSampling(label_key="cell_type", total_size=9_000)
    dataset = scDataset(path, strategy, 100, obs=["cell_type"], seed=0)
    counts = np.bincount(np.concatenate([batch.obs["cell_type"] for batch in dataset]), minlength=4)
    # Each of the three present classes has 3,000 expected draws with a standard deviation of 45.
    assert counts[3] == 0
    assert (np.abs(counts[:3] - 3_000) < 5 * 45).all()


@row("annbatch 0.3", "rng=np.random.default_rng(0)")
@row("Loaders with `enable_distributed`", "distributed_seed=42")
def test_one_seed_is_one_order():
    orders = [rows_in(scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, seed=seed)) for seed in (42, 42, 43)]
    assert orders[0] == orders[1] != orders[2]


# --- AnnLoader ----------------------------------------------------------------------------------------


@row("AnnLoader", "AnnLoader(adata, batch_size=b, shuffle=True)")
def test_blocks_of_one_shuffle_every_row_by_itself(adata):
    dataset = scDataset(adata, BlockShuffling(block_size=1), batch_size=BATCH, obs=["n_counts"], seed=0)
    rows = rows_in(dataset)
    assert sorted(rows) == list(range(N_OBS))
    assert (np.diff(rows) == 1).mean() < 0.05
    with pytest.warns(FutureWarning, match="AnnLoader is deprecated"):
        theirs = ad.experimental.AnnLoader(
            ad.AnnData(adata.X, obs=adata.obs[["n_counts"]]), batch_size=BATCH, shuffle=True
        )
    assert [len(batch.X) for batch in theirs] == [len(batch.X) for batch in dataset]


@row("AnnLoader", 'AnnLoader([one, two], join_vars="inner")')
def test_an_inner_join_keeps_the_genes_that_all_have(adata):
    bare = ad.AnnData(adata.X, obs=adata.obs[["n_counts"]], var=adata.var)
    several = [bare[:100, 3:].copy(), bare[100:, :9].copy()]
    joined = dasksc.open(several, join="inner")
    assert list(joined.var_names) == list(ad.experimental.AnnCollection(several, join_vars="inner").var_names)
    assert joined.n_obs == N_OBS


@row("AnnLoader", "use_cuda=True, pin_memory=True")
def test_batches_are_put_on_a_device(path):
    device = "cuda" if torch.cuda.is_available() else "meta"
    batch = next(iter(scDataset(path, Streaming(), BATCH, obs=["n_counts"], device=device)))
    assert batch.X.device.type == batch.obs["n_counts"].device.type == device


# --- Loaders that shard -------------------------------------------------------------------------------


@row("Loaders with `enable_distributed`", "contiguous shards, one per rank")
def test_indices_keep_contiguous_shards():
    for rank, shard in enumerate(np.array_split(np.arange(N_OBS), 3)):
        own = BlockShuffling(4, indices=shard)
        rows = rows_in(scDataset(np.arange(N_OBS), own, BATCH, rank=0, world_size=1, seed=rank))
        assert sorted(rows) == shard.tolist() != rows


@row("Loaders with `enable_distributed`", "shuffle=True")
def test_blocks_of_rows_are_shuffled():
    for read in rows_per_fetch(block_size=16, fetch_factor=6):
        assert (starts_of_runs(read, 16) % 16 == 0).all()


@row("Loaders with `enable_distributed`", "drop_last=True")
def test_drop_last_drops_less_than_a_batch_per_rank_and_other_rows_each_epoch():
    left_out = []
    for epoch in range(2):
        seen: set[int] = set()
        for rank in range(2):
            dataset = scDataset(
                np.arange(N_OBS), BlockShuffling(4), 50, drop_last=True, rank=rank, world_size=2, seed=0
            )
            dataset.set_epoch(epoch)
            batches = [batch.tolist() for batch in dataset]
            assert [len(batch) for batch in batches] == [50, 50]
            seen |= set(chain(*batches))
        left_out.append(set(range(N_OBS)) - seen)
    assert len(left_out[0]) == len(left_out[1]) == 40
    assert left_out[0] != left_out[1]


@row("Loaders with `enable_distributed`", "prefetch_batches=4")
def test_prefetch_counts_fetches():
    made = [scDataset(np.arange(N_OBS), BlockShuffling(4), BATCH, 2, seed=0, prefetch=n) for n in (1, 4)]
    assert rows_in(made[0]) == rows_in(made[1])


@row("Loaders with `enable_distributed`", "transform=f")
def test_a_transform_is_given_batches(path):
    dataset = scDataset(path, Streaming(), BATCH, transform=lambda batch: batch.X.sum(dim=1))
    assert next(iter(dataset)).shape == (BATCH,)


# --- YAML trainers ------------------------------------------------------------------------------------


@row("YAML trainers", "data.streaming: true")
def test_opening_reads_nothing_of_x(path):
    opened = dasksc.open(path)
    assert type(opened.X).__module__.startswith("dask.array")


@row("YAML trainers", "data.streaming_shuffle_buffer: 8192")
@row("YAML trainers", "data.streaming_chunk_size: 8192")
def test_the_buffer_is_a_fetch():
    buffer = 48
    assert {len(read) for read in rows_per_fetch(block_size=4, fetch_factor=buffer // BATCH)} == {buffer}


@row("YAML trainers", "data.gene_vocab: vocab.json")
@row("YAML trainers", "data.max_genes, tokenizer.max_genes")
@row("YAML trainers", "tokenizer: {strategy: rank_value, prepend_cls: true, masking: {mask_ratio: 0.15}}")
def test_a_tokenizer_section_makes_tokens_of_a_vocabulary_file(path, adata, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({gene: 100 + i for i, gene in enumerate(adata.var_names)}))
    section = {"strategy": "rank_value", "max_genes": 3, "prepend_cls": True, "masking": {"mask_ratio": 0.15}}
    made = dasksc.tokens.from_config(section, genes=adata.var_names, vocabulary=tmp_path / "vocab.json")
    for batch in scDataset(path, Streaming(), BATCH, layout="csr", transform=made):
        assert batch.input_ids.shape == (BATCH, 4)
        assert (batch.input_ids[:, 0] == made.vocabulary.cls_id).all()
        filled = batch.attention_mask[:, 1]
        assert ((batch.labels != dasksc.tokens.IGNORED).sum(dim=1) == filled).all()  # round(0.15 * 3) and at least one


@row("YAML trainers", "training.batch_size: 32")
def test_the_batch_size_is_per_rank():
    dataset = scDataset(np.arange(N_OBS), BlockShuffling(4), batch_size=32, rank=1, world_size=3, seed=0)
    assert [len(batch) for batch in dataset] == [32, 32, 16]


def test_every_row_of_the_page_is_run():
    runs = {(heading.replace("`", ""), left.replace("`", "")) for heading, left in RUNS}
    page = {(heading.replace("`", ""), left) for heading, left in rows_of_page()}
    assert runs == page
