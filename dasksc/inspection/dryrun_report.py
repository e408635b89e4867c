"""Result of a dry run, and its printed report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dask.utils import format_bytes

from dasksc.memory.limits import recommended_bytes
from dasksc.sampling.set_sampler import SetAccounts

__all__ = ["Check", "ClassShare", "RankShare"]

_N_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Share of an epoch that one rank reads.

    Parameters
    ----------
    rank
        Rank.
    n_rows, n_fetches, n_batches
        Rows and batches that the rank yields, and the number of fetches that read them.
    n_padded, n_dropped
        Number of rows of other ranks that this rank repeats, and number of rows of its own share that it drops.
    """

    rank: int
    n_rows: int
    n_fetches: int
    n_batches: int
    n_padded: int
    n_dropped: int

    def __str__(self) -> str:
        extra = "".join(
            f"; rows {what}: {n:,}" for n, what in ((self.n_padded, "padded"), (self.n_dropped, "dropped")) if n
        )
        return (
            f"{self.n_rows:,} row{'' if self.n_rows == 1 else 's'} in {self.n_batches:,} "
            f"batch{'' if self.n_batches == 1 else 'es'}, read in {self.n_fetches:,} "
            f"fetch{'' if self.n_fetches == 1 else 'es'}{extra}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """Frequency of a class.

    Parameters
    ----------
    name
        Label of the class.
    drawn
        Fraction of the labeled rows of the epoch that belong to the class.
    stored
        Fraction of the labeled candidates that belong to the class. Candidates are the rows of the collection that the
        filter and `indices` of the strategy select.
    """

    name: Any
    drawn: float
    stored: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of `dasksc.check`; printing it shows a report.

    Parameters
    ----------
    name
        Names of the data set and its strategy.
    epoch
        Number of the epoch.
    n_obs
        Number of rows of the collection.
    n_rows
        Number of rows of the epoch over all ranks, before padding and dropping.
    n_blocks, block_size
        Number of blocks that are distributed over the ranks, and rows per block; the last block may be shorter.
    batch_size, global_batch_size
        Rows per batch, for one rank and for all ranks together.
    fetch_size
        Rows per fetch.
    ranks
        Share of each rank.
    n_padded, n_dropped
        Numbers of padded and of dropped rows, over all ranks.
    set_size, n_controls, sets
        For `CellSets`: cells per set, control cells per cell, and the numbers of groups and cells that the strategy
        draws from (`SetAccounts`). None, 0 and None for other strategies.
    label_key
        Column whose classes are counted.
    classes
        Classes of that column, the most frequent first.
    num_workers, prefetch_factor
        Settings of the DataLoader.
    process_bytes, prefetched_bytes
        Upper bound of the memory of one reading process, and of the batches that the DataLoader prefetches, in bytes;
        None if the size of rows is unknown.
    pages_bytes
        Page cache that one reading process needs at a time, in bytes.
    job_bytes
        Memory that a rank needs in a job with a memory limit, in bytes. It covers the fetches, the batches being made,
        the page cache, the interpreter and the libraries of all its reading processes. It does not cover the model or
        the batches that the DataLoader prefetches.
    warnings
        Possible improvements, and how to make them.
    genes
        Summary of the matched gene names, one line per modality.
    """

    name: str
    epoch: int
    n_obs: int
    n_rows: int
    n_blocks: int
    block_size: int
    batch_size: int
    global_batch_size: int
    fetch_size: int
    ranks: tuple[RankShare, ...]
    n_padded: int
    n_dropped: int
    set_size: int | None
    n_controls: int
    sets: SetAccounts | None
    label_key: str | None
    classes: tuple[ClassShare, ...]
    num_workers: int
    prefetch_factor: int
    process_bytes: int | None
    prefetched_bytes: int | None
    pages_bytes: int | None
    job_bytes: int | None
    warnings: tuple[str, ...]
    genes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks that share the epoch."""
        return len(self.ranks)

    @property
    def rank_bytes(self) -> int | None:
        """Upper bound of the memory of a rank, including its DataLoader workers and their batches, in bytes."""
        if self.process_bytes is None or self.prefetched_bytes is None:
            return None
        return max(1, self.num_workers) * self.process_bytes + self.prefetched_bytes

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name}, epoch {self.epoch}, {self.world_size} rank{'s' * (self.world_size > 1)}"
        n_blocks = f"{self.n_blocks:,} block{'s' * (self.n_blocks != 1)}"
        blocks = f", in {n_blocks} of {self.block_size:,}" if self.sets is None else ""
        yield f"  rows     {self.n_rows:,} drawn (atlas: {self.n_obs:,}){blocks}"
        yield (
            f"  batches  {self.batch_size:,} rows per rank, {self.global_batch_size:,} over all ranks; "
            f"fetches of {self.fetch_size:,} rows"
        )
        if self.sets is not None and self.set_size is not None:
            yield (
                f"  sets     {self.n_rows // self.set_size:,}, of {self.set_size:,} cells each, from "
                f"{self.sets.n_groups:,} groups ({self.sets.n_cells:,} cells)"
                + (
                    f"; {self.n_controls} control{'s' if self.n_controls > 1 else ''} per target cell, drawn from "
                    f"{self.sets.n_control_cells:,}"
                    if self.n_controls
                    else ""
                )
            )
        for share, ranks in groupby(self.ranks, key=lambda one: str(one)):
            first, *others = (one.rank for one in ranks)
            name = f"rank {first}" if not others else f"ranks {first} to {others[-1]}"
            yield f"  {name}: {share}"
        yield f"  padded   {self.n_padded:,} rows over all ranks; dropped {self.n_dropped:,}"
        if self.classes:
            texts = [f"{one.name} {one.drawn:.1%} (unweighted: {one.stored:.1%})" for one in self.classes[:_N_SHOWN]]
            rest = len(self.classes) - len(texts)
            more = f" and {rest} more" if rest else ""
            yield f"  {self.label_key or 'classes'}: {', '.join(texts)}{more}"
        for line in self.genes:
            yield f"  genes    {line}"
        yield f"  memory   {self._memory()}"
        if self.job_bytes is not None:
            yield (
                f"           process: {format_bytes(self.job_bytes)} per rank plus the model; request "
                f"{format_bytes(recommended_bytes(self.job_bytes))}"
            )
        for warning in self.warnings:
            yield f"  warning: {warning}"

    def _memory(self) -> str:
        if self.rank_bytes is None or self.process_bytes is None or self.prefetched_bytes is None:
            return "unknown: rows that are read by indexing have no known size"
        pages = format_bytes(max(1, self.num_workers) * (self.pages_bytes or 0))
        if not self.num_workers:
            return f"fetches: at most {format_bytes(self.rank_bytes)} per rank, and {pages} of page cache"
        return (
            f"fetches: at most {format_bytes(self.rank_bytes)} per rank = {self.num_workers} workers x "
            f"{format_bytes(self.process_bytes)} + {format_bytes(self.prefetched_bytes)} of batches they prefetch "
            f"({self.prefetch_factor} each); in addition, {pages} of page cache"
        )
