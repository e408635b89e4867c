"""Checkpoints, written collectively by all ranks with ``torch.distributed.checkpoint``.

A checkpoint is a directory ``step-<number>``. It contains the shards of the model, the optimizer and the random
states, which any number of ranks can load under any strategy, and ``state.json`` with everything else. The directory
is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dasksc import CorruptDataError, DaskscError, InputError, MissingPathError, StorageError
from dasksc.train.parallel import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints of a run in a folder that all ranks see: the latest, and the `keep` best (-1: all)."""

    folder: Path
    keep: int
    is_larger_better: bool
    ranks: Ranks

    def all(self) -> list[Path]:
        """Return the complete checkpoints in ascending order of their steps."""
        # Copies under other names belong to the user.
        return sorted(path.parent for path in self.folder.glob(f"step-{'[0-9]' * 8}/state.json"))

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def find(self, resume_from: str | None) -> Path | None:
        """Return the checkpoint to resume from, or None to start a new run. All ranks must call this method."""
        existing = [Path(path) for path in self.ranks.broadcast([str(path) for path in self.all()])]
        if resume_from == "auto":
            return existing[-1] if existing else None
        path = None if resume_from is None else Path(resume_from)
        if existing and (path is None or path.resolve() != existing[-1].resolve()):
            raise InputError(
                f"{self.folder} has checkpoints of another run, the latest {existing[-1].name}. Resume it with "
                "training.resume_from=auto, or give another training.checkpoint_dir"
            )
        return path

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; ``state["values"]`` rates the candidates for the best. All ranks call this method."""
        path = self.path_of(step)
        partial = path.with_name(path.name + ".partial")
        unwritten = f"the checkpoint {path} cannot be written"

        def begin() -> None:
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.gone")]:
                shutil.rmtree(leftover)  # left by a run that was killed
            partial.mkdir(parents=True)

        def complete() -> None:
            with open(partial / "state.json", "w") as file:
                json.dump({"step": step, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
            self._prune(path, state["values"])

        self.ranks.on_rank_zero(begin, unwritten)
        tensors = _tensors_of(model, optimizer) | _random_state(self.ranks)
        with _converted_errors(StorageError, f"{partial} cannot be written", "Is there space left?"):
            save(tensors, checkpoint_id=partial)
        self.ranks.on_rank_zero(complete, unwritten)

    def _prune(self, latest: Path, values: Mapping[str, float]) -> None:
        if self.keep < 0:
            return
        existing = set(self.all())
        rated = [(value, path) for step, value in values.items() if (path := self.path_of(int(step))) in existing]
        best = sorted(rated, reverse=self.is_larger_better)[: self.keep]
        for path in existing - {latest, *(path for _, path in best)}:
            # It is renamed first, so that a partly removed one is never taken for a checkpoint.
            shutil.rmtree(path.rename(path.with_name(path.name + ".gone")))

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, made: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Load model, optimizer and random states, and return the remaining state. All ranks call this method."""
        state = read_state(path)
        saved = _metadata(path)
        tensors = _tensors_of(model, optimizer)
        own = {f"model.{name}": value.shape for name, value in tensors["model"].items()}
        held = {name: value.size for name, value in saved.items() if name.startswith("model.")}
        differing = [name for name in own | held if own.get(name) != held.get(name)]
        for section, tensor in (("model", differing[:1]), ("optimizer", [])):
            if tensor or state[section]["name"] != made[section]["name"]:
                raise InputError(
                    f"the checkpoint {path} is of {section} {state[section]}, and this run has {made[section]}. They "
                    f"differ in {', '.join(tensor) or 'the name'}. Restore these values (n_genes, n_labels and the "
                    "like come from the data), or start anew in another training.checkpoint_dir"
                )
        # The optimizer keeps its constructor arguments, such as weight_decay.
        kept = [
            {name: group[name] for name in inspect.signature(type(optimizer)).parameters if name in group}
            for group in optimizer.param_groups
        ]
        random = {name: value for name, value in _random_state(self.ranks).items() if name in saved}
        read_tensors(tensors | random, path)
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        for group, arguments in zip(optimizer.param_groups, kept, strict=True):
            group.update(arguments)
        for name, value in random.items():
            if name.startswith("random-cuda"):
                torch.cuda.set_rng_state(value, self.ranks.device)
            else:
                torch.set_rng_state(value)
        return state


@contextlib.contextmanager
def _converted_errors(kind: type[DaskscError], what: str, advice: str) -> Iterator[None]:
    """Convert torch's `CheckpointException`, which derives only from `BaseException`, to an error of dasksc."""
    with warnings.catch_warnings():  # a single process without a process group is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, KeyboardInterrupt | MemoryError | torch.OutOfMemoryError):
                raise cause from None
            raise kind(f"{what}: {type(cause).__name__} on rank {rank}, {cause}. {advice}") from error


def read_tensors(tensors: dict[str, Any], path: Path, *, no_dist: bool = False) -> None:
    """Load tensors and other named values from a checkpoint in place."""
    advice = "It is damaged, or does not fit: resume from another checkpoint, or remove this one"
    with _converted_errors(InputError, f"{path} cannot be loaded", advice):
        load(tensors, checkpoint_id=path, no_dist=no_dist)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint other than its tensors."""
    file = path / "state.json"
    try:
        return {**json.loads(file.read_text())}
    except FileNotFoundError as error:
        raise MissingPathError(f"there is no checkpoint at {path}: expected {file}") from error
    except (TypeError, ValueError) as error:  # not a JSON object, or not UTF-8
        raise CorruptDataError(
            f"{file} is damaged or truncated: {error}. Remove {path} to resume from the checkpoint before it"
        ) from error


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of the entries of a checkpoint, by names such as ``model.layer.weight``."""
    try:
        return dict(FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # unpickling a truncated file raises errors of any type
        raise CorruptDataError(
            f"{path / '.metadata'} is missing or damaged: {type(error).__name__}, {error}. Remove {path} to resume "
            "from the checkpoint before it"
        ) from error


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _random_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {f"random-cpu-{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state[f"random-cuda-{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return state
