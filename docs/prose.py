"""Linter of the prose in pages, docstrings, comments and messages: the vocabulary of this project, then proselint.

``python docs/prose.py`` prints each finding with its place, and exits with status 1 if there are any. Paths as
arguments limit it to these files. Code, literals, links and tables are replaced by blanks first, so that line numbers
stay those of the source.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["findings_of_message", "findings_of_page", "findings_of_source", "main"]

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = ROOT / "tests" / "recorded" / "messages.txt"

# Phrases that readers stumble over, with those of the field.
VOCABULARY = {
    r"(?:^|[.:;] )Of(?= )": "start with the subject of the sentence",
    r"\b(?:go(?:es)?|going|went|gone) on\b(?! to )": "write 'resumes' or 'continues'",
    r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)": "write 'reported', 'logged' or 'receives'",
    r"\b(?:is |are |was |were |be |been )?(?:let|lets|letting) (?:\w+ )?go\b": "write 'released'",
    r"\bask(?:s|ed|ing)? for\b": "write 'requested'",
    r"\bas told\b": "write 'as requested'",
    r"\b(?:does|did) so\b|\bsays? so\b": "name the action or the condition",
    r"\bwhat (?:(?:is|was|are|were) left|was read|they are)\b": "name the object: 'the remaining rows'",
    r"\bvery (?!well\b)": "leave it out, or give the amount",
    r"\b(?:nobody|no one) knows\b": "write 'unknown'",
    r"\bfor ever\b": "write 'forever'",
    r"\bcomes? to its end\b": "write 'ends'",
    r"\ba hair\b": "give the amount",
    r"\banew\b": "write 'again'",
    r"(?<!\b[Tt]here )\b(?:is|are|was|were) no (?!(?:longer|more|less|fewer|different|\w+er than)\b)(?=\w)": (
        "write 'is not a ...'"
    ),
    r"\b([A-Za-z]+) \1\b(?<!had had)(?<!that that)": "a word is repeated",
}
# A summary line is a verb phrase or a noun phrase, not a question.
QUESTION = re.compile(r"(?:What|Which|How|Where|Who|Whether|Why)\b")

# Checks of proselint that are off: typography reads "to resume" as a missing accent and wants curly quotes;
# lexical_illusions takes a parameter's name and the first word of its description for a repetition (VOCABULARY has
# that of a line); dates_times takes "from 1,000" for a range of years; weasel_words has only "very", with a joke for
# advice (VOCABULARY has it, too).
PROSELINT_OFF = ("typography", "lexical_illusions", "dates_times", "weasel_words")
_MAX_FINDINGS = 1000

_SOURCES = ("dasksc", "benchmarks", "docs", "examples", "tests")

_PAGE_CODE = (
    re.compile(r"\A---\n.*?\n---$", re.MULTILINE | re.DOTALL),
    re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL),
    re.compile(r"^ *:{3,}.*$|^ *:[\w-]+:.*$|^\|.*$", re.MULTILINE),
    re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL),
    re.compile(r"\{[\w:-]+\}(?=`)"),
    re.compile(r"(`+)(?!`).+?\1", re.DOTALL),
    re.compile(r"\]\([^)]*\)|https?://\S+"),
    re.compile(r"\$[^$]+\$"),
)
_DOCSTRING_CODE = (
    re.compile(r"^\s*>>>.*(?:\n(?!\s*\n).*)*", re.MULTILINE),
    re.compile(r"^( *)\.\. code-block::.*(?:\n(?:\1 +.*| *$))*", re.MULTILINE),
    re.compile(r"(?<=::\n)(?: *\n)+( +).*(?:\n(?:\1.*| *$))*", re.MULTILINE),
    re.compile(r"(?::[\w:]+:)?(?:``.+?``|`[^`]+`)", re.DOTALL),
    re.compile(r"https?://\S+|doi:\S+"),
    re.compile(r'"[^"\n]*"'),
)
_COMMENT_CODE = (
    # Addressed to programs: a shebang, a directive, and the header of a notebook's cell.
    re.compile(r"\A(?:!|noqa|type:|fmt:|mypy:|ruff:|pragma:|%%|---|timeout\b).*"),
    re.compile(r"(`+)(?!`).+?\1"),
    re.compile(r"https?://\S+|doi:\S+"),
    re.compile(r"'[^'\n]*'(?!\w)|\"[^\"\n]*\""),
)
_MESSAGE_CODE = (
    re.compile(r"^\[.*\]$|^[\w. ]+?: ", re.MULTILINE),
    re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}"),
    re.compile(r"%[-+.,0-9]*\w|\\n"),
    re.compile(r"'[^'\n]*'|\"[^\"\n]*\""),
)


def findings_of_page(name: str, text: str) -> list[str]:
    """Return the findings in a Markdown page."""
    return _findings(name, _without(text, _PAGE_CODE))


def findings_of_source(name: str, text: str) -> list[str]:
    """Return the findings in the docstrings and comments of a module, and each summary line that is a question."""
    lines = [""] * (text.count("\n") + 2)
    found = []
    for start, docstring in _docstrings(text):
        for number, line in enumerate(_without(docstring, _DOCSTRING_CODE).splitlines()):
            lines[start - 1 + number] = line.strip()
        if match := QUESTION.match(docstring):
            found.append(f"{name}:{start}: {match[0]!r}: start with a verb phrase or a noun phrase")
    for number, comment in _comments(text):
        lines[number - 1] = _without(comment, _COMMENT_CODE).strip()
    return found + _findings(name, "\n".join(lines))


def findings_of_message(name: str, text: str) -> list[str]:
    """Return the findings in recorded messages, one on each line."""
    return _findings(name, _without(text, _MESSAGE_CODE))


def _without(text: str, patterns: Iterable[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield first.lineno, value.value


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _findings(name: str, prose: str) -> list[str]:
    found = []
    for pattern, advice in VOCABULARY.items():
        for match in re.finditer(pattern, prose, re.MULTILINE):
            line = prose.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match[0].strip('.:; ')!r}: {advice}")
    return found + _proselint(name, prose)


def _proselint(name: str, prose: str) -> list[str]:
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    if not prose.strip():
        return []
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    checks = {check: is_on and check not in PROSELINT_OFF for check, is_on in DEFAULT["checks"].items()}
    results = LintFile(name, prose).lint({"max_errors": _MAX_FINDINGS, "checks": checks})
    return [
        f"{name}:{result.pos[0]}: {prose[start - 1 : stop - 1].strip()!r}: {result.check_result.message}"
        for result in results
        for start, stop in [result.check_result.span]
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def main(paths: Iterable[str] = ()) -> int:
    """Print the findings in the files given, by default all; return 1 if there are any."""
    files = [Path(path).resolve() for path in paths] or [
        *sorted(ROOT.glob("*.md")),
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(path for name in _SOURCES for path in (ROOT / name).rglob("*.py")),
        MESSAGES,
    ]
    found = []
    for path in files:
        findings_of = {".md": findings_of_page, ".py": findings_of_source}.get(path.suffix, findings_of_message)
        found += findings_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for finding in found:
        print(finding)
    print(f"{_count(len(found), 'finding')} in the prose of {_count(len(files), 'file')}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
