"""Under torchrun: say which rank this is, before there is a process group and after."""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

import dasksc
from dasksc.world import leave_group

logging.basicConfig(level=logging.INFO, stream=sys.stdout)


def tell(when: str) -> None:
    world = dasksc.World.detect()
    print(f"{when}: rank {world.rank} of {world.world_size} from {world.source}", flush=True)


tell("before")
dist.init_process_group("gloo")
tell("after")
leave_group()
