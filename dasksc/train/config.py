"""Configuration of a training run: sections of a YAML file whose keys are parameters of functions and classes.

The sections and their keys are declared in the signatures of `dasksc.open`, `dasksc.scDataset`, `dasksc.split`,
`dasksc.predict`, the sampling strategies, tokenizers and models, and in `dasksc.train.sections`. They are read and
checked without importing torch, anndata or numba.
"""

from __future__ import annotations

import ast
import glob
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile

from dasksc.errors import InputError, MissingPathError
from dasksc.options import REQUIRED, InvalidValue, Parser, nearest, parameters_of, parse
from dasksc.train.sections import MODELS, STRATEGIES, TOKENIZERS, Fsdp, Scheduler, Training

__all__ = ["Config", "add_sections"]

_OWN = "dasksc.train.sections"
# Parameters that a training run sets itself.
_SET_BY_RUN = {
    "scDataset": {
        *("data_collection", "strategy", "label_key", "rank", "world_size", "device", "return_index", "equal_ranks"),
        *("fetch_factor", "pin_memory"),
    },
    "open": {"data", "obs", "mmap", "names", "attach"},
    "split": {"data", "fractions", "indices"},
    "predict": {"dataset", "categories", "device", "progress"},
    "tokenizer": {"genes", "seed", "medians"},
    "predict_dataset": set(),
}
# Arguments of models that are filled in from the data, unless they are given.
_FROM_DATA = {"n_genes", "n_labels", "n_tokens", "pad_id", "n_bins", "max_seq_len"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a training run.

    Parameters
    ----------
    data
        Data to read, with the keys of the section as attributes; `open` and `validation` are dicts.
    model, tokenizer
        Name and arguments of the model, and options of the tokenizer, if there is one.
    training
        Options of the training loop.
    predict
        Prediction for all cells at the end of training, if given.

    Examples
    --------
    >>> from dasksc.train import Config
    >>> config = Config.of({"data": {"path": "atlas.h5ad"}, "model": {"name": "vae", "latent_dim": 8}})
    >>> config.data.batch_size, config.model
    (64, {'name': 'vae', 'latent_dim': 8})
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
        """Read a YAML file.

        Parameters
        ----------
        path
            Path of the file.
        changes
            Options that replace those of the file, such as ``training.optimizer.lr=1e-4``.

        Returns
        -------
        Config
            Checked configuration.

        Raises
        ------
        MissingPathError
            If there is no such file.
        InputError
            If the file is not YAML, or has an unknown key or a wrong value.
        """
        if not os.path.exists(path):
            raise MissingPathError(f"there is no configuration at {path}")
        return _parsed(["--config", os.fspath(path), *(f"--{change}" for change in changes)])

    @classmethod
    def of(cls, raw: Mapping[str, Any], *, changes: Iterable[str] = ()) -> Config:
        """Check the content of a YAML file.

        Parameters
        ----------
        raw
            Nested dicts, lists and values.
        changes
            As for `load`.

        Returns
        -------
        Config
            Checked configuration.

        Raises
        ------
        InputError
            If there is an unknown key or a wrong value.
        """
        return _parsed(["--config", yaml.safe_dump(raw), *(f"--{change}" for change in changes)])

    @classmethod
    def of_options(cls, options: Any) -> Config:
        """Check the options of a parser to which `add_sections` added the sections."""
        files = [str(one) for one in options.config or () if one is not None]
        try:
            return _checked_config(options)
        except InputError as error:
            raise (InputError(f"{files[-1]}: {error}") if files else error) from None

    def check_paths(self) -> None:
        """Raise an error for a local path that does not exist; patterns and URLs are left to `dasksc.open`."""
        given = {"data.path": self.data.path, "data.validation.path": (self.data.validation or {}).get("path")}
        for key, value in given.items():
            for path in (
                value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else value or ()
            ):
                if not ("://" in path or glob.has_magic(path) or os.path.exists(path)):
                    raise MissingPathError(f"{key}: there is no file or store at {path}")
        resumed = self.training.resume_from
        if resumed not in (None, "auto") and not Path(resumed, "state.json").exists():
            raise MissingPathError(
                f"training.resume_from={resumed!r} is not a checkpoint such as checkpoints/step-00000100"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration for logs and checkpoints, without storage options, which may contain secrets."""
        data = vars(self.data)
        shown = {**data, "open": {name: one for name, one in data["open"].items() if name != "storage_options"}}
        return {
            **{"data": shown, "model": self.model, "training": asdict(self.training)},
            **{"tokenizer": self.tokenizer, "predict": self.predict},
        }


def add_sections(parser: Parser) -> None:
    """Add ``--config``, and an option for each key of a configuration."""
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help="YAML file with the keys below.")
    parser.add_options(f"{_OWN}:Data", prefix="data.", title="data")
    parser.add_options("scDataset", prefix="data.", skip=_SET_BY_RUN["scDataset"])
    parser.add_options("open", prefix="data.open.", skip=_SET_BY_RUN["open"])
    parser.add_options(f"{_OWN}:Training", prefix="training.", skip={"optimizer"}, title="training")
    section = dict[str, Any] | None
    for name, type_, default, text in (
        ("data.strategy", str | dict[str, Any], "block_shuffling", "Name and arguments of a sampling strategy."),
        (
            "data.validation",
            float | bool | section,
            None,
            "Share of the rows to hold out, or arguments of dasksc.split.",
        ),
        ("model", str | section, None, "Name and arguments of the model."),
        ("tokenizer", section, None, "Options of the tokenizer."),
        ("training.optimizer", str | dict[str, Any], "adamw", "Name and arguments of the optimizer."),
        ("training.scheduler", str | dict[str, Any], "constant", "Schedule of the learning rate, and its arguments."),
        ("training.fsdp", section, None, "Options of FSDP; {} selects it."),
        ("predict", section, None, "Arguments of dasksc.predict, which runs at the end."),
    ):
        parser.add_argument(f"--{name}", type=type_, default=default, help=text)


class _Raising(Parser):
    """Parser whose errors are exceptions."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise InputError(str(message).partition("\n")[0].removeprefix(f"{self.prog}: "))


def _parsed(arguments: list[str]) -> Config:
    parser = _Raising("configuration", "")
    add_sections(parser)
    return Config.of_options(parser.parse_args(arguments))


def _checked_config(options: Any) -> Config:
    model = _named(options.model)
    if "name" not in model:
        raise InputError(f"model.name is missing; expected one of {', '.join(MODELS)}, or package.module:Class")
    data = Namespace(**options.data.as_dict())
    strategy = {"name": "block_shuffling"} | _named(data.strategy)
    if ":" not in strategy["name"]:
        strategy |= _checked("data.strategy", strategy, _choice("data.strategy", strategy, STRATEGIES))
    data.strategy = strategy
    validation = data.validation
    if validation is False or validation == 0:
        data.validation = None
    elif validation is not None:
        validation = {"share": validation} if isinstance(validation, float | int) else validation
        if "hold_out" in validation and "share" in validation:
            raise InputError("data.validation: hold_out and share both select the validation rows; give one of them")
        data.validation = _checked("data.validation", validation, f"{_OWN}:Validation", "split")
    if model["name"] == "vae":
        model |= {"name": "autoencoder", "variational": True}
    if ":" not in model["name"]:
        name = f"dasksc.train.models:{_choice('model', model, MODELS)}"
        model |= _checked("model", model, name, optional=_FROM_DATA)
    tokenizer = options.tokenizer
    if tokenizer is not None:
        tokenizer = {"strategy": "rank_value"} | tokenizer
        masking = tokenizer.get("masking") or {}
        kind = _choice("tokenizer", tokenizer, TOKENIZERS, "strategy")
        flat = {name: value for name, value in tokenizer.items() if name not in ("strategy", "masking")} | masking
        checked = _checked("tokenizer", flat, f"dasksc.transforms.tokens:{kind}")
        tokenizer |= {name: checked[name] for name in tokenizer.keys() & checked.keys()}
    fsdp, scheduler = options.training.fsdp, _named(options.training.scheduler)
    training = {
        **vars(options.training),
        "optimizer": _checked_optimizer({"name": "adamw"} | _named(options.training.optimizer)),
        "scheduler": Scheduler(**_checked("training.scheduler", scheduler, f"{_OWN}:Scheduler")),
        "fsdp": None if fsdp is None else Fsdp(**_checked("training.fsdp", fsdp, f"{_OWN}:Fsdp")),
    }
    predict = options.predict
    if predict is not None:
        predict = _checked("predict", predict, f"{_OWN}:Predict", "predict")
    return Config(data=data, model=model, training=Training(**training), tokenizer=tokenizer, predict=predict)


def _named(given: Any) -> dict[str, Any]:
    return {"name": given} if isinstance(given, str) else dict(given or {})


def _choice(key: str, section: Mapping[str, Any], known: Mapping[str, str], name: str = "name") -> str:
    if section[name] not in known:
        hint = nearest(str(section[name]), known) or f"; expected one of {', '.join(known)}"
        raise InputError(f"{key}.{name}={section[name]!r} is not known{hint}")
    return known[section[name]]


def _checked(key: str, given: Mapping[str, Any], *signatures: str, optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return the options of a section with the types of the parameters of signatures."""
    known = {
        one.name: one
        for signature in signatures
        for one in parameters_of(signature)
        if one.name not in _SET_BY_RUN.get(signature, ())
        and one.name not in _SET_BY_RUN["tokenizer" if key == "tokenizer" else "predict_dataset"]
    }
    checked = {}
    for name, value in given.items():
        if name == "name" and "name" not in known:
            continue
        if name not in known:
            raise InputError(
                f"{key}.{name} is not known{nearest(name, known) or f'; expected one of {chr(44).join(known)}'}"
            )
        try:
            checked[name] = parse(known[name].type, value)
        except InvalidValue as error:
            raise InputError(f"{key}.{name}: {error}") from error
    for name, one in known.items():
        if one.default is REQUIRED and name not in checked and name not in optional:
            raise InputError(f"{key}.{name} is missing: {one.help}")
    return checked


def _checked_optimizer(given: dict[str, Any]) -> dict[str, Any]:
    """Check the names of the arguments of an optimizer of torch, whose source file is read."""
    torch = find_spec("torch")
    if ":" in given["name"] or torch is None or torch.origin is None:
        return given
    path = Path(torch.origin).parent / "optim" / f"{given['name']}.py"
    if given["name"] not in ("adam", "adamw", "sgd"):
        raise InputError(
            f"training.optimizer.name={given['name']!r} is not known{nearest(given['name'], ['adam', 'adamw', 'sgd'])}"
        )
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    functions = [node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    known = [one.arg for one in functions[0].args.args + functions[0].args.kwonlyargs]
    for name in given:
        if name not in ("name", *known):
            raise InputError(f"training.optimizer.{name} is not known{nearest(name, known)}")
    return given
