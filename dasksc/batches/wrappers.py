"""Refusal of wrappers that would stack the batches of a data set, or share them among the ranks a second time."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import default_collate

from dasksc.errors import InputError


def refuse_sharding(dataset: Any, reader: Any = None) -> None:
    """Raise an error if Accelerate, which transformers uses, divides the batches of a data set among the ranks."""
    # Most cells would be lost, without an error.
    state = sys.modules.get("accelerate.state")
    loader: Any = None if state is None else state.GradientState().active_dataloader
    is_dispatched = type(loader).__name__ == "DataLoaderDispatcher" and loader.dataset is dataset
    if is_dispatched or type(reader).__name__ == "IterableDatasetShard":
        raise InputError(
            "Accelerate divides the batches among the ranks, but the data set already yields each of them its own "
            "share, so most cells would never be used. Iterate over the data set, or a DataLoader of it, as it is: "
            "prepare only the model and the optimizer. Or give the data set rank=0, world_size=1 and a seed, to leave "
            "the division among ranks to Accelerate"
        )


def refuse_stacking(reader: Any) -> None:
    """Raise an error if the reader of a data set is the part of a DataLoader that would stack its batches."""
    if getattr(reader, "auto_collation", False) and getattr(reader, "collate_fn", None) is default_collate:
        raise InputError(
            "the DataLoader has a batch_size of its own, and would stack k batches of the data set into arrays of "
            "shape (k, batch_size, n_vars). The data set already yields batches; use "
            "DataLoader(dataset, batch_size=None)"
        )
