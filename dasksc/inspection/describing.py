"""Description of an atlas: its contents, storage and reading rates, with advice."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mode
from typing import Any

import pandas as pd
from anndata import AnnData

from dasksc.atlas import opening
from dasksc.atlas.concat import Join
from dasksc.atlas.inputs import atlas_inputs
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.displays import first_of
from dasksc.errors import InputError
from dasksc.inspection.report import Report
from dasksc.readers.catalog import files_of
from dasksc.readers.options import OpenOptions, where_of
from dasksc.readers.registry import opened as opened_store
from dasksc.storage import Layout, redact_url

_MAX_FILES = 64
_PROBED_BLOCK = 64


def describe(
    data: Any,
    *,
    join: Join = "inner",
    seconds: float = 1.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Describe the contents, storage and reading rate of an atlas on this machine, and give advice.

    Parameters
    ----------
    data
        Argument of `dasksc.open`, or `Modalities`. The storage is described for paths and URLs (at most
        64 of them), but not for an AnnData that is already open.
    join
        Join of several atlases, as for `dasksc.open`.
    seconds
        Duration of each of four probes in seconds; 0 skips them. The probes read dense and CSR batches of X, each from
        blocks of 64 rows and from single rows.
    storage_options
        As for `dasksc.open`.

    Returns
    -------
    Report
        Facts by name, also as attributes: ``n_files``, ``n_obs`` and ``n_vars``; the ``conversion`` that
        `dasksc.convert` has recorded in a store; a row for each of the ``modalities`` of a MuData, of the columns in
        ``obs``, of the stored ``matrices`` and of the measured ``rates``; and ``advice``. A matrix that several files
        store in the same way is one row. ``stored_bytes`` is None for a Zarr store on a web server, which cannot list
        its contents.

    Examples
    --------
    >>> report = dasksc.describe("atlas.h5ad", seconds=0)
    >>> report.n_obs, report.matrices[0].encoding
    (2000, 'csr')
    """
    duration: Any = seconds
    if not isinstance(duration, int | float) or not 0 <= duration < math.inf:
        raise InputError(f"seconds={seconds} is no duration; give 0 to skip the speed tests")
    chosen = OpenOptions(storage_options=storage_options or {})
    opened: AnnData | Modalities
    parts: list[Any] = [data]
    if is_modalities(data):
        opened = data if isinstance(data, Modalities) else Modalities(data, storage_options=storage_options)
        modalities = [Report(name=name, n_vars=int(part.n_vars)) for name, part in opened.mod.items()]
        n_vars, has_x = sum(one.n_vars for one in modalities), all(part.X is not None for part in opened.mod.values())
    else:
        opened = data
        if not isinstance(data, AnnData):
            opened = opening.open(data, names=False, join=join, storage_options=storage_options)
            several = atlas_inputs(data, chosen.storage_options)
            if several is not None:
                parts = [one for _, one in several]
            elif files := files_of(where_of(data, chosen), chosen):
                parts = [*files]
        modalities, n_vars, has_x = [], int(opened.n_vars), opened.X is not None
    stored = [_stored(part, chosen) for part in parts[:_MAX_FILES]]
    matrices = list(_merged([matrix for matrices, _ in stored for matrix in matrices]))
    rates = list(_rates(opened, seconds)) if seconds and has_x and opened.n_obs else []
    conversion = stored[0][1] if len(parts) == 1 else None  # cells are not shuffled across files
    advice = [
        f"{one.key} is stored by columns, so the first fetch reads all of it; dasksc convert writes it by rows"
        for one in matrices
        if one.encoding == "csc"
    ]
    if not has_x:
        advice.insert(0, "X is not stored, so there are no batches until adata.X is set, for example from a layer")
    of_parts = first_of([Path(_shown(part)).name for part in parts])
    return Report(
        name=_shown(data) if isinstance(data, str | os.PathLike) else of_parts,
        n_files=len(parts),
        n_obs=int(opened.n_obs),
        n_vars=n_vars,
        conversion=conversion,
        modalities=modalities,
        obs=list(_columns(opened.obs)),
        matrices=matrices,
        rates=rates,
        advice=advice,
    )


def _shown(part: Any) -> str:
    return redact_url(os.fspath(part)) if isinstance(part, str | os.PathLike) else type(part).__name__


def _columns(obs: pd.DataFrame) -> Iterator[Report]:
    for name, column in obs.items():
        n_classes = len(column.cat.categories) if isinstance(column.dtype, pd.CategoricalDtype) else None
        n_missing = int(column.isna().sum())
        yield Report(name=str(name), dtype=str(column.dtype), n_classes=n_classes, n_missing=n_missing)


def _rates(data: AnnData | Modalities, seconds: float) -> Iterator[Report]:
    from dasksc.inspection.suggestions import rows_per_s  # needs torch
    from dasksc.loader import scDataset
    from dasksc.plan.strategies import BlockShuffling

    layouts: tuple[Layout, ...] = ("dense", "csr")
    for layout, block_size in product(layouts, (_PROBED_BLOCK, 1)):
        strategy, batch_size = BlockShuffling(block_size), min(64, data.n_obs)
        dataset = scDataset(data, strategy, batch_size, 64, layout=layout, rank=0, world_size=1, seed=0)
        yield Report(
            layout=layout,
            block_size=block_size,
            rows_per_s=rows_per_s(dataset, seconds),
            memory_bytes=dataset.projected_bytes,
            page_bytes=dataset.projected_pages,
        )


def _stored(source: Any, options: OpenOptions) -> tuple[list[Report], Report | None]:
    """Return the matrices of a file or store, and how `dasksc.convert` has ordered its cells."""
    if not isinstance(source, str | os.PathLike):
        return [], None
    with opened_store(where_of(source, options), options) as store:
        how = store.attributes.get("dasksc")
        matrices = [Report(n_files=1, **asdict(one)) for one in store.description()]
        return matrices, Report(how) if isinstance(how, Mapping) else None


def _merged(matrices: Sequence[Report]) -> Iterator[Report]:
    """Yield one row for the matrices that several files store in the same way."""
    groups: dict[tuple[Any, ...], list[Report]] = {}
    for one in matrices:
        # Chunk shapes are not compared, since the chunks of a short array are only as long as the array.
        kind = one.key, one.encoding, one.dtype, one.indices_dtype, one.codec, one.shards is None, one.chunks is None
        groups.setdefault(kind, []).append(one)
    for same in groups.values():
        sizes: list[Any] = [one.stored_bytes for one in same]
        joined = {
            "n_files": len(same),
            "chunks": mode(one.chunks for one in same),
            "shards": mode(one.shards for one in same),
            "nbytes": sum(one.nbytes for one in same),
            "stored_bytes": None if None in sizes else sum(sizes),
        }
        yield Report(same[0] | joined)
