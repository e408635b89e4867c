"""Adapters to private names of other libraries: a missing name causes an error or a warning."""

from __future__ import annotations

import logging

import pytest

from dasksc._compat import unsupported
from dasksc._compat.torch import check_training
from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, optional

pytestmark = pytest.mark.core


def test_a_missing_attribute_names_the_version():
    with pytest.raises(UnsupportedVersionError, match="unsupported.gone"):
        attribute(unsupported, "gone", library="dask")
    assert attribute(unsupported, "logger", library="dask") is unsupported.logger


def test_an_error_inside_a_property_is_not_a_missing_attribute():
    class Mistaken:
        @property
        def value(self) -> object:
            return None.nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="nothing"):
        attribute(Mistaken(), "value", library="dask")


def test_a_missing_name_names_the_version():
    with pytest.raises(UnsupportedVersionError, match="no_such_module"), needed("dask"):
        import dask.no_such_module  # noqa: F401
    with pytest.raises(UnsupportedVersionError, match="no_such_name"), needed("dask"):
        from dask.base import no_such_name  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needed("dask"):
        import no_such_library
    with pytest.raises(ModuleNotFoundError), needed("no_such_library"):
        import no_such_library  # noqa: F401


def test_names_that_are_imported_late():
    get = late_names("dask", "here", {"tokenize": ("dask.base", "tokenize"), "gone": ("dask.base", "gone")})
    assert get("tokenize").__name__ == "tokenize"
    with pytest.raises(UnsupportedVersionError, match="gone"):
        get("gone")
    with pytest.raises(AttributeError, match="'here'.*'other'"):
        get("other")


def test_what_is_optional_is_missed_once(caplog, monkeypatch):
    monkeypatch.setattr(unsupported, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="dasksc.compat"):
        for _ in range(2):
            assert optional("dask", "dask.array.core", "gone", without="it is slow") is None
        assert optional("dask", "dask.array.gone", "gone", without="it is slow") is None
    assert [record.getMessage().endswith("it is slow.") for record in caplog.records] == [True, True]
    assert "dask.array.core.gone" in caplog.text


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+git", "2.13.0+cpu", "3.0.0"])
def test_training_is_refused_with_a_torch_in_which_it_is_wrong(version: str) -> None:
    check_training(version)
    for old in ("2.8.0", "2.6.0+cu124", "1.13.1"):
        with pytest.raises(UnsupportedVersionError, match="FSDP.*2.9"):
            check_training(old)
