"""Bounded LRU cache of facts about stored objects that a process has read, shared by all stores.

A store may have millions of objects. A cached fact saves a request or shows that an object has changed. Beyond the
limit, the least recently used facts are dropped, and the objects are treated as new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from dasksc.platforms import after_fork

__all__ = ["ObjectCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Total size for all stores: about 130,000 entries that hold only an identity.
LIMIT_BYTES = 2**26
# Size of an entry: the key, the identity with its path, and the slots in the dict.
_ENTRY_BYTES = 512

_lock = threading.Lock()
_kept: OrderedDict[tuple[object, Any], tuple[Any, int]] = OrderedDict()
_n_bytes = 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one


after_fork(_after_fork)


class ObjectCache(Generic[K, V]):
    """Cached facts about the objects of one store. Instances pickle without the facts."""

    def __init__(self) -> None:
        self._mark = object()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectCache, ()

    def get(self, key: K) -> V | None:
        """Return the fact about an object, or None if there is none."""
        with _lock:
            entry = _kept.get((self._mark, key))
            if entry is None:
                return None
            _kept.move_to_end((self._mark, key))
            value: V = entry[0]
            return value

    def keep(self, key: K, value: V, *, n_bytes: int = 0) -> V:
        """Cache a fact about an object unless there is one already; return the cached fact."""
        global _n_bytes
        n_bytes += _ENTRY_BYTES
        with _lock:
            entry = _kept.get((self._mark, key))
            if entry is not None:
                cached: V = entry[0]
                return cached
            _kept[self._mark, key] = value, n_bytes
            _n_bytes += n_bytes
            while _n_bytes > LIMIT_BYTES:
                _, (_, freed) = _kept.popitem(last=False)
                _n_bytes -= freed
            return value
