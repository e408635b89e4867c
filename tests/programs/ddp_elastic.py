"""Training that resumes from its checkpoint: two epochs under DDP, where one rank is killed in the first epoch.

    ddp_elastic.py FOLDER KILLED [AGENT]

Each rank records its batches in FOLDER/batches-<attempt>-<rank>. The rank KILLED (-1: none) kills itself before step
5 of the first attempt. With AGENT, it also kills its agent, as if a machine were lost.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dasksc
from dasksc.plan.process_groups import leave_group

folder, killed, takes_agent = Path(sys.argv[1]), int(sys.argv[2]), "AGENT" in sys.argv[3:]
dist.init_process_group("gloo", timeout=dt.timedelta(seconds=20))
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while (folder / f"batches-{attempt}-{rank}").exists():
    attempt += 1  # a restart by another torchrun
dataset = dasksc.scDataset(np.arange(203.0), dasksc.BlockShuffling(4), batch_size=7, fetch_factor=2, seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
checkpoint = folder / "checkpoint"
first_epoch = n_before = 0
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    model.load_state_dict({name: torch.tensor(value) for name, value in saved["model"].items()})
    dataset.load_state_dict(saved["data"])
    first_epoch = saved["data"]["epoch"]
    n_before = sum(segment[-1] for segment in saved["data"]["consumed"])

with open(folder / f"batches-{attempt}-{rank}", "w", buffering=1) as notes:
    for epoch in range(first_epoch, 2):
        for step, batch in enumerate(dataset, n_before):
            if (rank, attempt, epoch, step) == (killed, 0, 0, 5):
                if takes_agent:
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.as_tensor(batch).reshape(-1, 1).float() / 203).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            print(json.dumps([epoch, step, np.asarray(batch).astype(int).tolist()]), file=notes)
            if rank == 0 and step % 2 == 0:
                weights = {name: value.tolist() for name, value in model.state_dict().items()}
                partial = folder / "checkpoint.partial"
                partial.write_text(json.dumps({"model": weights, "data": dataset.state_dict()}))
                partial.rename(checkpoint)
        n_before = 0
dist.barrier()
if rank == 0:
    (folder / "finished").write_text(json.dumps([dist.get_world_size(), model.module.weight.item()]))
leave_group()
