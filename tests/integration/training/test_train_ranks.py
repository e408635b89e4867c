"""Training on several ranks: processes with gloo, compared with one process on the same global batches.

Tolerance: losses, norms and accuracies of float32 runs agree to a relative error of 1e-4 over all steps of SGD with
momentum. The runs differ in the order of summation.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anndata as ad
import numpy as np
import pytest
import torch
import torch.distributed as dist

import dasksc
from dasksc.train import Config, fit, load_model
from tests.support.programs import torchrun
from tests.support.training import (
    EPOCHS,
    N_CELLS,
    RTOL,
    SHARE,
    alone,
    assert_same,
    figures,
    joined,
    split_rows,
    training,
)

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("train_ranks")]

ODD_SHARE = 0.084


@pytest.fixture(scope="session")
def atlas(training_atlas) -> Path:
    return training_atlas


@pytest.fixture(scope="module")
def half_labelled(atlas, tmp_path_factory) -> Path:
    """Write the atlas with labels for only half of the cells."""
    adata = ad.read_h5ad(atlas)
    adata.obs["cell_type"] = adata.obs["cell_type"].where(np.random.default_rng(0).random(N_CELLS) < 0.5)
    path = tmp_path_factory.mktemp("half") / "half.h5ad"
    adata.write_h5ad(path)
    return path


def run(n_ranks: int, folder: Path, trainings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainings.json").write_text(json.dumps(trainings))
    torchrun(n_ranks, "train_many.py", folder / "trainings.json")


PLAIN: dict[str, dict[str, Any]] = {
    "ddp": {},
    "full_shard": {"training__fsdp": {"min_num_params": 300}},
    "shard_grad_op": {"training__fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "min_num_params": 300}},
    "no_shard": {"training__fsdp": {"sharding_strategy": "NO_SHARD"}},
    "hybrid_of_one_copy": {"training__fsdp": {"sharding_strategy": "HYBRID_SHARD", "min_num_params": 300}},
    "offloaded": {"training__fsdp": {"cpu_offload": True}},
    "ddp_checkpointing_activations": {"training__activation_checkpointing": True},
    "fsdp_checkpointing_activations": {"training__fsdp": {"activation_checkpointing": True, "min_num_params": 300}},
}
ACCUMULATING: dict[str, dict[str, Any]] = {
    "ddp_accumulating": {"training__gradient_accumulation": 5},
    "fsdp_accumulating": {"training__gradient_accumulation": 5, "training__fsdp": {"min_num_params": 300}},
}
CLIPPING: dict[str, dict[str, Any]] = {
    "ddp_clipping": {"training__gradient_clip": 0.3},
    "fsdp_clipping": {"training__gradient_clip": 0.3, "training__fsdp": {"min_num_params": 300}},
    "offloaded_clipping": {"training__gradient_clip": 0.3, "training__fsdp": {"cpu_offload": True}},
}
UNLABELLED: dict[str, dict[str, Any]] = {f"half_labelled_{name}": options for name, options in ACCUMULATING.items()}
HALF: dict[str, dict[str, Any]] = {
    f"{strategy}_{precision}": {"training__precision": precision, "training__gradient_clip": 1.0, **options}
    for precision in ("bf16-mixed", "16-mixed")
    for strategy, options in {"ddp": {}, "fsdp": {"training__fsdp": {"min_num_params": 300}}}.items()
}


@pytest.fixture(scope="module")
def two_ranks(atlas, half_labelled, tmp_path_factory) -> Path:
    """Return the folder of all training runs on two ranks, executed in one launch."""
    folder = tmp_path_factory.mktemp("two")
    trainings = {
        name: training(atlas, folder / name, **changes)
        for name, changes in {**PLAIN, **ACCUMULATING, **CLIPPING, **HALF}.items()
    }
    for name, changes in UNLABELLED.items():
        clipped = {**changes, "training__gradient_clip": 100.0}  # records the norm
        trainings[name] = training(half_labelled, folder / name, **clipped)
    noting = {"name": "tests.programs.train_models:Noting", "folder": str(folder / "rows-0")}
    trainings["part"] = training(atlas, folder / "part", training__max_steps=5)
    trainings["part"]["model"] = noting
    trainings["part"]["data"] |= {"validation": None, "obs": ["cell_type"]}
    trainings["whole_copies"] = training(atlas, folder / "x", training__strategy="single")
    trainings["too_few"] = training(atlas, folder / "x", training__num_gpus=8)
    trainings["uneven"] = training(
        atlas, folder / "x", training__fsdp={"sharding_strategy": "HYBRID_SHARD", "shard_size": 3}
    )
    # 17 rows are held out: one rank has 9 and hence two batches, the other has 8.
    odd = {"data__validation": ODD_SHARE, "training__fsdp": {"min_num_params": 300}}
    trainings["odd"] = training(atlas, folder / "odd", **odd)
    run(2, folder, trainings)
    return folder


@pytest.mark.parametrize("name", PLAIN)
def test_every_strategy_has_the_losses_of_one_process_on_the_same_batches(name, two_ranks, atlas):
    expected = alone(atlas, 2)
    first, second = np.array_split(expected["loss"], EPOCHS)
    assert second.mean() < 0.95 * first.mean()
    assert_same(two_ranks / name, expected, "loss", "accuracy", "validation_loss")


@pytest.mark.parametrize("name", ACCUMULATING)
def test_accumulating_five_batches_equals_one_of_five_times_the_size_also_at_the_end(name, two_ranks, atlas):
    expected = alone(atlas, 2, k=5)
    n_batches = len(alone(atlas, 2)["loss"]) // EPOCHS
    assert n_batches % 5
    assert len(expected["loss"]) == EPOCHS * -(-n_batches // 5)
    assert_same(two_ranks / name, expected, "loss", "accuracy", "validation_loss")


@pytest.mark.parametrize("name", UNLABELLED)
def test_batches_and_ranks_are_weighted_by_their_number_of_labels(name, two_ranks, half_labelled):
    expected = alone(half_labelled, 2, k=5)
    assert_same(two_ranks / name, expected, "loss", "accuracy", "gradient_norm", "validation_loss")


@pytest.mark.parametrize("name", CLIPPING)
def test_the_gradient_is_clipped_by_the_norm_of_one_process(name, two_ranks, atlas):
    expected = alone(atlas, 2, clip=0.3)
    assert max(expected["gradient_norm"]) > 0.3
    assert_same(two_ranks / name, expected, "loss", "gradient_norm")


@pytest.mark.parametrize("name", ["ddp_bf16-mixed", "fsdp_bf16-mixed"])
def test_half_precision_follows_the_losses_of_full_precision(name, two_ranks, atlas):
    expected = alone(atlas, 2, clip=1.0)["loss"]
    found = figures(two_ranks / name)
    # The mantissa has eight bits. Equal losses would indicate full precision.
    np.testing.assert_allclose(found, expected, rtol=0.1)
    assert found != pytest.approx(expected, rel=1e-6)


def test_float16_skips_the_same_steps_on_all_ranks_and_continues(two_ranks, atlas):
    ddp, fsdp = (figures(two_ranks / f"{strategy}_16-mixed") for strategy in ("ddp", "fsdp"))
    # Gradients that overflow at the initial scale change no weights.
    np.testing.assert_allclose(ddp, fsdp, rtol=0.01)
    expected = alone(atlas, 2, clip=1.0)["loss"]
    assert np.mean(ddp[-12:]) == pytest.approx(np.mean(expected[-12:]), rel=0.1)


@pytest.mark.parametrize("name", ["ddp", "full_shard", "offloaded"])
def test_what_was_trained_loads_into_one_process(name, two_ranks, atlas):
    folder = two_ranks / name
    (checkpoint,) = folder.glob("step-*")
    one_file, shards = load_model(folder / "model.pt"), load_model(checkpoint)
    for ours, theirs in zip(one_file.parameters(), shards.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    adata = dasksc.open(atlas)
    _, held_out = split_rows(adata, share=SHARE)
    rest = dasksc.scDataset(adata, dasksc.Streaming(held_out), batch_size=8, obs=["cell_type"], rank=0, world_size=1)
    with torch.no_grad():
        loss = one_file(joined(list(rest)))["loss"].item()
    assert loss == pytest.approx(figures(folder, "validation_loss")[-1], rel=RTOL)


def test_sharded_ranks_validate_unequally_many_batches(two_ranks, atlas):
    _, held_out = split_rows(dasksc.open(atlas), share=ODD_SHARE)
    assert len(held_out) == 17
    assert_same(two_ranks / "odd", alone(atlas, 2, share=ODD_SHARE), "loss", "validation_loss")


def test_runs_that_do_not_fit_their_ranks_are_refused(two_ranks):
    assert "strategy='single' runs in one process, but this run has 2" in (two_ranks / "whole_copies.error").read_text()
    assert "num_gpus=8 is the total over all nodes" in (two_ranks / "too_few.error").read_text()
    assert "training.fsdp.shard_size=3" in (two_ranks / "uneven.error").read_text()
    assert {path.stem for path in two_ranks.glob("*.error")} == {"whole_copies", "too_few", "uneven"}


@pytest.fixture(scope="module")
def four_ranks(atlas, two_ranks, tmp_path_factory) -> Path:
    """Return the folder of all training runs on four ranks, in one launch; one resumes where two ranks stopped."""
    folder = tmp_path_factory.mktemp("four")
    fsdp = {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2, "min_num_params": 300}
    part = json.loads((two_ranks / "trainings.json").read_text())["part"]
    part["model"]["folder"] = str(folder / "rows-1")
    part["training"] |= {"max_steps": None, "max_epochs": 2, "resume_from": "auto"}
    part["training"]["fsdp"] = {"min_num_params": 10}  # the checkpoint is from DDP
    run(4, folder, {"hybrid": training(atlas, folder / "hybrid", training__fsdp=fsdp), "part": part})
    return folder


def test_two_copies_of_two_shards_have_the_losses_of_one_process(four_ranks, atlas):
    assert_same(four_ranks / "hybrid", alone(atlas, 4), "loss", "validation_loss")


def test_four_ranks_go_on_where_two_stopped_without_repeating_or_losing_rows(two_ranks, four_ranks):
    assert not list(four_ranks.glob("*.error"))
    first, second = (
        [rows_of(file) for file in sorted(folder.iterdir())] for folder in (two_ranks / "rows-0", four_ranks / "rows-1")
    )
    assert [len(batches) for batches in first] == [5, 5]
    assert len({len(batches) for batches in second}) == 1
    seen = Counter(row for ranks in (first, second) for batches in ranks for batch in batches for row in batch)
    assert set(seen) == set(range(N_CELLS))
    # Two epochs, the first in two segments (before and after resuming). Padding adds at most one row per rank and
    # segment.
    assert 2 * N_CELLS <= seen.total() <= 2 * N_CELLS + 2 + 4 + 4
    n_before = 5 * 2 * 8
    remaining = Counter(
        row for batches in second for batch in batches[: -(-(N_CELLS - n_before) // 32)] for row in batch
    )
    before = Counter(row for batches in first for batch in batches for row in batch)
    assert set(before) | set(remaining) == set(range(N_CELLS))
    assert len(set(before) & set(remaining)) <= 2
    folder = json.loads((four_ranks / "trainings.json").read_text())["part"]["training"]["checkpoint_dir"]
    steps = [int(step) for step in figures(Path(folder), "step")]
    assert steps == list(range(1, len(steps) + 1))


def rows_of(file: Path) -> list[list[int]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_rank_waits_for_rank_0_if_it_cannot_write(atlas, tmp_path):
    context = get_context("spawn")
    reports, done = context.Queue(), context.Event()
    ranks = [
        context.Process(target=_save_without_space, args=(rank, atlas, tmp_path, reports, done)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = dict(reports.get(timeout=600) for _ in ranks)
    done.set()
    for rank in ranks:
        rank.join()
    for text in found.values():
        assert text.startswith("StorageError: the ")
        assert text.endswith("cannot be written: OSError on rank 0, [Errno 28] No space left on device")


def _save_without_space(rank: int, atlas: Path, folder: Path, reports: Any, done: Any) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    full = patch("dasksc.train.metrics.Table.__call__", side_effect=OSError(28, "No space left on device"))
    try:
        with full if rank == 0 else nullcontext():
            fit(Config.of(training(atlas, folder / "run", training__max_steps=3)), say=lambda line: None)
        reports.put((rank, "nothing"))
    except Exception as error:
        reports.put((rank, f"{type(error).__name__}: {error}"))
    # Wait until both ranks have reported, because the exit of one would hide that the other waits for it.
    done.wait(120)
    dist.destroy_process_group()
