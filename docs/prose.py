"""Linter of the prose in pages and docstrings: the vocabulary of this project, then proselint.

``python docs/prose.py`` prints each finding with its place, and exits with status 1 if there are any. Code, literals,
links and tables are replaced by blanks first, so that line numbers stay those of the source.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["findings_of", "prose_of_page", "prose_of_source", "texts"]

ROOT = Path(__file__).resolve().parents[1]

# Words and phrases of this project's earlier language, with those of the field.
VOCABULARY = {
    r"\bgo(?:es)? on with\b": "write 'resumes' or 'continues'",
    r"\b(?:is|are) told\b": "write 'is reported', 'is logged' or 'receives'",
    r"\b(?:is|are) let go\b": "write 'is released'",
    r"\b(?:is|are|was|were) asked for\b": "write 'is requested'",
    r"\bwhat is left\b": "write 'the remaining ...'",
    r"\bwhat was read\b": "write 'the data read so far' or name the object",
    r"\bnobody knows\b": "write 'unknown'",
    r"\bgone on\b": "write 'resumed'",
    r"\bfor ever\b": "write 'forever'",
    r"\bcomes? to its end\b": "write 'ends'",
    r"\ba hair\b": "give the amount",
    r"\bOf (?:everything|what|all that)\b": "start with the subject of the sentence",
}
# A summary line is a verb phrase or a noun phrase, not a question.
QUESTION = re.compile(r"(?:What|Which|How|Where|Who|Whether|Why)\b")

# Checks of proselint that contradict code in prose, or the terms of the field.
PROSELINT_OFF = ["typography", "weasel_words", "hedging", "lexical_illusions", "redundancy", "spelling.able_atable"]
_FENCE = re.compile(r"^(`{3,}|:{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_PAGE_CODE = (
    _FENCE,
    re.compile(r"<!--.*?-->|<[^>\n]+>", re.DOTALL),
    re.compile(r"^\|.*$", re.MULTILINE),
    re.compile(r"(`+)(?!`).+?\1", re.DOTALL),
    re.compile(r"\]\([^)]*\)|https?://\S+"),
    re.compile(r"\$[^$]+\$"),
)
_DOCSTRING_CODE = (
    re.compile(r"^\s*>>>.*(?:\n(?!\s*\n).*)*", re.MULTILINE),
    re.compile(r"^\.\. code-block::.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL),
    re.compile(r"``.+?``|`[^`]+`", re.DOTALL),
    re.compile(r"https?://\S+|doi:\S+"),
    re.compile(r'"[^"\n]*"'),
)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose_of_page(text: str) -> str:
    """Return a Markdown page with code, links and tables replaced by blanks."""
    for pattern in _PAGE_CODE:
        text = pattern.sub(_blank, text)
    return text


def prose_of_source(text: str) -> str:
    """Return the docstrings of a module on their lines, with code replaced by blanks and all else left empty."""
    lines = [""] * (text.count("\n") + 2)
    for _, start, docstring in _docstrings(text):
        for pattern in _DOCSTRING_CODE:
            docstring = pattern.sub(_blank, docstring)
        for number, line in enumerate(docstring.splitlines()):
            lines[start - 1 + number] = line.strip()
    return "\n".join(lines)


def _docstrings(text: str) -> Iterator[tuple[ast.AST, int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node, first.lineno, value.value


def findings_of(name: str, prose: str) -> list[str]:
    """Return the findings of the vocabulary in the prose of one file, each with its line."""
    found = []
    for pattern, advice in VOCABULARY.items():
        for match in re.finditer(pattern, prose):
            line = prose.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match[0]!r}: {advice}")
    return found


def _questions(name: str, text: str) -> list[str]:
    return [
        f"{name}:{line}: docstring starts with {match[0]!r}: write a verb phrase or a noun phrase"
        for _, line, docstring in _docstrings(text)
        if (match := QUESTION.match(docstring))
    ]


def texts() -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, prose and findings of each page and each module of the package."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        name, prose = page.relative_to(ROOT).as_posix(), prose_of_page(page.read_text())
        yield name, prose, findings_of(name, prose)
    for module in sorted((ROOT / "dasksc").rglob("*.py")):
        name, text = module.relative_to(ROOT).as_posix(), module.read_text()
        prose = prose_of_source(text)
        yield name, prose, findings_of(name, prose) + _questions(name, text)


def _proselint(prose: dict[str, str]) -> list[str]:
    """Return the findings of proselint, which reads files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in prose.items():
            path = Path(folder, name + ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        config = Path(folder, "config.json")
        config.write_text(json.dumps({"checks": dict.fromkeys(PROSELINT_OFF, False)}))
        command = [sys.executable, "-m", "proselint", "--config", str(config), "check"]
        files = [str(Path(folder, name + ".txt")) for name in prose]
        done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        if done.returncode > 1 or "Traceback" in done.stderr:
            raise SystemExit(f"proselint failed: {done.stderr}")
        return [line.replace(f"{folder}/", "").replace(".txt:", ":") for line in done.stdout.splitlines() if line]


def main() -> int:
    """Print the findings; return 1 if there are any."""
    prose, found = {}, []
    for name, text, own in texts():
        prose[name] = text
        found += own
    found += _proselint(prose)
    print("\n".join(found))
    print(f"{len(found)} findings in the prose of {len(prose)} files", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
