"""Reports as text and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dasksc.inspection.report import Report

pytestmark = pytest.mark.core


def report(n_ranks: int = 2) -> Report:
    return Report(
        name="<atlas>",
        n_rows=12_345,
        limit_bytes=None,
        chunks=(1_000, 20),
        nbytes=2_048,
        system=Report(cpu_count=2),
        ranks=[Report(rank=rank, n_rows=np.int64(7), codec=None) for rank in range(n_ranks)],
        warnings=["Lower " + "batch_size " * 20],
        genes=[],
    )


def test_json_has_all_facts_which_are_attributes_too() -> None:
    made = report()
    facts = json.loads(made.to_json())
    assert list(facts) == list(made)
    assert facts["ranks"] == [{"rank": 0, "n_rows": 7, "codec": None}, {"rank": 1, "n_rows": 7, "codec": None}]
    assert (made.ranks[1].rank, made.limit_bytes) == (1, None)
    with pytest.raises(AttributeError, match="n_row'"):
        made.n_row  # noqa: B018
