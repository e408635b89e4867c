"""Display of a data set in notebooks, from sizes that are known without reading data or sampling rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import groupby

from dask.utils import format_bytes

from dasksc.batches.batch import tensor_dtype
from dasksc.errors import DaskscError
from dasksc.loader.parts import LoaderParts
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.ranks import World
from dasksc.plan.sets import SetSampler

__all__ = ["display_rows"]


def display_rows(parts: LoaderParts, world: World, arguments: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each row of the display.

    Parameters
    ----------
    parts
        Components of the data set.
    world
        Rank and world size, which may change until the first epoch begins.
    arguments
        Arguments of the data set that differ from their defaults, as text.
    """
    plan = parts.plan_of(world, 0)
    source = parts.source
    yield "data", f"{source.name}: {_shape_of(source)}"
    yield "strategy", arguments["strategy"]
    rest = ", ".join(f"{name}={text}" for name, text in arguments.items() if name not in ("strategy", "batch_size"))
    if rest:
        yield "arguments", rest
    name = "batch before transform" if "transform" in arguments else "batch"
    yield name, "\n".join(_batch_lines(source, plan))
    yield "fetch", f"{plan.fetch_rows * (1 + plan.sampler.n_controls):,} rows, {_counted(plan.fetch_factor, 'batch')}"
    yield "epoch", f"{plan.n_rows:,} rows{_padded(plan)}"
    yield "batches per rank", "\n".join(_rank_lines(plan))
    yield "this process", f"rank {world.rank} of {world.world_size}"
    yield "memory per rank", _memory(parts)


def _shape_of(source: MatrixSource | IndexedSource) -> str:
    if isinstance(source, IndexedSource):
        return f"{source.n_obs:,} rows, read by indexing"
    names = {key: matrix.shape[1] for key, matrix in source.matrices.items() if key.rpartition(":")[2] == "X"}
    columns = ", ".join(f"{n:,} columns{'' if key == 'X' else f' ({key[:-2]})'}" for key, n in names.items())
    return f"{source.n_obs:,} rows, {columns}"


def _batch_lines(source: MatrixSource | IndexedSource, plan: EpochPlan) -> Iterator[str]:
    n = plan.batch_size
    if isinstance(source, IndexedSource):
        yield f"{n:,} rows, in the form that the collection or a hook returns"
        return
    maker = source.maker
    for key, matrix in source.matrices.items():
        modality, _, name = key.rpartition(":")
        group, _, element = name.partition("/")
        name = f"{group}[{element!r}]" if element else group
        columns = maker.columns.get(key)
        dtype = tensor_dtype(matrix.dtype) if maker.dtype is None else maker.dtype
        layout = ", sparse CSR" if maker.layout == "csr" and group != "obsm" else ""
        shape = (n, matrix.shape[1] if columns is None else len(columns))
        named = "tensor" if maker.only_x else f"{modality}.{name}".lstrip(".")
        yield f"{named}: {shape} {dtype}{layout}"
    if maker.only_x:
        return
    for name, column in maker.obs.items():
        is_coded = name in maker.n_classes
        classes = f", {maker.n_classes[name]:,} classes" if is_coded else ""
        yield f"obs[{name!r}]: ({n},) {'int64' if is_coded else column.dtype}{classes}"
    yield f"index: ({n},) int64"
    if isinstance(plan.sampler, SetSampler):
        yield f"sets: ({n // plan.sampler.unit},) int64"
        if plan.sampler.n_controls:
            yield f"control: a Batch of {n * plan.sampler.n_controls:,} rows"


def _rank_lines(plan: EpochPlan) -> Iterator[str]:
    def sizes(rank: int) -> tuple[int, int]:
        of_rank = dataclasses.replace(plan, rank=rank)
        return of_rank.n_rank_rows, of_rank.n_batches

    for (n_rows, n_batches), group in groupby(range(plan.world_size), key=sizes):
        first, *others = group
        ranks = f"ranks {first} to {others[-1]}" if others else f"rank {first}"
        yield f"{ranks}: {_counted(n_batches, 'batch')}, {n_rows:,} rows"


def _padded(plan: EpochPlan) -> str:
    extra = [f"{n:,} {what}" for n, what in ((plan.n_padded, "repeated"), (plan.n_dropped, "left out")) if n]
    return f" ({', '.join(extra)})" if extra else ""


def _memory(parts: LoaderParts) -> str:
    if isinstance(parts.source, IndexedSource):
        return "unknown, because rows are read by indexing"
    try:
        demand = parts.projection.reading_mode().demand
    except DaskscError as error:  # such as a cluster that cannot be reached
        return f"unknown: {error}"
    return f"at most {format_bytes(demand.anonymous)}, and {format_bytes(demand.pages)} of page cache"


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 'es'}"
