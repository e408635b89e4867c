"""Memory that is used again never shows through what is still held."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from dasksc.storage import memory
from dasksc.storage.fetched import csr_pair

SHAPE = (64, 1024)


def filled(value: float) -> np.ndarray:
    array = memory.empty(SHAPE, np.float32)
    array[:] = value
    return array


HOLDERS = {
    "view": lambda array: array[1:],
    "view of a view": lambda array: array[1:].view(np.int32)[:, 2:],
    "tensor": lambda array: torch.from_numpy(array),
    "view of a tensor": lambda array: torch.from_numpy(array)[1:].t(),
    "alias of a tensor": lambda array: torch.from_numpy(array).numpy()[1:],
    "memoryview": lambda array: memoryview(array),
    "sparse tensor": lambda array: torch.sparse_csr_tensor(
        torch.tensor([0, array.size]), torch.zeros(array.size, dtype=torch.int64), torch.from_numpy(array.reshape(-1))
    ).values(),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_is_held_in_any_way_is_not_written_again(hold) -> None:
    with memory.recycled():
        first = filled(1)
        address = first.ctypes.data
        held = hold(first)
        del first
        second = filled(2)
        assert second.ctypes.data != address
        assert (np.frombuffer(np.asarray(held).tobytes(), dtype=np.float32) == 1).all()
        del held
        assert filled(3).ctypes.data == address


def test_other_types_and_near_sizes_use_the_same_memory() -> None:
    with memory.recycled():
        address = memory.empty(100_000, np.float32).ctypes.data
        assert memory.empty((2, 49_500), np.int32).ctypes.data == address


def test_memory_is_recycled_only_while_an_epoch_is_read() -> None:
    with memory.recycled():
        filled(1)
        with memory.recycled():
            pass
        filled(1)
        assert memory._pool._returned or memory._pool._idle
    assert not memory._pool._returned
    assert not memory._pool._idle
    kept = filled(1)
    del kept
    assert not memory._pool._returned


def test_unused_memory_stays_within_its_limit() -> None:
    with memory.recycled():
        arrays = [memory.empty(n, np.uint8) for n in range(2**24, 2**24 + 16 * 2**21, 2**21)]
        del arrays
        memory.empty(2**16, np.uint8)
        held = sum(capacity * len(kept) for capacity, kept in memory._pool._idle.items())
        assert held == memory._pool._idle_bytes
        assert 2**25 < held <= 2 * 2**26


def test_sizes_that_went_out_of_use_are_freed_when_others_come() -> None:
    with memory.recycled():
        for n in np.random.default_rng(0).integers(2**16, 2**27, 40).tolist():
            held = memory.empty(n, np.uint8)
            assert memory._pool._idle_bytes <= 2 * 2**27
            del held


def test_what_outlives_the_epoch_keeps_its_values() -> None:
    with memory.recycled():
        held = filled(1)
    with memory.recycled():
        others = [filled(2) for _ in range(4)]
        assert (held == 1).all()
        del others


def test_threads_never_share_what_they_hold() -> None:
    wrong = []

    def work(value: int) -> None:
        for _ in range(300):
            array = filled(value)
            if not (array == value).all():
                wrong.append(value)

    with memory.recycled():
        threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gc.collect()
    assert not wrong


def test_a_forked_child_starts_with_nothing() -> None:
    with memory.recycled():
        filled(1)
        pid = os.fork()
        if pid == 0:
            os._exit(memory._pool._n_users + len(memory._pool._returned) + len(memory._pool._idle))
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "int32", "float32", "float64"])
def test_columns_and_values_in_one_piece_are_aligned_and_apart(dtype: str) -> None:
    indices, values = csr_pair(50_001, np.dtype(dtype))
    assert (indices.dtype, values.dtype, len(indices), len(values)) == (np.int32, np.dtype(dtype), 50_001, 50_001)
    assert indices.flags.aligned
    assert values.flags.aligned
    assert not np.shares_memory(indices, values)
