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
    TrainingError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from dasksc import experimental, tokens, transforms
    from dasksc.batch import Batch
    from dasksc.collection import AnnDataView, open
    from dasksc.conversion import ConversionReport, convert
    from dasksc.description import describe
    from dasksc.dryrun import check, diversity
    from dasksc.experimental import estimate_sample_size, suggest_parameters
    from dasksc.filtering import rows_where
    from dasksc.lazy import row_local
    from dasksc.loader import scDataset
    from dasksc.modalities import Modalities
    from dasksc.multiindexable import MultiIndexable
    from dasksc.plan import EpochPlan
    from dasksc.sampling import (
        BlockShuffling,
        BlockWeightedSampling,
        ClassBalancedSampling,
        SamplingStrategy,
        Streaming,
    )
    from dasksc.splitting import split
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
    "Modalities": "dasksc.modalities",
    "MultiIndexable": "dasksc.multiindexable",
    "SamplingStrategy": "dasksc.sampling",
    "StartedCluster": "dasksc.window.start",
    "Streaming": "dasksc.sampling",
    "World": "dasksc.world",
    "adata_to_mindex": "dasksc.transforms",
    "bionemo_to_tensor": "dasksc.transforms",
    "check": "dasksc.dryrun",
    "convert": "dasksc.conversion",
    "describe": "dasksc.description",
    "diversity": "dasksc.dryrun",
    "estimate_sample_size": "dasksc.experimental",
    "fetch_transform_adata": "dasksc.transforms",
    "hf_tahoe_to_tensor": "dasksc.transforms",
    "open": "dasksc.collection",
    "row_local": "dasksc.lazy",
    "rows_where": "dasksc.filtering",
    "scDataset": "dasksc.loader",
    "split": "dasksc.splitting",
    "start_cluster": "dasksc.window.start",
    "suggest_parameters": "dasksc.experimental",
}
_MODULES = ("dashboard", "experimental", "integrations", "tokens", "train", "transforms")

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
    "Modalities",
    "MultiIndexable",
    "RankMismatchError",
    "SamplingStrategy",
    "StartError",
    "StartedCluster",
    "StorageError",
    "Streaming",
    "TrainingError",
    "World",
    "WrongTypeError",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "check",
    "convert",
    "describe",
    "diversity",
    "estimate_sample_size",
    "experimental",
    "fetch_transform_adata",
    "hf_tahoe_to_tensor",
    "open",
    "row_local",
    "rows_where",
    "scDataset",
    "split",
    "start_cluster",
    "suggest_parameters",
    "tokens",
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
