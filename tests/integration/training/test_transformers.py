"""Hugging Face Trainer: no cell is repeated or lost, and training resumes at the batch after a checkpoint."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import pytest

from dasksc import InputError
from tests.support import programs
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("transformers")]

PROGRAM = PROGRAMS / "hf_trainer.py"
N_TRAINING, N_OBS = 50, 60
Seen = dict[str, list[list[int]]]


def run(folder: Path, n_ranks: int, trainings: dict[str, dict[str, object]]) -> dict[str, list[Seen]]:
    """Run several training configurations in one launch; return the rows that each rank read, by configuration name."""
    path = write_store(make_adata(N_OBS), folder, "h5ad")
    given = json.dumps([{"folder": str(folder / name), "path": str(path), **trainings[name]} for name in trainings])
    if n_ranks > 1:
        torchrun(n_ranks, PROGRAM.name, given)
    else:
        programs.run([sys.executable, PROGRAM, given], is_preloaded=True)
    return {
        name: [json.loads((folder / name / f"seen-{rank}.json").read_text()) for rank in range(n_ranks)]
        for name in trainings
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Seen]:
    """Return the rows of one process: uninterrupted, from checkpoints, and with accumulated batches."""
    folder = tmp_path_factory.mktemp("alone")
    trainings: dict[str, dict[str, object]] = {"whole": {}}
    trainings |= {f"from-{step}": {"checkpoint": str(folder / f"whole/checkpoint-{step}")} for step in (3, 7, 9)}
    trainings["two"] = {"accumulate": 2}
    trainings["two-from-2"] = {"accumulate": 2, "checkpoint": str(folder / "two/checkpoint-2")}
    trainings["two-from-5"] = {"accumulate": 2, "checkpoint": str(folder / "two-from-2/checkpoint-5")}
    return {name: of_rank for name, (of_rank,) in run(folder, 1, trainings).items()}


def test_one_process_reads_every_cell_once_an_epoch(alone):
    batches = alone["whole"]["train"]
    assert len(batches) == 14
    assert batches[:7] != batches[7:]
    for epoch in (batches[:7], batches[7:]):
        assert sorted(chain(*epoch)) == list(range(N_TRAINING))
    assert sorted(chain(*alone["whole"]["eval"])) == list(range(N_TRAINING, N_OBS))


@pytest.mark.parametrize("step", [3, 7, 9])
def test_one_process_goes_on_from_its_checkpoints(step, alone):
    assert alone[f"from-{step}"]["train"] == alone["whole"]["train"][step:]


def test_accumulated_batches_are_not_read_twice_after_a_checkpoint(alone):
    assert alone["two-from-2"]["train"] == alone["two"]["train"][4:]
    assert alone["two-from-5"]["train"] == alone["two"]["train"][9:]


def test_two_ranks_share_each_epoch_and_go_on_in_the_middle_of_one(tmp_path):
    again = {"checkpoint": str(tmp_path / "whole/checkpoint-2")}
    ranks, rest = run(tmp_path, 2, {"whole": {}, "rest": again}).values()
    assert [len(rank["train"]) for rank in ranks] == [8, 8]
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(chain(*(chain(*rank["train"][epoch]) for rank in ranks))) == list(range(N_TRAINING))
    assert sorted(chain(*(chain(*rank["eval"]) for rank in ranks))) == list(range(N_TRAINING, N_OBS))
    assert [rank["train"] for rank in rest] == [rank["train"][2:] for rank in ranks]


def test_ranks_that_would_train_separate_models_are_refused(tmp_path, monkeypatch):
    from torch import nn
    from transformers import TrainingArguments

    from dasksc.integrations import transformers

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setattr(transformers.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(transformers.distributed, "get_world_size", lambda: 2)
    with pytest.raises(InputError, match="use_cpu=True"):
        transformers.scTrainer(nn.Linear(1, 1), arguments)
