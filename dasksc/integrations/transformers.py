"""Hugging Face's `Trainer` for data sets that track their rank and position.

Requires ``pip install dasksc[transformers]``. With the stock Trainer, Accelerate would distribute the batches of a
data set over the ranks a second time, so that most cells would never be used. To resume within an epoch, the
stock Trainer would read and discard all earlier batches.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_pt_utils import find_batch_size
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
    default: on several ranks, up to one cell per rank is evaluated twice, and predictions are in the order in which the
    ranks read. `dasksc.predict` writes predictions in the order of the cells.

    ``train(resume_from_checkpoint=)`` resumes with the next batch, on the same number of ranks and with the same batch
    size and ``gradient_accumulation_steps``.

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
        self._n_skipped = 0  # batches of a resumed epoch

    def get_train_dataloader(self) -> Any:
        """Return a loader of the training set."""
        self._training = _Batches(_checked(self.train_dataset), self._n_skipped)
        return _Loader(self._training, batch_size=None)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of an evaluation set, or of the Trainer's own, which a name selects if there are several."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = _checked(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        if chosen.world_size > 1 and not chosen.equal_ranks:
            raise InputError(
                "the evaluation set has equal_ranks=False: ranks may yield different numbers of batches, but the "
                "Trainer gathers after every batch, so some would wait forever. Create it with equal_ranks=True"
            )
        if chosen is self.train_dataset:
            raise InputError(
                "the evaluation set is the training set itself, whose position evaluation would change; create another "
                "scDataset"
            )
        return _Loader(_Batches(chosen), batch_size=None)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of a prediction set."""
        return self.get_eval_dataloader(test_dataset)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, or resume with the batch after that of a checkpoint (True: the latest in ``output_dir``)."""
        folder = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        dataset, accumulated = _checked(self.train_dataset), self.args.gradient_accumulation_steps
        self._n_skipped = 0
        if not folder:
            dataset.set_epoch(0)
        else:
            n_steps = TrainerState.load_from_json(str(Path(folder) / "trainer_state.json")).global_step
            epoch, n_steps = divmod(n_steps, -(-len(dataset) // accumulated))
            file = Path(folder) / _STATE_FILE
            self.args.ignore_data_skip = not file.exists()
            if not file.exists():
                logger.warning("%s does not exist, so the interrupted epoch starts from its beginning", file)
                dataset.set_epoch(epoch)
            else:
                dataset.load_state_dict(json.loads(file.read_text()))
                self._n_skipped = len(dataset) - dataset.n_batches_left
                if self._n_skipped != n_steps * accumulated:
                    raise InputError(
                        f"{folder} was saved after {self._n_skipped} batches of an epoch, but the Trainer counts "
                        f"{n_steps} steps of {accumulated}. Resume with the same number of ranks, batch size and "
                        "gradient_accumulation_steps"
                    )
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; in a checkpoint, also the position in the epoch."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.is_world_process_zero():
            (Path(output_dir) / _STATE_FILE).write_text(json.dumps(self._training.state()))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the loss of each batch weighted by its number of rows."""
        # The Trainer repeats what `prediction_step` returns as the loss by this argument.
        given, self.args.per_device_eval_batch_size = self.args.per_device_eval_batch_size, 1
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = given

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss once for each row, and what else the model returns."""
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        return (None if loss is None else loss.expand(find_batch_size(inputs)), *others)


class _Batches(IterableDataset[Any]):
    """Batches of a data set as dicts, in the first pass after `n_skipped` empty ones, which the Trainer discards."""

    def __init__(self, dataset: scDataset, n_skipped: int = 0) -> None:
        self.source, self._n_skipped, self._n_read = dataset, n_skipped, 0

    def __len__(self) -> int:
        return self.source.plan().n_rows

    def __iter__(self) -> Iterator[Any]:
        self._n_read = len(self.source) - self.source.n_batches_left
        n_skipped, self._n_skipped = self._n_skipped, 0
        yield from repeat({}, n_skipped)
        for batch in self.source:
            self._n_read += 1
            yield batch if isinstance(batch, Mapping) else {"X": batch}

    def state(self) -> dict[str, Any]:
        """Return the position; after the last batch of an epoch, the beginning of the next one."""
        state = self.source.state_dict()
        is_over = state["consumed"] and self._n_read >= len(self.source)
        return state | ({"epoch": state["epoch"] + 1, "consumed": []} if is_over else {})


class _Loader(DataLoader[Any]):
    """Loader whose length is its number of batches; the Trainer reads the number of rows from its data set."""

    def __len__(self) -> int:
        return len(self.dataset.source)  # type: ignore[attr-defined]


def _checked(dataset: Any) -> scDataset:
    if not isinstance(dataset, scDataset):
        raise InputError(f"train_dataset and eval_dataset must be a dasksc.scDataset each; got {dataset!r}")
    return dataset
