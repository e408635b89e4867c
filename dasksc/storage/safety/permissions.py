"""Access of other users to a file or folder."""

from __future__ import annotations

import os
import stat

__all__ = ["exposure"]


def exposure(status: os.stat_result) -> str | None:
    """Describe how other users can access a file or folder; None if they cannot."""
    # Root does not count as another user, since it has access to everything in any case. On Windows, where owners have
    # no numeric ids, the function returns None.
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid}; this process has uid {os.geteuid()})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return f"other users have access to it (mode {mode:03o})"
    return None
