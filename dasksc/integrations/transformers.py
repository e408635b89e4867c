"""Hugging Face's `Trainer` over data sets that know their rank and their place.

Needs ``pip install dasksc[transformers]``. The stock Trainer would have Accelerate deal the batches of a data set to
the ranks once more, so that most cells are seen by nobody, and would skip to a place in an epoch by reading all
that comes before it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dasksc import InputError, scDataset

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "dasksc.integrations.transformers needs transformers and accelerate: pip install 'dasksc[transformers]'"
    ) from error

__all__ = ["scTrainer"]

logger = logging.getLogger(__name__)

_STATE_FILE = "dasksc_state.json"


class scTrainer(Trainer):
    """A `Trainer` whose data sets are `dasksc.scDataset`: read as they are, and gone on with from checkpoints.

    ``train_dataset`` and ``eval_dataset`` yield whole batches, so what the arguments say of loaders (workers, pinning,
    dropping, batch sizes) does not apply; ``per_device_train_batch_size`` should still be the data set's, for
    the Trainer's own figures. Batches are dicts: a model's ``forward`` takes ``X``, ``obs`` and so on by name, or
    a subclass has a ``compute_loss``. Evaluation gathers after every batch, so its data set must keep
    ``equal_ranks=True``.

    ``train(resume_from_checkpoint=)`` goes on with the very next batch, on the same number of ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Labels are among obs, so a model that returns a loss needs no argument called labels.
        self.can_return_loss = True
        self.add_callback(_SaveState(self))

    def get_train_dataloader(self) -> Any:
        """Return the training set itself."""
        return _checked(self.train_dataset, "train_dataset")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation set itself.

        Parameters
        ----------
        eval_dataset
            Instead of the Trainer's own, or the name of one of them.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        chosen = _checked(chosen, "eval_dataset")
        if chosen.world_size > 1 and not chosen.equal_ranks:
            raise InputError(
                "eval_dataset has equal_ranks=False: ranks may yield unequally many batches, and the Trainer gathers "
                "after every batch, so some would wait for ever. Make it with equal_ranks=True"
            )
        return chosen

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return what to predict, itself.

        Parameters
        ----------
        test_dataset
            A `dasksc.scDataset`.
        """
        return self.get_eval_dataloader(test_dataset)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint's very next batch if one is given.

        Parameters
        ----------
        resume_from_checkpoint
            A folder, or True for the latest in ``output_dir``.
        *args, **kwargs
            For ``Trainer.train``.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            self._restore(Path(folder) / _STATE_FILE)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _restore(self, file: Path) -> None:
        # What was read is not to be read again in order to skip it.
        self.args.ignore_data_skip = True
        if file.exists():
            _checked(self.train_dataset, "train_dataset").load_state_dict(json.loads(file.read_text()))
        else:
            logger.warning("%s is not there: the epoch that was left begins at its start", file)


class _SaveState(TrainerCallback):
    """Keeps the place in the epoch beside every checkpoint."""

    def __init__(self, trainer: scTrainer) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            place = _checked(self._trainer.train_dataset, "train_dataset").state_dict()
            (folder / _STATE_FILE).write_text(json.dumps(place))


def _checked(dataset: Any, name: str) -> scDataset:
    if not isinstance(dataset, scDataset):
        raise InputError(f"{name} must be a dasksc.scDataset, which yields whole batches; got {dataset!r}")
    return dataset
