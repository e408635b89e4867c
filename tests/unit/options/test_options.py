"""Options of the command line and of YAML files: their values, and signatures read from source files."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest

import dasksc
from dasksc.options import REQUIRED, InvalidValue, parameters_of, parse

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("type_", "given", "value"),
    [
        (float, "1e-4", 1e-4),
        (float, 2, 2.0),
        (int | str | None, "8", 8),
        (int | str | None, "8GiB", "8GiB"),
        (bool, "false", False),
        (bool | Literal["auto"], "auto", "auto"),
        (list[str] | None, "a,b", ["a", "b"]),
        (list[str], "['a,b', c]", ["a,b", "c"]),
        (str | list[str], "mm10,hg19", ["mm10", "hg19"]),
        (dict[str, Any], "skip_signature=true", {"skip_signature": True}),
        (dict[str, float], "{T cell: 2, B cell: 0.5}", {"T cell": 2.0, "B cell": 0.5}),
        (str | dict[str, Any], "/scratch/a=b", "/scratch/a=b"),
        (Any, [1, 2], [1, 2]),
    ],
)
def test_text_and_yaml_become_values(type_, given, value):
    parsed = parse(type_, given)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("type_", "given"),
    [
        *((int, "1.5"), (int, 1.5), (int, True), (int, None), (float, "much"), (bool, 1), (str, ["a"])),
        *((Literal["inner", "outer"], "left"), (list[int], "1,b"), (dict[str, Any], "name"), (list[str], "[a")),
    ],
)
def test_other_values_are_refused(type_, given):
    with pytest.raises(InvalidValue):
        parse(type_, given)


NAMES = (
    *("open", "scDataset", "convert", "predict", "statistics", "split", "check", "describe", "suggest_parameters"),
    *("Streaming", "BlockShuffling", "BlockWeightedSampling", "ClassBalancedSampling", "CellSets"),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_order_and_defaults_are_those_of_the_object_and_every_parameter_is_described(name):
    static = {one.name: one.default for one in parameters_of(name)}
    real = {one.name: one.default for one in inspect.signature(getattr(dasksc, name)).parameters.values()}
    declared = [one for one in real if one in static]
    assert list(static) == declared
    assert static == {one: real[one] for one in declared}
    assert all(one.help for one in parameters_of(name))
    hooks = {"fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "transform", "group"}
    left_out = {"open": set(), "convert": set(), "check": {"data"}, "scDataset": hooks}
    assert set(real) - set(static) == left_out.get(name, set(real) - set(static))


def test_types_are_those_that_can_be_written():
    of_open, of_dataset = ({one.name: one.type for one in parameters_of(name)} for name in ("open", "scDataset"))
    assert of_open["join"] == Literal["inner", "outer"]
    assert of_open["data"] == str | list[str] | dict[str, str]
    assert of_open["cache"] == str | dict[str, Any] | None
    assert of_dataset["batch_size"] is int
    assert of_dataset["scheduler"] == str | None


def test_definitions_of_other_modules_are_read_too():
    (folder, overwrite) = parameters_of("dasksc.datasets:demo_data")
    assert (folder.name, folder.type, folder.default) == ("folder", str, REQUIRED)
    assert (overwrite.name, overwrite.type, overwrite.default) == ("overwrite", bool, False)
