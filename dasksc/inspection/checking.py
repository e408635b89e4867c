"""Check of an epoch, computed from its plan before any matrix is read, and warnings about possible improvements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import whole_number
from dasksc.errors import InputError
from dasksc.inspection.report import Report
from dasksc.kernels.draw import count_codes
from dasksc.loader import MatrixSource, scDataset
from dasksc.memory import recommended_bytes
from dasksc.plan.binding import reason_for_no_batches
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.labels import Diversity, encode_labels
from dasksc.plan.sets import SetSampler
from dasksc.plan.strategies import ClassBalancedSampling
from dasksc.storage import is_url

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Maximum number of rows whose classes are counted. At least one unit of the sampler (a set of cells, or a batch
# with per_batch=True) is counted, even if it has more rows.
_MAX_COUNTED_ROWS = 2**20
# Warnings are given if batches have less than this fraction of the label entropy of random batches, and if less than
# this fraction of the data transferred or decoded is used.
_MIXED, _MIN_USED_SHARE = 0.9, 0.5
# If a fetch uses a share s of the rows that it decodes, a converted store is read 2 + x / s times as fast. Values of x
# by layout, from AnnData's Zarr stores and blocks of 16 to 1,024 rows; see `benchmarks/README.md`.
_CONVERTED = {"csr": 0.6, "dense": 1.2}


def check(data: scDataset | DataLoader[Any], world_size: int | None = None, *, label_key: str | None = None) -> Report:
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
    Report
        Facts by name, also as attributes. ``n_obs`` rows are in the collection; ``n_rows`` are drawn over all ranks,
        before some are repeated (``n_padded``) or dropped (``n_dropped``). ``ranks`` has the share of each rank.
        ``classes`` has, for each class, its fraction of the labeled rows that are ``drawn``, and of those ``stored``
        that the filter and `indices` of the strategy select. ``sets`` counts the sets and groups of `CellSets`.
        ``warnings`` are possible improvements.

        Of the sizes in bytes, ``process_bytes`` bounds the memory of one reading process, ``pages_bytes`` is the page
        cache that it needs at a time, and ``prefetched_bytes`` are the batches that the DataLoader prefetches.
        ``rank_bytes`` bounds the memory of a rank with its workers and their batches. ``job_bytes`` is what a rank
        needs in a job with a memory limit: also the page cache, the interpreter and the libraries, but neither the
        model nor prefetched batches; ``request_bytes`` adds a margin. They are None if the size of rows is unknown.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type"], seed=0)
    >>> report = dasksc.check(dataset, world_size=3)
    >>> report.n_rows, report.n_padded
    (2000, 1)
    >>> [rank.n_batches for rank in report.ranks]
    [11, 11, 11]
    >>> print(report.classes[0].name, round(report.classes[0].drawn, 3))
    T cell 0.408
    """
    dataset = getattr(data, "dataset", data)
    if not isinstance(dataset, scDataset):
        raise InputError(f"check takes a dasksc.scDataset, or a DataLoader of one; got {data!r}")
    loader = None if dataset is data else data
    world_size = dataset.world_size if world_size is None else whole_number("world_size", world_size)
    plan = dataclasses.replace(dataset.plan(), rank=0, world_size=world_size)
    num_workers = int(getattr(loader, "num_workers", 0))
    prefetch_factor = int(getattr(loader, "prefetch_factor", None) or 0)
    name, labels = _labels_of(dataset, label_key)
    sampler, match = plan.sampler, dataset.gene_match
    sets = None
    if isinstance(sampler, SetSampler):
        n_sets = plan.n_rows // sampler.unit
        sets = Report(n_sets=n_sets, set_size=sampler.unit, n_controls=sampler.n_controls)
        sets |= sampler.accounts
    report = Report(
        name=f"{dataset.source.name} by {type(dataset.strategy).__name__}",
        epoch=plan.epoch,
        world_size=world_size,
        n_obs=dataset.source.n_obs,
        n_rows=plan.n_rows,
        n_blocks=None if sets else -(-plan.n_rows // plan.block_size),
        block_size=None if sets else plan.block_size,
        batch_size=plan.batch_size,
        global_batch_size=plan.batch_size * world_size,
        fetch_size=dataset.fetch_size,
        n_padded=plan.n_padded,
        n_dropped=plan.n_dropped,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        process_bytes=dataset.projected_bytes,
        pages_bytes=dataset.projected_pages,
        **dict.fromkeys(("prefetched_bytes", "rank_bytes", "job_bytes", "request_bytes")),
        label_key=name,
        ranks=[
            Report(
                rank=one.rank,
                n_rows=one.n_rank_rows,
                n_fetches=one.n_fetches,
                n_batches=one.n_batches,
                n_padded=one.n_rank_padded,
                n_dropped=one.n_rank_dropped,
            )
            for one in (dataclasses.replace(plan, rank=rank) for rank in range(world_size))
        ],
        sets=sets,
        classes=[] if labels is None else _classes_of(plan, labels),
        genes=[f"{key}: {one}" for key, one in match.items()]
        if isinstance(match, dict)
        else [str(match)] * bool(match),
        warnings=[
            *_warnings_of_sizes(plan),
            *_warnings_of_reading(dataset, plan),
            *_warnings_of_mixing(plan, name, labels),
        ],
    )
    if isinstance(dataset.source, MatrixSource):
        n_processes = max(1, num_workers)
        prefetched_bytes = int(num_workers * prefetch_factor * dataset.memory.batch_bytes)
        job_bytes = n_processes * dataset.memory.job_bytes
        report |= {
            "prefetched_bytes": prefetched_bytes,
            "rank_bytes": n_processes * report.process_bytes + prefetched_bytes,
            "job_bytes": job_bytes,
            "request_bytes": recommended_bytes(job_bytes),
        }
    return report


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
    return cast(Diversity, dataset.plan().diversity(dataset.source.labels_of(column), n_batches))


def _labels_of(dataset: scDataset, label_key: str | None) -> tuple[str | None, Any]:
    """Return the name of the column whose classes are counted, and its labels; either is None if it does not exist."""
    source = dataset.source
    name = label_key or getattr(dataset.strategy, "label_key", None)
    labels = dataset.strategy.labels if isinstance(dataset.strategy, ClassBalancedSampling) else None
    if name is None and labels is not None:
        return None, labels if len(labels) == source.n_obs else None
    name = name or next(iter(dataset.categories), None)
    return name, None if name is None else source.labels_of(name)


def _classes_of(plan: EpochPlan, labels: Any) -> list[Report]:
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
    return [Report(name=names[c], drawn=float(drawn[c]), stored=float(stored[c])) for c in order]


def _shares(codes: NDArray[Any], n_names: int) -> NDArray[np.float64]:
    counts = np.zeros(n_names + 1, dtype=np.int64)
    count_codes(codes, counts)
    shares: NDArray[np.float64] = counts[1:] / max(1, counts[1:].sum())
    return shares


def _warnings_of_sizes(plan: EpochPlan) -> Iterator[str]:
    """Yield warnings about sizes that leave rows or ranks unused."""
    if plan.n_dropped == plan.n_rows:
        yield f"no rank yields a batch: {reason_for_no_batches(plan)}"
    n_blocks = -(-plan.n_rows // plan.block_size)
    if 0 < n_blocks < plan.world_size:
        blocks = "sets" if isinstance(plan.sampler, SetSampler) else "blocks"
        yield (
            f"there are more ranks ({plan.world_size}) than {blocks} ({n_blocks}), so several ranks read "
            f"the same chunks. Use fewer ranks, more or smaller {blocks} or, with Streaming, a lower fetch_factor"
        )


def _warnings_of_reading(dataset: scDataset, plan: EpochPlan) -> Iterator[str]:
    """Yield warnings about fetches that use little of the data that they read."""
    source, n_rows = dataset.source, dataset.fetch_size
    if not plan.n_rows or not isinstance(source, MatrixSource):
        return
    run_rows = plan.sampler.run_rows if isinstance(plan.sampler, SetSampler) else plan.block_size
    for name, matrix in source.matrices.items():
        chunk_rows = matrix.cost.chunk_rows
        share = used_share(n_rows, run_rows, source.n_obs, chunk_rows)
        if share >= _MIN_USED_SHARE:
            continue
        if is_url(matrix.label):
            yield (
                f"a fetch uses only about {share:.0%} of the transferred bytes of {name}: chunks of about "
                f"{chunk_rows:,.0f} rows are transferred whole for runs of {run_rows:,.0f}. Raise block_size or "
                "fetch_factor, or store smaller chunks in shards (dasksc convert); for sets, sort the atlas by group "
                "(dasksc convert --group-by)"
            )
        elif matrix.cost.decoded_rows:
            gain = 2 + _CONVERTED[matrix.layout] / share
            yield (
                f"a fetch uses only about {share:.0%} of the rows of {name} that it decodes, since chunks of about "
                f"{chunk_rows:,.0f} rows are decoded for runs of {run_rows:,.0f}. Raise block_size or fetch_factor, or "
                f"convert the atlas: a store written by dasksc convert is read about {gain:.0f} times as fast"
            )


def used_share(n_rows: int, run_rows: float, n_obs: int, chunk_rows: float) -> float:
    """Return the share of the rows of whole chunks that a fetch uses; its runs of rows are at random positions."""
    chunk_rows, n_obs = max(1.0, chunk_rows), max(1, n_obs)
    touched_by_one = min(1.0, (run_rows + chunk_rows - 1) / n_obs)
    read_rows = n_obs * (1 - float((1 - touched_by_one) ** (n_rows / run_rows)))
    return min(1.0, n_rows / read_rows)


def _warnings_of_mixing(plan: EpochPlan, name: str | None, labels: Any) -> Iterator[str]:
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
