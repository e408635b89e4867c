"""Options of the command line and of YAML files: their values, and signatures read from source files."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest

import dasksc
from dasksc.options import REQUIRED, InvalidValue, Parser, arguments_of, parameters_of, parse
from tests.support.commands import ended

pytestmark = pytest.mark.core


def parser() -> Parser:
    made = Parser("dasksc try", "Try options.")
    made.add_argument("--config", action="config", metavar="FILE", help="YAML file")
    made.add_options("open", skip=("data",))
    made.add_options("scDataset", prefix="data.", skip=("data_collection",), seed=7)
    return made


@pytest.mark.parametrize(
    ("type_", "given", "value"),
    [
        (int, "128", 128),
        (float, "1e-4", 1e-4),
        (float, 2, 2.0),
        (int | str | None, "8", 8),
        (int | str | None, "8GiB", "8GiB"),
        (int | str | None, "null", None),
        (bool, "false", False),
        (bool | Literal["auto"], "auto", "auto"),
        (list[str] | None, "a,b", ["a", "b"]),
        (list[str], "['a,b', c]", ["a,b", "c"]),
        (list[int], "3,4", [3, 4]),
        (str | list[str], "Gene Expression", "Gene Expression"),
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


def test_underscores_and_hyphens_are_the_same():
    options = parser().parse_args(
        ["--fill_value", "1e-4", "--index-unique=-", "--data.batch-size", "128", "--no_names"]
    )
    assert (options.fill_value, options.index_unique, options.names) == (1e-4, "-", False)
    assert (options.data.batch_size, options.data.seed) == (128, 7)


def test_pairs_are_collected_and_go_to_the_function():
    line = ["--storage-option", "region=eu", "--storage_option", "skip_signature=true", "--keys", "a,b", "--raw"]
    named = arguments_of("open", parser().parse_args(line))
    assert named["storage_options"] == {"region": "eu", "skip_signature": True}
    assert (named["keys"], named["raw"], named["join"]) == (["a", "b"], True, "inner")


def test_a_file_is_read_and_printed_with_all_defaults(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("fill_value: 1e-4\nkeys: [a, b]\ndata: {batch_size: 32, obs: [cell_type], drop_last: true}\n")
    line = ["--config", str(path), "--data.fetch_factor", "null"]
    options = parser().parse_args(line)
    assert (options.fill_value, arguments_of("open", options)["keys"]) == (1e-4, ["a", "b"])
    assert (options.data.batch_size, options.data.obs, options.data.drop_last) == (32, ["cell_type"], True)
    assert options.data.fetch_factor is None
    assert ended(parser().parse_args, [*line, "--print_config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parser().parse_args(["--config", str(printed)]).data == options.data


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data: {batchsize: 3}", "data.batch_size"),
        ("data: {batch_size: few}", "data.batch_size: expected INTEGER; got 'few'"),
        ("join: outr", "join: expected inner|outer; got 'outr'; did you mean outer?"),
        ("data: {", "c.yaml"),
    ],
)
def test_an_error_names_the_key_and_the_file(tmp_path, capsys, text, told):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert ended(parser().parse_args, ["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(path) in error


NAMES = (
    *("open", "scDataset", "convert", "predict", "statistics", "split", "check", "describe", "suggest_parameters"),
    *("Streaming", "BlockShuffling", "BlockWeightedSampling", "ClassBalancedSampling", "CellSets"),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_order_and_defaults_are_those_of_the_object(name):
    static = {one.name: one.default for one in parameters_of(name)}
    real = {one.name: one.default for one in inspect.signature(getattr(dasksc, name)).parameters.values()}
    declared = [one for one in real if one in static]
    assert list(static) == declared
    assert static == {one: real[one] for one in declared}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("open", set()),
        ("convert", set()),
        ("check", {"data"}),
        ("scDataset", {"fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "transform", "group"}),
    ],
)
def test_only_parameters_that_cannot_be_written_are_left_out(name, left_out):
    real = set(inspect.signature(getattr(dasksc, name)).parameters)
    assert real - {one.name for one in parameters_of(name)} == left_out


def test_types_are_those_that_can_be_written():
    of_open = {one.name: one.type for one in parameters_of("open")}
    assert of_open["join"] == Literal["inner", "outer"]
    assert of_open["data"] == str | list[str] | dict[str, str]
    assert of_open["cache"] == str | dict[str, Any] | None
    assert of_open["mmap"] == bool | Literal["auto"]
    of_dataset = {one.name: one.type for one in parameters_of("scDataset")}
    assert of_dataset["batch_size"] is int
    assert of_dataset["device"] == str | int | None
    assert of_dataset["scheduler"] == str | None
    assert of_dataset["genes_missing"] == Literal["error", "zero", "drop"]


def test_every_parameter_is_described():
    for name in NAMES:
        assert [one.name for one in parameters_of(name) if not one.help] == [], name
    join = {one.name: one.help for one in parameters_of("open")}["join"]
    assert {one.name: one.help for one in parameters_of("convert")}["join"] == join


def test_definitions_of_other_modules_are_read_too():
    (folder, overwrite) = parameters_of("dasksc.datasets:demo_data")
    assert (folder.name, folder.type, folder.default) == ("folder", str, REQUIRED)
    assert (overwrite.name, overwrite.type, overwrite.default) == ("overwrite", bool, False)
