"""Rows of docs/guides/migrate.md, where the code on the right does the same as the code on the left."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from itertools import chain
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import dasksc
from dasksc import BlockShuffling, Streaming, scDataset
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs

N_OBS, BATCH = 240, 8


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


# --- scDataset ----------------------------------------------------------------------------------------


def test_the_import_is_what_changes():
    theirs = pytest.importorskip("scdataset")
    for library in (theirs, dasksc):
        dataset = library.scDataset(np.arange(N_OBS), library.BlockShuffling(block_size=4), BATCH, 2, True, seed=1)
        batches = [np.asarray(batch).tolist() for batch in dataset]
        assert [len(batch) for batch in batches] == [BATCH] * (N_OBS // BATCH)
        assert sorted(chain(*batches)) == list(range(N_OBS))
    assert set(theirs.__all__) <= set(dasksc.__all__)


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


def test_batches_without_hooks_equal_those_of_fetch_transform_adata(path):
    options = {"strategy": BlockShuffling(4), "batch_size": BATCH, "seed": 0}
    hooked = scDataset(path, fetch_transform=dasksc.fetch_transform_adata, **options)
    for ours, theirs in zip(scDataset(path, **options), hooked, strict=True):
        assert torch.equal(ours, theirs)


def test_obs_yields_the_codes_of_the_values_of_adata_to_mindex(path):
    options = {"strategy": BlockShuffling(4), "batch_size": BATCH, "seed": 0}
    hooked = scDataset(path, fetch_transform=partial(dasksc.adata_to_mindex, columns=["cell_type"]), **options)
    plain = scDataset(path, obs=["cell_type"], **options)
    for ours, theirs in zip(plain, hooked, strict=True):
        assert [plain.categories["cell_type"][code] for code in ours.obs["cell_type"]] == list(theirs["cell_type"])
        np.testing.assert_array_equal(ours.X, theirs["X"])


# --- annbatch -----------------------------------------------------------------------------------------


def annbatch_loader(adata: ad.AnnData, **options):
    annbatch = pytest.importorskip("annbatch")
    loader = annbatch.Loader(preload_to_gpu=False, rng=np.random.default_rng(0), **options)
    return loader.add_adata(ad.AnnData(X=sp.csr_matrix(adata.X), obs=adata.obs[["cell_type"]]))


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


def test_drop_last_drops_what_fills_no_batch(adata):
    dataset = scDataset(np.arange(N_OBS), BlockShuffling(4), 50, drop_last=True, seed=0)
    assert [len(batch) for batch in dataset] == [50] * 4


def test_annbatch_drops_as_many(adata):
    loader = annbatch_loader(adata, chunk_size=4, preload_nchunks=25, batch_size=50, shuffle=True, drop_last=True)
    assert [batch["X"].shape[0] for batch in loader] == [50] * 4


def test_a_collection_is_opened_as_one(adata, tmp_path):
    for i in range(2):
        write_store(adata, tmp_path / "collection.zarr", "v2", name=f"dataset_{i}")
    folder = tmp_path / "collection.zarr"
    for i in range(2):
        (folder / f"dataset_{i}.v2.zarr").rename(folder / f"dataset_{i}")
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    assert dasksc.open(folder, index_unique="-").n_obs == 2 * N_OBS


# --- AnnLoader ----------------------------------------------------------------------------------------


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


# --- Loaders that shard -------------------------------------------------------------------------------


# --- YAML trainers ------------------------------------------------------------------------------------


def test_a_tokenizer_section_makes_tokens_of_a_vocabulary_file(path, adata, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({gene: 100 + i for i, gene in enumerate(adata.var_names)}))
    section = {"strategy": "rank_value", "max_genes": 3, "prepend_cls": True, "masking": {"mask_ratio": 0.15}}
    made = dasksc.tokens.from_config(section, genes=adata.var_names, vocabulary=tmp_path / "vocab.json")
    for batch in scDataset(path, Streaming(), BATCH, layout="csr", transform=made):
        assert batch.input_ids.shape == (BATCH, 4)
        assert (batch.input_ids[:, 0] == made.vocabulary.cls_id).all()
        filled = batch.attention_mask[:, 1]
        assert ((batch.labels != dasksc.tokens.IGNORED).sum(dim=1) == filled).all()  # round(0.15 * 3) and at least one
