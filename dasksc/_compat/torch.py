"""What is private in PyTorch, which is imported when it is used."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import attribute, needed

__all__ = ["default_store", "is_stacking_fetcher"]


def default_store(distributed: Any) -> Any:
    """Return the store of the process group.

    That of ``torch.distributed.distributed_c10d._get_default_store``, for which there is no public name; raises where
    missing.

    Parameters
    ----------
    distributed
        ``torch.distributed``.
    """
    module = attribute(distributed, "distributed_c10d", library="torch")
    return attribute(module, "_get_default_store", library="torch")()


def is_stacking_fetcher(caller: object) -> bool:
    """Whether an object is what fetches for a DataLoader that stacks what an iterable data set yields.

    By ``_IterableDatasetFetcher`` and its two attributes; raises where missing.
    """
    with needed("torch"):
        from torch.utils.data import default_collate
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher

    if not isinstance(caller, _IterableDatasetFetcher):
        return False
    is_batched, collate = (attribute(caller, name, library="torch") for name in ("auto_collation", "collate_fn"))
    return bool(is_batched) and collate is default_collate
