from __future__ import annotations

import pickle

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from dasksc.errors import InputError
from dasksc.multiindexable import MultiIndexable, count_rows, take_rows

pytestmark = pytest.mark.core

N_ROWS = 12
X = np.arange(N_ROWS * 3).reshape(N_ROWS, 3)
FRAME = pd.DataFrame({"a": np.arange(N_ROWS), "b": list("abcdefghijkl")}, index=np.arange(N_ROWS)[::-1])

KINDS = {
    "numpy": X,
    "csr": sp.csr_matrix(X),
    "csr_array": sp.csr_array(X),
    "frame": FRAME,
    "series": FRAME["a"],
    "list": [row.tolist() for row in X],
    "tensor": torch.from_numpy(X),
    "categorical": pd.Categorical(FRAME["b"]),
    "hdf5": h5py.File("x", "w", driver="core", backing_store=False).create_dataset("x", data=X),
}


def as_list(data: object) -> object:
    if sp.issparse(data):
        data = data.toarray()
    if isinstance(data, pd.DataFrame | h5py.Dataset):
        data = np.asarray(data)
    return data.tolist() if hasattr(data, "tolist") else data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows",
    [np.array([7, 0, 7, 3]), [7, 0, 7, 3], slice(2, 9, 3), torch.arange(N_ROWS) % 5 == 0, np.array([], dtype=np.int64)],
    ids=["array", "list", "slice", "mask", "nothing"],
)
def test_rows_are_taken_by_position_whatever_the_collection(kind, rows):
    data = KINDS[kind]
    positions = np.arange(N_ROWS)[rows]
    assert count_rows(data) == N_ROWS
    assert as_list(take_rows(data, rows)) == [as_list(data)[i] for i in positions]
    mask = np.isin(np.arange(N_ROWS), positions)
    assert as_list(take_rows({"column": data}, mask)["column"]) == as_list(take_rows(data, np.unique(positions)))


@pytest.mark.parametrize(
    "multi",
    [
        MultiIndexable(X, FRAME["a"], names=["X", "y"]),
        MultiIndexable({"X": X, "y": FRAME["a"]}),
        MultiIndexable(X=X, y=FRAME["a"]),
    ],
    ids=["positions and names", "dict", "keywords"],
)
def test_members_are_reached_by_name_and_by_position_however_they_were_given(multi):
    assert multi.names == ["X", "y"] == multi.keys()
    assert multi["X"] is multi[0] is multi[-2] is multi[np.int64(0)] is X
    assert [name for name, _ in multi.items()] == ["X", "y"]
    assert multi.values() == list(multi)
    assert (multi.count, len(multi)) == (2, N_ROWS)


def test_taking_rows_keeps_names_members_in_step_and_what_lies_beside():
    multi = MultiIndexable(KINDS, unstructured={"genes": ["g0", "g1"]})
    part = multi[np.array([5, 1])][[1, 0]]
    assert part.names == list(KINDS)
    assert part.unstructured == {"genes": ["g0", "g1"]}
    assert part.unstructured_keys == ["genes"]
    for kind, member in part.items():
        assert as_list(member) == [as_list(KINDS[kind])[i] for i in (1, 5)]


def test_it_pickles():
    multi = pickle.loads(pickle.dumps(MultiIndexable(X, unstructured={"g": 1})))
    np.testing.assert_array_equal(multi[0], X)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((), {}, TypeError, "at least one member"),
        ((X,), {"y": X}, TypeError, "not both"),
        ((X, 5), {}, TypeError, "member 1 .int. has no length"),
        ((X,), {"unstructured": [1]}, TypeError, "must be a dict, not list"),
        ((X, X), {"names": ["a"]}, InputError, "2.*2"),
        ((), {"X": X, "names": ["a"]}, InputError, "already have names"),
        ((), {"X": X, "y": X[:5]}, InputError, "'X': 12, 'y': 5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        MultiIndexable(*arguments, **keywords)


def test_a_member_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="member 1.*1"):
        MultiIndexable(X)[1]
    with pytest.raises(IndexError):
        MultiIndexable(X)[np.array([N_ROWS])]


def test_to_makes_tensors_of_numbers_and_leaves_the_rest_alone():
    read_only = np.arange(N_ROWS, dtype=np.float32)
    read_only.flags.writeable = False
    members = {
        **KINDS,
        "bool": X[:, 0] > 3,
        "read_only": read_only,
        "reversed": X[::-1],
        "big_endian": X.astype(">i4"),
        "long_double": X.astype(np.longdouble),
        "text": np.array(list("abcdefghijkl")),
        "nested": MultiIndexable(y=X),
    }
    moved = MultiIndexable(members, unstructured={"n": 1}).to("cpu", non_blocking=True)
    for name in ("numpy", "tensor", "bool", "read_only", "reversed", "big_endian"):
        assert isinstance(moved[name], torch.Tensor), name
        np.testing.assert_array_equal(moved[name].numpy(), np.asarray(members[name]))
    for name in ("csr", "csr_array", "frame", "series", "list", "categorical", "text", "long_double"):
        assert moved[name] is members[name], name
    assert isinstance(moved["nested"]["y"], torch.Tensor)
    assert moved["bool"].dtype == torch.bool
    assert moved.unstructured == {"n": 1}


def test_to_shares_memory_on_the_cpu_and_moves_to_another_device():
    x = np.zeros(3, dtype=np.float32)
    multi = MultiIndexable(x=x)
    moved = multi.to("cpu")
    x[0] = 1
    assert moved["x"][0] == 1
    assert multi.to("meta")["x"].device.type == "meta"


def test_pin_memory_pins_what_torch_can_hold(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    result = MultiIndexable(X=X, t=torch.zeros(N_ROWS), labels=KINDS["categorical"]).pin_memory()
    assert [tuple(tensor.shape) for tensor in pinned] == [(N_ROWS, 3), (N_ROWS,)]
    assert result["labels"] is KINDS["categorical"]
