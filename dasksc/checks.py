"""Checks of arguments where the user gives them; each error names the argument."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

from dasksc.errors import InputError, MissingKeyError, WrongTypeError

# Number of names that an error lists, and number of examples.
N_KNOWN = 20
_N_EXAMPLES = 3


def is_whole(value: object) -> TypeGuard[int]:
    """Return True for Python and NumPy integers, and False for anything else, including bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole_number(name: str, value: Any, low: int = 1, end: int = 2**63) -> int:
    """Return `value` as an int if it is an integer in [low, end)."""
    if not is_whole(value) or not low <= value < end:
        above = f"2**{end.bit_length() - 1}" if end >= 2**32 else end
        span = f"of at least {low}" if end == 2**63 else f"in [{low}, {above})"
        raise InputError(f"{name} must be a whole number {span}; got {value!r}")
    return int(value)


def true_or_false(name: str, value: Any) -> bool:
    """Return `value` as a bool if it is True, False, 1 or 0."""
    if isinstance(value, bool | np.bool_) or (is_whole(value) and value in (0, 1)):
        return bool(value)
    raise WrongTypeError(f"{name} must be True or False; got {value!r}")


def check_flags(**flags: Any) -> None:
    """Raise an error unless all values are True or False, so that text such as ``"no"`` does not count as True."""
    for name, value in flags.items():
        true_or_false(name, value)


def check_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise an error unless `value` is one of the `allowed` names."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name} must be {' or '.join(map(repr, allowed))}; got {value!r}")


def name_or_none(name: str, value: Any) -> str | None:
    """Return `value` if it is a string or None."""
    if value is None or isinstance(value, str):
        return value
    raise WrongTypeError(f"{name} must be a single name, or None; got {value!r}")


def names_or_none(name: str, value: Any) -> list[str]:
    """Return one name or several as a list, which is empty for None."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    # Sets are refused, since their order differs between processes.
    names: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, Mapping | Set) else [None]
    if not all(isinstance(one, str) for one in names):
        raise WrongTypeError(f"{name}={value!r} must be a name or a list of names")
    return names


def list_of_names(name: str, value: Any) -> list[str]:
    """Return several names as a list, which is empty for None; a single name is refused."""
    if isinstance(value, str):
        raise WrongTypeError(f"{name}={value!r} is a string; give a list of names: {name}=[{value!r}]")
    return names_or_none(name, value)


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
    more = f" and {len(names) - N_KNOWN:,} more" if len(names) > N_KNOWN else ""
    return f"expected one of {', '.join(map(repr, sorted(names)[:N_KNOWN]))}{more}"


def known(kind: str, name: Any, names: Collection[Any]) -> str:
    """Return `name` if it is among `names`; otherwise raise an error with similar names."""
    if name not in names:
        raise MissingKeyError(f"{kind} has no {name!r}; {nearest(name, names, n=3)}")
    return str(name)


def some(names: Iterable[Any]) -> str:
    """Return the first few of several names, quoted."""
    first = list(islice(names, _N_EXAMPLES + 1))
    return ", ".join(map(repr, first[:_N_EXAMPLES])) + (", ..." if len(first) > _N_EXAMPLES else "")
