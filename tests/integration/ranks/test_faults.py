"""Faults of ranks and DataLoader workers: each is reported, ends every wait, and leaves the data set usable."""

from __future__ import annotations

import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dasksc import BlockShuffling, scDataset
from dasksc.memory import own_bytes
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, ended

pytestmark = pytest.mark.faults


# Rank 0 hosts the store, which ends with it, so a kill of either rank is tested. A rank that raises an error, unlike a
# killed one, first records in the store that its iteration has ended.
@pytest.mark.parametrize(("how", "whom"), [("raise", 1), ("SIGKILL", 0), ("SIGKILL", 1)])
def test_without_a_launcher_that_watches_the_other_rank_ends_too(how, whom):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, PROGRAMS / "ddp_faults.py", how, whom]
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: ended(command, RANK=rank, **shared), range(2)))
    assert all(rank.returncode != 0 for rank in ranks)
    assert not any("finished" in rank.stdout for rank in ranks)
    if how == "raise":
        assert "ZeroDivisionError: mine" in ranks[whom].stderr
        assert f"in batch 3 of 63 (epoch 0, rank {whom} of 2)" in ranks[whom].stderr
    else:
        assert ranks[whom].returncode == -signal.SIGKILL
    # The other rank reports the error of its collective, not one from closing the data set.
    assert "Error" in ranks[1 - whom].stderr
    assert "all_reduce" in ranks[1 - whom].stderr


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(203), tmp_path_factory.mktemp("atlas"), "h5ad")


# A worker that is killed while it transfers a tensor may leave a socket of torch's queue open.
@pytest.mark.filterwarnings("ignore:.*socket:pytest.PytestUnraisableExceptionWarning")
# All signals and start methods but not all pairs: the effect of a signal does not depend on the start method.
@pytest.mark.parametrize(
    ("how", "start"),
    [(signal.SIGKILL, "fork"), (signal.SIGTERM, "fork"), (signal.SIGSEGV, "fork"), (signal.SIGKILL, "spawn")],
)
def test_a_worker_that_dies_is_an_error_and_the_next_epoch_is_whole(tmp_path, how, start):
    mark = tmp_path / "once"
    mark.touch()

    def deadly(batch):
        if mark.exists() and torch.utils.data.get_worker_info().id == 1:
            mark.unlink()
            os.kill(os.getpid(), how)
        return batch

    one = scDataset(np.arange(100), BlockShuffling(4), 4, 2, seed=0, batch_transform=deadly)
    loader = DataLoader(one, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=60)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        list(loader)
    assert sorted(np.concatenate(list(loader)).tolist()) == list(range(100))
    assert one.stats()["n_rows"] == 100


# A notebook keeps the traceback of the last error and hence every frame.
INTERRUPTED = """
import os, random, signal, sys, threading, time
import numpy as np
import dasksc

def slow(data, rows):
    time.sleep(random.random() / 100)
    return data[rows]

hooks = {"fetch_callback": slow} if sys.argv[2] == "hooks" else {}
dataset = dasksc.scDataset(sys.argv[1], dasksc.BlockShuffling(4), 4, 2, seed=0, **hooks)
first = [len(batch) for batch in dataset]
threads = set(threading.enumerate())
cell = compile("for batch in dataset:\\n    time.sleep(0.001)", "cell", "exec")
random.seed(0)
kept, n_interrupted = None, 0
for i in range(30):
    timer = threading.Timer(random.random() / 10, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        for _ in range(100):
            exec(cell)
    except KeyboardInterrupt as error:
        kept = error
        n_interrupted += 1
    timer.join()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) == threads, threading.enumerate()
assert [len(batch) for batch in dataset] == first
assert len(dataset) == len(first)
print(n_interrupted)
"""


@pytest.mark.parametrize("what", ["matrices", "hooks"])
def test_interrupts_at_any_moment_stop_the_threads_and_leave_the_data_set_usable(path, what):
    done = ended([sys.executable, "-c", INTERRUPTED, path, what])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "30\n"
    assert done.stderr == ""


def test_many_epochs_of_short_lived_workers_are_all_different_and_keep_nothing(atlas_of):
    n_obs = 101
    one = scDataset(atlas_of(n_obs, 40), BlockShuffling(4), 4, 2, seed=5, obs=["cell_type"])
    loader = DataLoader(one, batch_size=None, num_workers=2)
    epochs, n_files, held = set(), [], []
    for _ in range(30):
        batches = [tuple(batch.index.tolist()) for batch in loader]
        assert sorted(row for batch in batches for row in batch) == list(range(n_obs))
        epochs.add(tuple(batches))
        n_files.append(len(os.listdir("/proc/self/fd")))
        held.append(own_bytes())
    assert len(epochs) == 30
    # Two workers that are still ending may hold two pipes each for a while, whereas a leak grows for 15 epochs.
    assert min(n_files[20:]) <= min(n_files[5:15]) + 4
    # A leak in every epoch would accumulate over fifteen epochs. 3 MiB are 200 KiB per epoch, about as much as the
    # pipes and queues of one worker.
    assert min(held[20:]) - min(held[5:15]) < 3 * 2**20
