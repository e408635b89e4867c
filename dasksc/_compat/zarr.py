"""What is private in zarr-python 3: how chunks are decoded. Chunks that swell are refused by it, so it raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dasksc._compat.unsupported import attribute, needed

with needed("zarr"):
    from zarr.codecs._v2 import V2Codec
    from zarr.core.array_spec import ArraySpec
    from zarr.core.codec_pipeline import BatchedCodecPipeline

__all__ = ["ArraySpec", "BatchedCodecPipeline", "V2Codec", "codec_config"]

# Where the codecs of numcodecs are, before and after they moved (zarr-python 3.1.3).
_OF_NUMCODECS = ("zarr.codecs.numcodecs", "numcodecs.zarr3")


def codec_config(codec: Any) -> Mapping[str, Any]:
    """Return the configuration of one of numcodecs' codecs; of zarr-python's own, which need none, an empty one."""
    if not hasattr(codec, "codec_config") and not type(codec).__module__.startswith(_OF_NUMCODECS):
        return {}
    config: Mapping[str, Any] = attribute(codec, "codec_config", library="zarr")
    return config
