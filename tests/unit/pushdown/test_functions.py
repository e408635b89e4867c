"""Known functions of CSR blocks: the values of NumPy, stored zeros and NaN among them, and shared index arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.special
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.pushdown import DaskMatrix, RowLocalMatrix, gather_block, matrix_of, row_local, to_dask
from dasksc.pushdown.functions import ELEMENTWISE, for_blocks
from dasksc.storage import as_matrix
from tests.support.data import dense

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

N_OBS, N_VARS = 12, 6
ROW, COLUMN = np.arange(N_VARS) - 2, np.arange(N_OBS)[:, None] - 4
UFUNCS = [one for one in vars(np).values() if isinstance(one, np.ufunc) and one.nout == 1 and not one.signature]
FUNCTIONS = [one for one in dict.fromkeys([*UFUNCS, *sorted(ELEMENTWISE, key=repr)]) if one is not np.isnat]
# Functions of one argument that map zeros to zeros, and those that do not.
KEPT = (np.absolute, np.expm1, np.isnan, np.log1p, np.negative, np.sign, np.sqrt, np.nan_to_num, operator.neg)
FILLED = (np.arccos, np.cos, np.exp, np.isfinite, np.log, np.logical_not, np.reciprocal, np.i0, np.isreal)
INTEGER = {"bitwise_and", "bitwise_count", "bitwise_or", "bitwise_xor", "gcd", "invert", "lcm", "left_shift"}
INTEGER |= {"right_shift", "and_", "or_", "xor", "inv"}
ONE_ARGUMENT = {"abs", "neg", "pos", "invert", "_sqrt", "around", "round", "angle", "fix", "i0", "imag", "real", "sinc"}
ONE_ARGUMENT |= {"iscomplex", "isneginf", "isposinf", "isreal", "nan_to_num"}


def values(dtype: Any) -> NDArray[Any]:
    made = np.random.default_rng(0).integers(-3, 4, (N_OBS, N_VARS)).astype(dtype)
    made[::2, ::2] = 0
    if made.dtype.kind == "f":
        made[1], made[4, 3] = [np.nan, np.inf, -np.inf, -0.5, 0.0, 1.5], np.nan
    return made


def with_stored_zeros(block: NDArray[Any]) -> sp.csr_matrix:
    """Return a CSR matrix that stores the zeros of the first four rows, and leaves out those of the others."""
    stored = (block != 0) | (np.arange(len(block)) < 4)[:, None]
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return sp.csr_matrix((block[stored], np.nonzero(stored)[1], indptr), shape=block.shape)


def uses(function: Callable[..., Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield the ways to call a function: with one block, and with numbers, one row, one column and a block."""
    name, elemwise = function.__name__, da.core.elemwise
    if name == "where":
        yield lambda x: da.where(x > 1, x, 0)
        yield lambda x: da.where(x > 1, x, ROW)
    elif name == "clip":
        yield from (lambda x, bounds=bounds: elemwise(np.clip, x, *bounds) for bounds in [(0, 2), (-1, 1), (1, 2)])
    elif name in ONE_ARGUMENT or getattr(function, "nin", 2) == 1:
        yield lambda x: elemwise(function, x)
    else:
        for other in (0, 2, -1, ROW, COLUMN):
            yield lambda x, other=other: elemwise(function, x, other)
            if name != "ldexp" and name not in ("left_shift", "right_shift"):
                yield lambda x, other=other: elemwise(function, other, x)
        yield lambda x: elemwise(function, x, x)
        yield lambda x: elemwise(function, x[:, 1:2], ROW)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_known_function_of_csr_rows_is_the_function_of_dense_rows(function: Callable[..., Any]) -> None:
    block = values(np.int32 if function.__name__ in INTEGER else np.float32)
    stored = with_stored_zeros(block)
    assert (stored.data == 0).any()
    sparse, whole = (to_dask(as_matrix(one, "X"), chunk_rows=5) for one in (stored, block))
    rows, n_checked = np.array([0, 1, 1, 4, 5, 9, 11]), 0
    for code in uses(function):
        if not isinstance(code(whole), da.Array):
            continue  # NumPy does not support this use, such as ldexp of two floating-point numbers
        expected, n_checked = code(whole).compute(scheduler="synchronous"), n_checked + 1
        by_row, by_chunk = matrix_of(code(sparse)), DaskMatrix(code(sparse))
        assert type(by_row) is RowLocalMatrix
        for matrix in (by_row, by_chunk):
            got = dense(gather_block(matrix.fetch(rows), np.arange(len(rows))))
            np.testing.assert_array_equal(got, expected[rows])
            assert got.dtype == expected.dtype
        if function in KEPT or function in FILLED:
            assert by_row.layout == ("csr" if function in KEPT else "dense")
    assert n_checked


@pytest.mark.parametrize(
    "code", [lambda x: da.exp(da.sqrt(x)), lambda x: da.sqrt(x) + 1, lambda x: da.sqrt(x) * da.sqrt(x)]
)
def test_float16_results_of_bytes_are_those_of_numpy(code: Callable[[da.Array], da.Array]) -> None:
    block = values(np.uint8)
    sparse, whole = (to_dask(as_matrix(one, "X"), chunk_rows=5) for one in (with_stored_zeros(block), block))
    rows = np.array([0, 1, 1, 11])
    got = dense(gather_block(matrix_of(code(sparse)).fetch(rows), np.arange(len(rows))))
    expected = code(whole).compute(scheduler="synchronous")[rows]
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype == np.float16


tripled = np.vectorize(lambda value: value * 3, otypes=[np.float32])

OTHER_USES: dict[str, Callable[[da.Array], da.Array]] = {
    "nan_to_num": da.nan_to_num,
    "nan_to_num of blocks, with values": lambda x: x.map_blocks(partial(np.nan_to_num, nan=5.0, posinf=9.0)),
    "nan_to_num declared": lambda x: x.map_blocks(row_local(np.nan_to_num)),
    "nan_to_num with a dtype": lambda x: da.core.elemwise(np.nan_to_num, x, dtype="float64"),
    "multiply with a dtype": lambda x: da.multiply(x, ROW, dtype="float64"),
    "rounded to tenths": lambda x: da.round(x / 3, 1),
    "a ufunc of SciPy": scipy.special.expit,
    "vectorized by NumPy": lambda x: x.map_blocks(tripled, dtype=x.dtype, meta=x._meta),
    "a sparse keyword": lambda x: x.map_blocks(np.isclose, b=sp.csr_matrix(ROW), dtype=bool),
    "weights by one gene": lambda x: ROW * x[:, [1]],
    "all genes by one": lambda x: x * x[:, [1]],
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_other_uses_of_known_functions_give_the_values_of_dense_rows(name: str) -> None:
    block, code, rows = values(np.float32), OTHER_USES[name], np.array([0, 1, 2, 4, 4, 11])
    sparse, whole = (
        matrix_of(code(to_dask(as_matrix(x, "X"), chunk_rows=5))) for x in (with_stored_zeros(block), block)
    )
    assert type(sparse) is RowLocalMatrix
    got, expected = (dense(gather_block(one.fetch(rows), np.arange(len(rows)))) for one in (sparse, whole))
    np.testing.assert_array_equal(got, expected)
    assert sparse.dtype == whole.dtype


def test_a_block_with_unused_space_has_the_values_of_its_rows() -> None:
    block = with_stored_zeros(abs(values(np.float32)[2:4]))
    longer = block.copy()
    longer.indices, longer.data = (np.append(part, part[:3]) for part in (block.indices, block.data))
    found = for_blocks(np.sqrt)(longer)
    np.testing.assert_array_equal(found.toarray(), np.sqrt(block.toarray()))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("sort", lambda x: x.map_blocks(np.sort, axis=1, dtype=x.dtype, meta=x._meta)),
        ("cumsum", lambda x: da.cumsum(x, axis=1)),
        ("ptp", lambda x: x.map_blocks(row_local(np.ptp), dtype=x.dtype, meta=x._meta)),
        ("modf", lambda x: da.modf(x)[0]),
        ("softmax", lambda x: x.map_blocks(scipy.special.softmax, axis=1, dtype=x.dtype, meta=x._meta)),
    ],
)
def test_functions_that_do_not_know_sparse_blocks_are_refused_by_name(
    name: str, code: Callable[[da.Array], da.Array]
) -> None:
    with pytest.raises(InputError, match=name):
        matrix_of(code(to_dask(as_matrix(with_stored_zeros(values("f4")), "X")))).fetch(np.arange(3))


@pytest.mark.parametrize("declared", [row_local, lambda function: function], ids=["row_local", "whole chunks"])
@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_function_may_change_in_place_what_known_functions_share(declared: Any, threshold: float) -> None:
    def without_small(block: Any) -> Any:
        block.data[block.data < threshold] = 0
        block.eliminate_zeros()
        return block

    x = to_dask(as_matrix(with_stored_zeros(abs(values("i4")).astype("f4")), "X"), chunk_rows=5)
    array = da.sqrt(da.log1p(x) * 2).map_blocks(declared(without_small), dtype=x.dtype, meta=x._meta)
    rows = np.arange(2, 11, dtype=np.int64)
    block = gather_block(matrix_of(array).fetch(rows), np.arange(len(rows)))
    expected = without_small(np.sqrt(np.log1p(x.compute()) * 2))[rows]
    np.testing.assert_array_equal(block.toarray(), expected.toarray())
