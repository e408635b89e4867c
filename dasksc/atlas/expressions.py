"""Expressions over obs, or over another table, which pandas evaluates after a check of their syntax.

Only the listed syntax is permitted, so an expression from a configuration file can compare columns but not run code.
Missing values follow pandas, except that ``.str`` of missing text is unknown in all versions and string dtypes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.elements import require_key
from dasksc.errors import InputError

ALLOWED = (
    "columns of obs (`in backticks` if the name is not a Python name), numbers, 'strings', lists, comparisons, "
    "arithmetic, the operators 'in', 'not in', 'and', 'or', 'not', '&', '|' and '~', and the methods .isna(), "
    ".notna(), .isin([...]), .between(low, high), .str.startswith('...'), .str.endswith('...') and "
    ".str.contains('...') of a column"
)
_SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Invert, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.BitAnd, ast.BitOr, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple),
)
_METHODS = ("isna", "notna", "isin", "between")
# Methods of `.str`, and the number of their arguments before `na`, which sets the result for missing text.
_STRING_METHODS = {"startswith": 1, "endswith": 1, "contains": 3}
# Matches a string, which may contain backticks, or a name in backticks.
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`([^`]+)`""")
# Number of rows that are evaluated together.
_PIECE_ROWS = 2**20


def columns_of(expression: str) -> list[str]:
    """Return the distinct columns in an expression, after a check of its syntax."""
    _, names = _parsed(expression)
    return list(names.values())


def holds(expression: str, obs: pd.DataFrame, *, of: Any = None) -> NDArray[np.bool_]:
    """Return a mask of the rows of a table for which an expression holds, shape (n_obs,)."""
    # If a column is missing, the error gives the path of `of`, the AnnData that the table belongs to.
    safe, names = _parsed(expression)
    # The index is left out, since its name may equal that of a column.
    table = pd.DataFrame(
        {safe_name: _values(obs[require_key("obs", name, obs.columns, of=of)]) for safe_name, name in names.items()},
        copy=False,
    )
    found = np.empty(len(table), dtype=bool)
    # Rows are evaluated in pieces, which bounds the size of temporary arrays.
    for start in range(0, max(len(table), 1), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        try:
            rewritten, extended = _with_text_results(safe, table.iloc[piece])
            result = extended.eval(rewritten, engine="python")
        except (MemoryError, ImportError, AssertionError):
            raise
        # pandas may raise any error if the expression does not suit the types of the columns.
        except Exception as error:
            dtypes = ", ".join(f"{name} is {obs[name].dtype}" for name in names.values())
            raise InputError(f"the filter {expression!r} cannot be evaluated ({dtypes}): {error}") from error
        found[piece] = _to_mask(result, expression)
    return found


def _to_mask(result: Any, expression: str) -> NDArray[np.bool_]:
    """Convert the result to a boolean for each row; unknown becomes False."""
    if not isinstance(result, pd.Series) or not pd.api.types.is_bool_dtype(result.dtype):
        found = result.dtype if isinstance(result, pd.Series) else type(result).__name__
        raise InputError(
            f"the filter {expression!r} gives {found} instead of true or false for each row. Use a comparison, "
            'as in "n_genes > 500"'
        )
    return np.asarray(result.to_numpy(dtype=bool, na_value=False) if result.hasnans else result, dtype=bool)


def _values(column: pd.Series[Any]) -> Any:
    """Return the values of a column; objects of True, False and None become a nullable boolean array."""
    if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "boolean":
        return pd.array(column, dtype="boolean")
    return column.array


def _with_text_results(safe: str, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Replace calls of ``.str`` by columns of their results; return the expression and the extended table."""
    # The results of pandas for missing text depend on its version and on the type of text. The rest of the expression
    # is not changed. If it were generated from the syntax tree, it could lack parentheses that pandas needs, since
    # ``&`` and ``|`` have a lower precedence in pandas than in Python.
    calls = [node for node in ast.walk(ast.parse(safe, mode="eval")) if isinstance(node, ast.Call)]
    prefix = "_answer"
    while prefix in safe:
        prefix += "_"
    text, results = safe.encode(), {}  # offsets of the syntax tree count bytes
    for i, call in enumerate(sorted(calls, key=lambda call: -call.col_offset)):
        column, method, is_of_text = _method_of(call) or ("", "", False)
        if is_of_text:
            name = f"{prefix}{i}"
            results[name] = _text_result(table[column], method, call.args)
            text = text[: call.col_offset] + name.encode() + text[call.end_col_offset :]
    return text.decode(), table.assign(**results)


def _text_result(column: pd.Series[Any], method: str, arguments: Sequence[ast.expr]) -> pd.Series[Any]:
    """Evaluate a method such as ``.str.startswith('...')`` on a column; the result is missing for missing text."""
    # `column` is a piece, which pandas refuses if it has no text, although other pieces of the column may have some.
    if column.dtype == object:
        column = column.where(np.fromiter((isinstance(value, str) for value in column), dtype=bool, count=len(column)))
    elif column.isna().all():
        column = column.astype(object)
    result = getattr(column.str, method)(*map(ast.literal_eval, arguments)).astype("boolean")
    return result.mask(column.isna()) if len(arguments) <= _STRING_METHODS[method] else result


def _method_of(call: ast.Call) -> tuple[str, str, bool] | None:
    """Return the column and method of a permitted call, and whether it is a method of text; None for other calls."""
    match call.func:
        case ast.Attribute(ast.Name(column), method) if method in _METHODS:
            return column, method, False
        case ast.Attribute(ast.Attribute(ast.Name(column), "str"), method) if method in _STRING_METHODS:
            return column, method, True
    return None


def _parsed(expression: Any) -> tuple[str, dict[str, str]]:
    """Return an expression with Python identifiers as column names, and the mapping to the original names."""
    if not isinstance(expression, str) or not expression.strip():
        raise InputError(f'a filter is an expression such as "n_genes > 500"; got {expression!r}')
    quoted: dict[str, str] = {}

    def plain(match: re.Match[str]) -> str:
        return match[1] or quoted.setdefault(match[2], f"_quoted_{len(quoted)}")

    # Line breaks are removed, since pandas treats each line as an expression.
    safe = _QUOTED.sub(plain, re.sub(r"\s*[\r\n]\s*", " ", expression.strip()))
    try:
        tree = ast.parse(safe, mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise InputError(f"the filter {expression!r} cannot be read: {reason}. Allowed are {ALLOWED}") from error
    _validate_syntax(tree, expression)
    columns = {safe_name: name for name, safe_name in quoted.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            columns.setdefault(node.id, node.id)
    if not columns:
        raise InputError(f'the filter {expression!r} uses no column of obs; compare one, as in "n_genes > 500"')
    return safe, columns


def _validate_syntax(node: ast.AST, expression: str) -> None:
    """Raise an error for syntax that is not permitted, at any depth."""
    if isinstance(node, ast.Call):
        method = _method_of(node)
        is_allowed = method is not None and not node.keywords and (not method[2] or all(map(_is_literal, node.args)))
        inside: Iterable[ast.AST] = node.args
    else:
        is_allowed, inside = isinstance(node, _SYNTAX), ast.iter_child_nodes(node)
    if not is_allowed:
        what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        raise InputError(f"the filter {expression!r} may not use {what}. Allowed are {ALLOWED}")
    for one in inside:
        _validate_syntax(one, expression)


def _is_literal(node: ast.AST) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
