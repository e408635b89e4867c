"""Private parts of PyTorch, which is imported on use."""

from __future__ import annotations

from typing import Any

from dasksc.errors import DaskscError


class UnsupportedVersionError(DaskscError, RuntimeError):
    """Error for a version of PyTorch that lacks something that dasksc uses."""


def check_training(version: str) -> None:
    """Check that a version of PyTorch trains correctly and can save checkpoints."""
    # Before 2.7, ``torch.distributed.checkpoint.save`` has no ``no_dist``, and FSDP fails on CPUs. In 2.7 and 2.8, two
    # ranks under FSDP on CPUs compute different losses than one process.
    if tuple(map(int, version.split(".")[:2])) < (2, 9):
        raise UnsupportedVersionError(
            f"torch {version} has no working FSDP checkpoints, which dasksc needs. Install torch 2.9 or later"
        )


def default_store(distributed: Any) -> Any:
    """Return the store of the process group, for which there is no public function."""
    return distributed.distributed_c10d._get_default_store()
