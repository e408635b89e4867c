"""Epochs without batches."""

from __future__ import annotations

from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.samplers import RowSampler

__all__ = ["is_empty", "reason_for_no_batches"]


def is_empty(plan: EpochPlan) -> bool:
    """Return True if no rank yields a batch."""
    return plan.n_dropped == plan.n_rows


def reason_for_no_batches(plan: EpochPlan) -> str:
    """Return why no rank yields a batch, with a remedy, for messages."""
    if plan.n_rows:
        return (
            f"{plan.n_rows:,} rows over all ranks (world size {plan.world_size}) leave each rank less than a batch of "
            f"{plan.batch_size}, and drop_last=True. Lower batch_size, or use drop_last=False"
        )
    if isinstance(plan.sampler, RowSampler) and plan.sampler.candidates.n:
        return (
            f"the strategy has drop_last=True, and its rows do not fill a block of {plan.block_size:,}. Lower "
            "block_size, or give the strategy drop_last=False"
        )
    return "the strategy draws no rows: the collection is empty, or the strategy (indices=) selects none of its rows"
