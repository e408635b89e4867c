"""Under torchrun with four ranks, two data-parallel by two tensor-parallel: write the rows and errors of each rank."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dasksc
from dasksc.plan.ranks import leave_group

dist.init_process_group("gloo")
here = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def dataset(**options):
    # With seed=None, all ranks agree on the seed, also those of different groups.
    return dasksc.scDataset(np.arange(101), dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, **options)


def rows(one):
    return [batch.tolist() for batch in one]


meshed, named = dataset(group=mesh), dataset(group=mesh["dp"])
grouped = dataset(group=mesh.get_group("dp"))
found = {
    "world": [meshed.rank, meshed.world_size, dasksc.World.detect(group=mesh).local_world_size],
    "copies": [rows(copy.copy(grouped)), rows(pickle.loads(pickle.dumps(grouped)))],
}
grouped.set_epoch(0)
found |= {"epochs": [rows(meshed), rows(meshed)], "named": rows(named), "grouped": rows(grouped)}

pair = dist.new_group([0, 1])
try:
    dasksc.World.detect(group=pair)
    found["pair"] = ""
except dasksc.InputError as error:
    found["pair"] = str(error)
try:
    dataset(group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
except dasksc.InputError as error:
    found["unknown"] = str(error)

gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, found)
if here == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(gathered, file)
leave_group()
