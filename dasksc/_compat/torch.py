"""Private parts of PyTorch, which is imported on use."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import attribute, needed

__all__ = ["default_store", "is_stacking_fetcher"]


def default_store(distributed: Any) -> Any:
    """Return the store of the process group.

    There is no public equivalent of ``torch.distributed.distributed_c10d._get_default_store``; raises if missing.

    Parameters
    ----------
    distributed
        Module ``torch.distributed``.
    """
    module = attribute(distributed, "distributed_c10d", library="torch")
    return attribute(module, "_get_default_store", library="torch")()


def is_stacking_fetcher(caller: object) -> bool:
    """Return True if an object fetches for a DataLoader that stacks the elements of an iterable data set.

    Uses ``_IterableDatasetFetcher`` and two of its attributes; raises if missing.
    """
    with needed("torch"):
        from torch.utils.data import default_collate
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    if not isinstance(caller, _IterableDatasetFetcher):
        return False
    is_batched, collate = (attribute(caller, name, library="torch") for name in ("auto_collation", "collate_fn"))
    return bool(is_batched) and collate is default_collate
