"""External files, ranges and recipes in a dump: their rows, and what the summary counts of them.

A file's state is looked up where the dump runs, by name and status alone: nothing that a capture names is opened here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np

from replayfmt.format.model import ExternalFile, FileIdentity
from replayfmt.format.reader import CaptureReader

Row = dict[str, Any]


def validation(file: ExternalFile) -> str:
    """What identifies the captured file: `digest`, `identity` or `none`."""
    return "digest" if file.digest is not None else "identity" if file.identity is not None else "none"


class Needs:
    """Which files a replay of a capture has to read, and which are in the capture."""

    def __init__(self, reader: CaptureReader) -> None:
        column = reader.definitions.column
        self.files = len(reader.files) - 1
        self.ranges = len(reader.file_ranges) - 1
        files = column("range_file").astype(np.int64)
        embedded = column("range_payload") != 0
        self._inline = np.concatenate(([False], column("file_payload") != 0))
        self._used = np.bincount(files, minlength=self.files + 1) > 0
        empty = column("range_bytes") == 0
        outside = np.bincount(files, ~(embedded | empty), minlength=self.files + 1) > 0
        self._outside = outside & ~self._inline
        self.embedded_range_bytes = int(column("range_bytes")[embedded].sum(dtype=np.uint64))
        self._lengths = np.concatenate(([0], column("file_bytes").astype(np.uint64)))

    def where(self, number: int) -> str:
        """Where a replay finds a file's content: `external`, `inline` (the whole file is in the capture), `ranges` (the
        parts that are used are), or `unknown` if no use of it is known."""
        if self._inline[number]:
            return "inline"
        if not self._used[number]:
            return "unknown"
        return "external" if self._outside[number] else "ranges"

    def count(self) -> tuple[dict[str, int], dict[str, int]]:
        """Files by where, and bytes: lengths of external and inline files, and of the ranges that are embedded."""
        wheres = [self.where(number) for number in range(1, self.files + 1)]
        counts = {name: wheres.count(name) for name in ("external", "inline", "ranges", "unknown")}
        lengths = {"external": 0, "inline": 0, "ranges": self.embedded_range_bytes}
        for number, where in enumerate(wheres, start=1):
            if where in ("external", "inline"):
                lengths[where] += int(self._lengths[number])
        return counts, lengths

    @property
    def hermetic(self) -> bool:
        """Whether a replay reads no file but the capture."""
        return not self._outside.any()

    def unconfirmed(self, reader: CaptureReader) -> bool:
        """Whether a replay needs a file that neither identity nor digest can confirm."""
        return any(validation(reader.files[number]) == "none" for number in np.flatnonzero(self._outside).tolist())


def state(file: ExternalFile) -> str:
    """The state of a file's captured path: `missing`, `unreadable`, `different`, `same` (by identity), or `unverified`
    (there and of the same length; only reading all of it could tell)."""
    try:
        found = os.stat(file.path)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError):
        return "unreadable"
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.bytes:
        return "different"
    if file.digest is not None or file.identity is None:
        return "unverified"
    return "same" if FileIdentity(found.st_dev, found.st_ino, found.st_mtime_ns) == file.identity else "different"


def file_rows(reader: CaptureReader, needs: Needs) -> Iterator[Row]:
    """A row for each external file, range and recipe, by id."""
    for number, file in enumerate(reader.files[1:], start=1):
        identity = file.identity
        yield {
            "kind": "external_file",
            "id": number,
            "path": file.path,
            "bytes": file.bytes,
            "where": needs.where(number),
            "validation": validation(file),
            "digest": file.digest,
            # Always strings, so that their type does not depend on their size.
            "identity": None
            if identity is None
            else {"device": str(identity.device), "inode": str(identity.inode), "mtime_ns": str(identity.mtime_ns)},
            "payload": file.payload or None,
            "format": file.format or None,
            "state": state(file),
        }
    for number, place in enumerate(reader.file_ranges[1:], start=1):
        yield {
            "kind": "range",
            "id": number,
            "file": place.file,
            "offset": place.offset,
            "bytes": place.bytes,
            "payload": place.payload or None,
        }
    for number, recipe in enumerate(reader.recipes[1:], start=1):
        yield {
            "kind": "recipe",
            "id": number,
            "dtype": recipe.dtype.name,
            "elements": recipe.elements,
            "seed": str(recipe.seed),
            "statistics": None if recipe.statistics is None else vars(recipe.statistics),
        }


def files_row(reader: CaptureReader, needs: Needs) -> Row:
    """The summary's keys about external files."""
    counts, lengths = needs.count()
    validations = [validation(file) for file in reader.files[1:]]
    return {
        "files": {
            "external": counts["external"],
            "inline": counts["inline"],
            "ranges": counts["ranges"],
            "unknown": counts["unknown"],
        },
        "file_bytes": lengths,
        "file_validation": {**{name: validations.count(name) for name in ("identity", "digest", "none")}, "unknown": 0},
    }
