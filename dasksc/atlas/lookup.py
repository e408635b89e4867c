"""Names looked up where they should be: what is not there is refused, with what is near it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from dasksc.errors import MissingKeyError
from dasksc.storage import Place

__all__ = ["known", "known_columns", "nearest", "nothing_at"]


def nearest(name: str, known: Iterable[object], *, n: int = 1) -> str:
    """Return the end of a sentence that says which of the `known` names was meant: up to `n` that are near it."""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(str(name), names, n=n, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(sorted(names)[:20])}"


def known(kind: str, name: str, held: Any) -> str:
    """Return `name` if `held` has it; else raise an error that says which of `held` are near it."""
    if name in held:
        return name
    raise MissingKeyError(f"{kind} has no {name!r}; {nearest(name, held, n=3)}")


def known_columns(wanted: Sequence[str], known: Iterable[str], where: str | Place, *, may_lack: bool) -> list[str]:
    """Return the `wanted` columns of an obs, each once; of those that it lacks, none, if it `may_lack` them."""
    known = list(known)
    missing = [name for name in wanted if name not in known]
    if may_lack:
        wanted = [name for name in wanted if name in known]
    elif missing:
        near = {name: difflib.get_close_matches(str(name), known, n=3) for name in missing}
        hints = "; ".join(f"{name!r}, near {', '.join(map(repr, found))}" for name, found in near.items() if found)
        raise MissingKeyError(
            f"obs of {where} has no column {', '.join(map(repr, missing))}"
            + (f" ({hints})" if hints else "")
            + f". Its columns: {', '.join(map(repr, known[:20]))}{', ...' if len(known) > 20 else ''}"
        )
    return list(dict.fromkeys(wanted))


def nothing_at(path: str) -> str:
    """Return what to say of a path where there is nothing."""
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        return f"there is nothing at {path}, nor is {folder} a directory"
    near = difflib.get_close_matches(name, os.listdir(folder), n=3)
    return f"there is nothing at {path}" + (f"; near it: {', '.join(near)}" if near else "")
