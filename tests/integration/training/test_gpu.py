"""Behavior specific to GPUs: transfer of pinned and sparse batches, NCCL, half precision, FSDP.

Without a GPU, tests for both devices run on the CPU and GPU-only tests are skipped. One GPU suffices.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
import yaml

import dasksc
from tests.support.programs import run
from tests.support.training import COMMAND, figures, train, training

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_thread")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU here")


@pytest.fixture(scope="session")
def atlas(training_atlas) -> Path:
    return training_atlas


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=needs_gpu)])
def test_batches_on_the_device_are_not_overwritten_by_later_ones(pinned, layout, n_workers, atlas):
    dataset = dasksc.scDataset(
        str(atlas),
        dasksc.BlockShuffling(4),
        batch_size=8,
        fetch_factor=2,
        layout=layout,
        obs=["cell_type"],
        pin_memory=pinned and not n_workers,
        seed=0,
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=n_workers, pin_memory=pinned and n_workers > 0
    )
    there = []
    for batch in loader if n_workers else dataset:
        parts = [batch.X] if layout == "dense" else [batch.X.crow_indices(), batch.X.col_indices(), batch.X.values()]
        assert [part.is_pinned() for part in parts] == [pinned] * len(parts)
        there.append(batch.to(DEVICE, non_blocking=True))
    expected = ad.read_h5ad(atlas)
    codes = torch.as_tensor(expected.obs["cell_type"].cat.codes.to_numpy().astype(np.int64))
    assert sum(len(batch.index) for batch in there) == len(codes)
    for batch in there:
        assert {batch.X.device.type, batch.obs["cell_type"].device.type, batch.index.device.type} == {DEVICE}
        X = batch.X.to_dense() if layout == "csr" else batch.X
        rows = batch.index.cpu()
        assert np.array_equal(X.cpu().numpy(), expected.X[rows.numpy()].toarray())
        assert torch.equal(batch.obs["cell_type"].cpu(), codes[rows])


FITS: dict[str, dict[str, Any]] = {
    "csr": {"data__layout": "csr"},
    "fsdp": {"training__fsdp": {"min_num_params": 300}, "training__gradient_clip": 0.3},
    "offloaded": {"training__fsdp": {"cpu_offload": True}, "training__gradient_clip": 0.3},
    "hybrid": {"training__fsdp": {"sharding_strategy": "HYBRID_SHARD", "min_num_params": 300}},
    "ddp": {"training__strategy": "ddp", "training__gradient_accumulation": 2},
    "tokens": {"data__strategy": {"name": "streaming"}},
}


def configured(atlas: Path, folder: Path, name: str) -> dict[str, Any]:
    raw = training(atlas, folder, training__max_epochs=1, **FITS[name])
    if name == "tokens":
        raw["tokenizer"] = {"strategy": "rank_value", "max_genes": 20, "prepend_cls": True}
        sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2}
        raw["model"] = {"name": "transformer_encoder", "label": "cell_type", "dropout": 0.0, **sizes}
    return raw


@pytest.mark.parametrize("precision", [pytest.param("bf16-mixed", marks=needs_gpu), "16-mixed"])
@pytest.mark.parametrize("name", FITS)
def test_trainings_in_half_precision_finish_and_resume(name, precision, atlas, tmp_path):
    raw = configured(atlas, tmp_path / "run", name)
    raw["training"] |= {"precision": precision, "resume_from": "auto"}
    report = train(raw)
    assert report.device == DEVICE
    assert np.isfinite(figures(tmp_path / "run")).any()
    raw["training"]["max_epochs"] = 2
    assert train(raw).n_steps == 2 * report.n_steps


@needs_gpu
@pytest.mark.parametrize("name", FITS)
def test_the_losses_of_a_gpu_are_those_of_the_cpu(name, atlas, tmp_path):
    for device in ("cpu", "cuda"):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(configured(atlas, tmp_path / device, name)))
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
        report = json.loads(run([*COMMAND, "--config", "c.yaml", "--json"], cwd=tmp_path, environment=environment))
        assert report["device"] == device
    # The order of summation differs, and TF32 is not requested.
    np.testing.assert_allclose(figures(tmp_path / "cuda"), figures(tmp_path / "cpu"), rtol=1e-3)
