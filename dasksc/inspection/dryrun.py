"""Dry run of an epoch, computed from its plan before any matrix is read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import whole_number
from dasksc.errors import InputError
from dasksc.inspection.dryrun_report import Check, ClassShare, RankShare
from dasksc.inspection.dryrun_warnings import (
    warnings_of_loader,
    warnings_of_mixing,
    warnings_of_sets,
    warnings_of_sizes,
)
from dasksc.kernels.draw import count_codes
from dasksc.loader import MatrixSource, components_of, scDataset
from dasksc.planning.label_entropy import Diversity
from dasksc.planning.plan import EpochPlan
from dasksc.planning.ranks import World
from dasksc.sampling.labels import encode_labels
from dasksc.sampling.set_sampler import SetSampler

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["check", "diversity"]

# Maximum number of rows whose classes are counted. At least one unit of the sampler (a set of cells, or a batch
# with per_batch=True) is counted, even if it has more rows.
_MAX_COUNTED_ROWS = 2**20


def check(data: scDataset | DataLoader[Any], world_size: int | None = None, *, label_key: str | None = None) -> Check:
    """Describe the next epoch without reading X.

    Parameters
    ----------
    data
        A data set, or a DataLoader of one. The workers and prefetched batches of a DataLoader count towards memory.
    world_size
        Number of ranks to plan for; default: the current number of ranks.
    label_key
        Name of the obs column whose classes are counted. Default: the labels of the strategy, or else the first column
        in ``obs=`` with classes.

    Returns
    -------
    Check
        Rows of each rank, padded and dropped rows, class frequencies, memory, and warnings about possible
        improvements. ``print(dasksc.check(dataset))`` prints a report.

    Raises
    ------
    InputError
        If `data` is not a data set or a DataLoader of one, or `world_size` is not positive.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type"], seed=0)
    >>> report = dasksc.check(dataset, world_size=3)
    >>> report.n_rows, report.n_padded
    (2000, 1)
    >>> for rank in report.ranks:
    ...     print(rank)
    667 rows in 11 batches, read in 1 fetch
    667 rows in 11 batches, read in 1 fetch
    667 rows in 11 batches, read in 1 fetch; rows padded: 1
    >>> print(report.classes[0].name, round(report.classes[0].drawn, 3))
    T cell 0.408
    """
    dataset = getattr(data, "dataset", data)
    if not isinstance(dataset, scDataset):
        raise InputError(f"check takes a dasksc.scDataset, or a DataLoader of one; got {data!r}")
    loader = None if dataset is data else data
    world_size = dataset.world_size if world_size is None else whole_number("world_size", world_size)
    parts = components_of(dataset)
    source = parts.source
    plan = parts.plan_of(World(0, world_size), parts.counter.peek())
    ranks = tuple(_share_of(dataclasses.replace(plan, rank=rank)) for rank in range(world_size))
    num_workers = int(getattr(loader, "num_workers", 0))
    prefetch_factor = int(getattr(loader, "prefetch_factor", None) or 0)
    name, labels = _labels_of(dataset, label_key)
    has_matrices = isinstance(source, MatrixSource)
    return Check(
        name=f"{source.name} by {type(dataset.strategy).__name__}",
        epoch=plan.epoch,
        n_obs=source.n_obs,
        n_rows=plan.n_rows,
        n_blocks=-(-plan.n_rows // plan.block_size),
        block_size=plan.block_size,
        batch_size=plan.batch_size,
        global_batch_size=plan.batch_size * world_size,
        fetch_size=dataset.fetch_size,
        ranks=ranks,
        n_padded=plan.n_padded,
        n_dropped=plan.n_dropped,
        set_size=plan.sampler.unit if isinstance(plan.sampler, SetSampler) else None,
        n_controls=plan.sampler.n_controls,
        sets=plan.sampler.accounts if isinstance(plan.sampler, SetSampler) else None,
        label_key=name,
        classes=() if labels is None else _classes_of(plan, labels),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        process_bytes=dataset.projected_bytes,
        pages_bytes=dataset.projected_pages,
        job_bytes=max(1, num_workers) * parts.projection.job_bytes if has_matrices else None,
        prefetched_bytes=int(num_workers * prefetch_factor * parts.projection.batch_bytes) if has_matrices else None,
        warnings=(
            *warnings_of_sizes(dataset, plan),
            *warnings_of_loader(loader, plan),
            *warnings_of_mixing(plan, name, labels),
            *warnings_of_sets(plan),
        ),
        genes=_genes_of(dataset),
    )


def diversity(dataset: Any, column: str, n_batches: int = 1000) -> Diversity:
    """Measure how well the batches of a data set mix the labels of an obs column, without reading a matrix.

    Parameters
    ----------
    dataset
        A `scDataset` of an AnnData.
    column
        Name of the obs column, such as ``"plate"``.
    n_batches
        Approximate number of batches to inspect, from the next epoch of this rank.

    Returns
    -------
    Diversity
        Mean and spread of the entropy of the batches, and those of ideal random batches.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", dasksc.BlockShuffling(8), batch_size=64, seed=0)
    >>> diversity = dasksc.diversity(dataset, "cell_type")
    >>> round(diversity.mean, 2), round(diversity.ideal_mean, 2)
    (2.21, 2.22)
    """
    measured: Diversity = dataset.plan().diversity(components_of(dataset).source.labels_of(column), n_batches)
    return measured


def _share_of(plan: EpochPlan) -> RankShare:
    return RankShare(
        rank=plan.rank,
        n_rows=plan.n_rank_rows,
        n_fetches=plan.n_fetches,
        n_batches=plan.n_batches,
        n_padded=plan.n_rank_padded,
        n_dropped=plan.n_rank_dropped,
    )


def _genes_of(dataset: scDataset) -> tuple[str, ...]:
    match = dataset.gene_match
    if isinstance(match, dict):
        return tuple(f"{modality}: {one}" for modality, one in match.items())
    return () if match is None else (str(match),)


def _labels_of(dataset: scDataset, label_key: str | None) -> tuple[str | None, Any]:
    """Return the name of the column whose classes are counted, and its labels; either is None if it does not exist."""
    strategy = dataset.strategy
    name = label_key or getattr(strategy, "label_key", None)
    labels = getattr(strategy, "labels", None)
    if name is None and labels is not None:
        return None, labels if len(labels) == components_of(dataset).source.n_obs else None
    if name is None:
        name = next(iter(dataset.categories), None)
    return name, None if name is None else components_of(dataset).source.labels_of(name)


def _classes_of(plan: EpochPlan, labels: Any) -> tuple[ClassShare, ...]:
    """Return the share of each class in drawn and in selected rows; a large epoch is sampled at equal intervals."""
    codes, names = encode_labels(labels)
    unit = plan.sampler.unit
    n_units = plan.n_rows // unit
    units = np.linspace(0, n_units - 1, min(n_units, max(1, _MAX_COUNTED_ROWS // unit))).astype(np.int64)
    positions = (units[:, None] * unit + np.arange(unit)).ravel()
    drawn = _shares(codes[plan.sampler.draw(plan.seed, plan.epoch).rows(positions)], len(names))
    candidates = getattr(plan.sampler, "candidates", None)  # absent for a strategy defined by a user
    stored = _shares(codes if candidates is None else codes[candidates.selector], len(names))
    order = [int(c) for c in np.argsort(-stored, kind="stable") if drawn[c] or stored[c]]
    return tuple(ClassShare(name=names[c], drawn=float(drawn[c]), stored=float(stored[c])) for c in order)


def _shares(codes: NDArray[Any], n_names: int) -> NDArray[np.float64]:
    counts = np.zeros(n_names + 1, dtype=np.int64)
    count_codes(len(codes), codes, np.empty(0, dtype=np.int64), counts)
    shares: NDArray[np.float64] = counts[1:] / max(1, counts[1:].sum())
    return shares
