"""Hugging Face's Trainer: no cell twice, none lost, and on from a checkpoint's very next batch."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.programs

PROGRAM = Path(__file__).parent / "programs" / "hf_trainer.py"
N_TRAINING, N_OBS = 50, 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


def run(folder: Path, path: Path, n_ranks: int, **options: object) -> list[dict[str, list[list[int]]]]:
    """Train on some ranks; what each saw."""
    given = json.dumps({"folder": str(folder), "path": str(path), **options})
    if n_ranks > 1:
        torchrun(n_ranks, PROGRAM.name, given)
    else:
        programs.run([sys.executable, PROGRAM, given])
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(n_ranks)]


def test_one_process_reads_every_cell_once_an_epoch_and_goes_on_from_its_checkpoints(path, tmp_path):
    (whole,) = run(tmp_path, path, 1)
    batches = whole["train"]
    assert len(batches) == 14
    assert batches[:7] != batches[7:]
    for epoch in (batches[:7], batches[7:]):
        assert sorted(chain(*epoch)) == list(range(N_TRAINING))
    assert sorted(chain(*whole["eval"])) == list(range(N_TRAINING, N_OBS))
    for step in (3, 7, 9):
        (rest,) = run(tmp_path / "again", path, 1, checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert rest["train"] == batches[step:], step


def test_two_ranks_share_each_epoch_and_go_on_in_the_middle_of_one(path, tmp_path):
    ranks = run(tmp_path, path, 2)
    assert [len(rank["train"]) for rank in ranks] == [8, 8]
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(chain(*(chain(*rank["train"][epoch]) for rank in ranks))) == list(range(N_TRAINING))
    assert sorted(chain(*(chain(*rank["eval"]) for rank in ranks))) == list(range(N_TRAINING, N_OBS))
    rest = run(tmp_path / "again", path, 2, checkpoint=str(tmp_path / "checkpoint-2"))
    assert [rank["train"] for rank in rest] == [rank["train"][2:] for rank in ranks]


def test_accumulated_batches_are_not_read_twice_after_a_checkpoint(path, tmp_path):
    (whole,) = run(tmp_path, path, 1, accumulate=2)
    (rest,) = run(tmp_path / "again", path, 1, accumulate=2, checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest["train"] == whole["train"][4:]
