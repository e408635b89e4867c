"""Schema of a training configuration, which validates YAML files and ``--set`` options."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dasksc import InputError
from dasksc.train.config_problems import problems_in
from dasksc.train.guide_layout import translated
from dasksc.train.validation_config import Paths, Validation, _Section, no_bool
from dasksc.train.yaml_trees import changed, read_file

__all__ = [
    *(
        "Config",
        "Data",
        "Fsdp",
        "Scheduler",
        "Model",
        "Named",
        "Optimizer",
        "Predict",
        "Profile",
        "Strategy",
        "Tokenizer",
        "Training",
    )
]

logger = logging.getLogger(__name__)


def _none_if_off(value: Any) -> Any:
    return None if value is False or value == 0 else value


_Positive = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]
_Count = Annotated[int, Field(ge=0), BeforeValidator(no_bool)]


def _no_dict(genes: Any) -> Any:
    if isinstance(genes, Mapping):
        raise ValueError(
            "expected one list, or a file; genes of several modalities can be set only in Python (dasksc.scDataset)"
        )
    return genes


_Genes = Annotated[list[str] | list[int] | str | None, BeforeValidator(_no_dict)]


class Named(BaseModel):
    """Name and arguments of an object: ``{name: block_shuffling, block_size: 64}``, or the name alone."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments given in addition to the name."""
        return dict(self.model_extra or {})


class Open(_Section):
    """Options of `dasksc.open`: joining several atlases, access to remote ones, and features of 10x files."""

    join: Literal["inner", "outer"] = "inner"
    label: str | None = None
    keys: list[str] | None = None
    index_unique: str | None = None
    merge: str | None = None
    fill_value: float | None = None
    raw: bool = False
    storage_options: dict[str, Any] | None = None
    cache: str | dict[str, Any] | None = None
    feature_types: str | list[str] | None = None
    genome: str | list[str] | None = None


class Strategy(Named):
    """A sampling strategy and its arguments: ``{name: block_shuffling, block_size: 64}``."""

    name: str = "block_shuffling"


class Data(_Section):
    """Data to read: the arguments of `dasksc.open`, `dasksc.scDataset` and ``DataLoader``.

    Parameters
    ----------
    path
        Path of the atlas; a list, dict, pattern or directory for several atlases.
    open
        Options for joining several atlases and for accessing remote ones.
    strategy
        Name of a sampling strategy (``shuffle``, ``stream``, ``balance``; or a class name such as ``CellSets`` or
        ``cell_sets``) and its arguments. ``weights`` may name an obs column.
    validation
        Share of the rows held out for validation, or detailed options (`Validation`); 0 or ``false`` for none.
    batch_size
        Number of rows in a batch, per rank.
    genes
        Names or positions of genes, or the path of a file: one name per line, or a vocabulary (``.json``, ``.pkl``),
        whose genes become the columns in ascending order of their ids.
    genes_missing, genes_key, genes_repeated
        As for `dasksc.scDataset`: treatment of names that the atlas lacks, column of var that has the names, and
        treatment of names that several columns share.
    filter
        Expression over obs, such as ``"n_counts > 500"``, applied in training and validation.
    num_workers, prefetch_factor
        Arguments of the ``DataLoader``. 0 workers are recommended, since threads of each rank read ahead.
    pin_memory
        If True, batches are in pinned memory. Default: True on a GPU.
    """

    path: Paths
    open: Open = Open()
    strategy: Strategy = Strategy()
    validation: Annotated[Validation | None, BeforeValidator(_none_if_off)] = None
    batch_size: _Positive = 64
    fetch_factor: _Positive | None = 64
    drop_last: bool = False
    obs: list[str] = Field(default=[])
    layers: list[str] = Field(default=[])
    obsm: list[str] = Field(default=[])
    genes: _Genes = None
    genes_missing: Literal["error", "zero", "drop"] = "error"
    genes_key: str | None = None
    genes_repeated: Literal["error", "sum"] = "error"
    filter: str | None = None
    layout: Literal["dense", "csr"] = "dense"
    dtype: str | None = "float32"
    equal_ranks: Literal[True] = True
    scheduler: str | None = None
    prefetch: _Positive | None = None
    memory_limit: int | str | None = None
    mmap: bool | Literal["auto"] = "auto"
    progress: bool = False
    seed: int | None = None
    num_workers: _Count = 0
    prefetch_factor: _Positive | None = None
    pin_memory: bool | None = None


class Tokenizer(_Section):
    """Tokenization of cells. `dasksc.tokens` documents and validates the options.

    Parameters
    ----------
    vocabulary
        Path of a vocabulary file; default: the gene names in ``var``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    strategy: str = "rank_value"
    vocabulary: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """All options except the vocabulary."""
        return self.model_dump(exclude={"vocabulary"})


class Model(Named):
    """A model and its arguments: ``{name: mlp_classifier, label: cell_type}``; see `dasksc.train.models`."""


class Optimizer(Named):
    """An optimizer and its arguments: ``{name: adamw, lr: 1.0e-3}``."""

    name: str = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3


class Scheduler(_Section):
    """Learning rate schedule: the learning rate of a step is that of the optimizer times a factor.

    Parameters
    ----------
    name
        ``constant``, ``cosine_warmup`` or ``linear_warmup``: the shape after the warm-up (constant, cosine decay or
        linear decay).
    warmup_steps
        Number of steps over which the rate increases linearly.
    total_steps
        Step at which the factor reaches `final`; default: the last step of the run.
    final
        Factor at the end of the schedule, in [0, 1].
    """

    name: Literal["constant", "cosine_warmup", "linear_warmup"] = "constant"
    warmup_steps: _Count = 0
    total_steps: _Positive | None = None
    final: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Fsdp(_Section):
    """Sharding of parameters. The presence of this section selects FSDP, unless `Training.strategy` is set.

    Parameters
    ----------
    sharding_strategy
        ``FULL_SHARD``; ``SHARD_GRAD_OP`` keeps parameters gathered between forward and backward passes;
        ``HYBRID_SHARD`` shards within groups of `shard_size` ranks and replicates across groups; ``NO_SHARD`` is DDP.
    cpu_offload
        Keep parameters, gradients and optimizer state in host memory.
    min_num_params
        Modules with at least this many parameters are sharded and gathered separately, the others together.
    shard_size
        Number of ranks that share one copy of the parameters; default: the ranks of a node.
    activation_checkpointing
        As in `Training`; setting either enables it.
    """

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    cpu_offload: bool = False
    min_num_params: _Positive = 1_000_000
    shard_size: _Positive | None = None
    activation_checkpointing: bool = False


class Profile(_Section):
    """Window of steps that the torch profiler records once, on every rank."""

    wait: _Count = 5
    warmup: _Count = 2
    active: _Positive = 3

    @model_validator(mode="before")
    @classmethod
    def _from_true(cls, value: Any) -> Any:
        return {} if value is True else value


_Logger = Literal["stdout", "csv", "tensorboard", "wandb"]


class Training(_Section):
    """Options of the training loop.

    Parameters
    ----------
    strategy
        Default: ``fsdp`` if there is an `fsdp` section, else ``ddp`` on several ranks and ``single`` on one.
    gradient_accumulation
        Number of batches per rank before an optimizer step.
    gradient_clip
        Maximum norm of the gradient, over all ranks.
    max_epochs, max_steps
        Maximum number of epochs and of optimizer steps; the run ends when it reaches either. Default: one epoch.
    scale_lr
        Multiply the learning rate by the number of ranks.
    activation_checkpointing
        Recompute the activations of each block in the backward pass instead of storing them.
    num_nodes, num_gpus
        Expected number of nodes, and expected number of GPUs over all nodes. On CPUs, `num_gpus` is the number of
        processes. A run with different numbers raises an error. The number of nodes is checked only if the launcher
        reports it: torchrun and srun do, and mpirun does on a single node.
    checkpoint_dir
        Directory of checkpoints, ``metrics.csv``, the plot and the model for inference.
    save_every
        Number of steps between checkpoints. Default: one checkpoint at the end of each epoch. A checkpoint is also
        written after each validation, unless `save_top_k` is 0. A checkpoint is always written at the end of the run.
    save_top_k
        Number of best checkpoints to keep in addition to the latest; -1 keeps all.
    monitor, monitor_mode
        Metric that determines the best checkpoint, and its direction. Default: the validation loss if there is one,
        else the training loss.
    resume_from
        ``auto`` for the latest checkpoint in `checkpoint_dir`, if there is one; or the path of a checkpoint.
    validate_every
        Number of epochs between validations.
    profile
        ``true``, or a window of steps (`Profile`).
    find_unused_parameters
        Option of DDP for models that do not use all of their parameters in each step.
    timeout_s
        Time after which a rank that waits for another raises an error, in seconds.
    """

    strategy: Literal["single", "dp", "ddp", "fsdp"] | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    gradient_accumulation: _Positive = 1
    gradient_clip: Annotated[float, Field(gt=0)] | None = None
    max_epochs: _Positive | None = None
    max_steps: _Positive | None = None
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    scale_lr: bool = False
    seed: int = 0
    activation_checkpointing: bool = False
    fsdp: Fsdp | None = None
    num_nodes: _Positive | None = None
    num_gpus: _Positive | None = None
    checkpoint_dir: str = "checkpoints"
    save_every: _Positive | None = None
    save_top_k: Annotated[int, Field(ge=-1)] = 1
    monitor: str | None = None
    monitor_mode: Literal["min", "max"] | None = None
    resume_from: str | None = None
    validate_every: _Positive = 1
    logger: _Logger | list[_Logger] = "stdout"
    wandb_project: str | None = None
    log_every_n_steps: _Positive = 50
    profile: Annotated[Profile | None, BeforeValidator(_none_if_off)] = None
    find_unused_parameters: bool = False
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0

    @property
    def checkpoints_activations(self) -> bool:
        """True if either section enables activation checkpointing."""
        return self.activation_checkpointing or (self.fsdp is not None and self.fsdp.activation_checkpointing)

    @property
    def loggers(self) -> list[str]:
        """Names of the loggers."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)


class Predict(_Section):
    """Prediction for every cell at the end of training, by `dasksc.predict`.

    Parameters
    ----------
    out
        Path of the store to create or extend.
    path
        Path of the atlas to read. Default: `data.path`. Predictions are made for all of its cells.
    key
        Name in obsm.
    method
        Method of the model. Default: ``embed`` if it has one, otherwise the model itself. ``predict`` of a classifier
        writes the column ``predicted`` of obs.
    batch_size
        Rows of a batch, per rank. Default: `data.batch_size`.
    overwrite, nan
        As for `dasksc.predict`.
    """

    out: str
    path: Paths | None = None
    key: str = "X_emb"
    method: str | None = None
    batch_size: _Positive | None = None
    overwrite: bool = False
    nan: Literal["error", "report"] = "error"


class Config(_Section):
    """Configuration of a training run.

    Parameters
    ----------
    data
        Data to read.
    model
        Model to train.
    training
        Options of the training loop.
    tokenizer
        Tokenization of cells, for models of tokens.
    predict
        Prediction for all cells at the end of training, if given.

    Examples
    --------
    >>> from dasksc.train import Config
    >>> config = Config.of({"data": {"path": "atlas.h5ad"}, "model": {"name": "vae", "latent_dim": 8}})
    >>> config.data.batch_size, config.model.arguments
    (64, {'latent_dim': 8})
    >>> config.training.optimizer.name, config.training.precision
    ('adamw', '32-true')
    """

    data: Data
    model: Model
    training: Training = Training()
    tokenizer: Tokenizer | None = None
    predict: Predict | None = None

    def written(self) -> dict[str, Any]:
        """Return the configuration for logs and checkpoints, without storage options, which may contain secrets."""
        return self.model_dump(exclude={"data": {"open": {"storage_options"}}})

    @classmethod
    def load(cls, path: str | Path, *, changes: Iterable[str] = ()) -> Config:
        """Read a YAML file.

        Parameters
        ----------
        path
            Path of the file, in the layout of the YAML schema or in the alternative layout
            (`dasksc.train.guide_layout`).
        changes
            Overrides such as ``training.optimizer.lr=1e-4``, whose values are parsed as YAML.

        Returns
        -------
        Config
            Validated configuration.

        Raises
        ------
        MissingPathError
            If there is no such file.
        InputError
            If the file is not YAML, or keys or values do not match the schema. The message lists all of them, with
            the nearest valid name.
        """
        return cls.of(read_file(path), changes=changes, source=str(path))

    @classmethod
    def of(cls, raw: Any, *, changes: Iterable[str] = (), source: str = "the configuration") -> Config:
        """Validate the content of a YAML file.

        Parameters
        ----------
        raw
            Nested dicts, lists and values.
        changes
            As for `load`.
        source
            Name of the configuration in error messages.

        Returns
        -------
        Config
            Validated configuration.

        Raises
        ------
        InputError
            As for `load`.
        """
        if not isinstance(raw, Mapping):
            content = "is empty" if raw is None else f"contains a {'list' if isinstance(raw, list) else 'single value'}"
            raise InputError(f"{source} {content}; expected sections: {', '.join(cls.model_fields)}")
        tree = changed(raw, changes)
        training = tree.get("training")
        if isinstance(training, dict) and training.get("fsdp", ...) is None and training.get("strategy") is None:
            logger.warning("training.fsdp is empty, which does not select FSDP; write fsdp: {} to use the defaults")
        try:
            return cls.model_validate(translated(tree))
        except ValidationError as error:
            raise InputError(f"{source}: {'; '.join(problems_in(cls, error))}") from error
