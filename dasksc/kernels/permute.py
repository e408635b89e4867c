"""Keyed randomness: bits, shuffles and permutations as pure functions of a key.

No function keeps state. `bits` is a counter-based generator (the output function of SplitMix64 [1]_
over ``key + counter * golden``). All other functions build on it, so a value depends only on its key
and position, on every platform.

`permuted` evaluates a keyed permutation of ``range(n)`` at one position in O(1) memory. It is a balanced
Feistel network [2]_ over the next power of four, with cycle walking until the result is below n. Such a network is
always an even permutation and mixes poorly for small n, for which a `shuffle` table is used instead.

.. [1] Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
.. [2] Luby, Rackoff: How to construct pseudorandom permutations, SIAM J. Comput. 17 (1988); cycle
   walking after Black, Rogaway: Ciphers with arbitrary finite domains, CT-RSA 2002.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel

N_ROUNDS = 6
"""Number of rounds of the Feistel network, and of round keys."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
_U1 = np.uint64(1)
_U11 = np.uint64(11)
_U27 = np.uint64(27)
_U30 = np.uint64(30)
_U31 = np.uint64(31)
_U32 = np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)


@kernel
def mix(x):
    """Mix a 64-bit word: a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> _U30)) * MIX_1
    x = (x ^ (x >> _U27)) * MIX_2
    return x ^ (x >> _U31)


@kernel
def bits(key, counter):
    """Return 64 random bits for a uint64 `key` and a counter."""
    return mix(key + (np.uint64(counter) + _U1) * GOLDEN)


@kernel
def uniform(key, counter):
    """Return a float64 in [0, 1) with 53 random bits."""
    return np.float64(bits(key, counter) >> _U11) * (1.0 / 9007199254740992.0)


@kernel
def stream(key, number):
    """Return the key of stream `number` among the independent streams of a uint64 `key`."""
    return mix(key ^ mix(np.uint64(number)))


@kernel
def _below_any(key, counter, size):
    # Draw as many bits as the largest number has, until the number is below `size`: two attempts on average.
    mask = size - _U1
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    own = stream(key, counter)
    attempt = 0
    while True:
        number = bits(own, attempt) & mask
        if number < size:
            return np.int64(number)
        attempt += 1


@kernel
def below(key, counter, n):
    """Return an integer in [0, n), exactly uniform, for 0 < n < 2**63."""
    # Below 2**32, the two halves of a word are tried in turn, then words of a separate stream (Lemire: Fast random
    # integer generation in an interval, 2019).
    size = np.uint64(n)
    if size > _LOW_32:
        return _below_any(key, counter, size)
    threshold = ((_U1 << _U32) - size) % size
    word = bits(key, counter)
    product = (word >> _U32) * size
    if (product & _LOW_32) >= threshold:
        return np.int64(product >> _U32)
    product = (word & _LOW_32) * size
    if (product & _LOW_32) >= threshold:
        return np.int64(product >> _U32)
    spare = mix(word ^ key)
    attempt = 0
    while True:
        product = (bits(spare, attempt) >> _U32) * size
        if (product & _LOW_32) >= threshold:
            return np.int64(product >> _U32)
        attempt += 1


@kernel
def shuffle(key, out):
    """Fill `out`, shape (n,), with a keyed uniform permutation of ``range(n)`` (Fisher-Yates)."""
    n = out.shape[0]
    for i in range(n):
        out[i] = i
    for i in range(n - 1, 0, -1):
        j = below(key, i, i + 1)
        out[i], out[j] = out[j], out[i]


@kernel
def permuted(position, n, half_bits, round_keys):
    """Return the image of `position` under a keyed permutation of ``range(n)``, for ``n <= 4**half_bits``."""
    shift = np.uint64(half_bits)
    mask = (_U1 << shift) - _U1
    end = np.uint64(n)
    x = np.uint64(position)
    while True:
        left = x >> shift
        right = x & mask
        for i in range(round_keys.shape[0]):
            left, right = right, left ^ (mix(right + round_keys[i]) & mask)
        x = (left << shift) | right
        if x < end:
            return np.int64(x)


@kernel
def _block_at(position, n_blocks, table, half_bits, round_keys):
    # The order is given by a table or by the network. Without either, it is storage order.
    if table.shape[0] > 0:
        return np.int64(table[position])
    if half_bits > 0:
        return permuted(position, n_blocks, half_bits, round_keys)
    return np.int64(position)


@kernel
def permuted_many(positions, n_blocks, table, half_bits, round_keys, out):
    """Write the number of the block at each of `positions` in the block order into `out`, shape (k,), int64."""
    for i in range(positions.shape[0]):
        out[i] = _block_at(positions[i], n_blocks, table, half_bits, round_keys)


@kernel
def deal(start, block_size, rank, world_size, first, piece_round, piece, n_blocks, table, half_bits, round_keys, out):
    """Write the range ``[start, start + len(out))`` of one rank's sequence of rows into `out`."""
    # The sequence consists of the rank's full blocks, one per round (positions first + rank + k * world_size in the
    # block order), with `piece`, the rank's share of the leftover rows, inserted before round `piece_round`.
    before = piece_round * block_size
    n_piece = piece.shape[0]
    last_round = np.int64(-1)
    base = np.int64(0)
    for i in range(out.shape[0]):
        s = start + i
        if s >= before:
            if s < before + n_piece:
                out[i] = piece[s - before]
                continue
            s -= n_piece
        this_round = s // block_size
        if this_round != last_round:
            order_position = first + rank + this_round * world_size
            base = _block_at(order_position, n_blocks, table, half_bits, round_keys) * block_size
            last_round = this_round
        out[i] = base + (s - this_round * block_size)
