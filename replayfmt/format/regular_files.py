"""Files that a user names and that are read whole. Reading a pipe or a device might never end."""

from __future__ import annotations

import errno
import os
import stat


def require_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError where there is nothing at a path, or it is neither a regular file nor a directory (as which opening
    it fails)."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")
