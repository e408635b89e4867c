"""Lookup of names, with suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dask.array as da
from anndata import AnnData

from dasksc.atlas.assemble import Elements
from dasksc.checks import nearest, similar, some, with_advice
from dasksc.errors import MissingKeyError
from dasksc.pushdown import leaves_of
from dasksc.readers.arrays import Lazy
from dasksc.storage import RemoteLocation

__all__ = ["known_columns", "nearest", "path_of", "require_key", "similar", "some", "with_advice"]


def require_key(kind: str, name: str, held: Any, *, of: Any = None) -> str:
    """Return `name` if `held` has it; otherwise raise an error with similar names, and with the path of `of`."""
    if name in held:
        return name
    path = str(of) if isinstance(of, str | RemoteLocation) else path_of(of)
    if of is not None and all(one is None for one in held):
        kind = f"columns in {kind}" if kind in ("obs", "var") else kind
        raise MissingKeyError(f"{path or 'the atlas'} has no {kind}; leave out the argument that names {name!r}")
    raise MissingKeyError(f"{kind}{f' of {path}' if path else ''} has no {name!r}; {nearest(name, held, n=3)}")


def path_of(adata: Any) -> str:
    """Return the path from which X of an open atlas is read; empty if there is none, or several."""
    if isinstance(adata, Elements):
        return adata.X.matrix.label.rpartition(":/")[0] if isinstance(adata.X, Lazy) else ""
    if not isinstance(adata, AnnData):
        return ""
    if adata.isbacked:
        return str(adata.filename)
    if adata.is_view:  # access to X would copy the selected rows
        return ""
    # The label of a stored matrix is its path and its key in the file.
    leaves = leaves_of(adata.X) if isinstance(adata.X, da.Array) else []
    paths: set[str] = {leaf.label.rpartition(":/")[0] for leaf in leaves}
    return paths.pop() if len(paths) == 1 else ""


def known_columns(
    wanted: Sequence[str], known: Iterable[str], where: str | RemoteLocation, *, may_lack: bool
) -> list[str]:
    """Return the distinct `wanted` columns of obs; missing ones raise an error, unless `may_lack` is True."""
    known = list(known)
    wanted = [name for name in dict.fromkeys(wanted) if name in known or not may_lack]
    return [require_key("obs", name, known, of=where) for name in wanted]
