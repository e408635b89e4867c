"""Labels as integer codes, shares of classes in an epoch, and the label entropy of batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.checks import nearest
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.plan.arrays import array_of

_Int64s = NDArray[np.int64]

# Maximum number of distinct fractional labels; more of them suggest a measurement rather than classes.
_MAX_FRACTIONAL_LABELS = 100
# Whole numbers below this number, or below the number of rows, are used as codes. With larger ones, the table of
# classes would be larger than the data.
_FEW_CODES = 65_536


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """Labels of rows as integer codes: an obs column, or labels that the user gave."""

    name: str  # Name of the column, or of the argument
    codes: NDArray[Any]  # Code of each row, shape (n_obs,), integers; negative for a missing label
    labels: Sequence[Any]  # Label of each code

    @classmethod
    def of(cls, name: str, values: Any, n_obs: int) -> CodedColumn:
        """Encode a column of obs; codes are in ascending order of the labels, or in that of the categories."""
        column = pd.Series(values, name=name)
        coded = cls.in_order(column, "value")
        if not isinstance(column.dtype, pd.CategoricalDtype):
            try:
                _are_whole(list(coded.labels), len(column))
            except InputError as error:
                raise InputError(f"the column {name!r}: {error}") from error
        if len(column) != n_obs:
            raise InputError(f"the column {name!r} has {len(column)} labels for {n_obs} rows; give one per row")
        return coded

    @classmethod
    def in_order(cls, column: pd.Series[Any], order: Literal["occurrence", "value", "text"]) -> CodedColumn:
        """Encode every distinct value of a column; categories keep their order, unless it is to be that of text."""
        # Codes have the smallest type. The order of text depends neither on that of categories nor on that of rows.
        if isinstance(column.dtype, pd.CategoricalDtype):
            codes, labels = np.asarray(column.array.codes), column.array.categories
        else:
            try:
                codes, labels = pd.factorize(column, sort=order == "value")
            except (TypeError, ValueError) as error:
                raise InputError(f"labels of type {column.dtype} cannot be compared: {error}") from error
            codes = codes.astype(np.min_scalar_type(-max(len(labels), 1)), copy=False)
        check_categories(labels, "labels" if column.name is None else f"obs column {column.name!r}")
        if order == "text":
            by_text = np.argsort(labels.map(str).to_numpy(object), kind="stable")
            places = np.full(len(labels) + 1, -1, dtype=np.int32)  # code -1 of missing values selects the last entry
            places[by_text] = np.arange(len(labels))
            codes, labels = places[codes], labels.take(by_text)
        return cls(str(column.name), codes, labels)

    def codes_of(self, argument: str, wanted: Iterable[Any]) -> list[int]:
        """Return the code of each label in `wanted`, which the user gave in `argument`."""
        by_label = {label: code for code, label in enumerate(self.labels)}
        codes = []
        for label in map(_pandas_label, wanted):
            try:
                code = by_label.get(label)
                if code is None and isinstance(label, float | np.floating):
                    with np.errstate(over="ignore"):
                        code = by_label.get(float(np.float32(label)))  # float32 columns store the nearest to 0.1
            except TypeError as error:  # the object is not hashable
                raise WrongTypeError(
                    f"{argument} has {label!r} for {self.name!r}; give a label or a list of labels"
                ) from error
            if code is None:
                present = [self.labels[one] for one in np.unique(self.codes).tolist() if one >= 0]
                raise MissingKeyError(
                    f"{argument}: {self.name!r} has no label {label!r}; {nearest(label, present, n=3)}"
                )
            codes.append(code)
        return codes

    def where(self, argument: str, wanted: Any) -> NDArray[np.bool_]:
        """Return a mask of the rows whose label is `wanted`, or one of several `wanted` labels."""
        several = listed(wanted)
        if not several:
            raise InputError(f"{argument} has no label for {self.name!r}; give one, or a list of labels")
        is_wanted = np.zeros(len(self.labels) + 1, dtype=np.bool_)  # the last entry is that of code -1
        is_wanted[self.codes_of(argument, several)] = True
        return np.asarray(is_wanted[self.codes])


def check_categories(categories: Any, column: object) -> None:
    """Raise an error for categories of several types, such as 1 and "1", which would be different classes."""
    objects = np.dtype(object)
    if getattr(categories, "dtype", objects) != objects:
        return
    values = np.asarray(categories, dtype=object).tolist()
    types = {str if isinstance(one, str) else type(one): one for one in values}
    if len(types) > 1 and not all(issubclass(one, Real) and not issubclass(one, bool) for one in types):
        first, second = list(types.values())[:2]
        raise InputError(
            f"the categories of {column} mix types: {first!r} is a {type(first).__name__}, and {second!r} a "
            f"{type(second).__name__}. In all joined atlases, labels must have the same type; convert them to "
            "strings"
        )


def encode_labels(labels: Any) -> tuple[NDArray[Any], list[Any]]:
    """Encode labels as integer codes and return the codes with the label of each code."""
    # Equal labels of any data type have equal codes. Categories keep their codes, and labels other than small whole
    # numbers are numbered in the order of their first occurrence.
    if hasattr(labels, "compute"):  # of Dask
        labels = labels.compute()
    if isinstance(labels, np.ma.MaskedArray) and np.ma.is_masked(labels):
        mask, labels = np.ma.getmaskarray(labels), np.array(labels.data, dtype=object)
        labels[mask] = None
    elif not hasattr(getattr(labels, "dtype", None), "construct_array_type"):  # not of pandas
        labels = array_of("labels", labels)
    if labels.ndim != 1:
        raise InputError(f"labels must contain one value per row; got shape {labels.shape}")
    if labels.dtype.names:  # pandas has no column of records
        labels = labels.astype(object)
    limit = max(len(labels), _FEW_CODES)
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and len(labels):
        low, high = int(labels.min()), int(labels.max())
        if low >= -1 and high < limit:
            return labels, list(range(high + 1))
    # Without the type, pandas would look for dates among objects, which takes as much memory as encoding them.
    coded = CodedColumn.in_order(pd.Series(labels, dtype=object if labels.dtype == object else None), "occurrence")
    codes, names = coded.codes, list(coded.labels)
    if isinstance(labels.dtype, pd.CategoricalDtype) or not _are_whole(names, len(labels)):
        return codes, names
    # Negative numbers have no class. The code -1 of a missing label selects the last entry.
    values = np.array([*names, -1], dtype=np.float64)
    if values.max() < limit:
        return np.maximum(values, -1).astype(np.int64)[codes], list(range(int(values.max()) + 1))
    is_class = values >= 0
    return np.where(is_class, np.cumsum(is_class) - 1, -1)[codes], [name for name in names if name >= 0]


def listed(labels: Any) -> list[Any]:
    """Return one label or several as a list, with dates and durations of NumPy as those of pandas."""
    labels = np.atleast_1d(labels) if isinstance(labels, np.ndarray) else labels
    is_several = pd.api.types.is_list_like(labels) and not isinstance(labels, Mapping)
    return [_pandas_label(one) for one in (labels if is_several else [labels])]


def _pandas_label(label: Any) -> Any:
    """Return a date or duration of NumPy as that of pandas, as `encode_labels` does; return other labels unchanged."""
    if isinstance(label, np.datetime64):
        return pd.Timestamp(label)
    return pd.Timedelta(label) if isinstance(label, np.timedelta64) else label


def _are_whole(names: list[Any], n_labels: int) -> bool:
    """Return True if all labels are whole numbers; raise an error for the values of a continuous column."""
    if not names or not all(isinstance(name, Real) and not isinstance(name, bool) for name in names):
        return False
    values = np.array(names, dtype=np.float64)
    is_whole = bool(np.all(np.isfinite(values) & (values == np.floor(values))))
    if not is_whole and len(names) > min(_MAX_FRACTIONAL_LABELS, max(8, n_labels // 2)):
        some = ", ".join(f"{name:g}" for name in names[:3])
        raise InputError(
            f"{n_labels} labels have {len(names)} different fractional values ({some}, ...), as in a continuous "
            "column, which has no classes. Divide it into bins (pandas.cut), or make each value a class "
            "(pandas.Categorical)"
        )
    return is_whole


def factors_of(class_weights: Any, column: CodedColumn) -> NDArray[np.float64]:
    """Return the factor of each class."""
    factors = np.ones(len(column.labels), dtype=np.float64)
    if class_weights is None:
        return factors
    if not isinstance(class_weights, Mapping):
        raise WrongTypeError(f"class_weights must be a dict of factors by label; got {class_weights!r}")
    for code, (label, factor) in zip(
        column.codes_of("class_weights", class_weights), class_weights.items(), strict=True
    ):
        if not isinstance(factor, Real) or not 0 <= float(factor) < np.inf:
            raise InputError(f"class_weights[{label!r}] must be finite and not negative; got {factor!r}")
        factors[code] = float(factor)
    return factors


def shares_of(
    counts: _Int64s, factors: NDArray[np.float64], *, smoothing: float = 0.0, temperature: float | None = None
) -> NDArray[np.float64]:
    """Return the probability of each class, shape (n_classes,), summing to 1."""
    present = counts > 0
    share = np.zeros(len(counts), dtype=np.float64)
    if temperature is None:
        share[present] = (1 - smoothing) / present.sum()
        share += smoothing * counts / counts.sum()
    else:
        # Counts are relative to the most frequent class, because powers of small frequencies could underflow.
        share[present] = (counts[present] / counts.max()) ** (1 / temperature)
    share *= factors
    if not share.sum() > 0:
        raise InputError("class_weights are 0 for all classes in the data; give at least one a positive weight")
    share /= share.sum()
    return share


def largest_remainders(share: NDArray[np.float64], total: int) -> _Int64s:
    """Divide `total` rows among classes by the largest remainder method."""
    exact = share * total
    quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    short = total - int(quotas.sum())
    quotas[np.argsort(-(exact - quotas), kind="stable")[:short]] += 1
    return quotas


def max_draws(counts: _Int64s, share: NDArray[np.float64]) -> int:
    """Return the number of rows that can be drawn with these shares before a class runs out of rows."""
    wanted = share > 0
    # The factor corrects rounding errors: a class of 5 rows with a share of 5/29 allows 29 draws in total, not 28.
    return int(np.floor(np.min(counts[wanted] / share[wanted]) * (1 + 1e-12)))


def check_quotas(quotas: _Int64s, counts: _Int64s, names: list[Any]) -> None:
    """Raise an error if more rows of a class are to be drawn than the class has."""
    over = np.flatnonzero(quotas > counts)
    if len(over):
        c = int(over[0])
        raise InputError(
            f"total_size={quotas.sum()} needs {quotas[c]} rows of class {names[c]!r}, which has {counts[c]}; lower "
            "total_size, or draw with replace=True"
        )


def encode_column(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    """Return an obs column as numbers, and the labels of its codes; None if the numbers are the values themselves."""
    dtype = series.dtype
    kind = ""
    if pd.api.types.is_object_dtype(dtype) or isinstance(dtype, pd.StringDtype):
        kind = pd.api.types.infer_dtype(series, skipna=True)
        if kind in ("integer", "floating", "mixed-integer-float"):
            series = pd.to_numeric(series)
        elif kind == "boolean":
            series = series.astype("boolean")
    elif isinstance(dtype, pd.DatetimeTZDtype):
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype) or kind in ("string", "empty"):
        coded = CodedColumn.in_order(series, "value")
        return coded.codes, list(coded.labels)
    if pd.api.types.is_bool_dtype(dtype):
        if series.hasnans:
            return series.astype("Int8").fillna(-1).to_numpy(dtype=np.int8), [False, True]
        return series.to_numpy(dtype=bool), None
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return _numbers(series), None
    if dtype.kind in "mM":
        return _seconds(series), None
    raise InputError(
        f"obs column {series.name!r} has dtype {dtype}{f' ({kind})' if kind else ''}, which cannot be converted to a "
        f"tensor. Convert it to numbers, strings or categories first: adata.obs[{series.name!r}].astype(str)"
    )


def _numbers(series: pd.Series[Any]) -> NDArray[Any]:
    if isinstance(series.dtype, pd.api.extensions.ExtensionDtype) and series.hasnans:
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    values = np.asarray(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", None)))
    is_long = values.dtype.kind == "f" and values.dtype.itemsize > 8  # torch has no such type
    return values.astype(np.float64 if is_long else values.dtype.newbyteorder("="), copy=False)


def _seconds(series: pd.Series[Any]) -> NDArray[np.float64]:
    values = series.to_numpy()
    whole = values.astype(f"{values.dtype.kind}8[s]")
    # Added separately, since float64 cannot represent nanoseconds since 1970 exactly.
    rest = (values - whole) / np.timedelta64(1, "s")
    return np.where(np.isnat(values), np.nan, whole.astype(np.int64) + rest)


_N_IDEAL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Label entropy of batches, in bits."""

    # mean, spread: Mean and standard deviation over the measured batches.
    mean: float
    spread: float
    # ideal_mean, ideal_spread: Mean and standard deviation over batches of the same size, drawn at random from all
    # measured rows.
    ideal_mean: float
    ideal_spread: float
    n_batches: int  # Number of measured batches

    @property
    def share(self) -> float:
        """Ratio of the mean to the ideal mean; 1 if there is only one label."""
        return self.mean / self.ideal_mean if self.ideal_mean > 0 else 1.0


def diversity_of(batches: Iterable[NDArray[Any]], n_labels: int) -> Diversity:
    """Compute the label entropy of batches."""
    counted = [np.bincount(codes[codes >= 0], minlength=n_labels) for codes in batches]
    counted = [counts for counts in counted if counts.any()]
    if not counted:
        return Diversity(mean=0.0, spread=0.0, ideal_mean=0.0, ideal_spread=0.0, n_batches=0)
    counts = np.array(counted)
    entropies = _entropies(counts)
    size = int(np.median(counts.sum(axis=1)))
    rng = np.random.default_rng(0)
    ideal = _entropies(rng.multivariate_hypergeometric(counts.sum(axis=0), size, _N_IDEAL, method="marginals"))
    return Diversity(
        mean=float(entropies.mean()),
        spread=float(entropies.std()),
        ideal_mean=float(ideal.mean()),
        ideal_spread=float(ideal.std()),
        n_batches=len(counts),
    )


def _entropies(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(np.abs((shares * logs).sum(axis=1)))
