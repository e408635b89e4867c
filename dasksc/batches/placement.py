"""Placement of batches in pinned memory or on a device.

A batch is gathered into one block of host memory and transformed there. One copy, on a stream of its own, moves the
block to the device, where CSR rows become dense. The stream of the loop waits for that of the copy, not the loop.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from dasksc.batches.batch import by_parts, csr_tensor, map_tensors, on_device
from dasksc.storage import buffers

__all__ = ["Block", "Placement"]

# The parts of a block begin at multiples of this number of bytes.
_ALIGNMENT = 64
# Smaller tensors are copied into the block if they lie elsewhere, and out of it on the device: a loop that collects row
# numbers must not keep whole blocks alive.
_SMALL_BYTES = 2**16
# torch adds up, and thus expands, these types only as signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Block:
    """Host memory of one batch."""

    def __init__(self, n_bytes: int, *, is_pinned: bool) -> None:
        # Memory is reused only when nothing refers to it any more. For pinned memory, torch also waits for the copies
        # that have begun.
        self.bytes = (
            torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
            if is_pinned
            else torch.from_numpy(buffers.empty(n_bytes, np.uint8))
        )
        self._array: NDArray[np.uint8] = self.bytes.numpy()
        self.n_used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array in the block, or elsewhere if the block has no room for it."""
        dtype = np.dtype(dtype)
        n_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        start = -(-self.n_used // _ALIGNMENT) * _ALIGNMENT
        if start + n_bytes > len(self._array):
            return buffers.empty(shape, dtype)
        self.n_used = start + n_bytes
        return self._array[start : self.n_used].view(dtype).reshape(shape)

    def place_of(self, tensor: torch.Tensor) -> slice | None:
        """Return the bytes of the block that hold a tensor, or None if it lies elsewhere."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr() - self.bytes.data_ptr()
        is_inside = 0 <= start <= self.n_used - tensor.nbytes and not tensor.requires_grad
        return slice(start, start + tensor.nbytes) if is_inside else None


class Placement:
    """Where the batches of an epoch are yielded: in memory, pinned or not, or on a device."""

    def __init__(self, device: torch.device | None, *, is_pinned: bool, expands: bool, block_bytes: int) -> None:
        if device == torch.device("cuda"):
            # The current device is that of the thread of the loop; other threads have their own.
            device = torch.device("cuda", torch.cuda.current_device())
        self._stream: Any = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device, self._is_pinned, self._expands = device, is_pinned, expands
        is_copied = device is not None and device.type != "cpu"
        self._block_bytes = block_bytes if is_pinned or is_copied or expands else 0

    def block(self) -> Block | None:
        """Return memory to gather a batch in; None for batches that stay where they are."""
        return (
            None
            if self._device is None and not self._is_pinned
            else Block(self._block_bytes, is_pinned=self._is_pinned)
        )

    def place(self, batch: Any, block: Block | None) -> tuple[Any, Any]:
        """Begin to move the tensors of a batch; return it with the event that ends the move, if there is one."""
        if block is None:
            return batch, None

        def pinned(part: torch.Tensor) -> torch.Tensor:
            return part if block.place_of(part) else part.pin_memory()

        if self._device is None:
            return map_tensors(batch, lambda one: by_parts(one, pinned)), None
        if self._block_bytes:
            batch = map_tensors(batch, lambda one: _in_block(one, block))
        with torch.cuda.stream(self._stream):
            there = block.bytes[: block.n_used].to(self._device, non_blocking=True)
            batch = map_tensors(batch, lambda one: self._moved(one, block, there))
            return batch, None if self._stream is None else self._stream.record_event()

    def ready(self, batch: Any, event: Any) -> Any:
        """Return a placed batch for use in the current stream, with objects of the user moved, too."""
        if self._device is None and not self._is_pinned:
            return batch
        if event is None:
            return map_tensors(batch, lambda one: one, self._object)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)

        def recorded(part: torch.Tensor) -> torch.Tensor:
            part.record_stream(stream)  # lest the memory be reused by the next copy while this stream uses it
            return part

        return map_tensors(batch, lambda one: by_parts(one, recorded), self._object)

    def _moved(self, tensor: torch.Tensor, block: Block, there: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, on which the bytes of the block are `there`."""

        def moved(part: torch.Tensor) -> torch.Tensor:
            place = block.place_of(part)
            if place is None:
                is_pinned = self._is_pinned and part.layout == torch.strided and part.device.type == "cpu"
                return on_device(part.pin_memory() if is_pinned else part, there.device, non_blocking=True)
            view = there[place].view(part.dtype).view(part.shape)
            return view.clone() if part.nbytes < _SMALL_BYTES and not expands else view

        expands = self._expands and tensor.layout == torch.sparse_csr
        tensor = by_parts(tensor, moved)
        return _expanded(tensor) if expands else tensor

    def _object(self, value: Any) -> Any:
        if self._is_pinned and hasattr(value, "pin_memory"):
            value = value.pin_memory()
        if self._device is not None and hasattr(value, "to"):
            value = value.to(self._device, non_blocking=self._is_pinned)
        return value


def _in_block(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a small tensor as a copy in the block, and any other as it is."""
    is_small = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.nbytes < _SMALL_BYTES
    if not is_small or tensor.requires_grad or block.place_of(tensor):
        return tensor
    memory = torch.from_numpy(block.empty(tensor.nbytes, np.uint8))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CSR tensor as a dense one, on its device."""
    values = tensor.values()
    signed = values.view(_SIGNED.get(values.dtype, values.dtype))
    size = tensor.shape[0], tensor.shape[1]
    return csr_tensor(tensor.crow_indices(), tensor.col_indices(), signed, size).to_dense().view(values.dtype)
