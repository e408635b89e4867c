"""Lightning data module: every stage, resuming from every step, and two processes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

import dasksc
from dasksc import BlockShuffling, InputError, Streaming
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, run

pytest.importorskip("lightning.pytorch")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint

from dasksc.integrations.lightning import scDataModule

N_OBS = 60
TRAINING, HELD_OUT = np.arange(50), np.arange(50, N_OBS)

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings(
        # Lightning warns about installed programs, few workers and short epochs.
        "ignore",
        # It must not warn about the loaders.
        "error:.*(sampler|resum|shuffl|length|IterableDataset|zero)",
        # Two warnings are correct in some tests: overfitting without shuffling, and an empty validation set.
        "ignore:You requested to overfit",
        "ignore:Total length of `list` across ranks is zero",
    ),
]


class Recorder(pl.LightningModule):
    """Small model that records the rows of each stage."""

    def __init__(self, *, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(17, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "validate": [], "test": [], "predict": []}
        self.ask_for_steps = ask_for_steps

    def _step(self, stage: str, batch: dasksc.Batch) -> torch.Tensor:
        assert isinstance(batch, dasksc.Batch)
        self.seen[stage].append(batch.index.tolist())
        return self.layer(batch.X).mean()

    def training_step(self, batch, batch_idx):
        return self._step("train", batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self._step("validate", batch), batch_size=len(batch.X))

    def test_step(self, batch, batch_idx):
        self._step("test", batch)

    def predict_step(self, batch, batch_idx):
        self._step("predict", batch)
        return batch.index

    def configure_optimizers(self):
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


def module(path, **options) -> scDataModule:
    strategies = {"train": BlockShuffling(4, indices=TRAINING), "validate": Streaming(indices=HELD_OUT)}
    options = {"batch_size": 8, "fetch_factor": 2, "obs": ["cell_type"], "seed": 3, **strategies, **options}
    return scDataModule(path, **options)


def trainer(folder, **options) -> pl.Trainer:
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
        **options,
    }
    return pl.Trainer(**options)


def every_step(folder) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def test_every_stage_reads_its_own_cells(path, tmp_path):
    model = Recorder()
    data = module(path, test=Streaming(indices=HELD_OUT[::-1]), predict=Streaming())
    one = trainer(tmp_path, num_sanity_val_steps=2)
    one.fit(model, data)
    epochs = model.seen["train"][:7], model.seen["train"][7:]
    assert len(epochs[1]) == 7
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(chain(*epoch)) == TRAINING.tolist()
    # Validation runs before training and after each epoch.
    assert Counter(chain(*model.seen["validate"])) == dict.fromkeys(HELD_OUT.tolist(), 3)
    one.validate(model, data, verbose=False)
    one.test(model, data, verbose=False)
    assert sorted(chain(*model.seen["test"])) == HELD_OUT.tolist()
    predicted = one.predict(model, data)
    assert torch.cat(predicted).tolist() == list(range(N_OBS))


@pytest.mark.parametrize("ask_for_steps", [False, True], ids=["plain", "estimated_stepping_batches"])
def test_training_resumes_from_the_checkpoint_of_a_step_with_the_next_batch(path, tmp_path, ask_for_steps):
    unbroken = Recorder(ask_for_steps=ask_for_steps)
    trainer(tmp_path, callbacks=[every_step(tmp_path)], enable_checkpointing=True).fit(unbroken, module(path))
    batches = unbroken.seen["train"]
    assert len(batches) == 14
    for step in (1, 6, 7, 8, 13):  # within an epoch, and next to its end
        again = Recorder(ask_for_steps=ask_for_steps)
        trainer(tmp_path).fit(again, module(path), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again.seen["train"] == batches[step:], step
    # Other batch sizes begin the next epoch after the last batch of one; stages other than training take any data set.
    other, data = Recorder(ask_for_steps=ask_for_steps), module(path, batch_size=4, test=Streaming(), seed=5)
    trainer(tmp_path).test(other, data, ckpt_path=tmp_path / "step=7.ckpt", verbose=False)
    trainer(tmp_path).fit(other, module(path, batch_size=4), ckpt_path=tmp_path / "step=7.ckpt")
    assert sorted(chain(*other.seen["train"])) == TRAINING.tolist()


def test_epochs_cut_short_by_lightning_resume_as_lightning_does(path, tmp_path):
    unbroken = Recorder()
    options = {"limit_train_batches": 4, "max_epochs": 3}
    saving = {"callbacks": [every_step(tmp_path)], "enable_checkpointing": True}
    trainer(tmp_path, **saving, **options).fit(unbroken, module(path))
    assert len(unbroken.seen["train"]) == 12
    for step in (3, 4, 5, 8):
        again = Recorder()
        trainer(tmp_path, **options).fit(again, module(path), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert again.seen["train"] == unbroken.seen["train"][step:], step
    ended, last = trainer(tmp_path, max_steps=3), Recorder()
    ended.fit(Recorder(), module(path))
    ended.save_checkpoint(tmp_path / "ended.ckpt")
    trainer(tmp_path).fit(last, module(path), ckpt_path=tmp_path / "ended.ckpt")
    assert (len(last.seen["train"]), len(last.seen["validate"])) == (4, 2)


def test_the_batch_size_finder_of_lightning_sets_the_batch_size_of_every_stage(path, tmp_path):
    model, data = Recorder(), module(path, batch_size=1, seed=None)
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=3)
    trainer(tmp_path, callbacks=[finder], max_epochs=1).fit(model, data)
    assert data.batch_size == 8
    assert [len(batch) for batch in model.seen["train"][-7:]] == [8] * 6 + [2]
    assert sorted(chain(*model.seen["train"][-7:])) == TRAINING.tolist()
    assert [len(batch) for batch in model.seen["validate"][-2:]] == [8, 2]


def test_training_without_validation_is_fine_and_validating_says_what_is_missing(path, tmp_path):
    model, data = Recorder(), module(path, validate=None)
    trainer(tmp_path, max_epochs=1).fit(model, data)
    assert len(model.seen["train"]) == 7
    with pytest.raises(InputError, match="pass validate="):
        trainer(tmp_path).validate(model, data)


def test_two_processes_resume_in_the_middle_of_an_epoch_and_one_takes_over(path, tmp_path):
    run([sys.executable, PROGRAMS / "lightning_ddp.py", path, tmp_path])
    whole, rest = (
        [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in ("whole", "rest")
    )
    assert [len(rank["train"]) for rank in whole] == [8, 8]
    for epoch in range(2):
        rows = [*chain(*(chain(*rank["train"][4 * epoch : 4 * epoch + 4]) for rank in whole))]
        assert sorted(rows) == TRAINING.tolist()
    # Each held-out cell is read once over both ranks after each epoch.
    assert Counter(chain(*(chain(*rank["validate"]) for rank in whole))) == dict.fromkeys(HELD_OUT.tolist(), 2)
    assert [rank["train"] for rank in rest] == [rank["train"][3:] for rank in whole]
    alone = Recorder()
    trainer(tmp_path).fit(alone, module(path, seed=None), ckpt_path=tmp_path / "whole" / "step=2.ckpt")
    seen = [*chain(*(chain(*rank["train"][:2]) for rank in whole)), *chain(*alone.seen["train"][:-7])]
    assert sorted(seen) == TRAINING.tolist()
    assert sorted(chain(*alone.seen["train"][-7:])) == TRAINING.tolist()


def test_a_module_of_pytorch_lightning_is_served_as_well(path):
    other = pytest.importorskip("pytorch_lightning")
    from dasksc.integrations.pytorch_lightning import scDataModule as OtherDataModule

    data = OtherDataModule(path, 8, train=BlockShuffling(4, indices=TRAINING), obs=["flag"])
    assert isinstance(data, other.LightningDataModule)
    data.setup("fit")
    assert sorted(row for batch in data.train_dataloader() for row in batch.index.tolist()) == TRAINING.tolist()


def test_stages_have_strategies_by_name_and_only_balance_takes_labels(path):
    module = scDataModule(path, 8, train="balance", validate="stream", label_key="cell_type", obs=["cell_type"], seed=1)
    assert str(module) == "scDataModule(train='balance', validate='stream')"
    module.setup("fit")
    assert repr(module.datasets["train"].strategy) == "ClassBalancedSampling(label_key='cell_type')"
    assert repr(module.datasets["validate"].strategy) == "Streaming()"
    refused = scDataModule(path, 8, train="shuffle", label_key="cell_type", seed=1)
    with pytest.raises(InputError, match="label_key='cell_type'.*strategy='balance'"):
        refused.setup("fit")
