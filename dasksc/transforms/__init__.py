"""Built-in hooks, augmentation, and tokenization of cells."""

from dasksc.transforms.augmentation import Downsample, MaskGenes
from dasksc.transforms.hooks import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor

__all__ = [
    "Downsample",
    "MaskGenes",
    "adata_to_mindex",
    "bionemo_to_tensor",
    "fetch_transform_adata",
    "hf_tahoe_to_tensor",
]
