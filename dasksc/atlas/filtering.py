"""Expressions over obs, such as ``"cell_type == 'T cell' and n_genes > 500"``: for which rows they hold.

pandas evaluates them, after a walk over their syntax: what is not named here is refused, so that an expression from a
configuration file can compare columns, and nothing else.

What is missing is as pandas has it, with one addition, so that all its versions and types of text agree: what is asked
by ``.str`` of a missing text is unknown, and so is its opposite. A row for which the whole is unknown is not selected.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas import opening
from dasksc.atlas.lookup import known
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.options import Openable
from dasksc.errors import InputError

__all__ = ["columns_of", "holds", "obs_of", "rows_where"]

ALLOWED = (
    "columns of obs (`in backticks` where the name is no Python name), numbers, 'strings', lists, comparisons, in, "
    "not in, and, or, not, &, |, ~, arithmetic, and of a column .isna(), .notna(), .isin([...]), .between(low, high), "
    ".str.startswith('...'), .str.endswith('...'), .str.contains('...')"
)
_SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Invert, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.BitAnd, ast.BitOr, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple),
)
_METHODS = ("isna", "notna", "isin", "between")
# With how many arguments each leaves it open what is said of a missing text.
_STRING_METHODS = {"startswith": 1, "endswith": 1, "contains": 3}
# A string, in which a backtick is a character like any other, or a name in backticks.
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`([^`]+)`""")
# Rows that are looked at together.
_PIECE_ROWS = 2**20


def rows_where(
    data: Openable | Modalities | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame, expression: str
) -> NDArray[np.int64]:
    """Return the rows for which an expression over obs holds.

    Parameters
    ----------
    data
        What `dasksc.open` takes or returns, several modalities (`Modalities`, a MuData, the path of an ``.h5mu``
        file), an AnnCollection, or a table of obs. Of a path only the columns that `expression` names are read. Of
        several modalities columns are ``"modality:column"`` (in backticks), and row i is cell i of `Modalities`.
    expression
        Such as ``"cell_type == 'T cell' and n_genes > 500"``, evaluated by pandas: columns of obs (in backticks
        where a name is no Python name), numbers, strings, lists, comparisons, ``in``, ``and``, ``or``, ``not``,
        arithmetic, and of a column ``.isna()``, ``.notna()``, ``.isin([...])``, ``.between(low, high)`` and
        ``.str.startswith('...')``, ``.str.endswith('...')``, ``.str.contains('...')``. Nothing else: no function, no
        other attribute, no ``@``. A column of true and false may be asked by its name alone.

    Returns
    -------
    NDArray
        Row numbers, ascending, int64: ``indices`` of a strategy.

    Raises
    ------
    InputError
        If the expression is none, holds something else, or says no yes or no for each row.
    MissingKeyError
        If it names a column that obs does not have.

    Notes
    -----
    A comparison with a missing value does not hold, but for ``!=``, as in pandas, so ``not`` before it selects the
    row. Unknown is what a nullable column or one of true and false says where a value is missing (``!=`` included),
    and what ``.str`` says of a missing text of any column. ``not`` of what is unknown is unknown, and such rows are
    not selected: neither ``cell_type.str.startswith('T')`` nor ``not cell_type.str.startswith('T')`` selects cells
    without a type. ``cell_type.isna() or not cell_type.str.startswith('T')`` does.
    """
    return np.flatnonzero(holds(expression, obs_of(data, columns_of(expression))))


def obs_of(data: Any, columns: list[str]) -> pd.DataFrame:
    """Return the obs that a data set of `data` has, with these columns; with all where it is in memory."""
    if is_modalities(data) and not isinstance(data, Modalities):
        # The obs of a MuData has cells, too, that some modality lacks.
        data = Modalities(data, obs=columns)
    obs = data if isinstance(data, pd.DataFrame) else getattr(data, "obs", None)
    return obs if isinstance(obs, pd.DataFrame) else opening.open(data, obs=columns, names=False).obs


def columns_of(expression: str) -> list[str]:
    """Return the columns that an expression names, each once, after a check that it is a permitted one."""
    _, names = _parsed(expression)
    return list(names.values())


def holds(expression: str, obs: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for each row of a table whether an expression holds, shape (n_obs,)."""
    safe, names = _parsed(expression)
    # Without the index, whose name might be that of a column.
    table = pd.DataFrame(
        {safe_name: _values(obs[known("obs", name, obs.columns)]) for safe_name, name in names.items()},
        copy=False,
    )
    found = np.empty(len(table), dtype=bool)
    # Every row by itself, so that what pandas makes on the way is as large as a piece.
    for start in range(0, max(len(table), 1), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        try:
            asked, answered = _with_answers(safe, table.iloc[piece])
            result = answered.eval(asked, engine="python")
        except (MemoryError, ImportError, AssertionError):
            raise
        # Whatever pandas raises on columns that an expression does not fit.
        except Exception as error:
            dtypes = ", ".join(f"{name} is {obs[name].dtype}" for name in names.values())
            raise InputError(f"the filter {expression!r} cannot be evaluated ({dtypes}): {error}") from error
        found[piece] = _answers(result, expression)
    return found


def _answers(result: Any, expression: str) -> NDArray[np.bool_]:
    """Return true or false for each row, false where that is unknown."""
    if not isinstance(result, pd.Series) or not pd.api.types.is_bool_dtype(result.dtype):
        found = result.dtype if isinstance(result, pd.Series) else type(result).__name__
        raise InputError(
            f"the filter {expression!r} gives {found} rather than true or false for each row; compare with something, "
            'as in "n_genes > 500"'
        )
    return np.asarray(result.to_numpy(dtype=bool, na_value=False) if result.hasnans else result, dtype=bool)


def _values(column: pd.Series[Any]) -> Any:
    """Return what a column holds; true and false that are objects, as beside None, as booleans that can be missing."""
    if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "boolean":
        return pd.array(column, dtype="boolean")
    return column.array


def _with_answers(safe: str, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return an expression in which what is asked by ``.str`` is a column, and the table with these columns.

    Versions of pandas and types of text differ in what they answer where it is missing. The rest of the expression
    stays as it was written, brackets too: pandas binds ``&`` and ``|`` in another order than Python's syntax tree.
    """
    calls = [node for node in ast.walk(ast.parse(safe, mode="eval")) if isinstance(node, ast.Call)]
    prefix = "_answer"
    while prefix in safe:
        prefix += "_"
    text, answers = safe.encode(), {}  # positions are those of bytes
    for i, call in enumerate(sorted(calls, key=lambda call: -call.col_offset)):
        question = _question(call)
        if question is not None and question.is_of_text:
            name = f"{prefix}{i}"
            answers[name] = _answer(table[question.column], question.method, call.args)
            text = text[: call.col_offset] + name.encode() + text[call.end_col_offset :]
    return text.decode(), table.assign(**answers)


def _answer(column: pd.Series[Any], method: str, arguments: Sequence[ast.expr]) -> pd.Series[Any]:
    """Return what a column says to ``.str.startswith('...')`` and the like, missing where its text is."""
    answer = getattr(column.str, method)(*map(ast.literal_eval, arguments)).astype("boolean")
    return answer.mask(column.isna()) if len(arguments) <= _STRING_METHODS[method] else answer


class _Question(NamedTuple):
    """What a call asks of a column, such as ``.isna()``, or of its text, such as ``.str.startswith('...')``."""

    column: str
    method: str
    is_of_text: bool


def _question(call: ast.Call) -> _Question | None:
    """Return the question that a call is; None if it is anything else."""
    method = call.func
    if isinstance(method, ast.Attribute):
        of = method.value
        if isinstance(of, ast.Name) and method.attr in _METHODS:
            return _Question(of.id, method.attr, is_of_text=False)
        if isinstance(of, ast.Attribute) and of.attr == "str" and isinstance(of.value, ast.Name):
            return _Question(of.value.id, method.attr, is_of_text=True) if method.attr in _STRING_METHODS else None
    return None


def _is_literal(node: ast.AST) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _parsed(expression: Any) -> tuple[str, dict[str, str]]:
    """Return an expression whose columns have Python names, and which column each of these is."""
    if not isinstance(expression, str) or not expression.strip():
        raise InputError(f'a filter is an expression such as "n_genes > 500"; got {expression!r}')
    quoted: dict[str, str] = {}

    def plain(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        return quoted.setdefault(match[2], f"_quoted_{len(quoted)}")

    # pandas takes lines for expressions of their own.
    safe = _QUOTED.sub(plain, re.sub(r"\s*[\r\n]\s*", " ", expression.strip()))
    try:
        tree = ast.parse(safe, mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"the filter {expression!r} cannot be read: {error}. Allowed are {ALLOWED}") from error
    _check(tree, expression)
    columns = {safe_name: name for name, safe_name in quoted.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            columns.setdefault(node.id, node.id)
    if not columns:
        raise InputError(f"the filter {expression!r} names no column of obs")
    return safe, columns


def _check(node: ast.AST, expression: str) -> None:
    """Refuse whatever is not permitted, at any depth."""
    if isinstance(node, ast.Call):
        question, arguments = _question(node), [*node.args, *node.keywords]
        if question is not None and (not question.is_of_text or all(map(_is_literal, arguments))):
            for argument in arguments:
                _check(argument, expression)
            return
    elif isinstance(node, _SYNTAX):
        for child in ast.iter_child_nodes(node):
            _check(child, expression)
        return
    what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
    raise InputError(f"the filter {expression!r} may not use {what}. Allowed are {ALLOWED}")
