"""Files that a user names and that are read whole. Reading a pipe or a device might never end."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

from replayfmt.errors import UsageError


def require_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError where there is nothing at a path, or it is neither a regular file nor a directory (as which opening
    it fails)."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")


def read_json(path: str | os.PathLike[str], named: str, wanted: str) -> Any:
    """The value in a JSON file of the user's. `named` is how messages call the file, `wanted` says what was expected
    of it. Raises UsageError for a file that cannot be read, or is not JSON."""
    try:
        require_regular_file(path)
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise UsageError(f"{named}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{named}: is not JSON; {wanted}") from None
