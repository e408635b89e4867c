"""Bytes of files: reading of many ranges with one call, and strings in the global heap of HDF5 files.

In Python, ``os.preadv`` reacquires the GIL after each range. Threads that read short ranges then wait longer for the
GIL than for the disk.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.intrinsics import call

_WILLNEED = 3  # MADV_WILLNEED on Linux and macOS
_COLLECTION_HEADER_BYTES = 16
_OBJECT_HEADER_BYTES = 16
_SIGNATURE = 0x4C4F4347  # "GCOL"


@kernel
def read_ranges(function, descriptor, offsets, sizes, enough, addresses):
    """Read at least `enough` bytes of each range to its address; return the first range that failed, or -1."""
    for i in range(len(offsets)):
        done = np.int64(0)
        while done < enough[i]:
            to = addresses[i] + np.uint64(done)
            n = np.int64(call(function, (descriptor, to, sizes[i] - done, offsets[i] + done)))
            if n <= 0:
                return i
            done += n
    return -1


@kernel
def advise_ranges(function, addresses, sizes, gap, most, page):
    """Request mapped ranges with ``madvise``, at most `most` bytes at a time."""
    # A range that begins inside the previous one or at most `gap` bytes after it is requested with it.
    i = 0
    while i < len(addresses):
        start, stop = addresses[i], addresses[i] + sizes[i]
        i += 1
        while i < len(addresses) and start <= addresses[i] <= stop + gap:
            stop = max(stop, addresses[i] + sizes[i])
            i += 1
        start -= start % page
        while start < stop:
            call(function, (start, min(stop - start, most), _WILLNEED))
            start += most


@kernel
def _number(data, at, n_bytes):
    value = np.int64(0)
    for i in range(n_bytes):
        # A signed index would be tested for negative ones, which prevents a single load.
        value |= np.int64(data[np.uint64(at + i)]) << np.int64(8 * i)
    return value


@kernel
def locate_strings(references, data, starts, sizes):
    """Write the place of each string in a file; return the first one that cannot be found, or -1."""
    last_collection = np.int64(-1)
    end = position = np.int64(0)
    for i in range(len(references)):
        length = _number(references[i], 0, 4)
        collection = _number(references[i], 4, 8)
        wanted = _number(references[i], 12, 4)
        starts[i] = sizes[i] = 0
        if length == 0:
            continue
        if collection != last_collection:
            if collection <= 0 or collection > len(data) - _COLLECTION_HEADER_BYTES:
                return i
            size = _number(data, collection + 8, 8)
            if _number(data, collection, 4) != _SIGNATURE or size < 0 or size > len(data) - collection:
                return i
            last_collection, end = collection, collection + size
            position = collection + _COLLECTION_HEADER_BYTES
        first = position
        has_wrapped = False
        while True:
            is_end = position + _OBJECT_HEADER_BYTES > end
            number = np.int64(0) if is_end else _number(data, position, 2)
            if is_end or number == 0:  # free space comes last in a collection
                if has_wrapped:
                    return i
                has_wrapped = True
                position = collection + _COLLECTION_HEADER_BYTES
                continue
            n_bytes = _number(data, position + 8, 8)
            after = position + _OBJECT_HEADER_BYTES + (n_bytes + 7) // 8 * 8
            if n_bytes < 0 or n_bytes > len(data) or after > end:
                return i
            if number == wanted:
                if length > n_bytes:
                    return i
                begin = position + _OBJECT_HEADER_BYTES
                stop = begin
                while stop < begin + length and data[stop] != 0:
                    stop += 1
                starts[i], sizes[i] = begin, stop - begin
                break
            position = after
            if has_wrapped and position >= first:
                return i
    return -1


@kernel
def copy_strings(data, starts, sizes, out):
    """Concatenate strings into `out`, uint8."""
    at = 0
    for i in range(len(starts)):
        for k in range(sizes[i]):
            out[at] = data[starts[i] + k]
            at += 1
