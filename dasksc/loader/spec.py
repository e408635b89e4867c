"""Arguments of `scDataset`, checked once, before any data are opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch

from dasksc import checks, config
from dasksc.batches.batch import device_of, torch_dtype
from dasksc.errors import InputError, WrongTypeError
from dasksc.loader.genes import GeneRequest, Missing, Repeated
from dasksc.plan.cell_sets import CellSets
from dasksc.plan.strategies import SamplingStrategy
from dasksc.storage import BFLOAT16, Layout, UseMmap
from dasksc.transforms import Transforms, as_transforms

HOOKS = ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoaderSpec:
    """Arguments of `scDataset` except those about ranks, the seed and the scheduler; see there."""

    strategy: SamplingStrategy
    batch_size: int
    fetch_factor: int | None
    drop_last: bool
    equal_ranks: bool
    fetch_callback: Callable[[Any, Any], Any] | None
    fetch_transform: Callable[[Any], Any] | None
    batch_callback: Callable[[Any, Any], Any] | None
    batch_transform: Callable[[Any], Any] | None
    transform: Any
    obs: Sequence[str]
    categories: Mapping[str, Sequence[Any]] | None
    layers: Sequence[str]
    obsm: Sequence[str]
    genes: Any
    genes_missing: Missing
    genes_key: str | None
    genes_repeated: Repeated
    filter: str | None
    layout: Layout
    dtype: Any
    return_index: bool
    prefetch: int | None
    memory_limit: Any  # in bytes once it is checked
    mmap: UseMmap
    device: Any
    expand: Literal["auto", "host", "device"]
    pin_memory: bool
    progress: bool
    gene_request: GeneRequest = field(init=False)
    transforms: Transforms | None = field(init=False)
    value_dtype: np.dtype[Any] | None = field(init=False)  # None keeps the data type of each matrix

    def __post_init__(self) -> None:
        for name in HOOKS:
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise WrongTypeError(f"{name} must be callable; got {hook!r}")
            if hasattr(hook, "at_epoch"):
                raise WrongTypeError(f"{name}={hook!r} is a transform of batches; give it as transform=")
        checks.check_one_of("layout", self.layout, ("dense", "csr"))
        checks.check_one_of("expand", self.expand, ("auto", "host", "device"))
        if self.expand == "device" and (self.device is None or self.layout != "dense"):
            raise InputError(
                f"expand='device' makes batches dense on a device, but got layout={self.layout!r} and device="
                f"{self.device!r}. Give device= and layout='dense', or omit expand="
            )
        prefetch = config.get("prefetch") if self.prefetch is None else self.prefetch
        flags = ("drop_last", "equal_ranks", "return_index", "pin_memory", "progress")
        checked = {
            "batch_size": checks.whole_number("batch_size", self.batch_size),
            **{name: checks.true_or_false(name, getattr(self, name)) for name in flags},
            **{name: checks.list_of_names(name, getattr(self, name)) for name in ("obs", "layers", "obsm")},
            "prefetch": None if prefetch is None else checks.whole_number("prefetch", prefetch),
            "memory_limit": config.memory_limit(self.memory_limit),
            "device": None if self.device is None else device_of(self.device),
            "gene_request": GeneRequest(self.genes, self.genes_missing, self.genes_key, self.genes_repeated),
            "transforms": as_transforms(self.transform),
            "value_dtype": _value_dtype(self.dtype),
        }
        if unknown := [name for name in self.categories or () if name not in self.obs]:
            raise InputError(f"categories= has labels of {unknown}, but obs={self.obs!r}. Add these columns to obs=")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.has_hooks:
            self.refuse_matrix_options("hooks determine what the data set yields; add the equivalent code to the hooks")

    @property
    def has_hooks(self) -> bool:
        """True if functions of the user replace indexing or follow it."""
        return any(getattr(self, name) is not None for name in HOOKS)

    @property
    def is_on_device(self) -> bool:
        """True if batches are copied to a device."""
        return self.device is not None and self.device.type != "cpu"

    @property
    def is_pinned(self) -> bool:
        """True if batches are gathered in pinned memory."""
        return self.pin_memory or (self.device is not None and self.device.type == "cuda")

    @property
    def only_x(self) -> bool:
        """True if a batch is the tensor X rather than a `Batch`."""
        has_more = self.obs or self.layers or self.obsm or isinstance(self.strategy, CellSets) or self.return_index
        return not has_more and self.transforms is None

    @property
    def control(self) -> str | None:
        """Expression over obs that selects the controls of `CellSets`, if there is one."""
        control = self.strategy.control if isinstance(self.strategy, CellSets) else None
        return control if isinstance(control, str) else None

    def __getstate__(self) -> dict[str, Any]:
        # Plain pickle, which DataLoader uses for workers, fails on lambdas.
        functions = {name: getattr(self, name) for name in (*HOOKS, "transform", "transforms")}
        return self.__dict__ | dict.fromkeys(functions) | {"_functions": cloudpickle.dumps(functions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        functions = cloudpickle.loads(state.pop("_functions"))
        self.__dict__.update(state | functions)

    def refuse_matrix_options(self, why: str) -> None:
        """Raise an error for options that only apply to matrices of an atlas."""
        given = [name for name in ("obs", "categories", "layers", "obsm") if getattr(self, name)]
        given += ["genes"] * (self.genes is not None) + ["transform"] * (self.transforms is not None)
        given += ["layout"] * (self.layout != "dense") + ["return_index"] * self.return_index
        given += ["expand"] * (self.expand == "device")
        if given:
            raise InputError(f"{', '.join(f'{name}=' for name in given)} cannot be used here: {why}")


def _value_dtype(given: Any) -> np.dtype[Any] | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given
    if isinstance(name, str) and name == "bfloat16":
        return BFLOAT16
    try:
        dtype = np.dtype(name).newbyteorder("=")  # tensors have native byte order
        torch_dtype(dtype)
    except TypeError as error:
        raise InputError(
            f"dtype={given!r} is not supported by both NumPy and PyTorch; give a type such as 'float32' or 'bfloat16'"
        ) from error
    return dtype
