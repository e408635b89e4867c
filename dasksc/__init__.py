"""Feed single-cell atlases on disk to PyTorch.

`open` returns an atlas as an AnnData of lazy Dask arrays. A sampling strategy selects the rows of an epoch.
`scDataset` yields these rows as torch tensors, and each rank receives its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dasksc.errors import (
    CorruptDataError,
    DaskscError,
    FetchError,
    InputError,
    MissingKeyError,
    MissingPathError,
    RankMismatchError,
    StorageError,
    TrainingError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from dasksc import datasets, experimental, readers, tokens, transforms
    from dasksc.atlas.catalog import index
    from dasksc.atlas.filtering import rows_where
    from dasksc.atlas.modalities import Modalities
    from dasksc.atlas.opening import open
    from dasksc.atlas.splitting import leaks, split
    from dasksc.atlas.view import AnnDataView
    from dasksc.batches.batch import Batch
    from dasksc.conversion import convert
    from dasksc.inference import predict
    from dasksc.inspection.checking import check, diversity
    from dasksc.inspection.describing import describe
    from dasksc.inspection.suggestions import suggest_parameters
    from dasksc.loader import scDataset
    from dasksc.loader.genes import GeneMatch
    from dasksc.multiindexable import MultiIndexable
    from dasksc.plan.cell_sets import CellSets
    from dasksc.plan.epoch_plan import EpochPlan
    from dasksc.plan.ranks import World
    from dasksc.plan.strategies import (
        BlockShuffling,
        BlockWeightedSampling,
        ClassBalancedSampling,
        SamplingStrategy,
        Streaming,
    )
    from dasksc.pushdown import row_local
    from dasksc.summaries import Statistics, highly_variable_genes, normalize, statistics
    from dasksc.transforms.hooks import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor

# Module of each public name. Names are imported on first use, so that planning and reading do not require torch.
_MODULE_OF = {
    "AnnDataView": "dasksc.atlas.view",
    "Batch": "dasksc.batches.batch",
    "BlockShuffling": "dasksc.plan.strategies",
    "BlockWeightedSampling": "dasksc.plan.strategies",
    "CellSets": "dasksc.plan.cell_sets",
    "ClassBalancedSampling": "dasksc.plan.strategies",
    "EpochPlan": "dasksc.plan.epoch_plan",
    "GeneMatch": "dasksc.loader.genes",
    "Modalities": "dasksc.atlas.modalities",
    "MultiIndexable": "dasksc.multiindexable",
    "SamplingStrategy": "dasksc.plan.strategies",
    "Streaming": "dasksc.plan.strategies",
    "Statistics": "dasksc.summaries",
    "World": "dasksc.plan.ranks",
    "adata_to_mindex": "dasksc.transforms.hooks",
    "bionemo_to_tensor": "dasksc.transforms.hooks",
    "check": "dasksc.inspection.checking",
    "convert": "dasksc.conversion",
    "describe": "dasksc.inspection.describing",
    "diversity": "dasksc.inspection.checking",
    "fetch_transform_adata": "dasksc.transforms.hooks",
    "hf_tahoe_to_tensor": "dasksc.transforms.hooks",
    "highly_variable_genes": "dasksc.summaries",
    "index": "dasksc.atlas.catalog",
    "leaks": "dasksc.atlas.splitting",
    "normalize": "dasksc.summaries",
    "open": "dasksc.atlas.opening",
    "predict": "dasksc.inference",
    "row_local": "dasksc.pushdown",
    "rows_where": "dasksc.atlas.filtering",
    "scDataset": "dasksc.loader",
    "split": "dasksc.atlas.splitting",
    "statistics": "dasksc.summaries",
    "suggest_parameters": "dasksc.inspection.suggestions",
}
_MODULES = ("dashboard", "datasets", "experimental", "integrations", "readers", "tokens", "train", "transforms")

__all__ = [
    "AnnDataView",
    "Batch",
    "BlockShuffling",
    "BlockWeightedSampling",
    "CellSets",
    "ClassBalancedSampling",
    "CorruptDataError",
    "DaskscError",
    "EpochPlan",
    "FetchError",
    "GeneMatch",
    "InputError",
    "MissingKeyError",
    "MissingPathError",
    "Modalities",
    "MultiIndexable",
    "RankMismatchError",
    "SamplingStrategy",
    "Statistics",
    "StorageError",
    "Streaming",
    "TrainingError",
    "World",
    "WrongTypeError",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "check",
    "convert",
    "datasets",
    "describe",
    "diversity",
    "experimental",
    "fetch_transform_adata",
    "hf_tahoe_to_tensor",
    "highly_variable_genes",
    "index",
    "leaks",
    "normalize",
    "open",
    "predict",
    "readers",
    "row_local",
    "rows_where",
    "scDataset",
    "split",
    "statistics",
    "suggest_parameters",
    "tokens",
    "transforms",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"dasksc.{name}")
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'dasksc' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    # Importing importlib.metadata takes longer than the rest of `import dasksc`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dasksc")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
