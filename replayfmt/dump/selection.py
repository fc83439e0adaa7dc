"""Which records a dump shows: `--ops`, `--scope` and `--kernel`, checked, and resolved against one capture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader, RecordFrame

from .values import Made

_RANGE = re.compile(r"([0-9]*):([0-9]*)", re.ASCII)


@dataclass(frozen=True)
class Selection:
    """What was asked for: ordinals from `start` up to, not including, `stop`; a scope; a pattern of operator names."""

    start: int = 0
    stop: int | None = None
    scope: str | None = None
    kernel: str | None = None

    @property
    def everything(self) -> bool:
        return self == Selection()


def parse_range(text: str) -> tuple[int, int | None]:
    """`A:B`, `A:`, `:B` or `:` as ordinals. Raises UsageError for anything else, and where A is behind B."""
    match = _RANGE.fullmatch(text)
    if match is None or max(map(len, match.groups())) > 18:
        raise UsageError(f"--ops={text}: expected A:B, two ordinals of which either may be missing: 10:20, or 500:")
    start, stop = (int(part) if part else None for part in match.groups())
    if stop is not None and (start or 0) > stop:
        raise UsageError(f"--ops={text}: the range ends before it begins")
    return start or 0, stop


class Filter:
    """A selection resolved against a capture: which records of a frame it takes."""

    def __init__(self, reader: CaptureReader, selection: Selection) -> None:
        """Raises UsageError where the capture has no scope of that name."""
        self.start = selection.start
        self.stop = min(reader.record_count, reader.record_count if selection.stop is None else selection.stop)
        self._scopes = None if selection.scope is None else _scopes(reader, selection.scope)
        self._kernels = None if selection.kernel is None else _kernels(reader, selection.kernel)
        self._signatures: Made[bool] = Made(
            lambda number: self._kernels is not None and reader.signatures[number].kernel in self._kernels)

    def indices(self, frame: RecordFrame) -> slice | np.ndarray:
        """The records to take, as something that indexes the frame's columns."""
        first = max(0, self.start - frame.first_ordinal)
        last = max(first, min(frame.count, self.stop - frame.first_ordinal))
        if self._scopes is None and self._kernels is None:
            return slice(first, last)
        chosen = np.ones(last - first, bool)
        if self._scopes is not None:
            chosen &= self._scopes[frame.scope[first:last]]
        if self._kernels is not None:
            chosen &= np.fromiter(self._signatures.of(frame.signature[first:last].tolist()), bool, last - first)
        return np.flatnonzero(chosen) + first


def _scopes(reader: CaptureReader, name: str) -> np.ndarray:
    """Which scopes are called `name`, by their own name or by full path, or lie inside one that is."""
    inside = np.zeros(len(reader.scopes), bool)
    for scope, definition in enumerate(reader.scopes[1:], start=1):
        inside[scope] = inside[definition.parent] or definition.name == name or _has_path(reader, scope, name)
    if not inside.any():
        known = sorted({definition.name for definition in reader.scopes[1:]})
        listed = ", ".join(map(repr, known[:10])) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        raise UsageError(f"--scope={name}: {reader.path} has no scope of that name or path; "
                         f"it has {listed or 'no scopes at all'}")
    return inside


def _has_path(reader: CaptureReader, scope: int, path: str) -> bool:
    """Whether this is the scope's path. Walks up no further than `path` reaches."""
    while scope:
        name, scope = reader.scopes[scope].name, reader.scopes[scope].parent
        if not scope:
            return path == name
        if not path.endswith(f"/{name}"):
            return False
        path = path[: -len(name) - 1]
    return False


def _kernels(reader: CaptureReader, pattern: str) -> set[int]:
    """The kernels whose name, with or without their overload, matches the pattern."""
    return {number for number, kernel in enumerate(reader.kernels[1:], start=1)
            if fnmatchcase(kernel.name, pattern) or fnmatchcase(kernel.qualified_name, pattern)}
