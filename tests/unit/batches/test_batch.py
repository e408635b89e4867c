"""Batches: transfers that preserve them, and reused buffers that never alter them."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn.parallel.scatter_gather import scatter
from torch.utils.data import default_convert

from dasksc import InputError, MissingKeyError
from dasksc.batches.batch import Batch, Categories, NamedTensors

pytestmark = pytest.mark.core


def make_batch() -> Batch:
    X = torch.arange(12.0).reshape(4, 3)
    return Batch(X=X, obs={"type": torch.arange(4)}, layers={"counts": X + 1}, obsm={}, index=torch.arange(4))


def test_parts_are_items_and_attributes() -> None:
    batch = make_batch()
    assert batch.X is batch["X"]
    assert {"X", "obs", "layers", "index"} <= set(dir(batch))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("type", r"'type'.*batch\.obs\['type'\]"),
        ("cell_type", r"'cell_type'.*batch\.obs\['type'\]\?.*obs=\['cell_type'\]"),
        ("count", r"batch\.layers\['counts'\]\?"),
        ("x", r"'x'.*'X'\?"),
        ("categories", r"dataset\.categories"),
    ],
)
def test_a_name_in_a_part_of_a_batch_is_found(key: str, message: str) -> None:
    with pytest.raises(MissingKeyError, match=message):
        make_batch()[key]
    with pytest.raises(AttributeError, match=message):
        getattr(make_batch(), key)


def test_an_index_of_rows_says_that_a_batch_is_indexed_by_names() -> None:
    with pytest.raises(MissingKeyError, match=r"X.*obs.*batch\.X\[0\]"):
        make_batch()[0]
    obs = NamedTensors(type=torch.arange(4))
    obs.part = "obs"
    with pytest.raises(MissingKeyError, match=r"batch\.obs.*\(type\).*batch\.obs\['type'\]\[0\]"):
        obs[0]


def test_named_tensors_name_their_part_of_the_batch() -> None:
    counts = NamedTensors(counts=torch.arange(4))
    with pytest.raises(MissingKeyError, match=r"'raw'.*layers=\['raw'\].*obsm="):
        counts["raw"]
    counts.part = "rna:layers"
    with pytest.raises(MissingKeyError, match=r"batch\['rna'\]\.layers.*'raw'.*layers=\['rna:raw'\]"):
        counts["raw"]
    with pytest.raises(AttributeError, match=r"'count'.*batch\['rna'\]\.layers\['counts'\]\?"):
        counts.count  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'to'$"):
        counts.to  # noqa: B018
    copied = pickle.loads(pickle.dumps(Batch(layers=counts).to("cpu"))).layers
    assert copied.part == "rna:layers"


def test_unknown_categories_say_what_to_request() -> None:
    categories = Categories(cell_type=["B", "T"])
    with pytest.raises(MissingKeyError, match=r"cell.*type.*'cell_type'\?"):
        categories["cell type"]
    with pytest.raises(MissingKeyError, match="'donor'.*'donor'.*labels"):
        Categories()["donor"]


def test_to_moves_every_tensor_and_keeps_the_type() -> None:
    moved = make_batch().to("meta", non_blocking=True)
    assert type(moved) is Batch
    assert {moved.X.device.type, moved.obs["type"].device.type, moved.layers["counts"].device.type} == {"meta"}


def test_to_a_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="torch.bfloat16"):
        make_batch().to(torch.bfloat16)


@pytest.mark.parametrize("copy", [default_convert, lambda b: pickle.loads(pickle.dumps(b))])
def test_converters_and_pickling_keep_type_and_values(copy) -> None:
    batch, copied = make_batch(), copy(make_batch())
    assert type(copied) is Batch
    assert torch.equal(copied.X, batch.X)
    assert torch.equal(copied.obs["type"], batch.obs["type"])


def test_what_dataparallel_scatters_are_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Scattering tensors needs GPUs; this test covers only the reconstruction of the container.
    monkeypatch.setattr(
        "torch.nn.parallel.scatter_gather.Scatter.apply", lambda devices, _, dim, x: x.chunk(len(devices), dim)
    )
    parts = scatter(make_batch(), [0, 1])
    assert [type(part) for part in parts] == [Batch, Batch]
    assert torch.equal(torch.cat([part.X for part in parts]), make_batch().X)


def test_names_that_are_not_strings_do_not_change_the_error() -> None:
    batch = Batch({"X": torch.zeros(2, 3), 3: torch.zeros(2)})
    with pytest.raises(KeyError, match="'zz'"):
        batch["zz"]
    assert not hasattr(batch, "zz")
    assert not hasattr(batch, "__zz__")
