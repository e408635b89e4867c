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
    batch.X = batch.X + 1
    assert batch.X is batch["X"] is Batch(batch).X
    del batch.X
    assert "X" not in batch


@pytest.mark.parametrize(
    ("use", "error", "fact"),
    [
        (lambda: make_batch()["type"], MissingKeyError, r"obs\['type'\]"),
        (lambda: make_batch().type, AttributeError, r"obs\['type'\]"),
        (lambda: make_batch()[0], MissingKeyError, "X"),
        (lambda: Batch({"X": torch.zeros(2, 3), 3: torch.zeros(2)})["zz"], KeyError, "'zz'"),
        (lambda: NamedTensors(counts=torch.arange(4))["raw"], MissingKeyError, r"\['counts'\].*layers="),
        (lambda: NamedTensors(counts=torch.arange(4)).to, AttributeError, "'to'"),
        (lambda: Categories(cell_type=["B", "T"])["cell type"], MissingKeyError, "'cell_type'"),
        (lambda: setattr(make_batch(), "values", torch.arange(4)), AttributeError, r"batch\['values'\]"),
        (lambda: make_batch().to(torch.bfloat16), InputError, "torch.bfloat16"),
    ],
)
def test_names_that_are_not_there_are_told_with_those_that_are(use, error, fact) -> None:
    with pytest.raises(error, match=fact):
        use()


def test_to_moves_every_tensor_and_keeps_the_type() -> None:
    moved = make_batch().to("meta", non_blocking=True)
    assert type(moved) is Batch
    assert {moved.X.device.type, moved.obs["type"].device.type, moved.layers["counts"].device.type} == {"meta"}


@pytest.mark.parametrize("copy", [default_convert, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.copy() | {}])
def test_converters_and_copies_keep_type_and_values(copy) -> None:
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
