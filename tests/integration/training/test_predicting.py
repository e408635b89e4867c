"""Predictions of trained models, at the end of training or by ``dasksc embed``, for any atlas that has their genes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dasksc
from dasksc import InputError, cli
from dasksc.train import load_model
from tests.support.commands import run_command
from tests.support.conversions import read
from tests.support.data import make_adata
from tests.support.training import small, train

pytestmark = pytest.mark.core

N_OBS, N_VARS = 83, 17


@pytest.fixture(scope="module")
def atlas(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "atlas.h5ad"
    make_adata(N_OBS, N_VARS).write_h5ad(path)
    return path


def configuration(atlas: Path, folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    raw = small(atlas, folder, training__max_epochs=1, **changes)
    if model is not None:
        raw["model"] = model
    return raw


AUTOENCODER = {"name": "autoencoder", "latent_dim": 3, "hidden_dim": 8}
TOKENS = {"strategy": "rank_value", "max_genes": 8, "masking": {"mask_ratio": 0.3}}
TRANSFORMER = {"name": "transformer_encoder", "hidden_dim": 8, "num_layers": 1, "num_heads": 2}


def by_hand(model: nn.Module, adata: Any, genes: list[str]) -> np.ndarray:
    X = torch.from_numpy(np.asarray(adata[:, genes].X.todense()))
    with torch.inference_mode():
        return model.embed(X).numpy()


def embed(*arguments: Any) -> str:
    """Run ``dasksc embed`` to completion; return its output."""
    parser, run = cli.prepared("embed")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert not run(parser.parse_args(list(map(str, arguments))))
    return printed.getvalue()


def test_a_training_predicts_at_its_end_and_the_command_does_the_same(atlas, tmp_path):
    raw = configuration(atlas, tmp_path / "run", AUTOENCODER)
    raw["predict"] = {"out": str(tmp_path / "trained.zarr"), "batch_size": 32}
    report = train(raw)
    expected = by_hand(load_model(report.model), read(atlas), [f"gene{i}" for i in range(N_VARS)])
    trained = read(tmp_path / "trained.zarr")
    np.testing.assert_allclose(trained.obsm["X_emb"], expected, rtol=1e-5, atol=1e-6)
    assert list(trained.obs_names) == [f"cell{i}" for i in range(N_OBS)]
    printed = embed(atlas, "--model", report.model, "--out", tmp_path / "emb.zarr", "--batch-size", 32)
    assert re.search(r"n_predicted +83\b.*obsm/X_emb +\(83, 3\) float32", printed, re.DOTALL)
    assert np.array_equal(read(tmp_path / "emb.zarr").obsm["X_emb"], trained.obsm["X_emb"])


def test_genes_are_matched_by_name(atlas, tmp_path):
    genes = ["gene3", "gene11", "gene5"]
    report = train(configuration(atlas, tmp_path / "run", AUTOENCODER, data__genes=genes))
    model, adata = load_model(report.model), read(atlas)
    other = tmp_path / "other.h5ad"
    adata[:50, ["gene5", "gene1", "gene11", "gene3"]].copy().write_h5ad(other)
    embed(other, "--model", report.model, "--out", tmp_path / "other.zarr", "--key", "X_mine")
    np.testing.assert_allclose(
        read(tmp_path / "other.zarr").obsm["X_mine"], by_hand(model, adata[:50], genes), rtol=1e-5, atol=1e-6
    )
    few = tmp_path / "few.h5ad"
    adata[:50, ["gene5", "gene11"]].copy().write_h5ad(few)
    with pytest.raises(InputError, match="gene3"):
        embed(few, "--model", report.model, "--out", tmp_path / "few.zarr")
    embed(few, "--model", report.model, "--out", tmp_path / "few.zarr", "--genes-missing", "zero")
    X = np.asarray(adata[:50, genes].X.todense())
    X[:, genes.index("gene3")] = 0
    with torch.inference_mode():
        expected = model.embed(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(read(tmp_path / "few.zarr").obsm["X_emb"], expected, rtol=1e-5, atol=1e-6)


def test_a_classifier_predicts_labels(atlas, tmp_path):
    report = train(configuration(atlas, tmp_path / "run"))
    model = load_model(report.model)
    embed(atlas, "--model", report.model, "--out", tmp_path / "emb.zarr", "--method", "predict")
    predicted = read(tmp_path / "emb.zarr").obs["predicted"]
    saved = torch.load(report.model, weights_only=True)
    X = torch.from_numpy(np.asarray(read(atlas).X.todense()))
    codes = model.scores(X).argmax(1).numpy()
    assert list(predicted) == [saved["categories"]["cell_type"][code] for code in codes]
    assert list(predicted.cat.categories) == saved["categories"]["cell_type"]


def test_tokens_are_those_of_the_training_without_masks(atlas, tmp_path):
    raw = configuration(atlas, tmp_path / "run", TRANSFORMER, training__max_steps=1)
    raw["tokenizer"] = TOKENS
    report = train(raw)
    model = load_model(report.model)
    adata = dasksc.open(atlas)
    tokens = dasksc.tokens.RankTokens(adata.var_names, max_genes=8)
    dataset = dasksc.scDataset(adata, dasksc.Streaming(), 16, layout="csr", transform=tokens)
    with torch.inference_mode():
        expected = np.concatenate([model.embed(batch).numpy() for batch in dataset])
    # Reordering the genes permutes the columns; the tokens are equal except for ties.
    other = tmp_path / "other.h5ad"
    read(atlas)[:, list(reversed(adata.var_names))].copy().write_h5ad(other)
    embed(other, "--model", report.model, "--out", tmp_path / "emb.zarr", "--batch-size", 16)
    np.testing.assert_allclose(read(tmp_path / "emb.zarr").obsm["X_emb"], expected, rtol=1e-4, atol=1e-5)


def first_two(batch: Any) -> Any:
    return batch[:, :2]


def test_a_function_is_imported_and_ranks_without_a_process_group_finish_independently(atlas, tmp_path, monkeypatch):
    name = f"{__name__}:first_two"
    arguments = [atlas, "--model", name, "--out", tmp_path / "emb.zarr", "--json", "--no-progress"]
    reports = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        reports.append(json.loads(embed(*arguments, "--batch-size", 8)))
    assert [one["is_complete"] for one in reports] == [False, True] or reports[0]["n_predicted"] == 0
    assert sum(one["n_predicted"] for one in reports) == N_OBS
    assert np.array_equal(read(tmp_path / "emb.zarr").obsm["X_emb"], read(atlas).X[:, :2].todense())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("none.pt", (), "there is no model at"),
        ("nowhere:function", (), "cannot be imported"),
        ("torch.nn:Linear", (), "or a module instance"),
        ("MODEL", ("--method", "embedd"), "'embedd'"),
        ("MODEL", ("--key", "a/b"), "no '/'"),
    ],
)
def test_invalid_options_are_reported(atlas, tmp_path, model, options, message):
    if model == "MODEL":
        model = train(configuration(atlas, tmp_path / "run", AUTOENCODER, training__max_steps=1)).model
    with pytest.raises(dasksc.DaskscError, match=message):
        embed(atlas, "--model", model, "--out", tmp_path / "emb.zarr", *options)
    assert "out" in run_command("embed", atlas, "--model", model, exit_code=2).stderr


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["code", "function", "text", "tensor"])
def test_a_file_without_a_model_is_refused_and_runs_no_code(atlas, tmp_path, kind):
    path, touched = tmp_path / "model.pt", tmp_path / "touched"
    if kind == "code":
        torch.save({"name": "autoencoder", "arguments": {}, "parameters": Harmful(touched)}, path)
    elif kind == "function":
        torch.save({"name": "os:mkdir", "arguments": {"path": str(touched)}, "parameters": {}}, path)
    elif kind == "tensor":
        torch.save(torch.ones(2), path)
    else:
        path.write_text("hello")
    with pytest.raises(
        InputError, match=r"is not a model\.pt that dasksc train wrote|is not a torch\.nn\.Module class"
    ):
        embed(atlas, "--model", path, "--out", tmp_path / "emb.zarr")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.pt"]
