"""Warnings about possible improvements of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dasksc.loader import MatrixSource, components_of, scDataset
from dasksc.loader.empty_epochs import is_empty, reason_for_no_batches
from dasksc.planning.plan import EpochPlan
from dasksc.sampling.set_sampler import SetSampler
from dasksc.storage import is_url

__all__ = ["warnings_of_loader", "warnings_of_mixing", "warnings_of_sets", "warnings_of_sizes", "used_share"]

# A warning is given if the label entropy of batches is below this fraction of that of random batches.
_MIXED = 0.9
_MUCH_DROPPED = 0.05
# A warning is given if less than this fraction of the data sent over the network is used.
_MIN_USED_SHARE = 0.5


def warnings_of_sizes(dataset: scDataset, plan: EpochPlan) -> Iterator[str]:
    """Yield warnings about sizes that leave rows or ranks unused, or that use little of the data read."""
    if is_empty(plan):
        yield f"no rank yields a batch: {reason_for_no_batches(plan)}"
        if not plan.n_rows:
            return
    elif plan.n_dropped > _MUCH_DROPPED * plan.n_rows:
        yield (
            f"{plan.n_dropped / plan.n_rows:.0%} of the rows are dropped in every epoch. Lower batch_size, or use "
            "drop_last=False"
        )
    n_blocks = -(-plan.n_rows // plan.block_size)
    sets = plan.sampler if isinstance(plan.sampler, SetSampler) else None
    if n_blocks < plan.world_size and sets is not None:
        yield (
            f"there are more ranks ({plan.world_size}) than sets ({n_blocks}): some ranks read the same sets. "
            + ("Draw more sets (n_sets=)" if sets.is_shuffled else "Lower set_size")
            + ", or use fewer ranks"
        )
    elif n_blocks < plan.world_size:
        yield (
            f"there are more ranks ({plan.world_size}) than blocks ({n_blocks}): blocks are divided, and several "
            "ranks read pieces of the same chunks. "
            + (
                "Lower block_size"
                if plan.sampler.block_size
                else "Lower fetch_factor, so that Streaming has more blocks"
            )
        )
    source = components_of(dataset).source
    n_rows, run_rows = dataset.fetch_size, plan.block_size if sets is None else sets.run_rows
    for name, matrix in source.matrices.items() if isinstance(source, MatrixSource) else ():
        chunk_rows = matrix.cost.chunk_rows
        if n_rows < chunk_rows:
            yield (
                f"a fetch ({n_rows:,} rows) is smaller than a storage chunk of {name} (about "
                f"{chunk_rows:,.0f} rows): chunks are decoded again and again for a few rows each. Raise fetch_factor, "
                "or store smaller chunks"
            )
        elif (
            is_url(matrix.label) and (share := used_share(n_rows, run_rows, source.n_obs, chunk_rows)) < _MIN_USED_SHARE
        ):
            runs = "blocks" if sets is None else "runs of consecutive rows"
            yield (
                f"a fetch uses only about {share:.0%} of the transferred bytes of {name}: chunks of about "
                f"{chunk_rows:,.0f} rows are transferred whole, but {runs} "
                f"have only {run_rows:,.0f} row{'' if round(run_rows) == 1 else 's'}. " + _advice_on_runs(sets)
            )


def _advice_on_runs(sets: SetSampler | None) -> str:
    if sets is not None and sets.block_rows == 1:
        names = ",".join(column.name for column in sets.columns)
        return f"Sort the atlas by group (dasksc convert --group-by {names}), or raise fetch_factor"
    return "Raise block_size or fetch_factor, or store smaller chunks in shards (dasksc convert)"


def used_share(n_rows: int, run_rows: float, n_obs: int, chunk_rows: float) -> float:
    """Return the fraction of the rows read from storage that a fetch uses.

    A fetch reads whole chunks to obtain runs of neighboring rows. The runs are assumed to be at random positions.

    Parameters
    ----------
    n_rows
        Rows of a fetch.
    run_rows
        Neighboring rows that are read together.
    n_obs
        Rows of the matrix.
    chunk_rows
        Rows of a chunk.
    """
    chunk_rows, n_obs = max(1.0, chunk_rows), max(1, n_obs)
    touched_by_one = min(1.0, (run_rows + chunk_rows - 1) / n_obs)
    read_rows = n_obs * (1 - float((1 - touched_by_one) ** (n_rows / run_rows)))
    return min(1.0, n_rows / read_rows)


def warnings_of_loader(loader: Any, plan: EpochPlan) -> Iterator[str]:
    """Yield warnings about DataLoader settings that do not suit the data set; none if `loader` is None."""
    if loader is None:
        return
    if loader.batch_size is not None:
        yield (
            f"the DataLoader collects batches of {loader.batch_size} from a data set that yields whole batches. "
            "Use DataLoader(dataset, batch_size=None)"
        )
    if loader.num_workers > plan.n_fetches:
        yield (
            f"{loader.num_workers} DataLoader workers share {plan.n_fetches} fetches, so some workers are idle. Use "
            "num_workers=0, which reads ahead on threads, or lower fetch_factor"
        )


def warnings_of_mixing(plan: EpochPlan, name: str | None, labels: Any) -> Iterator[str]:
    """Yield a warning if batches mix labels less well than random batches."""
    if labels is None or not plan.n_fetches or isinstance(plan.sampler, SetSampler):
        return
    share = plan.diversity(labels).share
    if share < _MIXED:
        n_blocks = max(1, plan.fetch_rows // plan.block_size)
        yield (
            f"batches have {share:.0%} of the label diversity of random batches ({name or 'labels'}): labels lie in "
            f"long runs, and a fetch mixes only {n_blocks:,} blocks. Raise fetch_factor, or lower block_size"
        )


def warnings_of_sets(plan: EpochPlan) -> Iterator[str]:
    """Yield warnings about cells that are left out or repeated."""
    sampler = plan.sampler
    if not isinstance(sampler, SetSampler):
        return
    found = sampler.accounts
    if found.n_unlabelled:
        names = " or ".join(column.name for column in sampler.columns)
        yield (
            f"{found.n_unlabelled:,} cells have no label in {names} and are never drawn. Exclude them with indices= to "
            "avoid this warning"
        )
    if found.n_unmatched_cells:
        yield (
            f"{found.n_unmatched_cells:,} cells of {found.n_unmatched_groups:,} groups are never drawn, since no "
            "control cell matches them. Match fewer columns (match=), or add control cells (control_indices=)"
        )
    if found.n_short_groups:
        yield (
            f"{found.n_short_groups:,} groups have fewer cells than a set of {sampler.set_size}: "
            + (
                "they are never drawn (incomplete='drop')"
                if found.drops_short
                else "their sets repeat cells. Lower set_size, or leave these groups out: incomplete='drop'"
            )
        )
