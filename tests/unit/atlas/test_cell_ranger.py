"""10x ``.h5`` files read in place, compared with `scanpy.read_10x_h5`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
from anndata import AnnData

import dasksc
from dasksc.errors import InputError, MissingKeyError, StorageError
from tests.support.cell_ranger import write_v2, write_v3
from tests.support.data import make_values

pytestmark = pytest.mark.core

GENES, PROTEINS = "Gene Expression", "Antibody Capture"
TYPES = [GENES] * 14 + [PROTEINS] * 4 + ["CRISPR Guide Capture"] * 2
GENOMES = ["GRCh38"] * 8 + ["mm10"] * 6 + [""] * 6
# Two genes share a name. Non-ASCII names have a separate test, because scanpy does not decode them.
NAMES = ["twice" if i in (3, 11) else f"gene {i}" for i in range(20)]


def scanpys(path: Path, kept: Any = slice(None), **options: Any) -> AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names repeat
        return sc.read_10x_h5(path, **{"gex_only": False} | options)[:, kept].copy()


def same(opened: AnnData, expected: AnnData) -> None:
    assert opened.shape == expected.shape
    assert list(opened.obs_names) == list(expected.obs_names)
    assert list(opened.var_names) == list(expected.var_names)
    pd.testing.assert_frame_equal(opened.obs, expected.obs, check_dtype=False)
    pd.testing.assert_frame_equal(opened.var.astype(object), expected.var.astype(object), check_dtype=False)
    for name in expected.var:
        assert (opened.var[name].dtype == bool) == (expected.var[name].dtype == bool), name
    np.testing.assert_array_equal(opened.X.compute().toarray(), expected.X.toarray())


def write(path: Path, **options: Any) -> Path:
    of_features = {"pattern": [""] * 14 + ["5PNNNNNNNNNN(BC)"] * 6, "is_control": np.arange(20) % 3 == 0}
    names = {"name": NAMES, "feature_type": TYPES, "genome": GENOMES, "features": of_features}
    return write_v3(path, make_values(60, 20, dtype=np.int32), **names, **options)


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    return write(tmp_path / "filtered_feature_bc_matrix.h5")


@pytest.mark.parametrize("variable_strings", [False, True])
@pytest.mark.parametrize("compression", [None, "lzf"])
def test_version_3_is_what_scanpy_reads(tmp_path: Path, compression: str | None, variable_strings: bool) -> None:
    path = write(tmp_path / "a.h5", compression=compression, variable_strings=variable_strings)
    opened = dasksc.open(path)
    same(opened, scanpys(path))
    assert list(opened.var) == ["gene_ids", "feature_types", "genome", "is_control", "pattern"]


def test_version_2_is_what_scanpy_reads(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.h5", {"GRCh38": make_values(30, 12, dtype=np.int32)})
    same(dasksc.open(path), scanpys(path))
    same(dasksc.open(path, feature_types=GENES), scanpys(path, gex_only=True))


@pytest.mark.parametrize("genome", ["hg19", "mm10"])
def test_version_2_has_a_matrix_for_each_genome(tmp_path: Path, genome: str) -> None:
    counts = {"hg19": make_values(30, 12, dtype=np.int32), "mm10": make_values(17, 9, dtype=np.int32, seed=1)}
    path = write_v2(tmp_path / "a.h5", counts)
    with pytest.raises(InputError, match="hg19.*mm10.*genome='hg19'"):
        dasksc.open(path)
    opened = dasksc.open(path, genome=genome)
    same(opened, scanpys(path, genome=genome))
    assert opened.shape == counts[genome].shape
    with pytest.raises(InputError, match="hg19.*mm10.*genome='hg19'"):
        dasksc.open(path, genome=["hg19", "mm10"])


@pytest.mark.parametrize(
    ("options", "of_scanpy", "n_vars"),
    [
        ({"feature_types": GENES}, {"gex_only": True}, 14),
        ({"genome": "mm10"}, {"genome": "mm10"}, 6),
        ({"genome": "GRCh38", "feature_types": GENES}, {"genome": "GRCh38", "gex_only": True}, 8),
    ],
)
def test_features_are_chosen_as_scanpy_chooses_them(v3: Path, options: Any, of_scanpy: Any, n_vars: int) -> None:
    opened = dasksc.open(v3, **options)
    same(opened, scanpys(v3, **of_scanpy))
    assert opened.n_vars == n_vars


def test_several_files_are_one_atlas(tmp_path: Path) -> None:
    counts = [make_values(30, 10, dtype=np.int32, seed=1), make_values(25, 10, dtype=np.int32, seed=2)]
    for sample, one in zip("ab", counts, strict=True):
        (tmp_path / sample).mkdir()
        write_v3(tmp_path / sample / "filtered_feature_bc_matrix.h5", one, feature_type=TYPES[9:19])
    pattern, expected = f"{tmp_path}/*/*.h5", np.vstack([one.toarray() for one in counts])
    both = dasksc.open(pattern, label="sample", index_unique="-")
    assert both.obs["sample"].unique().tolist() == ["a/filtered_feature_bc_matrix", "b/filtered_feature_bc_matrix"]
    np.testing.assert_array_equal(both.X.compute().toarray(), expected)
    proteins = dasksc.open(pattern, feature_types=PROTEINS, index_unique="-")
    streamed = dasksc.scDataset(proteins, dasksc.Streaming(), batch_size=10)
    np.testing.assert_array_equal(np.concatenate([batch.numpy() for batch in streamed]), expected[:, 5:9])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"feature_types": "Antibody"}, MissingKeyError, "'Antibody'.*Antibody.*Capture"),
        ({"genome": "GRCh37"}, MissingKeyError, "'GRCh37'.*'GRCh38'"),
        ({"genome": "mm10", "feature_types": PROTEINS}, InputError, r"feature_types=.*Capture.*genome=\['mm10'\]"),
        ({"feature_types": []}, InputError, "at least one"),
        ({"feature_types": 3}, InputError, "feature_types=3"),
        ({"genome": [3]}, InputError, "genome="),
    ],
)
def test_features_that_are_not_there_are_refused(v3: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dasksc.open(v3, **options)


def test_other_files_have_no_features_to_choose(tmp_path: Path, v3: Path) -> None:
    adata = scanpys(v3)
    adata.var_names_make_unique()
    adata.write_h5ad(tmp_path / "a.h5ad")
    for data in (tmp_path / "a.h5ad", adata):
        with pytest.raises(InputError, match=r"feature_types=.*10x.*\.h5"):
            dasksc.open(data, feature_types=GENES)
    with pytest.raises(InputError, match="genome= is for 10x"):
        dasksc.open([tmp_path / "a.h5ad"], genome="mm10")


def _with(path: Path, name: str, value: Any, **options: Any) -> None:
    with h5py.File(path, "r+") as file:
        if name in file["matrix"]:
            del file[f"matrix/{name}"]
        if value is not None:
            file.create_dataset(f"matrix/{name}", data=value, **options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shape", np.array([20, 61]), r"indptr has shape \(61,\)"),
        ("shape", np.array([20, -1]), "shape"),
        ("shape", np.array([20.0, 60.0]), "shape"),
        ("shape", np.array(["20", "60"], dtype="S"), "shape"),
        ("shape", np.array([2**40, 60]), r"columns"),
        ("shape", np.array([21, 60]), r"has 21 columns.*20 features"),
        ("barcodes", np.array([b"a"] * 59), "60.*obs.*59"),
        ("barcodes", np.zeros((60, 2)), "barcodes"),
        ("barcodes", h5py.Empty("S5"), "barcodes"),
        ("features/name", np.array([b"a"] * 19), "different lengths"),
        ("filtered_barcodes", np.array([b"x"] * 60), "filtered_barcodes.*dtype"),
        ("features/id", None, r"lacks id"),
        ("indices", np.zeros(3, dtype=np.int64), "the same length"),
        ("indptr", np.zeros(61), "integers are needed"),
        ("data", np.array([b"1"] * 3), "holds"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(v3: Path, name: str, value: Any, message: str) -> None:
    _with(v3, name, value)
    with pytest.raises((StorageError, InputError), match=message):
        dasksc.open(v3)


@pytest.mark.parametrize("name", ["shape", "barcodes", "features/name", "data"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, v3: Path, name: str) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside.h5"
    with h5py.File(outside, "w") as file:
        file["n"] = np.arange(3)
    with h5py.File(v3, "r+") as file:
        del file[f"matrix/{name}"]
        file[f"matrix/{name}"] = h5py.ExternalLink(os.path.relpath(outside, tmp_path), "/n")
    with pytest.raises(StorageError, match="lies in another file"):
        dasksc.open(v3)
