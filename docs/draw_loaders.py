"""Draw docs/_static/loaders-light.svg and loaders-dark.svg: rates of loaders, from benchmarks/results/h5ad-dense.json.

python docs/draw_loaders.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "h5ad-dense.json"
# Names on the chart.
NAMES = {
    "dasksc threads": "dasksc",
    "annbatch own store": "annbatch,\nown store",
    "scDataset": "scDataset",
    "AnnLoader": "AnnLoader",
}
THEMES = {
    "light": {"text": "#1f2328", "dasksc": "#0f766e", "peer": "#8c959f"},
    "dark": {"text": "#e6edf3", "dasksc": "#0d9488", "peer": "#6e7681"},
}


def draw(theme: str) -> None:
    """Draw the consumed rates as bars, with the range over the rounds, on a transparent ground."""
    colors = THEMES[theme]
    found = {result["name"]: result for result in json.loads(RESULTS.read_text())["results"]}
    names = sorted(NAMES.keys() & found.keys(), key=lambda name: found[name]["consumed"])
    rates = {name: found[name]["consumed"] for name in names}
    # A fixed salt: the same results are the same file.
    style = {"svg.hashsalt": theme, "font.size": 11, "text.color": colors["text"], "ytick.color": colors["text"]}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(figsize=(5.4, 2.4), layout="constrained")
        for i, (name, rate) in enumerate(rates.items()):
            rounds = found[name]["rounds"]["consumed"]
            axes.barh(i, rate, height=0.62, color=colors["dasksc" if name.startswith("dasksc") else "peer"])
            axes.plot([min(rounds), max(rounds)], [i, i], color=colors["text"], lw=1.2, marker="|", markersize=6)
            axes.text(max(rounds) + max(rates.values()) * 0.02, i, f"{rate:,.0f}", va="center")
        axes.set_yticks(range(len(rates)), [NAMES[name] for name in rates])
        axes.set_xticks([])
        axes.margins(x=0.16, y=0.02)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("cells per second, consumed", fontsize=10, loc="left")
        figure.savefig(HERE / "_static" / f"loaders-{theme}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    for one in THEMES:
        draw(one)
