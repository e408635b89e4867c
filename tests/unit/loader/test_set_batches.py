"""Batches of sets: targets, controls and groups, for every way of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import torch

import dasksc
from dasksc.errors import InputError
from tests.support.sets import N, dataset, numbers, screened, sets

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "screen.h5ad"
    screened().write_h5ad(path)
    return path


def test_batches_hold_sets_groups_and_controls(path: Path) -> None:
    adata = screened()
    data = dataset(path, obs=["gene", "dose"], layers=["counts"], obsm=["X_pca"])
    n_rows = 0
    for batch in data:
        groups = data.groups.iloc[batch.sets.numpy()]
        assert batch.sets.dtype == torch.int64
        assert list(groups.columns) == ["line", "gene"]
        own = adata.obs.iloc[batch.index.numpy()]
        assert own.line.tolist() == groups.line.repeat(8).tolist()
        assert own.gene.tolist() == groups.gene.repeat(8).tolist()
        assert isinstance(batch.control, dasksc.Batch)
        assert batch.control.index.shape == batch.index.shape
        for part in (batch, batch.control):
            rows = part.index.numpy()
            np.testing.assert_array_equal(part.X, adata.X[rows].toarray())
            np.testing.assert_array_equal(part.layers["counts"], adata.layers["counts"][rows].toarray())
            np.testing.assert_array_equal(part.obsm["X_pca"], adata.obsm["X_pca"][rows])
            labels = np.array(data.categories["gene"])[part.obs["gene"].numpy()]
            assert labels.tolist() == adata.obs.gene.iloc[rows].tolist()
            np.testing.assert_array_equal(part.obs["dose"], adata.obs.dose.iloc[rows])
        assert adata.obs.line.iloc[batch.control.index.numpy()].tolist() == own.line.tolist()
        n_rows += len(batch.index)
    assert n_rows == data.plan(0).n_rows == data.stats()["n_rows"]


def test_sizes_count_controls(path: Path) -> None:
    alone = dataset(path, sets(control=None))
    beside = dataset(path, sets(n_controls=2))
    assert (alone.fetch_size, beside.fetch_size) == (128, 384)
    assert beside.projected_bytes is not None
    assert alone.projected_bytes is not None
    assert beside.projected_bytes > alone.projected_bytes
    assert next(iter(beside)).control.X.shape == (64, 30)
    assert beside.plan(0).n_control_rows == 2 * beside.plan(0).n_rows
    # With a limit of half the projected memory, the larger fetches do not fit.
    with pytest.raises(InputError, match="memory_limit"):
        dataset(path, sets(n_controls=2), fetch_factor=64, memory_limit=2_000)


def test_a_state_resumes_with_a_multiple_of_the_set_size(path: Path) -> None:
    def sets_of(batches: Iterable[Any]) -> list[Any]:
        return sorted(
            one
            for batch in batches
            for one in zip(batch.sets.tolist(), batch.index.reshape(-1, 8).tolist(), strict=True)
        )

    every = list(dataset(path))
    for n_done in range(0, len(every), 5):
        first, other = dataset(path), dataset(path, batch_size=48)
        assert len(list(islice(first, n_done))) == n_done
        other.load_state_dict(first.state_dict())
        assert sets_of(other) == sets_of(every[n_done:])
    with pytest.raises(InputError, match="batch_size=20.*24"):
        dataset(path, batch_size=20)


def test_expressions_and_filters(path: Path) -> None:
    obs = screened().obs
    data = dataset(path, sets(control="gene == 'ctrl'"), filter="dose < 0.5")
    by_dict = dataset(path, sets(), filter="dose < 0.5")
    assert [numbers(batch) for batch in data] == [numbers(batch) for batch in by_dict]
    for batch in data:
        assert (obs.dose.iloc[batch.index.numpy()] < 0.5).all()
        assert (obs.dose.iloc[batch.control.index.numpy()] < 0.5).all()
    every = dataset(path, sets(control_indices=np.arange(200, 800)), filter="dose < 0.5")
    controls = np.concatenate([batch.control.index.numpy() for batch in every])
    assert (obs.dose.iloc[controls] < 0.5).all()
    assert 200 <= controls.min() <= controls.max() < 800
    with pytest.raises(InputError, match="control_indices"):
        dataset(path, sets(control_indices=[int(np.argmax(obs.dose))]), filter="dose < 0.5")


def test_transforms_hooks_and_devices(path: Path) -> None:
    data = dataset(path, transform=lambda batch: (batch.sets, batch.control.to("cpu").X.sum()), device="cpu")
    assert all(len(one) == 2 for one in data)
    with pytest.raises(InputError, match="CellSets.control="):
        dataset(path, batch_transform=lambda adata: adata)
    rows = [
        batch.obs["gene"].tolist()
        for batch in dataset(screened(), sets(control=None), batch_transform=lambda adata: adata)
    ]
    assert all(len(set(labels[i : i + 8])) == 1 for labels in rows for i in range(0, len(labels), 8))


def test_modalities_have_controls_of_every_kind() -> None:
    adata = screened()
    protein = anndata.AnnData(np.arange(N * 3, dtype="f4").reshape(N, 3), adata.obs)
    both = dasksc.CellSets(["rna:line", "rna:gene"], 8, control={"rna:gene": "ctrl"})
    data = dataset(dasksc.Modalities({"rna": adata, "protein": protein}), both)
    batch = next(iter(data))
    np.testing.assert_array_equal(batch.control["protein"].X[:, 0], batch.control.index.numpy() * 3)
    np.testing.assert_array_equal(batch.control["rna"].X, adata.X[batch.control.index.numpy()].toarray())


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "Downsample": lambda: dasksc.transforms.Downsample(0.5),
    "MaskGenes": lambda: dasksc.transforms.MaskGenes(0.5),
    "tokens": lambda: dasksc.tokens.RankTokens(map(str, range(30))),
    "bins": lambda: dasksc.tokens.ValueBins(map(str, range(30))),
    "list": lambda: [dasksc.transforms.Downsample(0.5), dasksc.tokens.RankTokens(map(str, range(30)))],
}


def counted() -> anndata.AnnData:
    adata = screened()
    adata.X.data = np.ceil(adata.X.data * 5)
    return adata


@pytest.mark.parametrize(("name", "layout"), [*zip(TRANSFORMS, ["csr", "dense", "csr", "dense", "csr"], strict=True)])
def test_groups_and_controls_survive_every_transform(name: str, layout: Any) -> None:
    plain = dataset(counted(), layout=layout)
    changed = dataset(counted(), layout=layout, transform=TRANSFORMS[name]())
    for before, after in zip(plain, changed, strict=True):
        assert after.sets.tolist() == before.sets.tolist()
        assert after.index.tolist() == before.index.tolist()
        assert after.control.index.tolist() == before.control.index.tolist()
        assert len(after.control.X) == len(before.control.X)
        if name != "tokens" and name != "bins":
            assert after.control.X.sum() < before.control.X.sum()
