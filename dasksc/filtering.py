"""Expressions over obs, such as ``"cell_type == 'T cell' and n_genes > 500"``: for which rows they hold.

pandas evaluates them, after a walk over their syntax: what is not named here is refused, so that an expression from a
configuration file can compare columns, and nothing else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc import collection
from dasksc.collection import Openable
from dasksc.errors import InputError

__all__ = ["columns_of", "holds", "rows_where"]

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
_STRING_METHODS = ("startswith", "endswith", "contains")
# A string, in which a backtick is a character like any other, or a name in backticks.
_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`([^`]+)`""")


def rows_where(data: Openable | Sequence[Openable] | Mapping[str, Openable], expression: str) -> NDArray[np.int64]:
    """Return the rows for which an expression over obs holds.

    Parameters
    ----------
    data
        What `dasksc.open` takes or returns. Of a path only the columns that `expression` names are read.
    expression
        Such as ``"cell_type == 'T cell' and n_genes > 500"``, evaluated by pandas: columns of obs (in backticks
        where a name is no Python name), numbers, strings, lists, comparisons, ``in``, ``and``, ``or``, ``not``,
        arithmetic, and of a column ``.isna()``, ``.notna()``, ``.isin([...])``, ``.between(low, high)`` and
        ``.str.startswith('...')``, ``.str.endswith('...')``, ``.str.contains('...')``. Nothing else: no function, no
        other attribute, no ``@``.

    Returns
    -------
    NDArray
        Row numbers, ascending, int64: ``indices`` of a strategy. A comparison with a missing value does not hold,
        but for ``!=``, as in pandas; of nullable columns it does not hold in any case.

    Raises
    ------
    InputError
        If the expression is none, holds something else, or says no yes or no for each row.
    MissingKeyError
        If it names a column that obs does not have.
    """
    names = columns_of(expression)
    adata = data if isinstance(data, AnnData) else collection.open(data, obs=names)
    return np.flatnonzero(holds(expression, adata.obs))


def columns_of(expression: str) -> list[str]:
    """Return the columns that an expression names, each once, after a check that it is a permitted one."""
    _, names = _parsed(expression)
    return list(names.values())


def holds(expression: str, obs: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for each row of a table whether an expression holds, shape (n_obs,)."""
    safe, names = _parsed(expression)
    # Without the index, whose name might be that of a column.
    table = pd.DataFrame(
        {safe_name: obs[collection.known("obs", name, obs.columns)].array for safe_name, name in names.items()},
        copy=False,
    )
    try:
        result = table.eval(safe, engine="python")
    except Exception as error:
        dtypes = ", ".join(f"{name} is {obs[name].dtype}" for name in names.values())
        raise InputError(f"the filter {expression!r} cannot be evaluated ({dtypes}): {error}") from error
    if not isinstance(result, pd.Series) or not pd.api.types.is_bool_dtype(result.dtype):
        found = result.dtype if isinstance(result, pd.Series) else type(result).__name__
        raise InputError(
            f"the filter {expression!r} gives {found} rather than true or false for each row; compare with something, "
            'as in "n_genes > 500"'
        )
    return np.asarray(result.to_numpy(dtype=bool, na_value=False) if result.hasnans else result, dtype=bool)


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
    safe = _QUOTED.sub(plain, re.sub(r"\s*\n\s*", " ", expression.strip()))
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
        method = node.func
        of = method.value if isinstance(method, ast.Attribute) else None
        allowed: tuple[str, ...] = _METHODS
        if isinstance(of, ast.Attribute) and of.attr == "str":
            of, allowed = of.value, _STRING_METHODS
        if isinstance(method, ast.Attribute) and method.attr in allowed and isinstance(of, ast.Name):
            for argument in [*node.args, *node.keywords]:
                _check(argument, expression)
            return
    elif isinstance(node, _SYNTAX):
        for child in ast.iter_child_nodes(node):
            _check(child, expression)
        return
    what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
    raise InputError(f"the filter {expression!r} may not use {what}. Allowed are {ALLOWED}")
