"""Lookup of names, with suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dasksc.atlas.assemble import Elements
from dasksc.checks import nearest, similar, some, with_advice
from dasksc.errors import MissingKeyError
from dasksc.readers.arrays import Lazy
from dasksc.storage import RemoteLocation

__all__ = ["known_columns", "nearest", "require_key", "similar", "some", "with_advice"]


def require_key(kind: str, name: str, held: Any, *, of: Any = None) -> str:
    """Return `name` if `held` has it; otherwise raise an error with similar names, and the path of the atlas `of`."""
    if name in held:
        return name
    path = of if isinstance(of, str | RemoteLocation) else ""
    if isinstance(of, Elements) and isinstance(of.X, Lazy):
        path = of.X.matrix.label.rpartition(":/")[0]
    if of is not None and all(one is None for one in held):
        kind = f"columns in {kind}" if kind in ("obs", "var") else kind
        raise MissingKeyError(f"{path or 'the atlas'} has no {kind}; leave out the argument that names {name!r}")
    raise MissingKeyError(f"{kind}{f' of {path}' if path else ''} has no {name!r}; {nearest(name, held, n=3)}")


def known_columns(
    wanted: Sequence[str], known: Iterable[str], where: str | RemoteLocation, *, may_lack: bool
) -> list[str]:
    """Return the distinct `wanted` columns of obs; missing ones raise an error, unless `may_lack` is True."""
    known = list(known)
    wanted = [name for name in dict.fromkeys(wanted) if name in known or not may_lack]
    return [require_key("obs", name, known, of=where) for name in wanted]
