"""Private parts of PyTorch, which is imported on use."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, needed

__all__ = ["check_training", "default_store", "is_stacking_fetcher"]


def check_training(version: str) -> None:
    """Check that a version of PyTorch trains correctly and can save checkpoints."""
    # Before 2.7, ``torch.distributed.checkpoint.save`` has no ``no_dist``, and FSDP fails on CPUs. In 2.7 and 2.8, two
    # ranks under FSDP on CPUs compute different losses than one process.
    if tuple(map(int, version.split(".")[:2])) < (2, 9):
        raise UnsupportedVersionError("torch", "working FSDP checkpoints (fixed in torch 2.9)")


def default_store(distributed: Any) -> Any:
    """Return the store of the process group."""
    # Uses ``torch.distributed.distributed_c10d._get_default_store``, which has no public equivalent; raises if missing.
    module = attribute(distributed, "distributed_c10d", library="torch")
    return attribute(module, "_get_default_store", library="torch")()


def is_stacking_fetcher(caller: object) -> bool:
    """Return True if an object is the fetcher of a DataLoader that stacks the elements of an iterable data set."""
    # Uses ``_IterableDatasetFetcher`` and two of its attributes; raises if missing.
    with needed("torch"):
        from torch.utils.data import default_collate
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    if not isinstance(caller, _IterableDatasetFetcher):
        return False
    is_batched, collate = (attribute(caller, name, library="torch") for name in ("auto_collation", "collate_fn"))
    return bool(is_batched) and collate is default_collate
