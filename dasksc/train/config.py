"""Configuration of a training run: sections of a YAML file whose keys are parameters of functions and classes.

The sections and their keys are declared in the signatures of `dasksc.open`, `dasksc.scDataset`, `dasksc.split`,
`dasksc.predict`, the sampling strategies, tokenizers and models, and in `dasksc.train.sections`. They are read and
checked without importing torch, anndata or numba.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

from dasksc.errors import InputError, MissingPathError
from dasksc.options import REQUIRED, InvalidValue, Parameter, Parser, check_path, nearest, parameters_of, parse
from dasksc.train.sections import MODELS, OPTIMIZERS, STRATEGIES, TOKENIZERS, Fsdp, Scheduler, Training

_SECTIONS = "dasksc.train.sections"
_PATHS = str | list[str] | dict[str, str]
# Keys of a section in addition to the parameters of a function.
_ADDED = {
    "scDataset": (
        Parameter("path", _PATHS, REQUIRED, "Path of the atlas; a list, dict, pattern or directory for several"),
    ),
    "split": (Parameter("share", float, 0.1, "Share of the rows to hold out; with by or conditions, of their values"),),
    "predict": (
        Parameter("path", _PATHS | None, None, "Path of the atlas to read, with all of its cells; null: data.path"),
        Parameter("method", str | None, None, "Method of the model; null: embed if it has one, else the model itself"),
        Parameter("batch_size", int | None, None, "Rows of a batch, per rank; null: data.batch_size"),
    ),
}
# Parameters that a run sets itself, and arguments of models that it takes from the data unless they are given.
_OF_RUN = {
    *("data", "data_collection", "dataset", "model", "strategy", "label_key", "rank", "world_size", "device", "group"),
    *("expand", "pin_memory", "return_index", "names", "attach", "fractions", "categories", "medians", "progress"),
}
_FROM_DATA = {"n_genes", "n_labels", "n_tokens", "pad_id", "n_bins", "max_seq_len"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a training run.

    Parameters
    ----------
    data
        Data to read, with the keys of the section as attributes; `open` and `validation` are dicts.
    model
        Name and arguments of the model.
    training
        Options of the training loop.
    tokenizer, predict
        Options of the tokenizer, and of the prediction for all cells at the end of training; None if not given.

    Examples
    --------
    >>> from dasksc.train import Config
    >>> config = Config.of({"data": {"path": "atlas.h5ad"}, "model": {"name": "vae", "latent_dim": 8}})
    >>> config.data.batch_size, config.model["latent_dim"]
    (64, 8)
    >>> config.training.optimizer, config.training.precision
    ({'name': 'adamw'}, '32-true')
    """

    data: Any
    model: dict[str, Any]
    training: Training
    tokenizer: dict[str, Any] | None = None
    predict: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, changes: Iterable[str] = ()) -> Config:
        """Read and check a YAML file; `changes` replace its options, such as ``training.optimizer.lr=1e-4``."""
        if not os.path.exists(path):
            raise MissingPathError(f"there is no configuration at {path}")
        return _parsed(["--config", os.fspath(path), *(f"--{change}" for change in changes)])

    @classmethod
    def of(cls, raw: Mapping[str, Any], *, changes: Iterable[str] = ()) -> Config:
        """Check the content of a YAML file: nested dicts, lists and values."""
        return _parsed(["--config", yaml.safe_dump(raw, sort_keys=False), *(f"--{change}" for change in changes)])

    @classmethod
    def of_options(cls, options: Any) -> Config:
        """Check the options of a parser to which `add_sections` added the sections."""
        files = [f"{one}: " for one in options.config or () if one is not None]
        try:
            return _checked_config(options)
        except InputError as error:
            raise InputError(f"{files[-1] if files else ''}{error}") from error

    def check_paths(self) -> None:
        """Raise an error for a local path that does not exist; patterns and URLs are left to `dasksc.open`."""
        given = {"data.path": self.data.path, "predict.path": (self.predict or {}).get("path")}
        for key, value in given.items():
            paths = value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else value or ()
            for path in paths:
                try:
                    check_path(path)
                except MissingPathError as error:
                    raise MissingPathError(f"{key}: {error}") from error
        resumed = self.training.resume_from
        if resumed not in (None, "auto") and not Path(str(resumed), "state.json").exists():
            raise MissingPathError(f"training.resume_from: there is no checkpoint at {resumed}")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration for logs and checkpoints, without storage options, which may contain secrets."""
        data = {**vars(self.data), "open": {**self.data.open, "storage_options": None}}
        return {**vars(self), "data": data, "training": asdict(self.training)}


def add_sections(parser: Parser) -> None:
    """Add ``--config``, and an option for each key of a configuration."""
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help="YAML file with the keys below")
    skipped = (_OF_RUN | {"equal_ranks"}) - {"progress"}
    parser.add_options("scDataset", *_ADDED["scDataset"], prefix="data.", skip=skipped, title="data", fetch_factor=64)
    parser.add_options("open", prefix="data.open.", skip=_OF_RUN | {"obs", "mmap"})
    parser.add_options(f"{_SECTIONS}:Training", prefix="training.", skip={"optimizer"}, title="training")
    named, section = str | dict[str, Any], dict[str, Any] | None
    parser.add_argument("--data.strategy", type=named, default="block_shuffling", help="Strategy and its arguments")
    parser.add_argument("--data.validation", type=float | bool | section, help="Share, or arguments of dasksc.split")
    parser.add_argument("--model", type=str | section, help="Name and arguments of the model")
    parser.add_argument("--tokenizer", type=section, help="Strategy, and arguments of dasksc.tokens")
    parser.add_argument("--training.optimizer", type=named, default="adamw", help="Name and arguments")
    parser.add_argument("--training.scheduler", type=named, default="constant", help="Name and arguments")
    parser.add_argument("--training.fsdp", type=section, help="Options of FSDP; {} selects it")
    parser.add_argument("--predict", type=section, help="Arguments of dasksc.predict, which runs at the end")


class _Raising(Parser):
    """Parser whose errors are exceptions."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise InputError(str(message).partition("\nAll options")[0].removeprefix(f"{self.prog}: "))


def _parsed(arguments: list[str]) -> Config:
    parser = _Raising("configuration", "")
    add_sections(parser)
    return Config.of_options(parser.parse_args(arguments))


def _checked_config(options: Any) -> Config:
    sections = {"data": options.data, "training": options.training, "data.open": getattr(options.data, "open", None)}
    for name, one in sections.items():
        if not hasattr(one, "as_dict"):
            raise InputError(f"{name} must be a section of keys with their values, not {one!r}; leave out an empty one")
    data, training = Namespace(**options.data.as_dict()), options.training.as_dict()
    data.strategy = _named("data.strategy", {"name": "block_shuffling"} | _as_dict(data.strategy), STRATEGIES)
    if data.validation is False or data.validation == 0:
        data.validation = None
    if data.validation is not None:
        validation = {"share": data.validation} if isinstance(data.validation, float | int) else data.validation
        if "hold_out" in validation and "share" in validation:
            raise InputError("data.validation: hold_out and share both select the validation rows; give one of them")
        data.validation = _checked("data.validation", validation, "split")
    model = _as_dict(options.model)
    if model.get("name") == "vae":
        model |= {"name": "autoencoder", "variational": True}
    model = _named("model", model, MODELS)
    tokenizer = options.tokenizer
    if tokenizer is not None:
        flat = {name: one for name, one in tokenizer.items() if name not in ("strategy", "masking")}
        flat["name"] = tokenizer.get("strategy", "rank_value")
        masking = tokenizer.get("masking") or {}
        if not isinstance(masking, dict):
            raise InputError(f"tokenizer.masking={masking!r} must be a section, such as {{mask_ratio: 0.15}}")
        tokenizer = _named("tokenizer", flat | masking, TOKENIZERS)
    scheduler, fsdp, predict = _as_dict(training["scheduler"]), training["fsdp"], options.predict
    optimizer = {"name": "adamw"} | _as_dict(training["optimizer"])
    training["optimizer"] = _named("training.optimizer", optimizer, OPTIMIZERS)
    training["scheduler"] = Scheduler(**_checked("training.scheduler", scheduler, f"{_SECTIONS}:Scheduler"))
    training["fsdp"] = None if fsdp is None else Fsdp(**_checked("training.fsdp", fsdp, f"{_SECTIONS}:Fsdp"))
    if predict is not None:
        predict = _checked("predict", predict, "predict")
    return Config(data=data, model=model, training=Training(**training), tokenizer=tokenizer, predict=predict)


def _as_dict(given: Any) -> dict[str, Any]:
    return {"name": given} if isinstance(given, str) else dict(given or {})


def _named(key: str, given: Any, known: Mapping[str, str]) -> dict[str, Any]:
    """Return the name of a class and its checked arguments; those of an import path are checked when it is imported."""
    section = _as_dict(given)
    if "name" not in section:
        raise InputError(f"{key}.name is missing; expected one of {', '.join(known)}, or package.module:Class")
    name = str(section.pop("name"))
    if ":" in name:
        return {"name": name, **section}
    if name not in known:
        advice = nearest(name, known) or f"; expected one of {', '.join(known)}."
        raise InputError(f"{key}: there is no {name!r}{advice} To use your own, give package.module:Class")
    return {"name": name, **_checked(key, section, known[name].removeprefix("dasksc:"))}


def keys_of(name: str) -> dict[str, Parameter]:
    """Return the keys of a section of a configuration, which are parameters of a function or class and a few more."""
    hidden = _OF_RUN - {"label_key"}
    known = (*_ADDED.get(name, ()), *parameters_of(name))
    return {one.name: one for one in known if one.name not in hidden}


def _checked(key: str, given: Mapping[str, Any], signature: str) -> dict[str, Any]:
    """Return the options of a section with the types of the parameters of a function or class."""
    known, checked = keys_of(signature), {}
    for name, value in given.items():
        if name not in known:
            raise InputError(
                f"there is no option {key}.{name}{nearest(name, known) or f'; {key} has ' + ', '.join(known)}"
            )
        try:
            checked[name] = parse(known[name].type, value)
        except InvalidValue as error:
            raise InputError(f"{key}.{name}: {error}") from error
    for name, one in known.items():
        if one.default is REQUIRED and name not in {*checked, *_FROM_DATA, "genes"}:
            raise InputError(f"{key}.{name} is missing: {one.help}")
    return checked


def found(name: str, known: Mapping[str, str], *, what: str) -> Any:
    """Return the object that a known name or ``package.module:name`` stands for; errors name the key `what`."""
    module, _, attribute = known.get(name, name).partition(":")
    try:
        return attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{what}={name!r} cannot be imported: {error}. Give package.module:name; is its directory on PYTHONPATH?"
        ) from error


def created(make: Callable[..., Any], arguments: Mapping[str, Any], *, what: str) -> Any:
    """Call a class with arguments of a section of the configuration, which errors name."""
    try:
        return make(**arguments)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:  # torch raises all of these
        raise InputError(f"{what}: {error}") from error
