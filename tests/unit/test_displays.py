"""Displays: abbreviated values that differ from defaults, without computing, reading or calling user code."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import dasksc
from dasksc.displays import brief

pytestmark = pytest.mark.core


class Hostile:
    """Object of the user whose code must not run in a display."""

    def __repr__(self) -> str:
        raise AssertionError("the repr of the user was called")

    @property
    def shape(self) -> Any:
        raise AssertionError("the shape of the user was read")


class ManualStrategy(dasksc.SamplingStrategy):
    pass


@dataclass
class Request:
    name: str
    size: int = 8
    tags: list[str] = field(default_factory=list)
    rows: Any = None
    secret: str = field(default="", repr=False)


def a_function(first: int, second: Any = None, *, names: Any = (), third: float = 0.0) -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x" * 80, repr("x" * 57 + "...")),
        (list(range(2000)), "[0, 1, 2, ... 2,000 in all]"),
        (np.arange(5), "ndarray(shape=(5,), dtype=int64)"),
        (a_function, "a_function"),
        (functools.partial(a_function, 1), "partial(a_function)"),
        (Hostile(), "Hostile(...)"),
        (ManualStrategy([3, 1]), "ManualStrategy(indices=ndarray(shape=(2,), dtype=int64))"),
        (dasksc.transforms.MaskGenes(0.1), "MaskGenes(0.1, layer=None, seed=0)"),
        (Request("x", rows=Hostile()), "Request(name='x', rows=Hostile(...))"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_value_is_one_short_line(value: Any, expected: str) -> None:
    assert brief(value) == expected
