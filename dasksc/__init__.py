"""Feed single-cell atlases on disk to PyTorch.

`open` returns an atlas as an AnnData of lazy Dask arrays. A sampling strategy selects the rows of an epoch.
`scDataset` yields these rows as torch tensors, and each rank receives its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dasksc import errors
from dasksc.errors import CorruptDataError as CorruptDataError
from dasksc.errors import DaskscError as DaskscError
from dasksc.errors import FetchError as FetchError
from dasksc.errors import InputError as InputError
from dasksc.errors import MissingKeyError as MissingKeyError
from dasksc.errors import MissingPathError as MissingPathError
from dasksc.errors import RankMismatchError as RankMismatchError
from dasksc.errors import StorageError as StorageError
from dasksc.errors import TrainingError as TrainingError
from dasksc.errors import WrongTypeError as WrongTypeError

if TYPE_CHECKING:
    from dasksc import datasets as datasets
    from dasksc import experimental as experimental
    from dasksc import readers as readers
    from dasksc import tokens as tokens
    from dasksc import transforms as transforms
    from dasksc.atlas.catalog import index as index
    from dasksc.atlas.filtering import rows_where as rows_where
    from dasksc.atlas.modalities import Modalities as Modalities
    from dasksc.atlas.opening import open as open
    from dasksc.atlas.splitting import leaks as leaks
    from dasksc.atlas.splitting import split as split
    from dasksc.atlas.stored import AnnDataView as AnnDataView
    from dasksc.batches.batch import Batch as Batch
    from dasksc.conversion import convert as convert
    from dasksc.inference import predict as predict
    from dasksc.inspection.checking import check as check
    from dasksc.inspection.checking import diversity as diversity
    from dasksc.inspection.describing import describe as describe
    from dasksc.inspection.suggestions import suggest_parameters as suggest_parameters
    from dasksc.loader import scDataset as scDataset
    from dasksc.loader.genes import GeneMatch as GeneMatch
    from dasksc.multiindexable import MultiIndexable as MultiIndexable
    from dasksc.plan.cell_sets import CellSets as CellSets
    from dasksc.plan.epoch_plan import EpochPlan as EpochPlan
    from dasksc.plan.ranks import World as World
    from dasksc.plan.strategies import BlockShuffling as BlockShuffling
    from dasksc.plan.strategies import BlockWeightedSampling as BlockWeightedSampling
    from dasksc.plan.strategies import ClassBalancedSampling as ClassBalancedSampling
    from dasksc.plan.strategies import SamplingStrategy as SamplingStrategy
    from dasksc.plan.strategies import Streaming as Streaming
    from dasksc.pushdown import row_local as row_local
    from dasksc.summaries import Statistics as Statistics
    from dasksc.summaries import highly_variable_genes as highly_variable_genes
    from dasksc.summaries import normalize as normalize
    from dasksc.summaries import statistics as statistics
    from dasksc.transforms.hooks import adata_to_mindex as adata_to_mindex
    from dasksc.transforms.hooks import bionemo_to_tensor as bionemo_to_tensor
    from dasksc.transforms.hooks import fetch_transform_adata as fetch_transform_adata
    from dasksc.transforms.hooks import hf_tahoe_to_tensor as hf_tahoe_to_tensor

# Public names by module. They are imported on first use, so that planning and reading do not require torch.
_NAMES = {
    "atlas.filtering": ["rows_where"],
    "atlas.modalities": ["Modalities"],
    "atlas.catalog": ["index"],
    "atlas.opening": ["open"],
    "atlas.splitting": ["leaks", "split"],
    "atlas.stored": ["AnnDataView"],
    "batches.batch": ["Batch"],
    "conversion": ["convert"],
    "inference": ["predict"],
    "inspection.checking": ["check", "diversity"],
    "inspection.describing": ["describe"],
    "inspection.suggestions": ["suggest_parameters"],
    "loader": ["scDataset"],
    "loader.genes": ["GeneMatch"],
    "multiindexable": ["MultiIndexable"],
    "plan.cell_sets": ["CellSets"],
    "plan.epoch_plan": ["EpochPlan"],
    "plan.ranks": ["World"],
    "plan.strategies": [
        "BlockShuffling",
        "BlockWeightedSampling",
        "ClassBalancedSampling",
        "SamplingStrategy",
        "Streaming",
    ],
    "pushdown": ["row_local"],
    "summaries": ["Statistics", "highly_variable_genes", "normalize", "statistics"],
    "transforms.hooks": ["adata_to_mindex", "bionemo_to_tensor", "fetch_transform_adata", "hf_tahoe_to_tensor"],
}
_MODULE_OF = {name: f"dasksc.{module}" for module, names in _NAMES.items() for name in names}
_MODULES = ("dashboard", "datasets", "experimental", "integrations", "readers", "tokens", "train", "transforms")

__all__ = sorted([*_MODULE_OF, *errors.__all__, "datasets", "experimental", "readers", "tokens", "transforms"])


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
