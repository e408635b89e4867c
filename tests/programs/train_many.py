"""Run the training configurations in a file, a dict by name, in one launch; errors are written to <name>.error."""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dasksc import DaskscError
from dasksc.plan.ranks import leave_group
from dasksc.train import Config, fit

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))  # ranks that hang fail early
trainings = Path(sys.argv[1])
for name, raw in json.loads(trainings.read_text()).items():
    try:
        fit(Config.of(raw), say=lambda line: None)
    except DaskscError as error:
        if dist.get_rank() == 0:
            (trainings.parent / f"{name}.error").write_text(str(error))
dist.barrier()
leave_group()
