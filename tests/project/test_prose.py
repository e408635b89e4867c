"""Prose linter: it finds bad sentences in examples of every kind of text, and the repository contains none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.core

proselint = pytest.importorskip("proselint")
ROOT = Path(__file__).parents[2]


def _linter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "docs" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = _linter()


@pytest.mark.parametrize(
    ("bad", "phrase", "good"),
    [
        ("Of each row, the first value is kept.", "Of", "The first value of each row is kept."),
        ("Rows are read. Of these, one is kept.", "Of", "Rows are read, and one of these is kept."),
        ("The run goes on with the next batch.", "goes on", "The run resumes with the next batch."),
        ("It went on.", "went on", "It goes on to the next rank."),
        ("The user is told about it.", "is told", "The two cannot be told apart."),
        ("The memory is let go.", "is let go", "The memory is released."),
        ("It lets go of the file.", "lets go", "It releases the file."),
        ("The reader let it go.", "let it go", "The reader released it."),
        ("The rows asked for are read.", "asked for", "The requested rows are read."),
        ("The loader asks for rows.", "asks for", "The loader requests rows."),
        ("It reads by asking for rows.", "asking for", "It reads by requesting rows."),
        ("The ranks stop as told.", "as told", "The ranks stop as requested."),
        ("Every thread that may collect does so.", "does so", "Every thread may collect."),
        ("Results arrive when the test says so.", "says so", "Results arrive as soon as they are sent."),
        ("Draw a line, and what they are below it.", "what they are", "Draw a line, and a label below it."),
        ("The share decreases if an atlas is very small.", "very", "It may very well decrease for a small atlas."),
        ("It returns what is left.", "what is left", "It returns the remaining rows, and says what is given."),
        ("A place that nobody knows.", "nobody knows", "The place is unknown."),
        ("The ranks wait for ever.", "for ever", "The ranks wait forever."),
        ("The epoch comes to its end.", "comes to its end", "The epoch comes to an end."),
        ("The margin is a hair.", "a hair", "The margin is one byte."),
        ("The store is written anew.", "anew", "The store is written again."),
        (
            "The path is no file.",
            "is no",
            "There is no file, this is no longer than that, and that is no larger than this.",
        ),
        ("Read the the rows.", "the the", "He had had that that day."),
    ],
)
def test_each_phrase_of_the_vocabulary_is_found_and_its_correction_passes(bad: str, phrase: str, good: str) -> None:
    found = prose.findings_of_page("page.md", f"# Title\n\n{bad}\n")
    assert any(one.startswith(f"page.md:3: {phrase!r}: ") for one in found), found
    assert prose.findings_of_page("page.md", good) == []


def test_every_phrase_of_the_vocabulary_is_tested() -> None:
    (marker,) = test_each_phrase_of_the_vocabulary_is_found_and_its_correction_passes.pytestmark
    assert len(marker.args[1]) >= len(prose.VOCABULARY)


def test_proselint_reads_prose_only() -> None:
    bad = "It is able to be seen in a very unique way."
    assert any("unique" in one for one in prose.findings_of_page("page.md", f"Good.\n\n{bad}\n"))
    assert prose.findings_of_page("page.md", "Training is resumed, epoch by epoch.\n") == []


def test_code_of_pages_is_no_prose() -> None:
    page = (
        "---\ntitle: goes on\n---\n\n```python\n# goes on\n```\n\n| goes on |\n|---|\n\n:::{note}\n:class: goes on\n"
        "It resumes with `goes on` and [a link](goes on).\n:::\n"
    )
    assert prose.findings_of_page("page.md", page) == []
    assert prose.findings_of_page("page.md", page.replace("It resumes", "It goes on")) == [
        "page.md:14: 'goes on': write 'resumes' or 'continues'"
    ]


def test_docstrings_are_read_and_code_is_not() -> None:
    source = (
        '"""A module.\n\n.. code-block:: python\n\n    goes on\n"""\n\nname = "goes on"\n\n\ndef f():\n'
        '    """What it does.\n\n    It uses ``goes on``, and goes on.\n    """\n    g("# goes on")\n'
    )
    assert prose.findings_of_source("m.py", source) == [
        "m.py:12: 'What': start with a verb phrase or a noun phrase",
        "m.py:14: 'goes on': write 'resumes' or 'continues'",
    ]


@pytest.mark.parametrize("word", ["What", "Which", "How", "Where", "Who", "Whether", "Why"])
def test_a_summary_line_is_not_a_question(word: str) -> None:
    (found,) = prose.findings_of_source("m.py", f'"""{word} the site is built."""\n')
    assert found == f"m.py:1: {word!r}: start with a verb phrase or a noun phrase"


def test_comments_are_read_without_their_code() -> None:
    source = (
        "#!/bin/goes on\n# It goes on.\nx = 1  # rows asked for\n# `goes on`, 'goes on', \"goes on\"\n"
        "y = 2  # type: goes on\n# The batch's\n# reader goes on.\n"
    )
    assert sorted(prose.findings_of_source("m.py", source)) == [
        "m.py:2: 'goes on': write 'resumes' or 'continues'",
        "m.py:3: 'asked for': write 'requested'",
        "m.py:7: 'goes on': write 'resumes' or 'continues'",
    ]


def test_messages_are_read_without_their_placeholders() -> None:
    recorded = "[dasksc/goes on.py]\nInputError: {goes_on(' goes on ')} is not a file; give 'goes on'\n"
    assert prose.findings_of_message("m.txt", recorded) == []
    assert prose.findings_of_message("m.txt", recorded.replace("not a", "no")) == [
        "m.txt:2: 'is no': write 'is not a ...'"
    ]


def test_the_program_reports_findings_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("The run goes on.\n")
    assert prose.main([str(tmp_path / "page.md")]) == 1
    output = capsys.readouterr()
    assert "page.md:1: 'goes on'" in output.out
    assert output.err == "1 finding in the prose of 1 file\n"
    (tmp_path / "page.md").write_text("The run resumes.\n")
    assert prose.main([str(tmp_path / "page.md")]) == 0
    assert capsys.readouterr().err == "0 findings in the prose of 1 file\n"


def test_the_repository_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out
