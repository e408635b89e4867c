"""Every error, warning and log message of the package as text, so that a review shows how a message changes.

Messages are collected from the source: the strings of ``raise X(...)``, of calls that create an exception, of
``warnings.warn(...)``, ``error.add_note(...)`` and ``logger.warning(...)``. Placeholders appear as in the source. For
a message that a function assembles from variables, only the name of the variable appears. All other strings of three or
more words, except docstrings, are listed as ``text``: parts of such messages, lines of reports, and help texts.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import dasksc
from dasksc import errors

__all__ = ["messages"]

_PACKAGE = Path(dasksc.__file__).parent
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_BUILT_IN = {
    name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)
}
_ERRORS = {*errors.__all__, *_BUILT_IN, "UsageError", "BadParameter", "ClickException"}
_WORDS = re.compile(r"[a-z]+[,;:]? [a-z]+[,;:]? [a-z]+")


def messages(package: Path = _PACKAGE) -> str:
    """Return the messages of all modules in source order, one section per module."""
    sections = []
    for path in sorted(package.rglob("*.py")):
        lines = [f"{kind}: {text}" for _, kind, text in sorted(_of_module(ast.parse(path.read_text())))]
        if lines:
            sections.append(
                f"[{path.relative_to(package.parent).as_posix()}]\n" + "".join(f"{line}\n" for line in lines)
            )
    return "\n".join(sections)


def _of_module(tree: ast.Module) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Yield position, kind and text of each message of a module."""
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    # Docstrings, and nodes within a string or message that is listed as a whole.
    listed = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):  # breadth first, so the whole comes before its parts
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in listed:
            text = _text_of(node)
            if _WORDS.search(text):
                listed.update(ast.walk(node))
                yield (node.lineno, node.col_offset), "text", text
        if not isinstance(node, ast.Call):
            continue
        kind = _kind_of(node.func) or ("raise " + ast.unparse(node.func) if node in raised else None)
        if kind is None:
            continue
        # The first argument of logger.log is the level.
        texts = [text for argument in node.args if (text := _text_of(argument, outermost=True))]
        if texts:
            listed.update(one for argument in node.args for one in ast.walk(argument))
            yield (node.lineno, node.col_offset), kind, " | ".join(texts)


def _kind_of(function: ast.expr) -> str | None:
    """Return the class of an error, ``warnings.warn``, ``add_note``, or ``logger`` with its level; else None."""
    if isinstance(function, ast.Name):
        return function.id if function.id in _ERRORS or function.id.endswith(("Error", "Warning")) else None
    if not isinstance(function, ast.Attribute):
        return None
    owner = ast.unparse(function.value)
    if owner.rpartition(".")[2] in ("logger", "log", "_logger") and function.attr in _LEVELS:
        return f"logger.{function.attr}"
    if function.attr == "warn" and owner == "warnings":
        return "warnings.warn"
    if function.attr == "add_note":
        return "add_note"
    if owner == "click" and function.attr in ("echo", "secho"):
        return f"click.{function.attr}"
    return function.attr if function.attr in _ERRORS else None


def _text_of(node: ast.expr, *, outermost: bool = False) -> str:
    """Return the text of an expression, with placeholders in braces; empty if it contains no text."""
    match node:
        case ast.Constant(value=str() as text):
            return text.replace("\n", "\\n")
        case ast.JoinedStr(values=parts):
            return "".join(map(_part_of, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _text_of(left), _text_of(right)
            if not (first or second):
                return ""
            return (first or _placeholder(left)) + (second or _placeholder(right))
        case ast.IfExp(test=test, body=body, orelse=other):
            texts = [_text_of(body), _text_of(other)]
            return f"{{{texts[0]!r} if {ast.unparse(test)} else {texts[1]!r}}}" if any(texts) else ""
        case ast.Call() | ast.Attribute() | ast.Name() | ast.Subscript() if outermost:
            return _placeholder(node)
    return ""


def _part_of(part: ast.expr) -> str:
    return _text_of(part) if isinstance(part, ast.Constant) else ast.unparse(ast.JoinedStr([part]))[2:-1]


def _placeholder(node: ast.expr) -> str:
    return f"{{{ast.unparse(node)}}}"
