"""Data sets of a Lightning run without Lightning: arguments, and a batch size that changes."""

from __future__ import annotations

import pytest

from dasksc import WrongTypeError
from dasksc.integrations.data_module import DataModule
from tests.support.data import make_adata

pytestmark = pytest.mark.core

N_OBS = 30


@pytest.fixture(scope="module")
def adata():
    return make_adata(N_OBS)


@pytest.mark.parametrize("name", ["layuot", "rank", "world_size"])
def test_an_unknown_argument_is_refused_at_once(adata, name):
    with pytest.raises(WrongTypeError, match=f"{name}="):
        DataModule(adata, 8, train="shuffle", **{name: 1})
