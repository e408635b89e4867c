"""Binding of a strategy to a source, after the filter and the strategy's own expressions over obs are evaluated."""

from __future__ import annotations

from dasksc.atlas.expressions import columns_of
from dasksc.errors import InputError
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.loader.spec import LoaderSpec
from dasksc.plan.binding import bind, restricted
from dasksc.plan.cell_sets import CellSets
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.samplers import RowSampler, Sampler
from dasksc.plan.strategies import SamplingStrategy
from dasksc.plan.stratified import StratifiedSampler

__all__ = ["bound", "reason_for_no_batches"]


def bound(spec: LoaderSpec, source: MatrixSource | IndexedSource) -> tuple[SamplingStrategy, Sampler]:
    """Return the strategy with row numbers and masks in place of expressions over obs, and bound to the rows."""
    strategy = spec.strategy
    if spec.filter is not None:
        strategy = restricted(strategy, source.rows_where(spec.filter), repr(spec.filter))
    if spec.control is not None and isinstance(strategy, CellSets):
        control = source.rows_where(spec.control)
        strategy = strategy.with_control(control, list(columns_of(spec.control)))
    sampler = bind(strategy, source.collection, source.n_obs, source.labels_of)
    if isinstance(sampler, StratifiedSampler):
        sampler = sampler.of_batches(spec.batch_size)
    if sampler.n_controls and isinstance(source, IndexedSource):
        raise InputError(
            "CellSets(control=) needs an atlas and cannot be combined with fetch or batch hooks, because batches "
            "would then lack batch.control. Instead of hooks, give transform=, a function that receives the batch"
        )
    return strategy, sampler


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
