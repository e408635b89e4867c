"""Epoch counter shared by the copies of a data set."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import pickle
import subprocess
import sys
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest

from dasksc.errors import StorageError
from dasksc.planning.epochs import EpochCounter

pytestmark = pytest.mark.core


def test_epochs_count_up_and_peeking_uses_none() -> None:
    counter = EpochCounter()
    assert [counter.peek(), counter.advance(), counter.peek(), counter.advance()] == [0, 0, 1, 1]
    counter.set(7)
    assert counter.advance() == 7


def test_a_full_temporary_folder_is_named_and_nothing_stays_in_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch("dasksc.planning.epochs.json.dump", side_effect=full),
        pytest.raises(StorageError, match=f"{tmp_path}.*TMPDIR"),
    ):
        EpochCounter()
    assert os.listdir(tmp_path) == []


def test_workers_of_one_pass_read_one_epoch() -> None:
    counter = EpochCounter()
    assert [counter.join(11, worker, 3) for worker in (2, 0, 1)] == [0, 0, 0]
    assert [counter.join(12, worker, 3) for worker in (0, 1, 2)] == [1, 1, 1]


def test_a_worker_seen_before_begins_the_next_epoch_under_the_same_seed() -> None:
    counter = EpochCounter()
    for epoch in range(4):
        assert [counter.join(11, worker, 2) for worker in (0, 1)] == [epoch, epoch]


def test_two_passes_at_once_do_not_mix() -> None:
    counter = EpochCounter()
    assert [counter.join(1, 0, 2), counter.join(2, 0, 2), counter.join(1, 1, 2), counter.join(2, 1, 2)] == [0, 1, 0, 1]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_count_together(copied) -> None:
    counter = EpochCounter()
    twin = copied(counter)
    assert [counter.advance(), twin.advance(), counter.advance()] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_are_begun_with_a_copy_count_by_themselves(method: str) -> None:
    counter = EpochCounter()
    counter.set(3)
    context = get_context(method)
    found = context.Queue()
    for _ in range(2):
        rank = context.Process(target=_count_twice, args=(counter, found))
        rank.start()
        assert [found.get(timeout=60) for _ in range(2)] == [3, 4]
        rank.join()
    assert counter.peek() == 3


def _count_twice(counter: EpochCounter, found: Any) -> None:
    found.put(counter.advance())
    found.put(counter.advance())


def test_a_copy_outlives_the_first() -> None:
    counter = EpochCounter()
    counter.advance()
    twin = pickle.loads(pickle.dumps(counter))
    del counter
    gc.collect()
    assert [twin.advance(), twin.advance()] == [1, 2]


def test_the_file_is_removed_with_the_counter_and_not_with_a_forked_child() -> None:
    counter = EpochCounter()
    path = counter._path
    child = get_context("fork").Process(target=gc.collect)
    child.start()
    child.join()
    assert os.path.exists(path)
    del counter
    gc.collect()
    assert not os.path.exists(path)


def test_the_file_goes_with_the_interpreter(tmp_path) -> None:
    code = "from dasksc.planning.epochs import EpochCounter; c = EpochCounter(); print(c._path)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))
    assert not list(tmp_path.glob("dasksc-epoch-*"))


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


def test_a_pass_can_be_gone_on_with_again():
    counter = EpochCounter()
    for epoch in (4, 4, 7):
        for worker in range(2):
            counter.resume(1234, worker, 2, epoch=epoch)
        assert [counter.join(1234, worker, 2) for worker in range(2)] == [epoch, epoch]
        assert counter.peek() == epoch + 1


def test_a_process_killed_at_any_moment_leaves_the_count_readable() -> None:
    counter = EpochCounter()
    context = get_context("fork")
    for i in range(20):
        begun_at = counter.peek()
        child = context.Process(target=_count_for_ever, args=(counter,))
        child.start()
        while counter.peek() <= begun_at + i:
            pass  # wait until the child has advanced the counter
        child.kill()
        child.join()
        before = counter.peek()
        assert [counter.advance(), counter.join(i, 0, 2), counter.peek()] == [before, before + 1, before + 2]


def _count_for_ever(counter: EpochCounter) -> None:
    for seed in itertools.count():
        counter.join(seed % 20, seed % 3, 10 ** (seed % 9))


def test_a_shorter_count_leaves_nothing_of_a_longer_one() -> None:
    counter = EpochCounter()
    counter.set(10**9)
    counter.set(3)
    assert counter.advance() == 3


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
