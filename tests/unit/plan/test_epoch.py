"""Epoch counter shared by the copies of a data set."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tempfile

import pytest

from dasksc.plan.epochs import EpochCounter

pytestmark = pytest.mark.core


def test_two_passes_at_once_do_not_mix() -> None:
    counter = EpochCounter()
    assert [counter.join(1, 0, 2), counter.join(2, 0, 2), counter.join(1, 1, 2), counter.join(2, 1, 2)] == [0, 1, 0, 1]


def test_workers_that_resume_a_pass_read_its_epoch_and_the_next_pass_reads_the_next():
    counter = EpochCounter()
    counter.set(9)
    for worker in range(2):
        counter.resume(1234, worker, 2, epoch=4)
    # A new pass reads the epoch after the resumed one, even if the workers of the resumed pass have not begun.
    assert counter.join(99, 0, 2) == 5
    assert [counter.join(1234, worker, 2) for worker in range(2)] == [4, 4]
    assert counter.join(99, 1, 2) == 5
    assert counter.peek() == 6


def test_the_work_of_workers_is_known_once_all_have_reported_it() -> None:
    counter = EpochCounter()
    assert counter.reports() is None
    assert [counter.join(11, worker, 2) for worker in (0, 1)] == [0, 0]
    assert counter.report(11, 1, 2, 0, {"n": 1}) is None
    assert counter.reports() == [{"n": 1}]
    assert counter.report(11, 0, 2, 0, {"n": 2}) == [{"n": 1}, {"n": 2}]
    assert counter.report(99, 0, 2, 0, {"n": 3}) is None
    counter.join(12, 0, 2)
    assert counter.reports() == []
    counter.advance()
    assert counter.reports() is None


def test_a_copy_shares_the_count_and_outlives_the_original() -> None:
    counter = EpochCounter()
    copies = [pickle.loads(pickle.dumps(counter)), copy.deepcopy(counter)]
    assert [one.join(11, 0, 1) for one in (counter, *copies)] == [0, 1, 2]
    path, saved = counter._path, pickle.dumps(counter)
    del counter
    assert [one.join(12, 0, 1) for one in copies] == [3, 4]
    copies.clear()
    assert not os.path.exists(path)
    # A counter that is loaded elsewhere makes a file at once, which its DataLoader workers share.
    loaded = pickle.loads(saved)
    assert [pickle.loads(pickle.dumps(loaded)).join(seed, 0, 1) for seed in (13, 14)] == [3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the count is in a temporary file")
def test_a_killed_process_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counter = EpochCounter()
    assert counter.advance() == 0
    assert os.listdir(tmp_path) == []


def test_a_copy_leaves_a_file_alone_that_has_the_place_of_the_count(tmp_path):
    counter = EpochCounter()
    counter.set(4)
    saved = pickle.dumps(counter)
    del counter
    with open(tmp_path / "other", "w+") as other:  # probably has the number of the descriptor
        loaded = pickle.loads(saved)
        assert [loaded.advance(), loaded.advance()] == [4, 5]
        assert other.read() == ""
