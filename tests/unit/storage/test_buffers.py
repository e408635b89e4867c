"""Reused memory, which never alters arrays still referenced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from dasksc.memory import own_bytes
from dasksc.storage import buffers

pytestmark = pytest.mark.core

SHAPE = (64, 1024)


def filled(value: float) -> np.ndarray:
    array = buffers.empty(SHAPE, np.float32)
    array[:] = value
    return array


@pytest.fixture(autouse=True)
def pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new pool, so that buffers still referenced by other tests do not matter."""
    monkeypatch.setattr(buffers, "_pool", buffers._Pool())


@contextmanager
def recycled() -> Iterator[None]:
    recycling = buffers.Recycling()
    yield
    del recycling


HOLDERS = {
    "view of a view": lambda array: array[1:].view(np.int32)[:, 2:],
    "view of a tensor": lambda array: torch.from_numpy(array)[1:].t(),
    "alias of a tensor": lambda array: torch.from_numpy(array).numpy()[1:],
    "memoryview": lambda array: memoryview(array),
    "sparse tensor": lambda array: torch.sparse_csr_tensor(
        torch.tensor([0, array.size]),
        torch.zeros(array.size, dtype=torch.int64),
        torch.from_numpy(array.reshape(-1)),
        check_invariants=False,
    ).values(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_that_is_referenced_in_any_way_is_not_reused(hold) -> None:
    with recycled():
        first = filled(1)
        address = first.ctypes.data
        held = hold(first)
        del first
        second = filled(2)
        assert second.ctypes.data != address
        assert (np.frombuffer(np.asarray(held).tobytes(), dtype=np.float32) == 1).all()
        del held
        assert filled(3).ctypes.data == address


def test_freed_memory_returns_to_the_system_even_below_memory_in_use() -> None:
    n = 20 * 2**20
    large = np.ones(n, np.uint8)
    del large  # From here on, glibc allocates blocks of this size on its heap.
    with recycled():
        array = buffers.empty(n, np.uint8)
        array[:] = 1
        later = np.ones(n, np.uint8)
        held = own_bytes()
        del array
    assert held - own_bytes() > 0.9 * n
    del later


def test_arrays_that_outlive_the_epoch_keep_their_values() -> None:
    with recycled():
        held = filled(1)
    with recycled():
        others = [filled(2) for _ in range(4)]
        assert (held == 1).all()
        del others


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "int32", "float32", "float64"])
def test_arrays_of_any_type_are_aligned_and_apart(dtype: str) -> None:
    with recycled():
        for _ in range(3):  # new, then reused
            indices, values = buffers.empty(150_001, np.int32), buffers.empty(150_001, dtype)
            assert (indices.dtype, values.dtype, values.shape) == (np.int32, np.dtype(dtype), (150_001,))
            assert indices.flags.aligned
            assert values.flags.aligned
            assert not np.shares_memory(indices, values)
