"""Data sets of a Lightning run, for either of Lightning's two packages.

Lightning restores the state of a loader only if it considers the epoch unfinished, and only if
``trainer.estimated_stepping_batches`` has not been read. The data module therefore keeps the state, since Lightning
always restores the state of a data module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from dasksc import InputError, SamplingStrategy, WrongTypeError, scDataset
from dasksc.displays import brief, constructor, with_options_of
from dasksc.plan.binding import StrategyName, is_balanced

__all__ = ["DataModule"]

_READ_IN = {"fit": ("train", "validate"), "validate": ("validate",), "test": ("test",), "predict": ("predict",)}


class DataModule:
    """Data sets of a Lightning run: one `dasksc.scDataset` for each given strategy.

    Each data set uses the rank that Lightning assigns for data-parallel training, and Lightning injects no sampler.
    Unless ``equal_ranks=False``, training yields the same number of batches on every rank. The other stages yield every
    row of their epoch exactly once, over all ranks together. Each data set counts its own epochs.

    The position in the training epoch is part of every checkpoint: ``trainer.fit(..., ckpt_path=)`` resumes with the
    next batch. The number of devices and the batch size may change; the remaining rows of the epoch are then
    redistributed.

    Parameters
    ----------
    data_collection
        As for `dasksc.scDataset`.
    batch_size
        Rows per batch, per device.
    train, validate, test, predict
        Sampling strategy of each stage, or its name. A stage without a strategy has no data set.
    fetch_factor, drop_last, fetch_callback, fetch_transform, batch_callback, batch_transform, seed, obs, layers, obsm
        As for `dasksc.scDataset`, in all stages; `drop_last` only in training.
    genes, filter, layout, dtype, equal_ranks, scheduler, prefetch, memory_limit, mmap, device, expand, pin_memory
        As for `dasksc.scDataset`, in all stages; `equal_ranks` only in training.
    progress, group, transform, genes_missing, genes_key, genes_repeated, label_key, return_index, categories
        As for `dasksc.scDataset`, in all stages; `label_key` only in those with the strategy ``"balance"``.

    Attributes
    ----------
    batch_size
        Rows per batch, per device. Lightning's batch size finder may change it.
    datasets
        Data sets by stage, created by `setup`.

    Examples
    --------
    >>> from dasksc.integrations.data_module import DataModule  # or scDataModule, with a Trainer
    >>> parts = dasksc.split("atlas.h5ad", by="donor", fractions=(0.75, 0.25), seed=0)
    >>> train = dasksc.BlockShuffling(indices=parts["train"])
    >>> data = DataModule("atlas.h5ad", 64, train=train, validate=dasksc.Streaming(parts["test"]), seed=0)
    >>> data.setup("fit")
    >>> len(data.train_dataloader()), len(data.val_dataloader())
    (25, 8)
    """

    trainer: Any = None  # set by Lightning

    @with_options_of(scDataset, without=("strategy", "rank", "world_size"))
    def __init__(
        self,
        data_collection: Any,
        batch_size: int,
        *,
        train: SamplingStrategy | StrategyName | None = None,
        validate: SamplingStrategy | StrategyName | None = None,
        test: SamplingStrategy | StrategyName | None = None,
        predict: SamplingStrategy | StrategyName | None = None,
        **options: Any,
    ) -> None:
        super().__init__()  # initializes Lightning's base class
        given = {"train": train, "validate": validate, "test": test, "predict": predict}
        self._strategies = {name: strategy for name, strategy in given.items() if strategy is not None}
        if not self._strategies:
            raise InputError("no strategy given: pass train=dasksc.BlockShuffling(), validate=dasksc.Streaming(), ...")
        if unknown := options.keys() - inspect.signature(DataModule.__init__).parameters.keys():
            raise WrongTypeError(f"{', '.join(sorted(unknown))}= is no argument; Lightning sets rank= and world_size=")
        self._data_collection = data_collection
        self.batch_size = batch_size
        self._options = options
        self.datasets: dict[str, scDataset] = {}
        self._ranks: dict[str, int] = {}

    def setup(self, stage: str | None = None) -> None:
        """Create the data sets of a stage (None: all of them) unless they exist."""
        ranks = {}
        if self.trainer is not None:
            sampler_options = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            ranks = {"rank": int(sampler_options["rank"]), "world_size": int(sampler_options["num_replicas"])}
        if ranks != self._ranks:  # the data sets were created without a trainer, or for another one
            self.datasets.clear()
            self._ranks = ranks
        wanted = self._strategies if stage is None else _READ_IN[str(getattr(stage, "value", stage))]
        for name in wanted:
            if name in self._strategies and name not in self.datasets:
                self._make(name)

    def _make(self, name: str, **options: Any) -> scDataset:
        if name != "train":
            options |= {"drop_last": False, "equal_ranks": False}
        dataset = self._read(self._strategies[name], self.batch_size, **self._ranks, **options)
        self.datasets[name] = dataset
        if name == "train":
            self._loader = _TrainingLoader(self, dataset)
        return dataset

    def _read(self, strategy: SamplingStrategy | StrategyName, batch_size: int, **options: Any) -> scDataset:
        """Return a data set; `options` take precedence over those of the module."""
        given = {**self._options, **options}
        if not is_balanced(strategy) and any(map(is_balanced, self._strategies.values())):
            given.pop("label_key", None)
        return scDataset(self._data_collection, strategy, batch_size, **given)

    def __repr__(self) -> str:
        shown = {name: brief(self.datasets.get(name, strategy)) for name, strategy in self._strategies.items()}
        return constructor(self, **shown)

    __str__ = __repr__  # the inherited one iterates over the loaders, which would begin an epoch

    # --- Hooks called by Lightning --------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the loader of the training set, which tracks the position in the epoch."""
        self._dataset("train")
        return self._loader

    def val_dataloader(self) -> Any:
        """Return the validation set; an empty list during training without validation."""
        if "validate" not in self._strategies and self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return self._dataset("validate")

    def test_dataloader(self) -> Any:
        """Return the test set."""
        return self._dataset("test")

    def predict_dataloader(self) -> Any:
        """Return the prediction set."""
        return self._dataset("predict")

    def _dataset(self, name: str) -> scDataset:
        if name not in self._strategies:
            raise InputError(f"there are strategies only for {', '.join(self._strategies)}; also pass {name}=")
        if name not in self.datasets:
            raise InputError(f"the {name} data set does not exist yet: call setup() first, as a Trainer does")
        dataset = self.datasets[name]
        if dataset.batch_size != self.batch_size:
            epoch, dataset = dataset.plan().epoch, self._make(name, seed=dataset.seed)
            dataset.set_epoch(epoch)
        return dataset

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training epochs, which is the same on every rank."""
        return self._loader.state() if "train" in self.datasets else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a position in the training epochs; stages other than training leave it as it is."""
        is_fitting = self.trainer is None or self.trainer.state.fn == "fit"
        if state_dict and "train" in self._strategies and is_fitting:
            self.setup("fit")
            self._loader.resume(state_dict)


class _TrainingLoader:
    """Loader that Lightning iterates during training; Lightning does not exhaust it."""

    def __init__(self, module: DataModule, dataset: scDataset) -> None:
        self._module, self._dataset = module, dataset
        self._position = 0  # number of batches of this epoch yielded to Lightning
        # Lightning's own count of the batches of a resumed epoch, which may have been of other ranks or batch sizes.
        self._counted = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        if self._module.trainer is not None and self._module.trainer.overfit_batches > 0:
            self._dataset.set_epoch(0)
        start = self._position = len(self) - self._dataset.n_batches_left
        for batch in self._dataset:
            if 0 < start == self._position and self._module.trainer is not None:
                # After a run that ended by itself within the epoch, Lightning counts the rest of it from 0.
                self._move_count(start - self._module.trainer.fit_loop.epoch_loop.batch_progress.current.ready)
            self._position += 1
            yield batch

    @property
    def _n_batches(self) -> Any:  # infinite for a trainer that has not trained
        return len(self) if self._module.trainer is None else self._module.trainer.num_training_batches

    def state(self) -> dict[str, Any]:
        dataset = self._dataset.state_dict()
        if dataset["consumed"] and self._position >= self._n_batches:
            dataset = {**dataset, "epoch": dataset["epoch"] + 1, "consumed": []}
        return {"dataset": dataset, "position": self._position}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(state["dataset"])
        self._position = len(self) - self._dataset.n_batches_left
        self._counted = state["position"]

    def state_dict(self) -> dict[str, Any]:
        # Lightning resumes within an epoch only if the loader has this method. The data module keeps the state.
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass

    @property
    def sampler(self) -> _TrainingLoader:
        """Sampler whose `set_epoch` Lightning calls when an epoch begins or resumes, after restoring its own counts."""
        return self

    def set_epoch(self, epoch: int) -> None:
        # Lightning's epoch number is ignored: a second trainer starts again at 0, whereas the data set continues its
        # own count.
        counted, self._counted = self._counted, 0
        if counted and self._module.trainer is not None:
            # The position 0 is that after the last batch of an epoch, which Lightning has yet to finish.
            self._move_count((self._position or self._n_batches) - counted)

    def _move_count(self, n: int) -> None:
        """Add to the number of batches of this epoch that Lightning has counted."""
        count = self._module.trainer.fit_loop.epoch_loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(count, name, getattr(count, name) + n)
