"""Private parts of PyTorch, which is imported on use."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError

__all__ = ["check_training", "default_store", "is_stacking_fetcher"]


def check_training(version: str) -> None:
    """Check that a version of PyTorch trains correctly and can save checkpoints."""
    # Before 2.7, ``torch.distributed.checkpoint.save`` has no ``no_dist``, and FSDP fails on CPUs. In 2.7 and 2.8, two
    # ranks under FSDP on CPUs compute different losses than one process.
    if tuple(map(int, version.split(".")[:2])) < (2, 9):
        raise UnsupportedVersionError("torch", "working FSDP checkpoints (fixed in torch 2.9)")


def default_store(distributed: Any) -> Any:
    """Return the store of the process group, for which there is no public function."""
    return distributed.distributed_c10d._get_default_store()


def is_stacking_fetcher(caller: Any) -> bool:
    """Return True if an object is the fetcher of a DataLoader that stacks the elements of an iterable data set."""
    from torch.utils.data import default_collate
    from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    is_fetcher = isinstance(caller, _IterableDatasetFetcher)
    return is_fetcher and bool(caller.auto_collation) and caller.collate_fn is default_collate
