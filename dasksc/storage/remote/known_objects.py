"""What a process remembers of the objects that it has read: all of it together, within a number of bytes.

A store may have millions of objects. What is known of one spares a request or shows that the object has changed
since; of those beyond the limit, the longest unused are forgotten, and met as if for the first time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from dasksc.platforms import after_fork

__all__ = ["Seen"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Of all stores together; entries that hold nothing but an identity are some 130,000.
LIMIT_BYTES = 2**26
# What an entry takes: key, identity with its path, and their places here.
_ENTRY_BYTES = 512

_lock = threading.Lock()
_kept: OrderedDict[tuple[object, Any], tuple[Any, int]] = OrderedDict()
_n_bytes = 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one


after_fork(_after_fork)


class Seen(Generic[K, V]):
    """What is known of the objects of one store, as far as it is remembered. Pickles empty."""

    def __init__(self) -> None:
        self._mark = object()

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen, ()

    def get(self, key: K) -> V | None:
        """Return what is known of an object; None if nothing is."""
        with _lock:
            entry = _kept.get((self._mark, key))
            if entry is None:
                return None
            _kept.move_to_end((self._mark, key))
            value: V = entry[0]
            return value

    def keep(self, key: K, value: V, *, n_bytes: int = 0) -> V:
        """Remember something of an object, unless something is known; return what is known then.

        Parameters
        ----------
        key, value
            The object, and what to remember.
        n_bytes
            What `value` holds beyond an identity.
        """
        global _n_bytes
        n_bytes += _ENTRY_BYTES
        with _lock:
            entry = _kept.get((self._mark, key))
            if entry is not None:
                known: V = entry[0]
                return known
            _kept[self._mark, key] = value, n_bytes
            _n_bytes += n_bytes
            while _n_bytes > LIMIT_BYTES:
                _, (_, freed) = _kept.popitem(last=False)
                _n_bytes -= freed
            return value
