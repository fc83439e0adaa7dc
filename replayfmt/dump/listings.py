"""Which records are shown (`--ops`, `--scope`, `--kernel`), and lists over a whole capture: its distinct signatures
(`--signatures`), and what ran on devices (`--device-kernels`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.attachments import device_kernel_rows, kernel_tier, only_inside
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signature_text import SignatureGroup, SignatureIndex
from replayfmt.format.validation import aligned, printable

from .definitions import lines
from .row_templates import ObjectCache

_RANGE = re.compile(r"([0-9]*):([0-9]*)", re.ASCII)


# One name or pattern, or several, any of which matches.
Names = str | tuple[str, ...]


def listed(names: Names | None) -> tuple[str, ...]:
    """Names as a tuple, empty for None."""
    return () if names is None else (names,) if isinstance(names, str) else names


@dataclass(frozen=True)
class Selection:
    """The request: ordinals from `start` up to, not including, `stop`; scopes; patterns of operator names."""

    start: int = 0
    stop: int | None = None
    scope: Names | None = None
    kernel: Names | None = None

    @property
    def everything(self) -> bool:
        return self == Selection()

    @property
    def text(self) -> str:
        """The equivalent flags."""
        given = [f"--scope={name}" for name in listed(self.scope)]
        given += [f"--kernel={pattern}" for pattern in listed(self.kernel)]
        if (self.start, self.stop) != (0, None):
            given.insert(0, f"--ops={self.start or ''}:{'' if self.stop is None else self.stop}")
        return " ".join(given)


def parse_range(text: str) -> tuple[int, int | None]:
    """`A:B`, `A:`, `:B` or `:` as ordinals. Raises UsageError for anything else, and if A is behind B."""
    match = _RANGE.fullmatch(text)
    if match is None or max(map(len, match.groups())) > 18:
        raise UsageError(f"--ops={text}: expected A:B, two ordinals, either of which may be omitted: 10:20, or 500:")
    start, stop = (int(part) if part else None for part in match.groups())
    if stop is not None and (start or 0) > stop:
        raise UsageError(f"--ops={text}: the range ends before it begins")
    return start or 0, stop


class Filter:
    """A selection resolved against a capture: which records of a frame it takes."""

    def __init__(self, reader: CaptureReader, selection: Selection) -> None:
        """Raises UsageError if the capture has no scope of a name, no kernel for a pattern, or no record in the
        range."""
        if selection.start and selection.start >= reader.record_count:
            raise UsageError(
                f"{Selection(selection.start, selection.stop).text}: {reader.path} has "
                f"{reader.record_count} records, with ordinals from 0 to {reader.record_count - 1}"
            )
        self.start = selection.start
        self.stop = min(reader.record_count, reader.record_count if selection.stop is None else selection.stop)
        scopes = [_scopes(reader, name) for name in listed(selection.scope)]
        self._scopes = np.logical_or.reduce(scopes) if scopes else None
        self._kernels = selected_kernels(reader, selection)
        self._signatures: ObjectCache[bool] = ObjectCache(
            lambda number: self._kernels is not None and reader.signatures[number].kernel in self._kernels
        )

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
        shown = ", ".join(map(repr, known[:10])) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        raise UsageError(
            f"--scope={name}: {reader.path} has no scope of that name or path; it has {shown or 'no scopes at all'}"
        )
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


def selected_kernels(reader: CaptureReader, selection: Selection) -> set[int] | None:
    """The ids of the kernels whose name, with or without their overload, matches a pattern; None for all of them.

    Raises UsageError for a pattern that matches none.
    """
    if selection.kernel is None:
        return None
    found: set[int] = set()
    for pattern in listed(selection.kernel):
        fitting = {
            number for number, kernel in enumerate(reader.kernels) if kernel is not None and kernel.fits(pattern)
        }
        if not fitting:
            raise _matches_nothing(reader, pattern)
        found |= fitting
    return found


def _matches_nothing(reader: CaptureReader, pattern: str) -> UsageError:
    inside = only_inside(reader, lambda name: fnmatchcase(name, pattern))
    hint = inside or "opreplay-dump --signatures lists what it has"
    return UsageError(f"--kernel={pattern}: {reader.path} has no op of that name; {hint}")


def selects_nothing(reader: CaptureReader, selection: Selection) -> UsageError:
    """The error for a selection whose parts all exist, but that no record satisfies together."""
    return UsageError(f"{selection.text}: selects no record of {reader.path}")


def signature_groups(reader: CaptureReader, selection: Selection) -> list[SignatureGroup]:
    """The signatures among the selected ops, in order of first use. Raises UsageError for a selection by scope, and
    for one that takes no op."""
    if selection.scope is not None:
        raise UsageError("--signatures ignores scopes: omit --scope, or use --ops=A:B")
    kernels = selected_kernels(reader, selection)
    groups = SignatureIndex(reader).groups(kernels, selection.start, selection.stop)
    if not groups and not selection.everything:
        raise selects_nothing(reader, selection)
    return groups


def signature_lines(reader: CaptureReader, selection: Selection) -> Iterator[str]:
    """A row for each signature, as JSON lines in chunks."""
    return lines(
        {
            "kind": "signature",
            "kernel": group.kernel,
            "calls": group.calls,
            "first": group.first,
            "signature": group.text,
        }
        for group in signature_groups(reader, selection)
    )


def signature_text_lines(reader: CaptureReader, selection: Selection) -> Iterator[str]:
    """For people: how often, from which ordinal on, which kernel id, and the signature."""
    groups = signature_groups(reader, selection)
    rows = [(str(group.calls), str(group.first), str(group.kernel), group.text) for group in groups]
    yield from (f"{line}\n" for line in aligned([("calls", "first at", "kernel", "signature"), *rows]))


_COLUMNS = (
    "name",
    "category",
    "tier",
    "device",
    "stream",
    "communication_stream",
    "grid",
    "block",
    "shared_memory_bytes",
    "registers_per_thread",
    "blocks_per_sm",
    "warps_per_sm",
    "occupancy_percent",
    "bytes",
    "direction",
    "collective_by",
    "count",
    "untimed",
    "total_ns",
    "min_ns",
    "max_ns",
)
_COLLECTIVE = (
    "name",
    "dtype",
    "in_elements",
    "out_elements",
    "group_size",
    "group",
    "group_description",
    "group_ranks",
)
_SHOWN_NAME = 100


def device_kernels(reader: CaptureReader) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The streams, then the kernels, those with the most time first, as rows of docs/rows.md. Raises UsageError if the
    capture has no such table."""
    found = device_kernel_rows(reader)
    if found is None:
        raise UsageError(
            f"{reader.path} holds no device kernels; imports of profiler traces with device work keep them "
            "(opreplay-import), and what is trimmed from those does not"
        )
    streams = _streams(found)
    communicates = {(each["device"], each["stream"]): each["communication"] for each in streams}
    rows = [
        {"kind": "device_kernel"}
        | {name: row.get(name) for name in _COLUMNS}
        | {"communication_stream": communicates[row["device"], row["stream"]]}
        | {"occupancy_percent": _occupancy(row), "tier": kernel_tier(row["name"])}
        | {"collective": None if row["collective"] is None else {n: row["collective"].get(n) for n in _COLLECTIVE}}
        for row in found
    ]
    rows.sort(key=lambda row: (-(row["total_ns"] or 0), -row["count"], row["name"]))
    return streams, rows


def _occupancy(row: dict[str, Any]) -> Any:
    """The profiler's estimate, None where it failed: it says 0 then. No processor holds more than 64 warps, so that one
    of them is more than a percent."""
    failed = row["occupancy_percent"] == 0 and (row["warps_per_sm"] or 0) >= 1
    return None if failed else row["occupancy_percent"]


def _streams(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    streams: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in rows:
        place = row["device"], row["stream"]
        made = {"kind": "device_stream", "device": place[0], "stream": place[1], "count": 0, "untimed": 0}
        each = streams.setdefault(place, made | {"total_ns": 0, "collective_ns": 0, "communication": None})
        each["count"] += row["count"]
        each["untimed"] += row["untimed"]
        each["total_ns"] += row["total_ns"] or 0
        each["collective_ns"] += (row["total_ns"] or 0) if row["collective_by"] is not None else 0
    for each in streams.values():
        if each["count"] == each["untimed"]:
            each["total_ns"] = each["collective_ns"] = None
        elif each["total_ns"]:
            each["communication"] = 2 * each["collective_ns"] >= each["total_ns"]
    return sorted(streams.values(), key=lambda each: (str(each["device"]), each["stream"] or 0))


def device_kernel_lines(reader: CaptureReader) -> Iterator[str]:
    """The rows as JSON lines in chunks: streams, then kernels."""
    streams, rows = device_kernels(reader)
    return lines(iter([*streams, *rows]))


def device_kernel_csv(reader: CaptureReader) -> Iterator[str]:
    """The kernels as CSV (RFC 4180 with newlines), in chunks; what is unknown is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"collective_{name}" for name in _COLLECTIVE)])
    for row in device_kernels(reader)[1]:
        collective = row["collective"] or {}
        writer.writerow([csv_cell(row[name]) for name in _COLUMNS] + [csv_cell(collective.get(n)) for n in _COLLECTIVE])
        if text.tell() > 1 << 20:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "x".join(map(str, value)) if isinstance(value, list) else value


def device_kernel_text(reader: CaptureReader) -> Iterator[str]:
    """For people: a line for each stream, then a table of kernels. `-` is unknown."""
    streams, rows = device_kernels(reader)
    for each in streams:
        time = "time not known" if each["total_ns"] is None else f"{each['total_ns'] / 1e3:,.3f} us"
        if each["total_ns"] is not None and each["untimed"]:
            time += f" without the {each['untimed']:,} whose time is not known"
        share = ""
        if each["communication"]:
            share = f", communication: {each['collective_ns'] / each['total_ns']:.0%} in collectives"
        where = f"{each['device'] or 'device not known'} stream {'-' if each['stream'] is None else each['stream']}"
        yield f"{where}: {each['count']:,} kernels, copies and fills, {time}{share}\n"
    total = sum(row["total_ns"] or 0 for row in rows)
    for tier, what in (("copy", "copies and fills"), ("gemm", "matrix products"), ("other", "others")):
        mine = [row for row in rows if row["tier"] == tier]
        taken = sum(row["total_ns"] or 0 for row in mine)
        share = f", {taken / total:.1%} of the time" if total else ""
        yield f"{what}: {len(mine):,} kernels, {sum(row['count'] for row in mine):,} launches{share}\n"
    heads = ("count", "total us", "device", "stream", "grid", "block", "shared B", "registers", "bytes", "occupancy")
    cells = [heads] + [
        (
            f"{row['count']:,}",
            "-" if row["total_ns"] is None else f"{row['total_ns'] / 1e3:,.3f}",
            row["device"] or "-",
            *(
                "-" if row[name] is None else str(csv_cell(row[name]))
                for name in ("stream", "grid", "block", "shared_memory_bytes", "registers_per_thread", "bytes")
            ),
            "-" if row["occupancy_percent"] is None else f"{row['occupancy_percent']:g}%",
        )
        for row in rows
    ]
    widths = [max(len(printable(cell)) for cell in column) for column in zip(*cells, strict=True)]
    names = ["name", *(_shown_name(row) for row in rows)]
    for line, name in zip(cells, names, strict=True):
        shown = [f"{printable(cell):>{width}}" for cell, width in zip(line, widths, strict=True)]
        yield f"{'  '.join(shown)}  {name}\n"


def _shown_name(row: dict[str, Any]) -> str:
    collective = row["collective"]
    if collective is None:
        return printable(row["name"], _SHOWN_NAME)
    told = (("", "name", ""), ("of ", "in_elements", ""), ("", "dtype", ""), ("over ", "group_size", " ranks"))
    text = " ".join(f"{b}{collective[n]}{a}" for b, n, a in told if collective[n] not in (None, ""))
    return printable(f"{row['name']:.60} [{text}]", _SHOWN_NAME + 60)
