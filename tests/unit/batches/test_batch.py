"""Batches: what moves them keeps them, and buffers used again never show."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn.parallel.scatter_gather import scatter
from torch.utils.data import default_collate, default_convert

from dasksc import InputError
from dasksc.batches.batch import Batch

pytestmark = pytest.mark.core


def make_batch() -> Batch:
    X = torch.arange(12.0).reshape(4, 3)
    return Batch(X=X, obs={"type": torch.arange(4)}, layers={"counts": X + 1}, obsm={}, index=torch.arange(4))


def test_parts_are_items_and_attributes() -> None:
    batch = make_batch()
    assert batch.X is batch["X"]
    assert {"X", "obs", "layers", "index"} <= set(dir(batch))


def test_an_unknown_attribute_names_those_there_are() -> None:
    with pytest.raises(AttributeError, match="X, obs, layers, obsm, index, but no 'cell_type'"):
        make_batch().cell_type  # noqa: B018


def test_to_moves_every_tensor_and_keeps_the_type() -> None:
    moved = make_batch().to("meta", non_blocking=True)
    assert type(moved) is Batch
    assert {moved.X.device.type, moved.obs["type"].device.type, moved.layers["counts"].device.type} == {"meta"}


def test_to_a_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="a device; got torch.bfloat16"):
        make_batch().to(torch.bfloat16)


@pytest.mark.parametrize("copy", [default_convert, lambda b: pickle.loads(pickle.dumps(b))])
def test_converters_and_pickling_keep_type_and_values(copy) -> None:
    batch, copied = make_batch(), copy(make_batch())
    assert type(copied) is Batch
    assert torch.equal(copied.X, batch.X)
    assert torch.equal(copied.obs["type"], batch.obs["type"])


def test_collating_batches_keeps_the_type() -> None:
    collated = default_collate([make_batch(), make_batch()])
    assert type(collated) is Batch
    assert collated.X.shape == (2, 4, 3)


def test_what_dataparallel_scatters_are_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The scattering of single tensors needs GPUs; what is tested is how their container is rebuilt.
    monkeypatch.setattr(
        "torch.nn.parallel.scatter_gather.Scatter.apply", lambda devices, _, dim, x: x.chunk(len(devices), dim)
    )
    parts = scatter(make_batch(), [0, 1])
    assert [type(part) for part in parts] == [Batch, Batch]
    assert torch.equal(torch.cat([part.X for part in parts]), make_batch().X)
