"""What a training is: the one schema that YAML files and ``--set`` are checked against."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dasksc import InputError, MissingPathError
from dasksc.train.config_problems import problems_in
from dasksc.train.guide_layout import translated
from dasksc.train.validation_config import Paths, Validation, _Section, no_bool
from dasksc.train.yaml_trees import copied, read_yaml, set_value

__all__ = [
    *(
        "Config",
        "Data",
        "Fsdp",
        "Model",
        "Named",
        "Optimizer",
        "Predict",
        "Profile",
        "Scheduler",
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
            "expected one list, or a file; genes of several modalities are given in Python (dasksc.scDataset)"
        )
    return genes


_Genes = Annotated[list[str] | list[int] | str | None, BeforeValidator(_no_dict)]


class Named(BaseModel):
    """A name, and the arguments of what it names: ``{name: block_shuffling, block_size: 64}``, or the name alone."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def arguments(self) -> dict[str, Any]:
        """What was given beside the name."""
        return dict(self.model_extra or {})


class Open(_Section):
    """What `dasksc.open` is told: how several are joined, and how remote ones are reached."""

    join: Literal["inner", "outer"] = "inner"
    label: str | None = None
    keys: list[str] | None = None
    index_unique: str | None = None
    merge: str | None = None
    fill_value: float | None = None
    raw: bool = False
    storage_options: dict[str, Any] | None = None
    cache: str | dict[str, Any] | None = None


class Strategy(Named):
    """A sampling strategy and its arguments: ``{name: block_shuffling, block_size: 64}``."""

    name: str = "block_shuffling"


class Data(_Section):
    """What is read, and how: the arguments of `dasksc.open`, `dasksc.scDataset` and ``DataLoader``.

    Parameters
    ----------
    path
        Of the atlas; a list, dict, pattern or directory for several.
    open
        How several are joined, and remote ones reached.
    strategy
        What is drawn: the name of a strategy (``BlockShuffling`` or ``block_shuffling``) and its arguments. ``weights``
        may name an obs column.
    validation
        A share of the rows, or more (`Validation`); 0 or ``false``: none.
    batch_size
        Rows of a batch, per rank.
    genes
        Names or positions, or the path of a file with one name a line, or of a vocabulary (``.json``, ``.pkl``), whose
        genes are the columns by ascending id.
    genes_missing, genes_key, genes_repeated
        As for `dasksc.scDataset`: what becomes of names that the atlas lacks, the column of var that names are compared
        with, and what becomes of names that several columns have.
    filter
        An expression over obs, such as ``"n_counts > 500"``, in training and validation.
    num_workers, prefetch_factor
        Of a ``DataLoader``. 0 is the mode to use: threads of each rank read ahead.
    pin_memory
        Default: where there is a GPU.
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
    """How cells become tokens; what it means is for ``dasksc.tokens`` to say.

    Parameters
    ----------
    vocabulary
        The path of a file; default: the names in ``var``.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    strategy: str = "rank_value"
    vocabulary: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the vocabulary."""
        return self.model_dump(exclude={"vocabulary"})


class Model(Named):
    """A model and its arguments: ``{name: mlp_classifier, label: cell_type}``; see `dasksc.train.models`."""


class Optimizer(Named):
    """An optimizer and its arguments: ``{name: adamw, lr: 1.0e-3}``."""

    name: str = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3


class Scheduler(_Section):
    """The learning rate over the steps, as a factor of the optimizer's.

    Parameters
    ----------
    name
        ``constant``, ``cosine_warmup`` or ``linear_warmup``: what follows the warm-up.
    warmup_steps
        Over which the rate rises in a straight line.
    total_steps
        At which it reaches `final`; default: all steps of the run.
    final
        The share of the rate that is left at the end.
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
    """How parameters are sharded. That it is there selects FSDP.

    Parameters
    ----------
    sharding_strategy
        ``FULL_SHARD``; ``SHARD_GRAD_OP`` keeps parameters whole between forward and backward; ``HYBRID_SHARD`` shards
        inside groups of `shard_size` ranks and replicates across them; ``NO_SHARD`` is DDP.
    cpu_offload
        Keep parameters, gradients and the optimizer's state in the memory of the host.
    min_num_params
        Modules of at least that many parameters are gathered by themselves, the rest together.
    shard_size
        Ranks that share one copy; default: those of a node.
    activation_checkpointing
        As in `Training`; either is enough.
    """

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    cpu_offload: bool = False
    min_num_params: _Positive = 1_000_000
    shard_size: _Positive | None = None
    activation_checkpointing: bool = False


class Profile(_Section):
    """The window of steps that torch's profiler records, once, on every rank."""

    wait: _Count = 5
    warmup: _Count = 2
    active: _Positive = 3

    @model_validator(mode="before")
    @classmethod
    def _from_true(cls, value: Any) -> Any:
        return {} if value is True else value


_Logger = Literal["stdout", "csv", "tensorboard", "wandb"]


class Training(_Section):
    """How the model is trained.

    Parameters
    ----------
    strategy
        Default: ``fsdp`` where there is an `fsdp` section, else ``ddp`` on several ranks and ``single`` on one.
    gradient_accumulation
        Batches of a rank before a step.
    gradient_clip
        Largest norm of the gradient, over all ranks.
    max_epochs, max_steps
        Whichever comes first; steps of the optimizer. Neither: one epoch.
    scale_lr
        Multiply the learning rate by the number of ranks.
    activation_checkpointing
        Compute the activations of each block again in the backward pass instead of keeping them.
    num_nodes, num_gpus
        What the run is for: GPUs (on CPUs: processes) of all nodes together. A run of other size is refused; on other
        nodes, if the launcher tells how many there are (torchrun, srun; mpirun, where there is one).
    checkpoint_dir
        Where checkpoints, ``metrics.csv``, the plot and the model for inference go.
    save_every
        Steps between checkpoints, beside those of validated epochs; default: one at the end of each epoch. There is one
        at the end of the run.
    save_top_k
        How many of the best are kept beside the latest; -1: all.
    monitor, monitor_mode
        The figure that says which is best. Default: the validation loss where there is one, else that of training.
    resume_from
        ``auto``: the latest in `checkpoint_dir`, if there is one; or the path of a checkpoint.
    validate_every
        Epochs.
    profile
        ``true``, or a window of steps (`Profile`).
    find_unused_parameters
        For DDP, where a step does not use all of the model.
    timeout_s
        Seconds after which ranks that wait for another give up.
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
        """Whether either section asks for it."""
        return self.activation_checkpointing or (self.fsdp is not None and self.fsdp.activation_checkpointing)

    @property
    def loggers(self) -> list[str]:
        """Their names."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)


class Predict(_Section):
    """What is predicted at the end of the training, for every cell, by `dasksc.predict`.

    Parameters
    ----------
    out
        Path of the store to create or extend, or of the h5ad file with `in_place`.
    path
        Of the atlas to read. Default: `data.path`, all of its cells.
    key
        Name in obsm.
    method
        Of the model. Default: ``embed`` where it has that, otherwise the model itself. ``predict`` of a classifier
        writes the column ``predicted`` of obs.
    batch_size
        Rows of a batch, per rank. Default: `data.batch_size`.
    in_place, overwrite, nan
        As for `dasksc.predict`.
    """

    out: str
    path: Paths | None = None
    key: str = "X_emb"
    method: str | None = None
    batch_size: _Positive | None = None
    in_place: bool = False
    overwrite: bool = False
    nan: Literal["error", "report"] = "error"


class Config(_Section):
    """A training: what is read, what is trained, and how.

    Parameters
    ----------
    data
        What is read.
    model
        What is trained.
    training
        How.
    tokenizer
        For models of tokens.
    predict
        What is predicted at the end, if anything.
    """

    data: Data
    model: Model
    training: Training = Training()
    tokenizer: Tokenizer | None = None
    predict: Predict | None = None

    def written(self) -> dict[str, Any]:
        """Return it as it is written down: without what may be secret."""
        return self.model_dump(exclude={"data": {"open": {"storage_options"}}})

    @classmethod
    def load(cls, path: str | Path, *, changes: Iterable[str] = ()) -> Config:
        """Read a YAML file.

        Parameters
        ----------
        path
            Of the file; in the layout of this schema, or that of the published guide (`dasksc.train.guide_layout`).
        changes
            Texts such as ``training.optimizer.lr=1e-4``, whose values are read as YAML.

        Returns
        -------
        Config
            Checked.

        Raises
        ------
        MissingPathError
            If there is no such file.
        InputError
            If it is no YAML, or a key or value is not of the schema: all of them are told, with the nearest known name.
        """
        try:
            raw = read_yaml(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingPathError(f"there is no configuration at {path}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is no text file with a configuration: {error}") from error
        except yaml.YAMLError as error:
            raise InputError(f"{path} is not YAML: {error}") from error
        return cls.of(raw, changes=changes, source=str(path))

    @classmethod
    def of(cls, raw: Any, *, changes: Iterable[str] = (), source: str = "the configuration") -> Config:
        """Check what a YAML file holds.

        Parameters
        ----------
        raw
            Dicts, lists and values.
        changes
            As for `load`.
        source
            What messages call it.

        Returns
        -------
        Config
            Checked.

        Raises
        ------
        InputError
            As for `load`.
        """
        if not isinstance(raw, Mapping):
            raise InputError(f"{source} holds {type(raw).__name__}; expected sections: {', '.join(cls.model_fields)}")
        tree = copied(raw)
        for change in changes:
            set_value(tree, change)
        training = tree.get("training")
        if isinstance(training, dict) and training.get("fsdp", ...) is None and training.get("strategy") is None:
            logger.warning("training.fsdp is empty, which does not select FSDP; write fsdp: {} for all its defaults")
        try:
            return cls.model_validate(translated(tree))
        except ValidationError as error:
            raise InputError(f"{source}: {'; '.join(problems_in(cls, error))}") from error
