"""Tokens made by PyTorch on a device, equal bit for bit to those of `dasksc.kernels.tokens`.

The host counts, validates and draws; the device sorts, bins and masks. Sizes are known on the host, so that no
function waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dasksc.kernels import permute
from dasksc.kernels import tokens as kernels

_LAST = 2**32 - 1  # sorts nonzeros without a token behind the others of their row
_MOST_BITS = 2**31 - 1


class CellTokens(NamedTuple):
    """Nonzeros of CSR rows, and the tokens of each row, of which the first `longest` at most are kept."""

    ids: torch.Tensor  # token of each nonzero, -1 without one; shape (nnz,), int64
    values: torch.Tensor  # shape (nnz,), float32
    starts: torch.Tensor  # first nonzero of each row, shape (n_rows, 1), int64
    rows: torch.Tensor  # row of each nonzero, shape (nnz,), int64
    counts: torch.Tensor  # tokens of each row, shape (n_rows, 1), int64
    longest: int

    def ordered(self, by: torch.Tensor) -> torch.Tensor:
        """Return the positions of the nonzeros, row by row, the tokens of a row in ascending order `by` a number."""
        keys = torch.where((self.ids >= 0) & (self.values != 0), by.long(), _LAST)
        return torch.argsort((self.rows << 32) | keys, stable=True)

    def at(self, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the positions of the nonzeros at `places` in the rows of an order; any position beyond the last."""
        return order[(self.starts + places).clamp_(0, len(order) - 1)]


def cell_tokens(
    X: torch.Tensor, ids: torch.Tensor, medians: torch.Tensor, counts: torch.Tensor, longest: int
) -> CellTokens:
    """Return the tokens of a CSR tensor with at least one nonzero, divided by `medians` unless these are empty."""
    indptr, columns, values = X.crow_indices().long(), X.col_indices(), X.values().float()
    rows = torch.arange(len(X), device=X.device)
    rows = rows.repeat_interleave(indptr.diff(), output_size=len(columns))
    if len(medians):
        values = values / medians[columns]
    return CellTokens(ids[columns], values, indptr[:-1, None], rows, counts[:, None], longest)


def ranked(cells: CellTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and values in descending order of value, each of shape (n_rows, longest); see `rank_tokens`."""
    # The bits of positive floats are in the order of the floats.
    order = cells.ordered(_MOST_BITS - cells.values.view(torch.int32))
    positions = cells.at(order, torch.arange(cells.longest, device=order.device))
    return cells.ids[positions], cells.values[positions]


def binned(
    cells: CellTokens, chosen: torch.Tensor | None, keys: torch.Tensor, n_bins: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and bins of the `chosen` tokens of each row, None for the first ones; see `bin_tokens`."""
    if chosen is None:
        chosen = torch.arange(cells.longest, device=keys.device).expand(len(keys), -1)
    positions = cells.at(cells.ordered(torch.zeros_like(cells.ids)), chosen)
    ascending = cells.values[cells.ordered(cells.values.view(torch.int32))]
    identity = torch.arange(len(ascending), device=keys.device)

    shares = torch.arange(n_bins - 1, dtype=torch.float64, device=keys.device) * (1.0 / max(1, n_bins - 2))
    if n_bins > 2:
        shares[-1] = 1.0
    places = shares * (cells.counts - 1)
    below = places.long()
    low = ascending[cells.at(identity, below)]
    high = ascending[cells.at(identity, torch.minimum(below + 1, cells.counts - 1))]
    share, span = places - below, (high - low).double()
    edges = torch.where(share >= 0.5, high.double() - span * (1.0 - share), low.double() + span * share)

    values = cells.values[positions].double()
    highest = torch.searchsorted(edges, values, right=True)
    n_equal = highest - torch.searchsorted(edges, values)
    tied = _mix(keys ^ _signed(permute.mix(np.uint64(kernels.TIED))))
    return cells.ids[positions], (highest - (_uniform(tied[:, None], chosen) * n_equal).long()).float()


def _uniform(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return `permute.uniform` of int64 tensors that hold the bits of unsigned numbers."""
    return _shifted(_mix(keys + (counters + 1) * _signed(permute.GOLDEN)), 11) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(permute.MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(permute.MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(number: np.uint64) -> int:
    return int(np.uint64(number).view(np.int64))
