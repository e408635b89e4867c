"""Description of an atlas: its contents, storage and reading rates, with advice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData

from dasksc.atlas import opening
from dasksc.atlas.concat import Join
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.options import OpenOptions, names_given, refuse_feature_choice
from dasksc.displays import first_of
from dasksc.errors import InputError
from dasksc.inspection.description import PROBED_BLOCKS, Column, Description, Modality, Rate, StoredMatrix
from dasksc.inspection.stored_matrices import merge_alike, stored_part
from dasksc.storage import is_url, redact_url

__all__ = ["describe"]

# Maximum number of files inspected.
_MAX_FILES = 64
# Advice is given if single rows are read at less than this fraction of the rate of long blocks.
_SLOW_BLOCKS = 0.5


def describe(
    data: Any,
    *,
    join: Join = "inner",
    seconds: float = 1.0,
    feature_types: str | Sequence[str] | None = None,
    genome: str | Sequence[str] | None = None,
) -> Description:
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
    feature_types, genome
        Features of 10x ``.h5`` files, as for `dasksc.open`.

    Returns
    -------
    Description
        Description of the atlas; ``print(dasksc.describe("atlas.h5ad"))`` prints a report.

    Raises
    ------
    InputError, StorageError
        As for `dasksc.open`.

    Examples
    --------
    >>> description = dasksc.describe("atlas.h5ad", seconds=0)
    >>> print(description)
    atlas.h5ad: 2,000 cells x 300 genes
      obs  cell_type (6 classes), donor (12 classes), batch (3 classes), n_counts (float32), n_genes (int32)
      X      csr float32, columns int32; chunks of 2,650, uncompressed; 339.07 kiB
      raw/X  csr float32, columns int32; chunks of 2,650, uncompressed; 339.07 kiB
    """
    if seconds < 0:
        raise InputError(f"seconds={seconds} is negative; give 0 to skip the speed tests")
    if is_modalities(data) or isinstance(data, AnnData):
        chosen = OpenOptions(
            feature_types=names_given("feature_types", feature_types), genomes=names_given("genome", genome)
        )
        refuse_feature_choice(chosen, "an AnnData" if isinstance(data, AnnData) else "an input with several modalities")
    several = None if is_modalities(data) else opening.several_of(data)
    parts = [data] if several is None else several[0]
    opened: AnnData | Modalities
    if is_modalities(data):
        opened = data if isinstance(data, Modalities) else Modalities(data)
        modalities = tuple(Modality(name=name, n_vars=int(part.n_vars)) for name, part in opened.mod.items())
        has_x = all(part.X is not None for part in opened.mod.values())
    else:
        opened = (
            data
            if isinstance(data, AnnData)
            else opening.open(data, names=False, join=join, feature_types=feature_types, genome=genome)
        )
        modalities, has_x = (), opened.X is not None
    stored = [stored_part(part) for part in parts[:_MAX_FILES]]
    matrices = merge_alike([matrix for one in stored for matrix in one.matrices])
    rates: tuple[Rate, ...] = ()
    if seconds and has_x and opened.n_obs:
        from dasksc.inspection.reading_rates import read_rates  # needs torch

        rates = tuple(read_rates(opened, seconds))
    return Description(
        name=_shown(data) if isinstance(data, str | os.PathLike) else _names(parts),
        n_files=len(parts),
        n_obs=int(opened.n_obs),
        n_vars=int(opened.n_vars) if isinstance(opened, AnnData) else sum(one.n_vars for one in modalities),
        modalities=modalities,
        obs=tuple(_columns(opened.obs)),
        matrices=tuple(matrices),
        rates=rates,
        # Cells are not shuffled across files, even if each file is shuffled.
        advice=tuple(_advice(matrices, rates, is_shuffled=len(parts) == 1 and stored[0].is_shuffled)),
    )


def _shown(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return redact_url(text) if is_url(text) else text


def _names(parts: Sequence[Any]) -> str:
    return first_of(
        [Path(_shown(part)).name if isinstance(part, str | os.PathLike) else type(part).__name__ for part in parts]
    )


def _columns(obs: pd.DataFrame) -> Iterator[Column]:
    for name, column in obs.items():
        is_category = isinstance(column.dtype, pd.CategoricalDtype)
        yield Column(
            name=str(name),
            dtype=str(column.dtype),
            n_classes=len(column.cat.categories) if is_category else None,
            n_missing=int(column.isna().sum()),
        )


def _advice(matrices: Sequence[StoredMatrix], rates: Sequence[Rate], *, is_shuffled: bool) -> Iterator[str]:
    for one in matrices:
        if one.encoding == "csc":
            yield (
                f"{one.key} is stored by columns, so the first fetch reads all of it; dasksc convert writes it by rows"
            )
    # The key of a modality's X starts with the name of the modality.
    x = [one for one in matrices if one.key.rpartition("/")[2] == "X" and one.key.split("/")[-2:-1] != ["raw"]]
    if any(one.chunks is not None and one.codec and one.encoding == "dense" and one.chunks[0] > 4096 for one in x):
        yield (
            "chunks of X hold more rows than a fetch, and each is decoded for only a few of its rows; dasksc convert "
            "writes smaller chunks"
        )
    speed = {(rate.layout, rate.block_size): rate.rows_per_s for rate in rates}
    for layout in ("dense", "csr"):
        if speed.get((layout, 1), np.inf) < _SLOW_BLOCKS * speed.get((layout, PROBED_BLOCKS[0]), 0.0):
            times = speed[layout, PROBED_BLOCKS[0]] / speed[layout, 1]
            otherwise = (
                "; the cells were shuffled on conversion, so block_size does not affect how well batches are mixed"
                if is_shuffled
                else ", or dasksc convert, which shuffles cells once"
            )
            yield (
                f"single rows are read {times:.1f} times slower than blocks of {PROBED_BLOCKS[0]} ({layout}): use "
                f"BlockShuffling(block_size=64) with a large fetch_factor{otherwise}"
            )
            break
