"""Checkpoints, written by all ranks together with ``torch.distributed.checkpoint``.

A checkpoint is a directory ``step-<number>``: the shards of the model, the optimizer and the random states, which any
number of ranks under any strategy can read again, and ``state.json`` with everything else. It is written under another
name and renamed when it is complete. ``model.pt`` is one file for inference, read by `load_model`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dasksc import InputError, MissingPathError
from dasksc.train.models import BUILT_IN
from dasksc.train.names import find
from dasksc.train.parallel import Place

__all__ = ["Checkpoints", "load_model", "save_model"]

_VERSION = 1
_NAME = re.compile(r"step-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run.

    Parameters
    ----------
    folder
        Seen by all ranks.
    keep
        How many of the best stay beside the latest; -1: all.
    mode
        Whether the best has the smallest (``min``) or largest (``max``) value.
    place
        Where this process is.
    """

    folder: Path
    keep: int
    mode: str
    place: Place

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        value: float | None,
    ) -> Path:
        """Write a checkpoint. All ranks must call it.

        Parameters
        ----------
        step
            Its number.
        model, optimizer
            Sharded or not.
        state
            Everything else, in what JSON can say; rank 0's is written.
        value
            Of the figure by which the best are kept; None: only until the next checkpoint.

        Returns
        -------
        Path
            Of the checkpoint.
        """
        path = self.folder / f"step-{step:08d}"
        partial = path.with_name(path.name + ".partial")
        if self.place.rank == 0:
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.gone")]:
                shutil.rmtree(leftover)  # of a run that was killed
            partial.mkdir(parents=True)
        self.place.barrier()
        tensors = _tensors_of(model, optimizer) | _random_state(self.place)
        with _quiet():
            save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized())
        if self.place.rank == 0:
            written = {"version": _VERSION, "step": step, "value": value, **state}
            with open(partial / "state.json", "w") as file:
                json.dump(written, file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():  # of a run that was resumed from an earlier one
                _remove(path)
            partial.rename(path)
            self._prune(path)
        self.place.barrier()
        return path

    def _prune(self, latest: Path) -> None:
        if self.keep < 0:
            return
        values = {path: json.loads((path / "state.json").read_text())["value"] for path in self.all()}
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * value, path) for path, value in values.items() if value is not None)
        kept = {latest, *(path for _, path in ranked[: self.keep])}
        for path in values.keys() - kept:
            _remove(path)

    def all(self) -> list[Path]:
        """Return the complete ones, in the order of their steps."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.search(path.name) and (path / "state.json").exists()]
        return sorted(found, key=lambda path: path.name)

    def find(self, resume_from: str | None) -> Path | None:
        """Return the checkpoint to go on from; None to begin anew. All ranks must call it.

        Raises
        ------
        InputError
            If a new run would write among the checkpoints of another one.
        MissingPathError
            If there is no such checkpoint.
        """
        there = self.place.agreed([str(path) for path in self.all()])
        if resume_from is None:
            if there:
                raise InputError(
                    f"{self.folder} has {len(there)} checkpoints of another run, the latest {Path(there[-1]).name}. "
                    "Go on from it with training.resume_from=auto, or give another training.checkpoint_dir"
                )
            return None
        if resume_from == "auto":
            return Path(there[-1]) if there else None
        path = Path(resume_from)
        if not (path / "state.json").exists():
            raise MissingPathError(f"training.resume_from={resume_from!r} is no checkpoint; {self.folder} has {there}")
        return path

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Fill model, optimizer and random states; return the rest. All ranks must call it."""
        state = read_state(path)
        tensors = _tensors_of(model, optimizer)
        known = FileSystemReader(path).read_metadata().state_dict_metadata
        random = {name: value for name, value in _random_state(self.place).items() if name in known}
        with _quiet():
            load(tensors | random, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        _set_random_state(random, self.place)
        return state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that there is but one process, which was said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _remove(path: Path) -> None:
    """Remove a checkpoint, under another name first: half of one must not look like one."""
    shutil.rmtree(path.rename(path.with_name(path.name + ".gone")))


def read_state(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says beside its tensors."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    if state.get("version") != _VERSION:
        raise InputError(f"{path} is of version {state.get('version')}; this dasksc reads version {_VERSION}")
    return state


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _random_state(place: Place) -> dict[str, torch.Tensor]:
    state = {f"random-cpu-{place.rank}": torch.get_rng_state()}
    if place.device.type == "cuda":
        state[f"random-cuda-{place.rank}"] = torch.cuda.get_rng_state(place.device)
    return state


def _set_random_state(state: Mapping[str, torch.Tensor], place: Place) -> None:
    for name, value in state.items():
        if name.startswith("random-cuda"):
            torch.cuda.set_rng_state(value, place.device)
        else:
            torch.set_rng_state(value)


def save_model(
    path: Path, model: nn.Module, *, name: str, arguments: Mapping[str, Any], place: Place, more: Mapping[str, Any]
) -> None:
    """Write one file with all parameters, for `load_model`. All ranks must call it; rank 0 needs memory for them.

    Parameters
    ----------
    path
        Of the file.
    model
        Sharded or not.
    name, arguments
        Of its class.
    place
        Where this process is.
    more
        What else goes into the file: plain numbers, texts, lists and dicts.
    """
    parameters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if place.rank == 0:
        partial = path.with_name(path.name + ".partial")
        torch.save({"name": name, "arguments": dict(arguments), "parameters": parameters, **more}, partial)
        partial.rename(path)
    place.barrier()


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """Build a trained model, for inference in one process.

    Parameters
    ----------
    path
        Of a ``model.pt``, or of a checkpoint (``step-...``) of any number of ranks.

    Returns
    -------
    torch.nn.Module
        On the CPU, in evaluation mode.

    Raises
    ------
    MissingPathError
        If there is nothing at the path.
    """
    path = Path(path)
    if not path.exists():
        raise MissingPathError(f"there is no model at {path}")
    if path.is_file():
        saved = torch.load(path, weights_only=True, map_location="cpu")
        model = build_model(saved["name"], saved["arguments"])
        model.load_state_dict(saved["parameters"])
    else:
        saved = read_state(path)["model"]
        model = build_model(saved["name"], saved["arguments"])
        parameters = get_model_state_dict(model)
        with _quiet():
            load({"model": parameters}, checkpoint_id=path, no_dist=True)
        model.load_state_dict(parameters)
    return model.eval()


def build_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Make a model of a built-in name or import path."""
    model: nn.Module = find(name, BUILT_IN, what="model.name")(**arguments)
    return model
