"""Lists over a whole capture: distinct signatures (`--signatures`), and what ran on devices (`--device-kernels`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.attachments import device_kernel_rows, kernel_tier
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import SignatureGroup, SignatureIndex
from replayfmt.format.validation import aligned, csv_text, printable

from .definitions import lines
from .selection import Selection, selected_kernels, selects_nothing


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
    """The kernels as CSV; what is unknown is empty."""
    rows = []
    for row in device_kernels(reader)[1]:
        values = [row[name] for name in _COLUMNS], [(row["collective"] or {}).get(name) for name in _COLLECTIVE]
        rows.append([csv_cell(each) for part in values for each in part])
    yield csv_text([*_COLUMNS, *(f"collective_{name}" for name in _COLLECTIVE)], rows)


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
    cells = [
        (
            f"{row['count']:,}",
            "-" if row["total_ns"] is None else f"{row['total_ns'] / 1e3:,.3f}",
            printable(row["device"] or "-"),
            *(
                "-" if row[name] is None else str(csv_cell(row[name]))
                for name in ("stream", "grid", "block", "shared_memory_bytes", "registers_per_thread", "bytes")
            ),
            "-" if row["occupancy_percent"] is None else f"{row['occupancy_percent']:g}%",
            _shown_name(row),
        )
        for row in rows
    ]
    yield from (f"{line}\n" for line in aligned([(*heads, "name"), *cells]))


def _shown_name(row: dict[str, Any]) -> str:
    collective = row["collective"]
    if collective is None:
        return printable(row["name"], _SHOWN_NAME)
    told = (("", "name", ""), ("of ", "in_elements", ""), ("", "dtype", ""), ("over ", "group_size", " ranks"))
    text = " ".join(f"{b}{collective[n]}{a}" for b, n, a in told if collective[n] not in (None, ""))
    return printable(f"{row['name']:.60} [{text}]", _SHOWN_NAME + 60)
