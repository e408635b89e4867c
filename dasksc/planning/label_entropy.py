"""How well batches are mixed: the entropy of their labels, beside that of ideal random batches.

Blocks of neighbouring rows often share a plate, donor or cell type, so batches from few blocks hold
fewer labels than batches drawn at random do. Entropy says how much fewer (the measure that block
sampling was published with: d'Ascenzo, Cultrera di Montesano, scDataset, 2025).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Diversity", "diversity_of"]

_N_IDEAL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Label entropy of batches, in bits.

    Parameters
    ----------
    mean, spread
        Mean and standard deviation over the batches looked at.
    ideal_mean, ideal_spread
        The same of batches of as many rows, drawn at random from all rows looked at.
    n_batches
        Batches looked at.
    """

    mean: float
    spread: float
    ideal_mean: float
    ideal_spread: float
    n_batches: int

    @property
    def share(self) -> float:
        """Mean as a share of the ideal one; 1 where there is but one label."""
        return self.mean / self.ideal_mean if self.ideal_mean > 0 else 1.0


def diversity_of(batches: Iterable[NDArray[Any]], n_labels: int) -> Diversity:
    """Measure batches given by the codes of their rows' labels.

    Parameters
    ----------
    batches
        For each batch the code of each row's label, in [0, n_labels); negative ones are left out.
    n_labels
        How many labels there are.

    Returns
    -------
    Diversity
        In bits; all zero without batches. The ideal is estimated from 1,000 random batches, always
        the same ones.
    """
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
    """Return the entropy in bits of each row of counts."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies: NDArray[np.float64] = np.abs((shares * logs).sum(axis=1))
    return entropies
