"""A reader of another package, the `.npz` reader of the guide, in every function that takes a path; and old files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

import dasksc
from dasksc.cli import main
from dasksc.readers import registry
from tests.support import guides
from tests.support.data import make_adata
from tests.support.programs import ROOT

pytestmark = pytest.mark.core

GUIDE = ROOT / "docs" / "reference" / "formats.md"


def write_npz(adata: AnnData, path: Path) -> Path:
    names = {"obs_names": adata.obs_names.to_numpy(dtype=str), "var_names": adata.var_names.to_numpy(dtype=str)}
    np.savez(path, X=adata.X, **names, **{"obs:kind": adata.obs["kind"].to_numpy(dtype=str)})
    return path


@pytest.fixture
def atlas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AnnData, Path]]:
    """Install the package of the guide; return an atlas in memory and the path of its `.npz` file."""
    site = tmp_path / "site"
    guides.write_files(GUIDE.read_text(), site)
    assert len((site / "npz_atlas.py").read_text().splitlines()) <= 36
    monkeypatch.syspath_prepend(site)
    registry.readers.cache_clear()
    source = make_adata(60, layout="dense")
    obs = pd.DataFrame({"kind": np.where(np.arange(60) % 3, "a", "b")}, index=source.obs_names)
    adata = AnnData(source.X, obs, pd.DataFrame(index=source.var_names))
    yield adata, write_npz(adata, tmp_path / "plate.npz")
    sys.modules.pop("npz_atlas", None)
    registry.readers.cache_clear()


def batches(data: Any) -> list[np.ndarray]:
    dataset = dasksc.scDataset(data, dasksc.BlockShuffling(4), batch_size=16, obs=["kind"], seed=1)
    return [np.column_stack([batch.X, batch.obs["kind"]]) for batch in dataset]


def test_an_atlas_of_another_format_opens_and_yields_the_batches_of_its_h5ad(atlas: Any, tmp_path: Path) -> None:
    adata, path = atlas
    opened = dasksc.open(path)
    np.testing.assert_array_equal(opened.X.compute(), adata.X)
    assert list(opened.obs_names) == list(adata.obs_names)
    assert list(opened.var_names) == list(adata.var_names)
    assert dasksc.open(path, obs=[], names=False).obs.index.equals(pd.RangeIndex(60))
    adata.write_h5ad(tmp_path / "plate.h5ad")
    for ours, theirs in zip(batches(path), batches(tmp_path / "plate.h5ad"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert list(dasksc.scDataset(path, batch_size=16).collection.obs_names) == list(adata.obs_names)
    with pytest.raises(dasksc.MissingKeyError, match="'kin'.*plate.npz|plate.npz.*'kin'"):
        dasksc.open(path, obs=["kin"])
    with pytest.raises(dasksc.InputError, match=r"plate\.npz"):
        dasksc.open(path, feature_types="Gene Expression")


def test_it_joins_with_other_formats_and_is_found_in_folders(atlas: Any, tmp_path: Path) -> None:
    adata, path = atlas
    folder = tmp_path / "plates"
    folder.mkdir()
    path.rename(folder / "1.npz")
    adata[:20].copy().write_h5ad(folder / "2.h5ad")
    for data in (folder, str(folder / "*")):
        joined = dasksc.open(data, label="plate")
        assert joined.obs["plate"].value_counts().to_dict() == {"1": 60, "2": 20}
        np.testing.assert_array_equal(joined.X.compute(), np.vstack([adata.X, adata.X[:20]]))


def test_statistics_conversion_prediction_and_description_read_it(
    atlas: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adata, path = atlas
    found = dasksc.statistics(path)
    np.testing.assert_allclose(found.genes["mean"], adata.X.mean(axis=0), rtol=1e-6)
    dasksc.convert(path, tmp_path / "out.zarr", order="keep", verify=True)
    converted = dasksc.open(tmp_path / "out.zarr")
    np.testing.assert_array_equal(converted.X.compute(), adata.X)
    assert list(converted.obs_names) == list(adata.obs_names)
    dasksc.predict(lambda X: X.sum(dim=1), path, tmp_path / "total.zarr", key="total")
    predicted = dasksc.open(tmp_path / "total.zarr")
    assert list(predicted.obs_names) == list(adata.obs_names)
    attached = dasksc.open(path, attach={"obs/total": tmp_path / "total.zarr"})
    np.testing.assert_allclose(attached.obs["total"], adata.X.sum(axis=1), rtol=1e-6)
    (matrix,) = dasksc.describe(path, seconds=0).matrices
    assert (matrix.key, matrix.encoding, matrix.nbytes) == ("X", "dense", adata.X.nbytes)
    assert dasksc.check(dasksc.scDataset(path, batch_size=16, obs=["kind"], seed=0)).n_rows == 60
    assert main(["info", str(path), "--seconds", "0", "--json"]) in (None, 0)
    assert json.loads(capsys.readouterr().out)["matrices"][0]["key"] == "X"


def test_a_reader_that_cannot_be_imported_does_not_prevent_reading(
    atlas: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adata, _ = atlas
    (tmp_path / "site" / "npz_atlas.py").write_text("import a_module_that_is_missing")
    sys.modules.pop("npz_atlas", None)
    registry.readers.cache_clear()
    adata.write_h5ad(tmp_path / "plate.h5ad")
    assert dasksc.open(tmp_path / "plate.h5ad").shape == adata.shape
    assert "a_module_that_is_missing" in caplog.text


def test_readers_stand_in_the_order_of_their_names_before_those_of_dasksc(atlas: Any) -> None:
    kinds = [type(reader).__name__ for reader in registry.readers()]
    assert kinds == ["NpzReader", "CatalogReader", "ParquetReader", "ZarrReader", "SomaReader", "Hdf5Reader"]


def test_tables_obsm_and_raw_of_old_files_are_read(tmp_path: Path) -> None:
    path, rows = tmp_path / "old.h5ad", np.arange(30, dtype=np.float32).reshape(10, 3)
    obs = np.zeros(10, dtype=[("index", "S8"), ("kind", np.int8)])
    obs["index"], obs["kind"] = [f"cell{i}" for i in range(10)], np.arange(10) % 2
    genes = np.array([(b"gene0",), (b"gene1",), (b"gene2",)], dtype=[("index", "S8")])
    embeddings = np.zeros(10, dtype=[("X_pca", np.float32, (3,))])
    embeddings["X_pca"] = rows + 1
    with h5py.File(path, "w") as file:
        file["X"], file["obs"], file["var"], file["obsm"] = rows, obs, genes, embeddings
        file["raw.X"], file["raw.var"] = rows + 2, genes
        file["uns/kind_categories"] = np.array([b"T", b"B"])
    adata = dasksc.open(path)
    assert [*adata.obs_names[:2]] == ["cell0", "cell1"]
    assert [*adata.var_names] == ["gene0", "gene1", "gene2"]
    assert [*adata.obs["kind"][:3]] == ["T", "B", "T"]
    np.testing.assert_array_equal(adata.X.compute(), rows)
    np.testing.assert_array_equal(np.asarray(adata.obsm["X_pca"]), rows + 1)
    np.testing.assert_array_equal(dasksc.open(path, raw=True).X.compute(), rows + 2)
