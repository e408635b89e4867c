"""Train with the Hugging Face Trainer several times in one process; write the rows of each rank each time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments

import dasksc
from dasksc.integrations.transformers import scTrainer
from dasksc.plan.ranks import leave_group


class Model(torch.nn.Module):
    """Linear map that records the rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(17, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "eval": []}

    def forward(self, X: torch.Tensor, index: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        """Return the mean prediction as a loss."""
        self.seen["train" if self.training else "eval"].append(index.tolist())
        return {"loss": self.layer(X).mean(), "index": index}


def train(given: dict[str, Any]) -> None:
    """Train once, in a separate folder."""
    folder = Path(given["folder"])
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        learning_rate=1e-6,
        gradient_accumulation_steps=given.get("accumulate", 1),
    )
    common = {"batch_size": 8, "fetch_factor": 2, "obs": ["cell_type"], "seed": 3}
    training = dasksc.scDataset(given["path"], dasksc.BlockShuffling(4, indices=np.arange(50)), **common)
    held_out = dasksc.scDataset(given["path"], dasksc.Streaming(indices=np.arange(50, 60)), **common)
    model = Model()
    trainer = scTrainer(model, arguments, train_dataset=training, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=given.get("checkpoint"))
    X = torch.from_numpy(dasksc.open(given["path"]).X[50:].compute().toarray()).float()
    np.testing.assert_allclose(trainer.evaluate()["eval_loss"], model.layer(X).mean().item(), rtol=1e-4)
    (folder / f"seen-{training.rank}.json").write_text(json.dumps(model.seen))


for given in json.loads(sys.argv[1]):
    train(given)
leave_group()
