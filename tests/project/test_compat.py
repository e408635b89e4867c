"""Versions of other libraries with which dasksc would compute wrong results are refused."""

from __future__ import annotations

import pytest

from dasksc._compat.torch import UnsupportedVersionError, check_training

pytestmark = pytest.mark.core


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git", "2.13.0+cpu", "3.0.0"])
def test_training_is_refused_with_a_torch_in_which_it_is_wrong(version: str) -> None:
    check_training(version)
    for old in ("2.8.0", "2.6.0+cu124", "1.13.1"):
        with pytest.raises(UnsupportedVersionError, match="FSDP.*2.9"):
            check_training(old)
