"""Label entropy of batches, compared with that of ideal random batches.

Blocks of neighboring rows often share a plate, donor or cell type, so batches from few blocks hold
fewer labels than batches drawn at random. The entropy of the labels measures the difference. d'Ascenzo
and Cultrera di Montesano (scDataset, 2025) introduced this measure together with block sampling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_N_IDEAL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Label entropy of batches, in bits."""

    # mean, spread: Mean and standard deviation over the measured batches.
    mean: float
    spread: float
    # ideal_mean, ideal_spread: Mean and standard deviation over batches of the same size, drawn at random from all
    # measured rows.
    ideal_mean: float
    ideal_spread: float
    n_batches: int  # Number of measured batches

    @property
    def share(self) -> float:
        """Ratio of the mean to the ideal mean; 1 if there is only one label."""
        return self.mean / self.ideal_mean if self.ideal_mean > 0 else 1.0


def diversity_of(batches: Iterable[NDArray[Any]], n_labels: int) -> Diversity:
    """Compute the label entropy of batches."""
    counted = [np.bincount(codes[codes >= 0], minlength=n_labels) for codes in batches]
    counted = [counts for counts in counted if counts.any()]
    if not counted:
        return Diversity(mean=0.0, spread=0.0, ideal_mean=0.0, ideal_spread=0.0, n_batches=0)
    counts = np.array(counted)
    entropies = _entropies(counts)
    size = int(np.median(counts.sum(axis=1)))
    rng = np.random.default_rng(0)
    ideal = _entropies(rng.multivariate_hypergeometric(counts.sum(axis=0), size, _N_IDEAL, method="marginals"))
    return Diversity(
        mean=float(entropies.mean()),
        spread=float(entropies.std()),
        ideal_mean=float(ideal.mean()),
        ideal_spread=float(ideal.std()),
        n_batches=len(counts),
    )


def _entropies(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the entropy of each row of counts, in bits."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies: NDArray[np.float64] = np.abs((shares * logs).sum(axis=1))
    return entropies
