"""Draw docs/guides/sampling.png: which rows of a small data set land in which rank, fetch and batch.

python docs/guides/draw_sampling.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
mpl.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

import dasksc  # noqa: E402
from dasksc.plan.binding import bind  # noqa: E402

N, WORLD_SIZE, BATCH, FETCH_FACTOR = 64, 2, 4, 4
CLASSES = np.repeat([0, 1, 2], [40, 18, 6])
STRATEGIES = {
    "Streaming()": dasksc.Streaming(),
    "BlockShuffling(4)": dasksc.BlockShuffling(4),
    "BlockShuffling(1)": dasksc.BlockShuffling(1),
    "ClassBalancedSampling(labels, 4)": dasksc.ClassBalancedSampling(CLASSES, 4),
}


def main() -> None:
    """Draw it."""
    figure, panels = plt.subplots(len(STRATEGIES), 1, figsize=(9, 9), sharex=True, constrained_layout=True)
    for panel, (title, strategy) in zip(panels, STRATEGIES.items(), strict=True):
        sampler = bind(strategy, range(N), N, lambda key: None)
        plan = dasksc.EpochPlan(
            sampler=sampler, batch_size=BATCH, fetch_factor=FETCH_FACTOR, world_size=WORLD_SIZE, seed=1
        )
        for rank in range(WORLD_SIZE):
            of_rank = plan.of_rank(rank)
            for batch in range(of_rank.n_batches):
                rows = of_rank.batch_rows(batch)
                y = rank * (of_rank.n_batches + 1) + batch
                color = plt.cm.tab10(batch // FETCH_FACTOR + 2 * rank)
                panel.scatter(rows, np.full(len(rows), y), marker="s", s=22, color=color)
        for edge in np.flatnonzero(np.diff(CLASSES)):
            panel.axvline(edge + 0.5, color="0.8", zorder=0)
        n = plan.n_batches
        panel.set_yticks(
            [0, n - 1, n + 1, 2 * n], ["rank 0, first batch", "last batch", "rank 1, first batch", "last batch"]
        )
        panel.set_title(title, loc="left", family="monospace", fontsize=10)
        panel.invert_yaxis()
    panels[-1].set_xlabel("row, in storage order; grey lines separate three classes of 40, 18 and 6 rows")
    figure.savefig(HERE / "sampling.png", dpi=100)


if __name__ == "__main__":
    main()
