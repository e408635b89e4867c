"""Batches like those of a data set, from a range of rows in storage order, in this process alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dasksc.loader.dataset import scDataset
from dasksc.plan.strategies import Streaming
from dasksc.transforms.composed import Transforms


class RowRange(scDataset):
    """Rows ``[start, stop)`` of the collection of a data set, in storage order, in batches of its content and size."""

    # `start` is a multiple of the batch size: random transforms depend on the position of a batch in the collection.
    def __init__(self, dataset: scDataset, start: int, stop: int, *, device: Any = None, title: str = "") -> None:
        spec, given = dataset.spec, dataset.spec.transforms
        options = {one.name: getattr(spec, one.name) for one in fields(spec) if one.init}
        options |= {"obs": (), "layers": (), "obsm": (), "genes": None, "filter": None, "progress": False}
        options |= {"genes_missing": "error", "genes_key": None, "genes_repeated": "error"}  # the source has the genes
        options |= {"strategy": Streaming(indices=slice(start, stop)), "drop_last": False, "equal_ranks": False}
        options["fetch_factor"] = dataset.memory.ordered_fetch_factor
        options["transform"] = None if given is None else Transforms(given.steps, start // dataset.batch_size)
        options["device"] = spec.device if device is None else device
        super().__init__(dataset.source, **options, scheduler=dataset._scheduler(), rank=0, world_size=1, seed=0)
        self._title = title or f"rows {start:,} to {stop:,}"
