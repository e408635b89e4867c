"""Lookup of names, with suggestions for unknown ones."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import dask.array as da
from anndata import AnnData

from dasksc.errors import MissingKeyError
from dasksc.pushdown import leaves_of
from dasksc.storage import SCHEMES, RemoteLocation, redact_url

__all__ = ["known_columns", "nearest", "nothing_at", "path_of", "require_key", "similar", "some", "with_advice"]

# Number of names that an error lists, and number of examples.
_N_KNOWN = 20
_N_EXAMPLES = 3
# Scheme and remainder of a URL that lost a slash: "s3:/bucket/atlas.zarr".
_URL_WITH_ONE_SLASH = re.compile(rf"(?:^|/)((?:{'|'.join(SCHEMES)}):)/(.+)")


def similar(name: object, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Return up to `n` names similar to `name`; names that differ only in case precede all others."""
    by_folded: dict[str, list[str]] = {}
    for one in map(str, known):
        by_folded.setdefault(one.casefold(), []).append(one)
    folded = str(name).casefold()
    near = [folded] if folded in by_folded else difflib.get_close_matches(folded, by_folded, n=n, cutoff=0.57)
    return [one for match in near for one in by_folded[match]][:n]


def nearest(name: object, known: Iterable[object], *, n: int = 1) -> str:
    """Return a hint for an error message about an unknown name: up to `n` similar names, or the `known` ones."""
    names = [str(one) for one in known if one is not None]  # from AnnData 0.13 on, layers[None] is X
    near = similar(name, names, n=n)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if not names:
        return "none are available"
    more = f" and {len(names) - _N_KNOWN:,} more" if len(names) > _N_KNOWN else ""
    return f"expected one of {', '.join(sorted(names)[:_N_KNOWN])}{more}"


def with_advice(error: str, advice: str) -> str:
    """Return an error message with advice appended as a separate sentence."""
    return f"{error}{'' if error.endswith('?') else '.'} {advice}"


def some(names: Iterable[Any]) -> str:
    """Return the first few of several names, quoted."""
    first = list(islice(names, _N_EXAMPLES + 1))
    return ", ".join(map(repr, first[:_N_EXAMPLES])) + (", ..." if len(first) > _N_EXAMPLES else "")


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


def nothing_at(path: str) -> str:
    """Return the message for a path that does not exist, with similar names."""
    if url := _URL_WITH_ONE_SLASH.search(path):
        suggested_url = redact_url(f"{url[1]}//{url[2]}")
        return f"there is nothing at {suggested_url.replace('//', '/', 1)}; did you mean {suggested_url}?"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"there is nothing at {path}: {folder} is not a directory"
    near = difflib.get_close_matches(name, os.listdir(folder or "."), n=3)
    return f"there is nothing at {path}" + (f"; similar names: {', '.join(near)}" if near else "")
