"""Whether a file or folder of this machine is its user's alone."""

from __future__ import annotations

import os
import stat

__all__ = ["exposure"]


def exposure(status: os.stat_result) -> str | None:
    """Return how another user can get at a file or folder, for people; None if no other user can.

    Root, who can anyway, counts as this user. Where owners have no numbers (Windows) nothing is known, and None is
    returned.

    Parameters
    ----------
    status
        What `os.stat` or `os.fstat` says of it.
    """
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid}; this process has uid {os.geteuid()})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return f"other users have access to it (mode {mode:03o})"
    return None
