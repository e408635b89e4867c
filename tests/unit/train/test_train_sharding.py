"""Sharding of parameters across ranks under FSDP, as seen by one of four ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dasksc.train.parallel import Ranks, distribute, strategy_of
from dasksc.train.sections import Fsdp, Training

pytestmark = pytest.mark.core

PLACE = Ranks(rank=0, world_size=4, local_world_size=4, device=torch.device("cpu"), strategy="fsdp")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(64, 128)
        self.small = nn.Linear(128, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.small(self.large(batch["X"])).mean()}


@pytest.fixture(autouse=True, scope="module")
def _four_ranks() -> Iterator[None]:
    """Fake process group of four ranks, of which only this one exists; collectives return arbitrary values."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def spread_out(sharding_strategy: str, **options: object) -> tuple[Model, nn.Module]:
    """Return a model whose layers with 1,000 or more parameters are sharded, and the module called in training."""
    training = Training(fsdp=Fsdp(sharding_strategy=sharding_strategy, min_num_params=1000, **options))
    model = Model()
    context = dataclasses.replace(PLACE, strategy=strategy_of(training, 4))
    return model, distribute(model, training, context)


@pytest.mark.parametrize(
    ("strategy", "options", "mesh", "placements"),
    [
        ("FULL_SHARD", {}, (4,), (Shard(0),)),
        ("HYBRID_SHARD", {"shard_size": 2}, (2, 2), (Replicate(), Shard(0))),
        ("HYBRID_SHARD", {}, (1, 4), (Replicate(), Shard(0))),
    ],
)
def test_parameters_lie_on_the_mesh_that_the_strategy_says(strategy, options, mesh, placements):
    model, whole = spread_out(strategy, **options)
    assert whole is model
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert tuple(parameter.device_mesh.shape) == mesh
        assert parameter.placements == placements
    n_shards = mesh[-1]
    assert model.large.weight.to_local().shape == (128 // n_shards, 64)


@pytest.mark.parametrize(("strategy", "is_gathered"), [("FULL_SHARD", False), ("SHARD_GRAD_OP", True)])
def test_parameters_stay_gathered_after_the_forward_pass_or_not(strategy, is_gathered):
    model, whole = spread_out(strategy)
    assert isinstance(model.large.weight, DTensor)
    whole({"X": torch.ones(3, 64)})
    assert isinstance(model.large.weight, DTensor) is not is_gathered
