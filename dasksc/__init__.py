"""Feed single-cell atlases on disk to PyTorch.

`open` wraps an atlas as an AnnData of Dask arrays without reading it, a sampling strategy says what
an epoch draws, and `scDataset` yields it as torch tensors, each rank its own share.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dasksc.errors import (
    CorruptDataError,
    DaskscError,
    FetchError,
    InputError,
    MissingKeyError,
    MissingPathError,
    RankMismatchError,
    StartError,
    StorageError,
)

if TYPE_CHECKING:
    from dasksc import experimental, transforms
    from dasksc.batch import Batch
    from dasksc.collection import AnnDataView, open
    from dasksc.conversion import ConversionReport, convert
    from dasksc.dataset import scDataset
    from dasksc.dryrun import check
    from dasksc.experimental import estimate_sample_size, suggest_parameters
    from dasksc.lazy import row_local
    from dasksc.mixing import diversity
    from dasksc.multiindexable import MultiIndexable
    from dasksc.plan import EpochPlan
    from dasksc.sampling import (
        BlockShuffling,
        BlockWeightedSampling,
        ClassBalancedSampling,
        SamplingStrategy,
        Streaming,
    )
    from dasksc.transforms import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor
    from dasksc.window.start import StartedCluster, start_cluster
    from dasksc.world import World

try:
    __version__ = version("dasksc")
except PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0+unknown"

# Where each public name lives. Loaded when first used, so that planning and reading need no torch.
_HOMES = {
    "AnnDataView": "dasksc.collection",
    "Batch": "dasksc.batch",
    "BlockShuffling": "dasksc.sampling",
    "BlockWeightedSampling": "dasksc.sampling",
    "ClassBalancedSampling": "dasksc.sampling",
    "ConversionReport": "dasksc.conversion",
    "EpochPlan": "dasksc.plan",
    "MultiIndexable": "dasksc.multiindexable",
    "SamplingStrategy": "dasksc.sampling",
    "StartedCluster": "dasksc.window.start",
    "Streaming": "dasksc.sampling",
    "World": "dasksc.world",
    "adata_to_mindex": "dasksc.transforms",
    "bionemo_to_tensor": "dasksc.transforms",
    "check": "dasksc.dryrun",
    "convert": "dasksc.conversion",
    "diversity": "dasksc.mixing",
    "estimate_sample_size": "dasksc.experimental",
    "fetch_transform_adata": "dasksc.transforms",
    "hf_tahoe_to_tensor": "dasksc.transforms",
    "open": "dasksc.collection",
    "row_local": "dasksc.lazy",
    "scDataset": "dasksc.dataset",
    "start_cluster": "dasksc.window.start",
    "suggest_parameters": "dasksc.experimental",
}
_MODULES = ("experimental", "transforms")

__all__ = [
    "AnnDataView",
    "Batch",
    "BlockShuffling",
    "BlockWeightedSampling",
    "ClassBalancedSampling",
    "ConversionReport",
    "CorruptDataError",
    "DaskscError",
    "EpochPlan",
    "FetchError",
    "InputError",
    "MissingKeyError",
    "MissingPathError",
    "MultiIndexable",
    "RankMismatchError",
    "SamplingStrategy",
    "StartError",
    "StartedCluster",
    "StorageError",
    "Streaming",
    "World",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "check",
    "convert",
    "diversity",
    "estimate_sample_size",
    "experimental",
    "fetch_transform_adata",
    "hf_tahoe_to_tensor",
    "open",
    "row_local",
    "scDataset",
    "start_cluster",
    "suggest_parameters",
    "transforms",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"dasksc.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dasksc' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
