"""Hugging Face's `Trainer` for data sets that track their rank and position.

Requires ``pip install dasksc[transformers]``. With the stock Trainer, Accelerate would distribute the batches of a
data set over the ranks a second time, so that most cells would never be used. To resume within an epoch, the
stock Trainer would read and discard all earlier batches.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from dasksc import InputError, scDataset

__all__ = ["scTrainer"]

logger = logging.getLogger(__name__)

_STATE_FILE = "dasksc_state.json"


class scTrainer(Trainer):
    """A `Trainer` that reads a `dasksc.scDataset` directly and resumes it from checkpoints.

    ``train_dataset`` and ``eval_dataset`` yield whole batches, so the training arguments for loaders (workers, pinned
    memory, ``dataloader_drop_last``, batch sizes) have no effect. Nevertheless, set ``per_device_train_batch_size`` to
    the batch size of the data set, because the Trainer computes its reported figures from it. Batches are dicts: the
    ``forward`` of a model takes ``X``, ``obs`` and so on by name. Alternatively, define ``compute_loss`` in a subclass
    of `scTrainer`. Evaluation gathers results after every batch, so its data set needs ``equal_ranks=True``, the
    default.

    ``train(resume_from_checkpoint=)`` resumes with the next batch, on the same number of ranks. The Trainer counts the
    batches that remain of the epoch from 0: the reported epoch is too low, and with gradient accumulation, the last
    batches may join the first step of the next epoch.

    Examples
    --------
    >>> import torch
    >>> from transformers import TrainingArguments
    >>> from dasksc.integrations.transformers import scTrainer
    >>> class Classifier(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scores = torch.nn.Linear(300, 6)
    ...
    ...     def forward(self, X, obs, **others):
    ...         return {"loss": torch.nn.functional.cross_entropy(self.scores(X.log1p()), obs["cell_type"])}
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type"], seed=0)
    >>> quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    >>> arguments = TrainingArguments("run", max_steps=5, per_device_train_batch_size=64, **quiet)
    >>> scTrainer(Classifier(), arguments, train_dataset=dataset).train().global_step
    {'train_runtime': ...}
    5
    """

    @functools.wraps(Trainer.__init__, assigned=(), updated=())  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        n_ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if n_ranks > 1 and self.args.world_size == 1:
            raise InputError(
                f"{n_ranks} ranks were started, but TrainingArguments has world_size=1, so each rank would train a "
                "separate model. On CPUs, give TrainingArguments(use_cpu=True)"
            )
        # Labels are part of obs, so a model that returns a loss needs no argument named labels.
        self.can_return_loss = True
        self.add_callback(_SaveState(self))

    def get_train_dataloader(self) -> Any:
        """Return the training set itself."""
        return _checked(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the given evaluation set, or the Trainer's own, which a name selects if there are several."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = _checked(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        if chosen.world_size > 1 and not chosen.equal_ranks:
            raise InputError(
                "the evaluation set has equal_ranks=False: ranks may yield different numbers of batches, but the "
                "Trainer gathers after every batch, so some would wait forever. Create it with equal_ranks=True"
            )
        return chosen

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the prediction set itself."""
        return self.get_eval_dataloader(test_dataset)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, or resume with the batch after that of a checkpoint (True: the latest in ``output_dir``)."""
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if folder:
            # The data set resumes at its position, so the Trainer must not read earlier batches to skip them.
            self.args.ignore_data_skip = True
            file = Path(folder) / _STATE_FILE
            if file.exists():
                _checked(self.train_dataset).load_state_dict(json.loads(file.read_text()))
            else:
                logger.warning("%s does not exist, so the interrupted epoch starts from its beginning", file)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)


class _SaveState(TrainerCallback):
    """Callback that saves the position in the epoch with every checkpoint."""

    def __init__(self, trainer: scTrainer) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            position = _checked(self._trainer.train_dataset).state_dict()
            (folder / _STATE_FILE).write_text(json.dumps(position))


def _checked(dataset: Any) -> scDataset:
    if not isinstance(dataset, scDataset):
        raise InputError(f"train_dataset and eval_dataset must be a dasksc.scDataset each; got {dataset!r}")
    return dataset
