"""Draw the pictures of docs/concepts: plans of small data sets.

python docs/concepts/draw.py            # all of them
python docs/concepts/draw.py plan ranks # some of them
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
mpl.use("agg")

import anndata  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import dasksc  # noqa: E402
from dasksc.plan.deal import BlockOrder, ConsumedSegment  # noqa: E402

# Lines and text have a contrast ratio of at least 3.7:1 against both white and the background of the dark theme.
INK, ON_COLOR = "#7d8590", "#14181e"
HUES = ["#2aa198", "#e0952f", "#8a7fe0", "#d9688e"]
GRAY = "#a9b0b8"
BY_PLACE = LinearSegmentedColormap.from_list("by place", ["#6f9fe0", "#3fb3a5", "#c3c24a", "#e0952f", "#e07a9c"])

mpl.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "dasksc",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def plan_of(n_rows: int, block_size: int, **sizes: Any) -> dasksc.EpochPlan:
    """Return the plan that `BlockShuffling` makes for a data set of `n_rows` rows."""
    sampler = dasksc.BlockShuffling(block_size).bind(n_rows, lambda name: None)
    return dasksc.EpochPlan(sampler=sampler, **sizes)


def batches_of(plan: dasksc.EpochPlan, rank: int) -> list[list[int]]:
    """Return the row numbers of each batch of a rank."""
    of_rank = plan.of_rank(rank)
    return [of_rank.batch_rows(i).tolist() for i in range(of_rank.n_batches)]


def by_place(n_rows: int) -> Callable[[int], Any]:
    """Return a function that gives each row a color by its place in storage."""
    return lambda row: BY_PLACE(row / (n_rows - 1))


def strip(
    panel: Axes,
    x: float,
    y: float,
    groups: Sequence[Sequence[int]],
    color: Callable[[int], Any],
    *,
    gap: float = 0.35,
    outlined: Collection[int] = (),
) -> list[float]:
    """Draw groups of numbers as squares side by side, and return where each group begins, and where the last ends."""
    edges = [x]
    for group in groups:
        for row in group:
            face, ink = ("none", INK) if row in outlined else (color(row), ON_COLOR)
            panel.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=face, edgecolor=ink, lw=float(row in outlined)))
            panel.text(x + 0.47, y + 0.45, str(row), color=ink, fontsize=7.5, ha="center", va="center")
            x += 1
        x += gap
        edges.append(x)
    edges[-1] -= gap
    return edges


def bracket(panel: Axes, start: float, stop: float, y: float, text: str) -> None:
    """Draw a line under squares, and a label below it."""
    panel.plot([start, stop - 0.06], [y, y], color=INK, lw=1)
    panel.text((start + stop) / 2, y + 0.25, text, ha="center", va="top", fontsize=8.5)


def canvas(width: float, height: float, x: float, y: float) -> tuple[Any, Axes]:
    """Return a figure of `width` by `height` inches and its panel.

    The x axis spans [-0.2, x]. The y axis points down and spans [0, y].
    """
    figure, panel = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    panel.set(xlim=(-0.2, x), ylim=(y, 0))
    panel.axis("off")
    return figure, panel


def save(figure: Any, name: str) -> None:
    """Write a picture with a transparent background."""
    figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    print(f"{name}.svg")


def draw_plan() -> None:
    """Draw how an epoch becomes fetches and batches of two ranks."""
    n, block, batch, factor, world_size, seed = 36, 3, 3, 3, 2, 2
    plan = plan_of(n, block, batch_size=batch, fetch_factor=factor, world_size=world_size, seed=seed)
    order = BlockOrder.shuffled(n // block, seed, 0).at(np.arange(n // block))
    fetches = [plan.of_rank(rank).fetch(k) for rank in range(world_size) for k in range(plan.n_fetches)]
    color = by_place(n)
    figure, panel = canvas(9, 3.9, 42.2, 12.8)

    def title(y: float, text: str) -> None:
        panel.text(0, y, text, va="bottom", fontsize=10.5, fontweight="bold")

    title(1.2, "1  Rows in storage order, in blocks of 3")
    strip(panel, 0, 1.4, np.arange(n).reshape(-1, block).tolist(), color)
    title(4.2, "2  Blocks in random order, dealt to two ranks in turn")
    edges = strip(panel, 0, 4.4, [range(b * block, b * block + block) for b in order.tolist()], color)
    for i, edge in enumerate(edges[:-1]):
        panel.text(edge + block / 2, 5.5, f"rank {i % world_size}", ha="center", va="top", fontsize=8.5)
    title(7.8, "3  Fetches of three blocks, read in ascending order")
    edges = strip(panel, 0, 8.0, [fetch.rows.tolist() for fetch in fetches], color, gap=1.2)
    stops = [*(edge - 1.2 for edge in edges[1:-1]), edges[-1]]
    for i, (start, stop) in enumerate(zip(edges[:-1], stops, strict=True)):
        bracket(panel, start, stop, 9.15, "rank {}, fetch {}".format(*divmod(i, plan.n_fetches)))
    title(11.3, "4  Rows of each fetch in random order, cut into batches of 3")
    x = 0.0
    for fetch in fetches:
        batches = [fetch.rows[fetch.batch(i)].tolist() for i in range(fetch.n_batches)]
        x = strip(panel, x, 11.5, batches, color, gap=0.3)[-1] + 1.2
    save(figure, "plan")


def draw_mixing() -> None:
    """Draw how well batches of sorted cells mix, by the number of blocks in a fetch."""
    n, batch = 100_000, 64
    figure, panel = plt.subplots(figsize=(7.5, 3.6), constrained_layout=True)
    for n_types, hue in ((10, HUES[0]), (100, HUES[1])):
        labels = np.arange(n) * n_types // n
        points = []
        for block_size, marker in ((8, "o"), (32, "s"), (128, "D")):
            factors = [f for f in 2 ** np.arange(10) if batch * f >= block_size and batch * f <= 2**15]
            xs = [batch * int(f) // block_size for f in factors]
            ys = [
                100 * plan_of(n, block_size, batch_size=batch, fetch_factor=int(f)).diversity(labels).share
                for f in factors
            ]
            points += list(zip(xs, ys, strict=True))
            panel.plot(xs, ys, marker, color=hue, ms=6, label=f"{n_types} types, block_size={block_size}")
        means = {x: np.mean([y for at, y in points if at == x]) for x in sorted({x for x, _ in points})}
        panel.plot(list(means), list(means.values()), color=hue, lw=1, zorder=0)
        print(n_types, sorted(points))
    panel.set_xscale("log", base=2)
    panel.set_xticks(2 ** np.arange(0, 13, 2), 2 ** np.arange(0, 13, 2))
    panel.set(xlabel="blocks in a fetch", ylabel="share of ideal entropy, %", ylim=(0, 104))
    panel.legend(frameon=False, labelcolor=INK, fontsize=9)
    save(figure, "mixing")


def draw_ranks() -> None:
    """Draw the shares of four ranks in an epoch that does not divide evenly."""
    n, block, batch, world_size, seed = 42, 4, 4, 4, 1
    plan = plan_of(n, block, batch_size=batch, fetch_factor=1, world_size=world_size, seed=seed)
    order = BlockOrder.shuffled(n // block, seed, 0).at(np.arange(n // block)).tolist()
    blocks = [list(range(b * block, b * block + block)) for b in order] + [list(range(n // block * block, n))]
    n_dealt = len(order) // world_size * world_size
    rank_of = {row: i % world_size for i, one in enumerate(blocks[:n_dealt]) for row in one}

    def color(row: int) -> str:
        return HUES[rank_of[row]] if row in rank_of else GRAY

    ranks = [batches_of(plan, rank) for rank in range(world_size)]
    held = Counter(row for batches in ranks for rows in batches for row in rows)
    twice = [row for row, n_times in sorted(held.items()) if n_times > 1]
    assert len(held) == n
    assert len(twice) == plan.n_padded
    figure, panel = canvas(9, 3.4, 46, 13)
    panel.text(0, 1.1, "Order of the epoch: 10 full blocks of 4 and a short one", fontsize=10.5, fontweight="bold")
    edges = strip(panel, 0, 1.5, blocks, color)
    bracket(panel, edges[0], edges[4] - 0.35, 2.7, "round 0: a block for each rank")
    bracket(panel, edges[4], edges[8] - 0.35, 2.7, "round 1")
    bracket(panel, edges[8], edges[-1], 2.7, "leftover rows, dealt in pieces")
    panel.text(0, 5.6, "Batches of each rank: 4, 4 and 3 rows on every rank", fontsize=10.5, fontweight="bold")
    for rank, batches in enumerate(ranks):
        y = 6 + 1.6 * rank
        panel.text(0, y + 0.5, f"rank {rank}", va="center", color=HUES[rank], fontweight="bold")
        end = strip(panel, 4.5, y, batches, color, gap=1, outlined=twice)[-1]
    text = f"outlined: rows {' and '.join(map(str, twice))}, each on two ranks"
    panel.text(end + 0.8, y + 0.5, text, va="center", fontsize=9)
    save(figure, "ranks")


def draw_resume() -> None:
    """Draw an epoch that three ranks begin and two ranks finish."""
    sizes = {"batch_size": 4, "fetch_factor": 2, "seed": 3}
    n, block, n_done = 48, 4, 2
    before = plan_of(n, block, world_size=3, **sizes)
    read = ConsumedSegment(world_size=3, batch_size=4, fetch_factor=2, n_batches=n_done)
    after = plan_of(n, block, world_size=2, consumed=(read,), **sizes)
    figure, panel = plt.subplots(figsize=(8.5, 3.4), constrained_layout=True)
    y, ticks, counts = 0.0, [], np.zeros(n, dtype=int)
    for plan, n_batches in ((before, n_done), (after, after.n_batches)):
        for step in range(n_batches):
            for rank in range(plan.world_size):
                rows = plan.of_rank(rank).batch_rows(step)
                panel.scatter(rows, np.full(len(rows), y), marker="s", s=58, color=HUES[rank], lw=0)
                np.add.at(counts, rows, 1)
            ticks.append((y, f"step {len(ticks)}"))
            y += 1
        if plan is before:
            panel.axhline(y, color=INK, lw=1, ls=(0, (4, 3)))
            panel.text(n - 0.5, y + 0.15, "stopped; resumed by two ranks", ha="right", va="top", fontsize=9)
            y += 1.2
    assert (counts == 1).all()
    for rank in range(3):
        panel.scatter([], [], marker="s", s=58, color=HUES[rank], lw=0, label=f"rank {rank}")
    panel.legend(frameon=False, labelcolor=INK, ncols=3, loc="lower left", bbox_to_anchor=(-0.01, 1), borderpad=0)
    panel.set_yticks(*zip(*ticks, strict=True))
    panel.set_xlabel("row, in storage order; every row has one square")
    panel.invert_yaxis()
    save(figure, "resume")


def draw_memory() -> None:
    """Draw which memory holds the rows of fetches and batches, for mapped files and for files copied into buffers."""
    figure, panel = canvas(9, 4.2, 90, 42)

    def box(x: float, y: float, width: float, text: str, hue: str, *, filled: bool = True, height: float = 7) -> None:
        panel.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.8",
                facecolor=hue if filled else "none",
                edgecolor=hue,
                lw=1.4,
            )
        )
        panel.text(
            x + width / 2,
            y + height / 2,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            color=ON_COLOR if filled else INK,
            linespacing=1.3,
        )

    def arrow(x: float, to: float, y: float) -> None:
        panel.add_patch(
            FancyArrowPatch(
                (x, y), (to, y), arrowstyle="-|>", mutation_scale=10, color=INK, lw=1.2, shrinkA=0, shrinkB=0
            )
        )

    for x, text in (
        (9, "disk"),
        (36, "page cache:\nshared, reclaimable"),
        (75, "anonymous memory:\none process, not reclaimable"),
    ):
        panel.text(x, 4.4, text, ha="center", va="bottom", fontsize=10, fontweight="bold", linespacing=1.3)
    for y, name, mapped in ((10, "mapped", True), (27, "read", False)):
        panel.text(0, y - 1.6, f"Files that are {name}", va="bottom", fontsize=9.5, color=INK)
        box(0, y, 18, "chunks of rows", INK, filled=False)
        box(73, y, 16.5, "batches ahead\nof the loop", HUES[1])
        box(22, y, 28, "pages of the fetches\nin flight" if mapped else "pages being read,\nor none", HUES[0])
        if mapped:
            arrow(18.4, 21.6, y + 3.5)
            arrow(50.4, 72.6, y + 3.5)
            panel.text(61.5, y + 2.9, "gather", ha="center", va="bottom", fontsize=8.5)
        else:
            box(54, y, 12, "fetches\nin flight", HUES[1])
            arrow(18.4, 21.6, y + 3.5)
            arrow(50.4, 53.6, y + 3.5)
            arrow(66.4, 72.6, y + 3.5)
            panel.text(69.5, y + 2.9, "gather", ha="center", va="bottom", fontsize=8.5)
    panel.plot([52, 52], [1, 37], color=INK, lw=1, ls=(0, (4, 3)))
    panel.text(36, 38.4, "dataset.projected_pages", ha="center", va="top", family="monospace", fontsize=9)
    panel.text(72, 38.4, "dataset.projected_bytes", ha="center", va="top", family="monospace", fontsize=9)
    save(figure, "memory")


def rows_by_number(n_obs: int) -> anndata.AnnData:
    """Return an AnnData object with a single gene, whose value in each cell is the row number."""
    return anndata.AnnData(np.arange(n_obs, dtype=np.float32)[:, None])


def draw_workers() -> None:
    """Draw the order in which the loop gets the batches of DataLoader workers."""
    n, batch, factor = 96, 4, 4
    dataset = dasksc.scDataset(
        rows_by_number(n), dasksc.BlockShuffling(4), batch, fetch_factor=factor, seed=0, rank=0, world_size=1
    )
    expected = [tuple(rows) for rows in batches_of(dataset.plan(0), 0)]
    figure, panel = canvas(9, 2.2, 33, 8.2)
    for row, n_workers in enumerate((0, 2, 3)):
        dataset.set_epoch(0)
        loader = DataLoader(dataset, batch_size=None, num_workers=n_workers)
        numbers = [expected.index(tuple(one[:, 0].int().tolist())) for one in loader]
        assert sorted(numbers) == list(range(len(expected)))
        y = 1.4 + 1.7 * row
        panel.text(0, y + 0.5, f"num_workers={n_workers}", va="center", family="monospace", fontsize=9)
        hues = HUES[:n_workers] or [GRAY]
        strip(panel, 7, y, [numbers], lambda i, hues=hues: hues[i // factor % len(hues)])
    panel.text(0, 0.8, "Batches in the order in which the loop receives them", fontsize=10.5, fontweight="bold")
    for i, (hue, text) in enumerate(
        zip([GRAY, *HUES[:3]], ["the rank", "worker 0", "worker 1", "worker 2"], strict=True)
    ):
        panel.add_patch(Rectangle((7 + 5.5 * i, 7), 0.94, 0.94, facecolor=hue, lw=0))
        panel.text(8.3 + 5.5 * i, 7.5, text, va="center", fontsize=9)
    save(figure, "workers")


if __name__ == "__main__":
    drawings = {name.removeprefix("draw_"): function for name, function in globals().items() if name[:5] == "draw_"}
    for name in sys.argv[1:] or drawings:
        drawings[name]()
