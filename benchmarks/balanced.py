#!/usr/bin/env python
"""Compare the recall of rare cell types after shuffled and class-balanced training.

    python benchmarks/balanced.py --out benchmarks/results/balanced

The program trains the same small classifier twice for each seed, with equal numbers of steps and cells: once on
shuffled blocks, in which common types dominate, and once with `ClassBalancedSampling`. It reports the recall of each
type on the same held-out cells, a fifth of each type. The scores are the mean recall over all types (balanced
accuracy), over the rare types, and weighted by cells (accuracy). The exit status is 1 unless balancing raises the mean
recall of rare types with every seed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _atlas import add_options, atlas
from _reports import add_out, write_report

import dasksc
from dasksc.train import Config, fit, load_model

LABEL = "cell_type"
HELD_OUT = {"share": 0.2, "stratify": LABEL}
STRATEGIES = {
    "shuffled": {"name": "block_shuffling"},
    "balanced": {"name": "class_balanced_sampling", "label_key": LABEL},
}
MEASURES = {
    "balanced_accuracy": "balanced accuracy, all types",
    "rare_balanced_accuracy": "balanced accuracy, rare types",
    "accuracy": "accuracy, all cells",
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=30_000)
    parser.set_defaults(genes=8_000)
    parser.add_argument("--rare", type=float, default=0.01, help="share of the cells below which a type is rare")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    add_out(parser)
    options = parser.parse_args(arguments)

    path = atlas(options)
    adata = dasksc.open(path, obs=[LABEL])
    rows, held_out = dasksc.split(adata, fractions=[0.8, 0.2], stratify=LABEL).values()
    codes = adata.obs[LABEL].cat.codes.to_numpy()
    names = list(adata.obs[LABEL].cat.categories)
    n_training = np.bincount(codes[rows], minlength=len(names))
    is_rare = np.bincount(codes, minlength=len(names)) < options.rare * len(codes)
    recalls: dict[str, list[Any]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(options.seeds):
        for strategy in STRATEGIES:
            model = trained(path, STRATEGIES[strategy], seed, options)
            recalls[strategy].append(recall_of(model, adata, held_out, len(names)))
            scores = scores_of(recalls[strategy][-1], codes[held_out], is_rare)
            print(f"seed {seed}  {strategy:9}" + "".join(f"  {MEASURES[name]} {scores[name]:.1%}" for name in MEASURES))
    scores = {
        strategy: [scores_of(recall, codes[held_out], is_rare) for recall in found]
        for strategy, found in recalls.items()
    }
    report = {
        "n_rows": len(codes),
        "n_vars": adata.n_vars,
        "n_types": len(names),
        "n_rare_types": int(is_rare.sum()),
        "rare_cells_share": float(is_rare[codes].mean()),
        **{name: getattr(options, name) for name in ("rare", "steps", "batch", "block", "seeds")},
        "scores": {
            measure: {strategy: summary(one[measure] for one in found) for strategy, found in scores.items()}
            for measure in MEASURES
        },
        "types": [
            {
                "name": name,
                "n_training": int(n_training[i]),
                "is_rare": bool(is_rare[i]),
                "recall": {
                    strategy: float(np.median([one[i] for one in found])) for strategy, found in recalls.items()
                },
            }
            for i, name in enumerate(names)
        ],
        "load": os.getloadavg()[0],
    }
    shuffled, balanced = ([one["rare_balanced_accuracy"] for one in scores[strategy]] for strategy in STRATEGIES)
    report["is_better"] = all(ours > theirs for ours, theirs in zip(balanced, shuffled, strict=True))
    print(table_of(report))
    write_report(options.out, report, draw)
    return report


def trained(path: Path, strategy: dict[str, Any], seed: int, options: argparse.Namespace) -> torch.nn.Module:
    """Train the classifier of ``dasksc train`` from the start."""
    with tempfile.TemporaryDirectory() as folder:
        data = {"strategy": {**strategy, "block_size": options.block}, "validation": HELD_OUT}
        training = {"max_steps": options.steps, "seed": seed, "checkpoint_dir": folder, "logger": "csv"}
        config = {
            "data": {"path": str(path), "batch_size": options.batch, **data},
            "model": {"name": "mlp_classifier", "label": LABEL, "hidden_dim": 128, "num_layers": 1},
            # Validate and save checkpoints only at the end.
            "training": {**training, "validate_every": 10**9, "save_every": 10**9},
        }
        return load_model(fit(Config.of(config)).model)


def recall_of(model: Any, adata: Any, rows: Any, n_labels: int) -> Any:
    """Return the recall of each type, shape (n_labels,)."""
    dataset = dasksc.scDataset(adata, dasksc.Streaming(rows), 512, obs=[LABEL], rank=0, world_size=1, seed=0)
    right, n = np.zeros(n_labels, dtype=np.int64), np.zeros(n_labels, dtype=np.int64)
    with torch.no_grad():
        for batch in dataset:
            labels = batch.obs[LABEL]
            is_right = model.scores(batch.X).argmax(dim=1) == labels
            n += np.bincount(labels, minlength=n_labels)
            right += np.bincount(labels[is_right], minlength=n_labels)
    return right / n


def scores_of(recall: Any, labels: Any, is_rare: Any) -> dict[str, float]:
    """Return the mean recall over all types, over the rare types, and over cells."""
    means = {"balanced_accuracy": recall, "rare_balanced_accuracy": recall[is_rare], "accuracy": recall[labels]}
    return {name: float(values.mean()) for name, values in means.items()}


def summary(values: Any) -> dict[str, Any]:
    """Return the median and the values of several runs."""
    runs = list(values)
    return {"median": statistics.median(runs), "runs": runs}


def table_of(report: dict[str, Any]) -> str:
    """Format the scores as a table: medians, minima and maxima over seeds."""
    lines = [f"| {report['steps']} steps of {report['batch']} cells | shuffled | balanced |", "| --- | ---: | ---: |"]
    for measure, label in MEASURES.items():
        found = [report["scores"][measure][strategy] for strategy in STRATEGIES]
        texts = [f"{one['median']:.1%} ({min(one['runs']):.1%} to {max(one['runs']):.1%})" for one in found]
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the recall of each type against its number of cells, and the mean scores."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    colours = {"shuffled": "0.6", "balanced": "#1f77b4"}
    figure, (each, means) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", width_ratios=[3, 2])
    types = sorted(report["types"], key=lambda one: one["n_training"])
    for one in types:
        each.plot([one["n_training"]] * 2, [one["recall"][name] for name in STRATEGIES], color="0.85", lw=1, zorder=0)
    for strategy, colour in colours.items():
        recall = [one["recall"][strategy] for one in types]
        each.scatter([one["n_training"] for one in types], recall, s=18, color=colour, label=strategy)
    each.axvspan(each.get_xlim()[0], report["rare"] * 0.8 * report["n_rows"], color="0.95", zorder=-1)
    each.set_xscale("log")
    each.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    each.set_xlabel("training cells of the type (shaded: rare)")
    each.set_ylabel("recall on held-out cells")
    each.legend(frameon=False, loc="lower right")
    for i, (strategy, colour) in enumerate(colours.items()):
        for j, measure in enumerate(MEASURES):
            found = report["scores"][measure][strategy]
            x = j + (i - 0.5) * 0.38
            means.bar(x, found["median"], 0.36, color=colour)
            means.vlines(x, min(found["runs"]), max(found["runs"]), color="0.2", lw=1)
            means.annotate(f"{found['median']:.0%}", (x, max(found["runs"])), ha="center", va="bottom", fontsize=8)
    labels = [label.replace("balanced ", "balanced\n").replace(", ", ",\n") for label in MEASURES.values()]
    means.set_xticks(range(len(labels)), labels, fontsize=8)
    for axes in (each, means):
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report['n_rows']:,} cells x {report['n_vars']:,} genes, {report['n_types']} types, {report['n_rare_types']} "
        f"of them rare; {report['steps']} steps of {report['batch']} cells, {report['seeds']} seeds",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(not main()["is_better"])
