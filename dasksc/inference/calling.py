"""Calls of models and functions on batches for inference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dasksc.errors import WrongTypeError

__all__ = ["Predictor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A model or function that is called with a batch.

    Parameters
    ----------
    function
        Function to call.
    module
        Module whose parameters the function uses; None if it is unknown.
    identity
        Object that determines the results, from which the model digest is computed.
    """

    function: Callable[[Any], Any]
    module: nn.Module | None
    identity: Any

    @classmethod
    def of(cls, model: Any) -> Predictor:
        """Unwrap a model: a module, a method of one, or a function.

        Raises
        ------
        WrongTypeError
            If `model` cannot be called.
        """
        if isinstance(model, type):
            raise WrongTypeError(f"model is the class {model.__name__}; give an instance: {model.__name__}(...)")
        if not callable(model):
            raise WrongTypeError(f"model must be a torch.nn.Module or a function of a batch; got {model!r}")
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        if isinstance(model, nn.Module):
            return cls(function=model, module=model, identity=model)
        owner = model.__self__ if isinstance(model, MethodType) else None
        if not isinstance(owner, nn.Module):
            return cls(function=model, module=None, identity=model)
        # Take the method of the class: sharding may have wrapped the method of the instance.
        name = getattr(model, "__name__", "")
        identity = (name, getattr(type(owner), name, model.__func__), owner)
        if isinstance(owner, FSDPModule):
            # FSDP gathers the parameters only in calls of the module itself and of methods registered as forward
            # methods.
            register_fsdp_forward_method(owner, name)
            model = getattr(owner, name)
        return cls(function=model, module=owner, identity=identity)

    def __call__(self, batch: Any) -> Any:
        """Return the result for a batch."""
        try:
            return self.function(batch)
        except AttributeError as error:
            if error.obj is batch and isinstance(batch, torch.Tensor):
                error.add_note(
                    "The data set yields X alone, so the model was called with a tensor of shape "
                    f"{tuple(batch.shape)}, which has no {error.name!r}. Use the tensor itself, or pass a data "
                    "set that yields a Batch: scDataset(..., return_index=True), or obs= with the columns that the "
                    "model reads."
                )
            raise

    @property
    def is_sharded(self) -> bool:
        """True if parameters are gathered from all ranks in every call."""
        return self.module is not None and any(isinstance(part, FSDPModule) for part in self.module.modules())

    @property
    def device(self) -> torch.device | None:
        """Device of the first parameter or buffer; None if there are none."""
        if self.module is None:
            return None
        held = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return None if held is None else held.device

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradients and set the module to evaluation mode; restore the mode of each submodule."""
        parts = [] if self.module is None else [(part, part.training) for part in self.module.modules()]
        # FSDP frees and refills parameters in place. PyTorch forbids this for inference tensors once inference mode has
        # ended, so a sharded model runs under `no_grad`.
        mode = torch.no_grad() if self.is_sharded else torch.inference_mode()
        try:
            if self.module is not None:
                self.module.eval()
            with mode:
                yield
        finally:
            for part, was_training in parts:
                part.training = was_training
