"""Synthetic atlases: the structure that their arguments describe, identical on every call."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc import InputError
from dasksc.datasets import demo_data, synthetic
from tests.support.commands import run_command

pytestmark = pytest.mark.core

SMALL = {"n_obs": 3_000, "n_vars": 150, "n_types": 4, "n_donors": 3, "n_batches": 2}


@pytest.fixture(scope="module")
def atlas(tmp_path_factory):
    return ad.read_h5ad(synthetic(tmp_path_factory.mktemp("synthetic") / "atlas.h5ad", **SMALL))


def test_an_atlas_holds_raw_counts_with_types_donors_and_batches(atlas):
    assert atlas.shape == (3_000, 150)
    assert atlas.X.dtype == np.float32
    assert atlas.X.has_canonical_format
    assert (atlas.X.data == np.round(atlas.X.data)).all()
    assert (atlas.X.data > 0).all()
    assert list(atlas.obs) == ["cell_type", "donor", "batch", "n_counts"]
    assert {name: atlas.obs[name].nunique() for name in ("cell_type", "donor", "batch")} == {
        "cell_type": 4,
        "donor": 3,
        "batch": 2,
    }
    np.testing.assert_array_equal(atlas.obs["n_counts"], np.asarray(atlas.X.sum(axis=1)).ravel())
    assert atlas.obs["cell_type"].is_monotonic_increasing
    assert atlas.obs["cell_type"].value_counts().iloc[0] == 3_000 * 12 // 25
    assert atlas.obs_names.is_unique
    assert len(pd.crosstab(atlas.obs["donor"], atlas.obs["cell_type"]).to_numpy().ravel().nonzero()[0]) == 12


@pytest.mark.parametrize("name", ["atlas.h5ad", "atlas.zarr"])
def test_the_seed_alone_decides(atlas, name, tmp_path):
    path = synthetic(tmp_path / name, **SMALL)
    again = ad.read_zarr(path) if path.suffix == ".zarr" else ad.read_h5ad(path)
    assert (again.X != atlas.X).nnz == 0
    pd.testing.assert_frame_equal(again.obs, atlas.obs)
    other = ad.read_h5ad(synthetic(tmp_path / "other.h5ad", **SMALL, seed=1))
    assert (other.X != atlas.X).nnz > 0


def test_donors_and_batches_can_be_left_out(tmp_path):
    options = {**SMALL, "n_donors": 0, "n_batches": 0, "donor_effect": 0.0, "batch_effect": 0.0}
    assert list(ad.read_h5ad(synthetic(tmp_path / "a.h5ad", **options)).obs) == ["cell_type", "n_counts"]
    options |= {"n_batches": 2, "batch_key": "plate"}
    obs = ad.read_h5ad(synthetic(tmp_path / "b.h5ad", **options)).obs
    assert list(obs) == ["cell_type", "plate", "n_counts"]
    assert list(obs["plate"].cat.categories) == ["plate_0", "plate_1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_obs": 0}, "n_obs"),
        ({"batch_effect": float("nan")}, "batch_effect.*10"),
        ({"seed": -1}, r"seed.*2\*\*64.*-1"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        synthetic(tmp_path / "a.h5ad", **SMALL | options)
    assert not list(tmp_path.iterdir())


def test_an_existing_atlas_is_kept_unless_it_may_be_overwritten(tmp_path):
    path = tmp_path / "a.h5ad"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match=r"a\.h5ad.*overwrite=True"):
        synthetic(path, **SMALL)
    assert path.read_bytes() == b"mine"
    assert dasksc.open(synthetic(path, **SMALL, overwrite=True)).shape == (3_000, 150)
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_writes_the_files_of_the_guides(tmp_path):
    done = run_command("demo-data", tmp_path / "demo")
    folder = tmp_path / "demo"
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        *("atlas.h5ad", "plates/1.h5ad", "plates/2.h5ad", "cite.h5mu", "filtered_feature_bc_matrix.h5", "screen.h5ad")
    ]
    assert written == {line.split()[0] for line in done.stdout.splitlines()}
    atlas = dasksc.open(folder / "atlas.h5ad")
    assert atlas.shape == dasksc.open(folder / "atlas.h5ad", raw=True).shape == (2_000, 300)
    assert atlas.obs["donor"].nunique() == 12
    assert {"T cell", "B cell", "NK cell"} < set(atlas.obs["cell_type"])
    assert dasksc.open(f"{folder}/plates/*.h5ad", join="outer").shape == (600, 300)
    assert dasksc.open(f"{folder}/plates/*.h5ad", join="inner").shape == (600, 100)
    cite = dasksc.Modalities(folder / "cite.h5mu")
    assert {name: cite[name].shape for name in ("rna", "prot")} == {"rna": (600, 300), "prot": (600, 5)}
    ten_x = folder / "filtered_feature_bc_matrix.h5"
    for name, feature_type in (("rna", "Gene Expression"), ("prot", "Antibody Capture")):
        features = dasksc.open(ten_x, feature_types=feature_type)
        assert list(features.var_names) == list(cite[name].var_names)
        total = cite[name].X.sum(dtype=np.float64).compute()
        assert features.X.sum(dtype=np.float64).compute() == total > 0
    assert set(dasksc.open(folder / "screen.h5ad").obs["cell_line"]) == {"K562", "RPE1"}

    before = (folder / "atlas.h5ad").stat().st_mtime_ns
    with pytest.raises(InputError, match=r"atlas\.h5ad.*overwrite=True"):
        demo_data(folder)
    assert (folder / "atlas.h5ad").stat().st_mtime_ns == before
    demo_data(folder, overwrite=True)
    assert (folder / "atlas.h5ad").stat().st_mtime_ns > before
