"""Damaged checkpoints, and disks that cannot be written to."""

from __future__ import annotations

from typing import Any

import pytest

from dasksc import CorruptDataError, InputError, MissingPathError, StorageError
from dasksc.train import load_model
from tests.support.training import checkpoints, train

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("text", ["", '{"version": 1, "st', "[]", "\udcff"], ids=["empty", "cut", "list", "binary"])
def test_a_state_that_is_cut_off_is_named(text, raw, folder):
    train(raw)
    file = folder / "step-00000006" / "state.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptDataError, match=f"{file}.*Remove"):
        train(raw, training__resume_from="auto")
    with pytest.raises(CorruptDataError, match=str(file)):
        load_model(file.parent)
    with pytest.raises(MissingPathError, match=r"state\.json"):
        load_model(folder)


def test_a_damaged_older_checkpoint_stops_no_run(raw, folder):
    train(raw)
    (folder / "step-00000002" / "state.json").write_text("")
    train(raw, training__resume_from="auto", training__max_steps=8)
    assert checkpoints(folder) == [2, 4, 6, 8]


def test_tensors_that_are_damaged_are_refused_with_the_path(raw, folder):
    train(raw)
    path = folder / "step-00000006"
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(metadata[:100])
    with pytest.raises(CorruptDataError, match=rf"{path}/\.metadata"):
        train(raw, training__resume_from="auto")
    (path / ".metadata").write_bytes(metadata)
    for shard in path.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:200])
    for going_on in (lambda: train(raw, training__resume_from="auto"), lambda: load_model(path)):
        with pytest.raises(InputError, match=f"{path}"):
            going_on()


def test_a_disk_that_cannot_be_written_is_named(raw, folder, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
    with pytest.raises(StorageError, match=f"{folder}/step-00000002.partial"):
        train(raw)
