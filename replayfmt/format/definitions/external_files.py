"""External files, their ranges and recipes as rows of Tables columns: made, read back, and what a row must obey.

The writer checks the values it is given here, because the mistake is its caller's; a reader checks whole columns,
because they come from a file. Both hold the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from ..codes import ITEM_BYTES, DType, FileValidation
from ..container.frames import MAX_LENGTH
from ..model import ExternalFile, FileIdentity, FileRange, Recipe, Statistics

_DIGEST = re.compile(r"[0-9a-f]{32}")
_HALF = 0xFFFFFFFFFFFFFFFF
_COUNTS = ("zeros", "nans", "positive_infinities", "negative_infinities")
_MOMENTS = ("mean", "std", "min", "max")
ITEM_SIZES = np.array([ITEM_BYTES[dtype] for dtype in sorted(DType)], np.int64)

Columns = Mapping[str, np.ndarray]


def _whole(value: int, lowest: int, highest: int, what: str) -> int:
    if not lowest <= value <= highest:
        raise ValueError(f"{what} is {value}, allowed {lowest}..{highest}")
    return int(value)


def check_path(path: str) -> None:
    """Raise ValueError where a path cannot be stored so that it is found again."""
    if not path or "\0" in path:
        raise ValueError(f"an external file with the path {path!r}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"an external file whose path is not UTF-8: {path!r}; embed its content") from None


def file_row(file: ExternalFile, string: Callable[[str], int]) -> tuple[int, ...]:
    """A file's row. Raises ValueError where the format cannot hold it; its payload is the caller's to check."""
    check_path(file.path)
    _whole(file.bytes, 0, MAX_LENGTH, "the length of an external file")
    identity, validation, digest = file.identity, FileValidation(0), 0
    if identity is not None:
        validation |= FileValidation.identity
    if file.digest is not None:
        if not _DIGEST.fullmatch(file.digest):
            raise ValueError(f"a file digest of 32 hexadecimal digits was expected, got {file.digest!r}")
        validation |= FileValidation.digest
        digest = int(file.digest, 16)
    device, inode, mtime_ns = (identity.device, identity.inode, identity.mtime_ns) if identity else (0, 0, 0)
    return (
        string(file.path),
        file.bytes,
        int(validation),
        _whole(device, 0, _HALF, "a file's device"),
        _whole(inode, 0, _HALF, "a file's inode"),
        _whole(mtime_ns, -(1 << 63), (1 << 63) - 1, "a file's mtime_ns"),
        digest & _HALF,
        digest >> 64,
        file.payload,
        string(file.format) if file.format else 0,
    )


def file_at(column: Callable[[str], np.ndarray], text: Callable[[int], str], row: int) -> ExternalFile:
    """The file of a row; `text` is the string of an id, "" for 0."""

    def number(name: str) -> int:
        return int(column(name)[row])

    validation = FileValidation(number("file_validation"))
    identity = digest = None
    if validation & FileValidation.identity:
        identity = FileIdentity(number("file_device"), number("file_inode"), number("file_mtime_ns"))
    if validation & FileValidation.digest:
        digest = f"{number('file_digest_high'):016x}{number('file_digest_low'):016x}"
    return ExternalFile(
        text(number("file_path")),
        number("file_bytes"),
        identity,
        digest,
        number("file_payload"),
        text(number("file_format")),
    )


def range_row(given: FileRange, file_bytes: int) -> tuple[int, ...]:
    """A range's row. Raises ValueError where it does not lie in its file, of `file_bytes`."""
    if given.offset < 0 or given.bytes < 0 or given.offset + given.bytes > file_bytes:
        raise ValueError(
            f"a range of {given.bytes} bytes at {given.offset} of file {given.file}, which has {file_bytes}"
        )
    return given.file, given.offset, given.bytes, given.payload


def range_at(column: Callable[[str], np.ndarray], row: int) -> FileRange:
    """The range of a row."""
    return FileRange(
        *(int(column(name)[row]) for name in ("range_file", "range_offset", "range_bytes", "range_payload"))
    )


def recipe_row(recipe: Recipe) -> tuple[int | float, ...]:
    """A recipe's row. Raises ValueError where its numbers contradict each other."""
    if not 1 <= recipe.dtype <= max(DType):
        raise ValueError(f"a recipe with the dtype {recipe.dtype!r}")
    _whole(recipe.elements, 0, MAX_LENGTH, "a recipe's number of elements")
    _whole(recipe.seed, 0, _HALF, "a recipe's seed")
    known = recipe.statistics
    moments = [float(getattr(known, name)) if known else 0.0 for name in _MOMENTS]
    counts = [_whole(getattr(known, name), 0, recipe.elements, name) if known else 0 for name in _COUNTS]
    if sum(counts) > recipe.elements:
        raise ValueError(f"statistics that count {counts} special elements of {recipe.elements}")
    return int(recipe.dtype), recipe.elements, recipe.seed, int(known is not None), *moments, *counts


def recipe_at(column: Callable[[str], np.ndarray], row: int) -> Recipe:
    """The recipe of a row."""
    statistics = None
    if column("recipe_statistics")[row]:
        mean, std, lowest, highest = (float(column(f"recipe_{name}")[row]) for name in _MOMENTS)
        statistics = Statistics(mean, std, lowest, highest, *(int(column(f"recipe_{name}")[row]) for name in _COUNTS))
    return Recipe(
        DType(int(column("recipe_dtype")[row])),
        int(column("recipe_elements")[row]),
        int(column("recipe_seed")[row]),
        statistics,
    )


# ---------------------------------------------------------------------------------------------- rules for whole columns
# Each says what is wrong with a body's columns, or "".


def _beyond(columns: Columns, name: str, lowest: int, highest: int) -> str:
    column = columns[name]
    if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
        return f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}"
    return ""


def _other_length(payloads: np.ndarray, lengths: np.ndarray, payload_bytes: np.ndarray, what: str) -> str:
    """Whether a payload that is `what` as a whole has another length."""
    rows = np.flatnonzero(payloads)
    wrong = payload_bytes[payloads[rows].astype(np.int64) - 1] != lengths[rows]
    if wrong.any():
        row = int(rows[np.argmax(wrong)])
        found = int(payload_bytes[int(payloads[row]) - 1])
        return f"{what} of {int(lengths[row])} bytes has payload {int(payloads[row])}, of {found}"
    return ""


def files_problem(columns: Columns, strings: int, payload_bytes: np.ndarray) -> str:
    """`payload_bytes` are the raw lengths of the payloads that come before, in order."""
    problem = (
        _beyond(columns, "file_path", 1, strings)
        or _beyond(columns, "file_format", 0, strings)
        or _beyond(columns, "file_bytes", 0, MAX_LENGTH)
        or _beyond(columns, "file_payload", 0, len(payload_bytes))
    )
    if problem:
        return problem
    for flag, names in (
        (FileValidation.identity, ("file_device", "file_inode", "file_mtime_ns")),
        (FileValidation.digest, ("file_digest_low", "file_digest_high")),
    ):
        unknown = (columns["file_validation"] & flag) == 0
        for name in names:
            if columns[name][unknown].any():
                return f"{name} of a file without {flag.name} is not 0"
    return _other_length(columns["file_payload"], columns["file_bytes"], payload_bytes, "a file")


def ranges_problem(columns: Columns, file_bytes: np.ndarray, payload_bytes: np.ndarray) -> str:
    """`file_bytes` are the lengths of every file so far, in order."""
    problem = (
        _beyond(columns, "range_file", 1, len(file_bytes))
        or _beyond(columns, "range_offset", 0, MAX_LENGTH)
        or _beyond(columns, "range_bytes", 0, MAX_LENGTH)
        or _beyond(columns, "range_payload", 0, len(payload_bytes))
    )
    if problem:
        return problem
    ends = columns["range_offset"].astype(np.int64) + columns["range_bytes"].astype(np.int64)
    lengths = file_bytes[columns["range_file"].astype(np.int64) - 1].astype(np.int64)
    if (ends > lengths).any():
        row = int(np.argmax(ends > lengths))
        return f"a range ends at {int(ends[row])} of a file of {int(lengths[row])} bytes"
    return _other_length(columns["range_payload"], columns["range_bytes"], payload_bytes, "a range")


def recipes_problem(columns: Columns) -> str:
    """Whether a recipe counts what it cannot have."""
    problem = _beyond(columns, "recipe_elements", 0, MAX_LENGTH) or _beyond(columns, "recipe_statistics", 0, 1)
    if problem:
        return problem
    unknown = columns["recipe_statistics"] == 0
    for name in (f"recipe_{name}" for name in (*_MOMENTS, *_COUNTS)):
        if (columns[name][unknown] != 0).any():
            return f"{name} of a recipe without statistics is not 0"
    special = np.zeros(len(unknown), np.float64)
    for name in _COUNTS:
        special += columns[f"recipe_{name}"]
    if (special > columns["recipe_elements"]).any():
        return "a recipe's statistics count more elements than it has"
    return ""
