"""Placement of batches in pinned memory or on a device.

A batch is gathered into one block of host memory. One copy, on a stream of its own, moves the block to the device,
where CSR rows become dense. The stream of the loop waits for that of the copy, not the loop. The tensors of a batch are
made once, on the device, unless transforms need them on the host first.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from dasksc.batches.batch import Memory, by_parts, csr_tensor, map_tensors, on_device, torch_dtype
from dasksc.errors import InputError
from dasksc.storage import buffers

# The parts of a block begin at multiples of this number of bytes.
_ALIGNMENT = 64
# Smaller tensors are copied into the block if they lie elsewhere, and out of it on the device: a loop that collects row
# numbers must not keep whole blocks alive.
_SMALL_BYTES = 2**16
# torch adds up, and thus expands, these types only as signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Block(Memory):
    """Memory of one batch: on the host and, if there is a device, as much memory there."""

    def __init__(self, n_bytes: int, device: torch.device | None, *, is_pinned: bool, is_staged: bool) -> None:
        n_bytes += -n_bytes % _ALIGNMENT
        # Memory is reused only when nothing refers to it any more. For pinned memory, torch also waits for the copies
        # that have begun.
        if is_pinned:
            self.here = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
            self._array: NDArray[np.uint8] = self.here.numpy()
        else:
            self._array = buffers.empty(n_bytes, np.uint8)
            self.here = torch.from_numpy(self._array)
        is_copied = device is not None and device.type != "cpu"
        self.there = torch.empty(n_bytes, dtype=torch.uint8, device=device) if is_copied else self.here
        # Tensors that hold all memory on the device
        self.held = [self.there]
        self._views = {torch.uint8: self.there}
        self._places: dict[int, tuple[int, NDArray[Any]]] = {}  # first bytes of arrays in the block, by their ids
        self._n_used = 0
        # A staged block holds tensors of the host for transforms, whose results are then moved.
        self._device, self._is_pinned, self._is_staged = device, is_pinned, is_staged

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array in the block, or elsewhere if the block has no room for it."""
        dtype = np.dtype(dtype)
        n_bytes = (math.prod(shape) if isinstance(shape, tuple) else shape) * dtype.itemsize
        start = self._n_used + -self._n_used % _ALIGNMENT
        if start + n_bytes > len(self._array):
            return super().empty(shape, dtype)
        self._n_used = start + n_bytes
        array: NDArray[Any] = np.ndarray(shape, dtype, self._array, start)
        self._places[id(array)] = start, array
        return array

    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a tensor of the values of an array, where `moved` puts it unless the block `is_staged`."""
        if self._is_staged:
            return super().tensor(array)
        # The tensors of most arrays are made without a tensor on the host, which takes as long.
        if (known := self._places.get(id(array))) is None:
            return self.moved(super().tensor(array))
        return self._view(torch_dtype(array.dtype), array.shape, known[0])

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a strided tensor where the batch goes: in the block if it lies there or is small, or by itself."""
        if tensor.layout != torch.strided:
            return tensor
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad:
            place = self._place(tensor)
            if place is None and self._device is not None and tensor.nbytes < _SMALL_BYTES:
                copy = torch.from_numpy(self.empty(tensor.nbytes, np.uint8))
                copy.view(tensor.dtype).view(tensor.shape).copy_(tensor)
                place = self._place(copy)
            if place is not None:
                return self._view(tensor.dtype, tensor.shape, place)
        if self._is_pinned and tensor.is_cpu:
            tensor = tensor.pin_memory()
        if self._device is not None:
            tensor = on_device(tensor, self._device, non_blocking=self._is_pinned)
        self.held.append(tensor)
        return tensor

    def _place(self, tensor: torch.Tensor) -> int | None:
        """Return the byte of the block at which a tensor begins; None if it lies elsewhere."""
        start = tensor.data_ptr() - self.here.data_ptr()
        return start if 0 <= start <= self._n_used - tensor.nbytes else None

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], place: int) -> torch.Tensor:
        """Return the contiguous tensor of the device that begins at a byte of the block."""
        if dtype not in self._views:
            self._views[dtype] = self.there.view(dtype)
        strides = (1,) if len(shape) == 1 else [math.prod(shape[i:]) for i in range(1, len(shape) + 1)]
        return self._views[dtype].as_strided(shape, strides, place // dtype.itemsize)

    def copy(self) -> None:
        """Begin to copy the used memory to the device."""
        if self.there is not self.here:
            self.there[: self._n_used].copy_(self.here[: self._n_used], non_blocking=self._is_pinned)

    def finished(self, tensor: torch.Tensor, *, expands: bool) -> torch.Tensor:
        """Return a tensor on the device as it is yielded: CSR as dense if it `expands`, small parts as copies."""
        if expands and tensor.layout == torch.sparse_csr:
            tensor = _expanded(tensor)
        elif tensor.layout != torch.strided or not tensor.nbytes < min(_SMALL_BYTES, tensor.untyped_storage().nbytes()):
            return tensor
        else:
            tensor = tensor.clone()
        self.held.append(tensor)
        return tensor


class Placement:
    """Where the batches of an epoch are yielded: in memory, pinned or not, or on a device."""

    def __init__(
        self,
        device: torch.device | None,
        *,
        is_pinned: bool,
        is_staged: bool,
        expands: bool,
        block_bytes: int,
        last: Callable[[Any], Any] | None = None,
    ) -> None:
        if is_pinned and not torch.accelerator.is_available():
            raise InputError("pin_memory=True and device='cuda' need a GPU, but PyTorch finds none")
        if device == torch.device("cuda"):
            # The current device is that of the thread of the loop; other threads have their own.
            device = torch.device("cuda", torch.cuda.current_device())
        self._stream = _stream_of(device) if device is not None and device.type == "cuda" else None
        self._device, self._is_pinned, self._is_staged = device, is_pinned, is_staged
        self._expands, self._block_bytes = expands, block_bytes
        self._last = last  # transform of batches on the device

    def memory(self) -> Memory:
        """Return memory to gather a batch in."""
        if self._device is None and not self._is_pinned:
            return Memory()
        # Memory of the device is allocated in the stream that copies.
        with self._streaming():
            return Block(self._block_bytes, self._device, is_pinned=self._is_pinned, is_staged=self._is_staged)

    def place(self, batch: Any, memory: Memory) -> tuple[Any, list[torch.Tensor], Any]:
        """Begin to move a batch; return it, the tensors that hold its memory, and the event that ends the move."""
        if not isinstance(memory, Block):
            return batch, [], None
        with self._streaming():
            if self._is_staged:
                batch = map_tensors(batch, lambda one: by_parts(one, memory.moved))
            if self._device is not None:
                memory.copy()
                if self._last is not None:
                    batch = self._last(batch)
                    memory.held += [one for one in batch.values() if isinstance(one, torch.Tensor)]
                batch = map_tensors(batch, lambda one: memory.finished(one, expands=self._expands))
            return batch, memory.held, None if self._stream is None else self._stream.record_event()

    def ready(self, batch: Any, held: list[torch.Tensor], event: Any) -> Any:
        """Return a placed batch for use in the current stream, with what has no stream moved, too."""
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for part in held:
                part.record_stream(stream)  # lest the memory be reused by the next copy while this stream uses it
        return map_tensors(batch, self._tensor, self._object) if held and self._is_staged else batch

    def _streaming(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._device is None else on_device(value, self._device)

    def _object(self, value: Any) -> Any:
        if self._is_pinned and hasattr(value, "pin_memory"):
            value = value.pin_memory()
        if self._device is not None and hasattr(value, "to"):
            value = value.to(self._device, non_blocking=self._is_pinned)
        return value


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of this process that copies to a device."""
    # torch keeps the memory of each stream for that stream, so another one in each epoch would need as much again.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CSR tensor as a dense one, on its device."""
    # CUDA expands CSR by a thread for each row, but COO by one for each value.
    values = tensor.values()
    if signed := _SIGNED.get(values.dtype):
        shape = tensor.shape[0], tensor.shape[1]
        tensor = csr_tensor(tensor.crow_indices(), tensor.col_indices(), values.view(signed), shape)
    return tensor.to_sparse().to_dense().view(values.dtype)
