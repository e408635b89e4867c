"""Decoding of parts of chunks (Blosc, Zstandard, deflate), with one call for all chunks of a fetch, and of LZF.

The kernels call the decoders of C libraries by their addresses. A Python loop would allocate memory for every chunk,
and would spend a third of its time between calls of the decoder, while holding the GIL.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.intrinsics import call, load

_HEADER_BYTES = 16
_CODEC_VERSION = 1  # the format version of every Blosc codec
_IS_COPIED = 2
_FIRST_ERROR = np.uint64(2**64 - 120)  # larger results are error codes
_HAS_CHECKSUM = 0x04  # in the byte after the magic number


@kernel
def _copy_bytes(source, out):
    """Copy `source` to the beginning of `out`, both uint8."""
    # Assigning slices, or indices that may be negative, is ten times slower, since it is not vectorized.
    for i in range(len(source)):
        out[i] = source[i]


@kernel
def decode_blosc(function, sources, sizes, chunk_bytes, chunks, starts, stops, to, scratch, out):
    """Decode pieces of chunks into `out`, uint8; return the number of the first piece that failed, or -1."""
    # Piece i consists of decoded bytes [starts[i], stops[i]) of chunk chunks[i], and begins at out[to[i]]. Chunks are
    # ascending, and so are the pieces of a chunk. `scratch` has `chunk_bytes` bytes.
    first = 0
    byte = np.empty(0, dtype=np.uint8)
    word = np.empty(0, dtype=np.int32)
    while first < len(chunks):
        chunk = chunks[first]
        source = sources[chunk]
        # The library trusts the sizes in the header, which come from the file, so they are checked here.
        if sizes[chunk] < _HEADER_BYTES:
            return first
        item = np.int64(load(source, 3, byte))
        block = np.int64(load(source, 2, word))
        stored = load(source, 3, word)
        if load(source, 1, word) != chunk_bytes or stored > sizes[chunk] or not (0 < block <= chunk_bytes) or item < 1:
            return first
        # The library trusts that uncompressed chunks are complete, so their size is checked here.
        if load(source, 1, byte) != _CODEC_VERSION or (
            load(source, 2, byte) & _IS_COPIED and stored != chunk_bytes + _HEADER_BYTES
        ):
            return first
        # Pieces that share a block of the chunk are decoded together, so that each block is decoded once.
        after = first + 1
        while (
            after < len(chunks) and chunks[after] == chunk and starts[after] // block <= (stops[after - 1] - 1) // block
        ):
            after += 1
        start = starts[first]
        n_bytes = stops[after - 1] - start
        if start % item or n_bytes % item:
            return first
        alone = after == first + 1
        target = np.uint64(out.ctypes.data + to[first]) if alone else np.uint64(scratch.ctypes.data)
        if np.int32(call(function, (source, start // item, n_bytes // item, target))) != n_bytes:
            return first
        if not alone:
            for i in range(first, after):
                _copy_bytes(scratch[starts[i] - start : stops[i] - start], out[to[i] :])
        first = after
    return -1


@kernel
def decode_pieces(functions, sources, sizes, chunk_bytes, chunks, starts, stops, to, scratch, out):
    """Decode pieces of Zstandard or deflate chunks as `decode_blosc` does."""
    # The functions are those of `zstd_addresses` or `deflate_addresses` in `dasksc._compat`. Chunks of
    # several frames or gzip members fail, and so do frames that do not state their size.
    context = call(functions[0], ())
    first, failed = 0, -1
    while first < len(chunks):
        chunk = chunks[first]
        after = first + 1
        while after < len(chunks) and chunks[after] == chunk:
            after += 1
        is_whole = stops[first] - starts[first] == chunk_bytes
        target = np.uint64(out.ctypes.data) + np.uint64(to[first]) if is_whole else np.uint64(scratch.ctypes.data)
        given = sources[chunk], sizes[chunk], stops[after - 1], target, chunk_bytes
        if context == 0 or not _decode_chunk(functions, context, *given):
            failed = first
            break
        if not is_whole:
            for i in range(first, after):
                _copy_bytes(scratch[starts[i] : stops[i]], out[to[i] :])
        first = after
    call(functions[1], (context,))
    return failed


@kernel
def _decode_chunk(functions, context, source, size, n_needed, target, n_bytes):
    """Decode the chunk of `size` bytes at `source` to `target`, up to at least `n_needed` of its `n_bytes` bytes."""
    size, n_needed, n_bytes = np.uint64(size), np.uint64(n_needed), np.uint64(n_bytes)
    # Numba compiles one of the two branches for each number of functions.
    if len(functions) == 3:
        # Without an address for the decoded size, libdeflate fails for any other size than that of the chunk.
        return np.int32(call(functions[2], (context, source, size, target, n_bytes, np.uint64(0)))) == 0
    # Frames are decoded block by block, straight into place. A streaming decompressor would copy each block twice, and
    # would allocate its window again for every frame.
    _, _, content_size, begin, next_size, proceed = functions
    if call(content_size, (source, size)) != n_bytes:
        return False
    # A checksum can be verified only for the whole frame.
    if load(source, 4, np.empty(0, dtype=np.uint8)) & _HAS_CHECKSUM:
        n_needed = n_bytes
    call(begin, (context,))
    done = at = np.uint64(0)
    n = call(next_size, (context,))
    while n != 0 and n <= size - at and (done < n_needed or n_needed == n_bytes):
        got = call(proceed, (context, target + done, n_bytes - done, source + at, n))
        if got > _FIRST_ERROR:
            return False
        done += got
        at += n
        n = call(next_size, (context,))
    # The end of a frame that is decoded whole must be that of the chunk.
    return done >= n_needed and (n_needed < n_bytes or (n == 0 and at == size))


@kernel
def decode_lzf(data, out):
    """Decode `data` into `out`, both uint8; return the number of bytes, or -1 if it is corrupt or does not fit."""
    # Otherwise, only libhdf5 decodes this filter of HDF5, under its global lock.
    # Indices are unsigned, so that numba need not handle negative ones and can vectorize the copies.
    at = to = np.int64(0)
    while at < len(data):
        control = np.int64(data[np.uint64(at)])
        at += 1
        if control < 32:
            # A run of `control + 1` literal bytes.
            n = control + 1
            if at + n > len(data) or to + n > len(out):
                return -1
            for i in range(n):
                out[np.uint64(to + i)] = data[np.uint64(at + i)]
            at += n
        else:
            # A reference to earlier output. It may overlap the bytes that this copy writes, so bytes are copied singly.
            n = control >> 5
            if n == 7 and at < len(data):
                n += data[at]
                at += 1
            n += 2
            if at >= len(data):
                return -1
            back = ((control & 31) << 8) + data[at] + 1
            at += 1
            if back > to or to + n > len(out):
                return -1
            for i in range(n):
                out[np.uint64(to + i)] = out[np.uint64(to + i - back)]
        to += n
    return to
