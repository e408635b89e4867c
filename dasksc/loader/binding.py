"""Binding of a strategy to a source, after the filter and the strategy's own expressions over obs are evaluated."""

from __future__ import annotations

from dasksc.atlas import filtering
from dasksc.errors import InputError
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.plan.binding import bind, restricted
from dasksc.plan.cell_sets import CellSets
from dasksc.plan.samplers import Sampler
from dasksc.plan.strategies import SamplingStrategy
from dasksc.plan.stratified import StratifiedSampler

__all__ = ["bound", "columns_of_expressions"]


def columns_of_expressions(strategy: SamplingStrategy, filter: str | None) -> list[str]:
    """Return the obs columns that the filter and the control expression of `CellSets` use."""
    return [*([] if filter is None else filtering.columns_of(filter)), *_control_columns(strategy)]


def bound(
    strategy: SamplingStrategy, source: MatrixSource | IndexedSource, *, filter: str | None, batch_size: int
) -> tuple[SamplingStrategy, Sampler]:
    """Bind a strategy to the rows of a source.

    Parameters
    ----------
    strategy
        Strategy as given by the user.
    source
        Source that provides the number of rows and the obs table.
    filter
        Expression over obs that rows must satisfy.
    batch_size
        Number of rows in a batch, per rank.

    Returns
    -------
    SamplingStrategy
        Strategy with expressions over obs replaced by row numbers and masks.
    Sampler
        Strategy bound to the rows.

    Raises
    ------
    InputError
        If the strategy or the filter does not fit the source.
    """
    if filter is not None:
        strategy = restricted(strategy, source.rows_where(filter), repr(filter))
    if isinstance(strategy, CellSets) and isinstance(strategy.control, str):
        with filtering.explaining_control(strategy.control):
            control = source.rows_where(strategy.control)
        strategy = strategy.with_control(control, _control_columns(strategy))
    sampler = bind(strategy, source.collection, source.n_obs, source.labels_of)
    if isinstance(sampler, StratifiedSampler):
        sampler = sampler.of_batches(batch_size)
    if sampler.n_controls and isinstance(source, IndexedSource):
        raise InputError(
            "CellSets(control=) needs an atlas and cannot be combined with fetch or batch hooks, because batches "
            "would then lack batch.control. Instead of hooks, give transform=, a function that receives the batch"
        )
    return strategy, sampler


def _control_columns(strategy: SamplingStrategy) -> list[str]:
    control = strategy.control if isinstance(strategy, CellSets) else None
    return list(filtering.columns_of(control)) if isinstance(control, str) else []
