"""Row filters: rows for which an expression over obs holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.expressions import columns_of, holds
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.opening import elements_of
from dasksc.errors import MissingKeyError
from dasksc.readers.options import Openable, OpenOptions


@contextmanager
def explaining_control(control: Any) -> Iterator[None]:
    """Add advice to errors about missing columns if `control` looks like a label instead of an expression."""
    try:
        yield
    except MissingKeyError as error:
        # The label "non-targeting" parses as a subtraction of columns. Unlike most expressions that select rows, a
        # label has no comparison or call.
        if not isinstance(control, str) or re.search(r"[=<>([]", control):
            raise
        raise MissingKeyError(
            f"{error} (control={control!r} is read as an expression over obs; if it is a label, give its column, too: "
            f"control={{'gene': {control!r}}})"
        ) from None


def rows_where(
    data: Openable | Modalities | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame, expression: str
) -> NDArray[np.int64]:
    """Return the rows for which an expression over obs holds.

    Parameters
    ----------
    data
        Any argument or result of `dasksc.open`, several modalities (`Modalities`, a MuData, the path of an ``.h5mu``
        file), or an obs table. From a path, only the columns in `expression` are read. For several modalities, columns
        are ``"modality:column"`` (in backticks), and row i is cell i of `Modalities`.
    expression
        Expression such as ``"cell_type == 'T cell' and n_genes > 500"``, evaluated by pandas. It may contain columns of
        obs (in backticks unless the name is a Python identifier), numbers, strings, lists, comparisons, ``in``,
        ``and``, ``or``, ``not``, arithmetic, and the methods ``.isna()``, ``.notna()``, ``.isin([...])``,
        ``.between(low, high)``, ``.str.startswith('...')``, ``.str.endswith('...')`` and ``.str.contains('...')`` of a
        column. Other functions, attributes and ``@`` are not permitted. A boolean column may stand alone.

    Returns
    -------
    NDArray
        Row numbers, ascending, int64, suitable as ``indices`` of a strategy.

    Raises
    ------
    InputError
        If the expression is invalid, contains other syntax, or does not give true or false for each row.
    MissingKeyError
        If the expression names a column that obs lacks.

    Notes
    -----
    Missing values follow the rules of pandas:

    - In most columns, a comparison with a missing value is false, except ``!=``, which is true. For example,
      ``not n_genes > 500`` also selects the rows without a value.
    - In nullable and boolean columns, every comparison with a missing value is unknown. So is ``.str`` of missing text
      in any column. The negation of an unknown result is unknown, and rows with an unknown result are not selected.

    Examples
    --------
    >>> rows = dasksc.rows_where("atlas.h5ad", "cell_type == 'T cell' and n_genes > 20")
    >>> len(rows)
    419
    >>> dataset = dasksc.scDataset("atlas.h5ad", dasksc.BlockShuffling(indices=rows), seed=0)
    """
    return np.flatnonzero(holds(expression, obs_of(data, columns_of(expression)), of=data))


def obs_of(data: Any, columns: list[str]) -> pd.DataFrame:
    """Return the obs of `data` with at least these columns; an obs in memory is returned with all its columns."""
    if is_modalities(data) and not isinstance(data, Modalities):
        # The obs of a MuData also has cells that some modality lacks.
        data = Modalities(data, obs=columns)
    obs = data if isinstance(data, pd.DataFrame) else getattr(data, "obs", None)
    if isinstance(obs, pd.DataFrame):
        return obs
    return elements_of(data, columns, OpenOptions(has_names=False), extent="batches").obs
