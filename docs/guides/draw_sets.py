"""Draw docs/guides/sets.png: the rows of one batch of sets and matched controls, in a small screen sorted by condition.

python docs/guides/draw_sets.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
mpl.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

import dasksc  # noqa: E402

SET_SIZE, N_SETS = 6, 5
CELLS = {"control": 14, "GATA1": 12, "TP53": 18, "MYC": 9}
LINES = ["K562", "RPE1"]


def main() -> None:
    """Draw it."""
    obs = pd.DataFrame([(line, gene) for line in LINES for gene, n in CELLS.items() for _ in range(n)])
    obs.columns = ["cell_line", "gene"]
    strategy = dasksc.CellSets(
        ["cell_line", "gene"], SET_SIZE, control={"gene": "control"}, weights="groups", block_size=3, n_sets=N_SETS
    )
    plan = dasksc.EpochPlan(sampler=strategy.bind(len(obs), obs.__getitem__), batch_size=N_SETS * SET_SIZE, seed=4)
    fetch = plan.fetch(0)
    targets = fetch.rows[fetch.batch(0)].reshape(N_SETS, SET_SIZE)
    controls = fetch.rows[fetch.batch_controls(0)].reshape(N_SETS, SET_SIZE)

    figure, panel = plt.subplots(figsize=(9, 2.9), constrained_layout=True)
    runs = obs.ne(obs.shift()).any(axis=1).cumsum()
    for start in np.flatnonzero(runs.diff().fillna(1)):
        n = int((runs == runs[start]).sum())
        line, gene = obs.iloc[start]
        panel.axvspan(start - 0.5, start + n - 0.5, color="0.93" if gene == "control" else "white", zorder=0)
        panel.axvline(start - 0.5, color="0.8", lw=0.8, zorder=0)
        panel.text(start + n / 2 - 0.5, -0.75, gene, ha="center", fontsize=8, color="0.35")
        if gene == "control":
            panel.text(start - 0.5, -1.35, line, fontsize=9, weight="bold")
    for i in range(N_SETS):
        color = plt.cm.tab10(i)
        panel.scatter(targets[i], np.full(SET_SIZE, i), marker="s", s=30, color=color)
        panel.scatter(controls[i], np.full(SET_SIZE, i), marker="s", s=30, facecolor="none", edgecolor=color)
    panel.set_yticks(range(N_SETS), [f"set {i}" for i in range(N_SETS)])
    panel.set_ylim(N_SETS - 0.5, -0.55)
    panel.set_xlim(-0.5, len(obs) - 0.5)
    panel.set_xlabel("row, in storage order; filled: batch.X, open: batch.control")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "sets.png", dpi=110)


if __name__ == "__main__":
    main()
