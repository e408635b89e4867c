"""Built-in hooks, and tokenization of cells."""

from dasksc.transforms.hooks import adata_to_mindex, bionemo_to_tensor, fetch_transform_adata, hf_tahoe_to_tensor

__all__ = ["adata_to_mindex", "bionemo_to_tensor", "fetch_transform_adata", "hf_tahoe_to_tensor"]
