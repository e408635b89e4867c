"""Values of options, from command lines and YAML files."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from dasksc.options import InvalidValue, Parser, arguments_of, parse
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
