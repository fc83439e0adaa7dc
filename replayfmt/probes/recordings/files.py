"""Opening files of recordings, and writing new ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from replayfmt.errors import CaptureFailed, CaptureNotFound, InvalidRecording
from replayfmt.format.container.output import check_place

MOST_LINE_BYTES = 1 << 20


def damaged(path: str | os.PathLike[str], offset: int, expected: str, got: str) -> InvalidRecording:
    """The error for a file that does not hold what it has to."""
    return InvalidRecording(f"{os.fspath(path)}: at byte {offset}: expected {expected}, got {got}")


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise CaptureNotFound unless `path` is a regular file that can be read."""
    name = os.fspath(path)
    if not os.path.lexists(name):
        raise CaptureNotFound(f"{name}: no such file or directory; expected a file of a recording")
    if not os.path.isfile(name):
        what = "is a directory" if os.path.isdir(name) else "is not a regular file"
        raise CaptureNotFound(f"{name}: {what}; expected a file of a recording")
    if not os.access(name, os.R_OK):
        raise CaptureNotFound(f"{name}: permission denied")


def mapped(path: str | os.PathLike[str], at_least: int, what: str) -> memoryview:
    """The bytes of a file of `at_least` so many, mapped for reading. Raises CaptureNotFound or InvalidRecording."""
    check_readable(path)
    size = os.path.getsize(path)
    if size < at_least:
        raise damaged(path, 0, f"{what} of at least {at_least} bytes", f"a file of {size} bytes")
    try:
        return np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise CaptureNotFound(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a log, without their ends; bytes that are not UTF-8 are replaced. Raises CaptureNotFound, and
    InvalidRecording for a line longer than a mebibyte."""
    check_readable(path)
    offset = 0
    with open(path, "rb") as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise damaged(path, offset, f"lines of at most {MOST_LINE_BYTES} bytes", "a longer one")
            offset += len(line)
            yield line.decode("utf-8", "replace").rstrip("\r\n")


@contextmanager
def new_file(path: str | os.PathLike[str], force: bool) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when the block ends well and is removed otherwise.

    Raises OutputExists without `force`, CaptureFailed if it cannot be written.
    """
    final = Path(path)
    check_place(final, force)
    partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
        os.replace(partial, final)
    except OSError as error:
        raise CaptureFailed(f"{final}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
