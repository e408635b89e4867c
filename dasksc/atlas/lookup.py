"""Lookup of names, with suggestions for unknown ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from dasksc.errors import MissingKeyError
from dasksc.storage import RemoteLocation

__all__ = ["known_columns", "nearest", "nothing_at", "require_key", "with_advice"]

# Number of names that an error lists.
_N_KNOWN = 20


def nearest(name: str, known: Iterable[object], *, n: int = 1) -> str:
    """Return a hint for an error message about an unknown name: up to `n` similar names, or the `known` ones."""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(str(name), names, n=n, cutoff=0.57)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if not names:
        return "none are available"
    more = f" and {len(names) - _N_KNOWN:,} more" if len(names) > _N_KNOWN else ""
    return f"expected one of {', '.join(sorted(names)[:_N_KNOWN])}{more}"


def with_advice(error: str, advice: str) -> str:
    """Return an error message with advice appended as a separate sentence."""
    return f"{error}{'' if error.endswith('?') else '.'} {advice}"


def require_key(kind: str, name: str, held: Any) -> str:
    """Return `name` if `held` has it; otherwise raise an error with similar names."""
    if name in held:
        return name
    raise MissingKeyError(f"{kind} has no {name!r}; {nearest(name, held, n=3)}")


def known_columns(
    wanted: Sequence[str], known: Iterable[str], where: str | RemoteLocation, *, may_lack: bool
) -> list[str]:
    """Return the distinct `wanted` columns of obs; missing ones raise an error, unless `may_lack` is True."""
    known = list(known)
    missing = [name for name in wanted if name not in known]
    if may_lack:
        wanted = [name for name in wanted if name in known]
    elif missing:
        near = [match for name in missing for match in difflib.get_close_matches(str(name), known, n=3)]
        columns = f"Its columns: {', '.join(map(repr, known[:_N_KNOWN]))}{', ...' if len(known) > _N_KNOWN else ''}"
        raise MissingKeyError(
            with_advice(
                f"obs of {where} has no column {', '.join(map(repr, missing))}"
                + (f"; did you mean {' or '.join(map(repr, near))}?" if near else ""),
                columns,
            )
        )
    return list(dict.fromkeys(wanted))


def nothing_at(path: str) -> str:
    """Return the message for a path that does not exist, with similar names."""
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"there is nothing at {path}: {folder} is not a directory"
    near = difflib.get_close_matches(name, os.listdir(folder or "."), n=3)
    return f"there is nothing at {path}" + (f"; similar names: {', '.join(near)}" if near else "")
