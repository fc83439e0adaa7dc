"""The part of a dump before its records: the file, the summary, the session, and every definition that records refer
to.

As rows, as text, and as HTML for notebooks, in which everything that a capture says is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from replayfmt.format.codes import KernelKind, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.frames import MAX_NESTING
from replayfmt.format.model import CHILD_WORK, CaptureInfo, Device
from replayfmt.format.reader import CaptureReader, RecordFrame, count_uncompared
from replayfmt.format.validation import counted, nested_deeper, parse_json, printable, scope_count

from .contents import (
    FileNeeds,
    attachment_rows,
    code_in,
    contained,
    file_rows,
    files_row,
    payload_range,
    state,
    statement,
    validation,
)
from .expansion import Column, Expander, Numbers, Piece, Sheet, Slot, Words, ranked
from .row_templates import CHUNK_CHARACTERS, encode, quote, scope_path

Row = dict[str, Any]

SHOWN_FILES = 10
SHOWN_LINE = 1000  # characters; no statement of what a capture contains is as long
# What the text says of an external file, by where its content is.
_WHERE = {"external": "", "inline": ", embedded", "ranges": ", what is used of it is embedded", "unknown": ", not used"}


def file_row(reader: CaptureReader) -> Row:
    """The kind of file, and whether it is complete."""
    return {
        "kind": "file",
        "path": str(reader.path),
        "version": f"{reader.version[0]}.{reader.version[1]}",
        "complete": reader.complete,
        "length": reader.length,
        "incomplete_reason": None if reader.complete else reader.incomplete_reason,
        "warnings": list(reader.warnings),
    }


def obstacles(reader: CaptureReader) -> list[str]:
    """Why a strict replay would refuse this capture, as far as the file alone can tell; empty if nothing prevents it.
    (An operator that the replaying build lacks, or content that was not captured and that no initializer can
    synthesize, is found by opreplay-run.)"""
    found = []
    if not reader.complete:
        found.append("incomplete")
    if reader.summary.unsupported.keys() - {CHILD_WORK}:
        found.append("unsupported records")
    used = (signature for signature in reader.signatures[1:] if signature.kind == RecordKind.op)
    if any(node.kind == ValueKind.opaque for signature in used for node in signature.nodes):
        found.append("opaque arguments")
    if any(
        (kernel.kind == KernelKind.collective or kernel.kind != KernelKind.operator and not kernel.attachments)
        and reader.summary.kernel_calls.get(number)
        for number, kernel in enumerate(reader.kernels[1:], start=1)
    ):
        found.append("kernels without code")
    if reader.summary.records.get(RecordKind.collective):
        found.append("collectives")
    if FileNeeds(reader).unconfirmed(reader):
        found.append("external files that cannot be validated")
    return found


def summary_row(reader: CaptureReader) -> Row:
    """Totals over the whole capture, and what it contains. Values that the capture does not have are None."""
    summary, needs = reader.summary, FileNeeds(reader)
    records = {kind.name: summary.records.get(kind, 0) for kind in RecordKind if kind != RecordKind.none}
    return {
        "kind": "summary",
        "hermetic": needs.hermetic,
        "environment_referenced": needs.files > 0,
        "strict_replay_supported": not obstacles(reader),
        "ops": records["op"],
        "kernels": len(reader.kernels) - 1,
        "storages": summary.storages,
        "scopes": {"begin": records["scope_begin"], "end": records["scope_end"]},
        "payloads": {"count": len(reader.payloads), "bytes": summary.storage_payload_bytes},
        **files_row(reader, needs),
        "unsupported": dict(sorted(summary.unsupported.items())),
        "records": records,
        "absent_storages": summary.absent_storages,
        "duration_ns": summary.ended_ns,
        "recovered": summary.recovered,
        "origins": _by_origin(summary.origins),
        "origin_bytes": _by_origin(summary.origin_bytes),
        "annotated": summary.annotated,
        "uncompared": count_uncompared(reader),
        "contains": contained(reader).row(),
        "code": vars(code_in(reader)),
    }


def _by_origin(counts: dict[StorageOrigin, int]) -> dict[str, int]:
    return {origin.name: counts.get(origin, 0) for origin in StorageOrigin if origin != StorageOrigin.none}


def created(session: CaptureInfo) -> str | None:
    """When the capture was started, as ISO 8601 in UTC. None if that is unknown or no date at all."""
    if not 0 < session.created_unix_ns < 253402300800 * 10**9:
        return None
    return datetime.fromtimestamp(session.created_unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def session_row(session: CaptureInfo) -> Row:
    """The capture's origin."""
    found = vars(session) | {"argv": list(session.argv)}
    producer = {name: found.pop(name) for name in ("session_id", "producer", "producer_version")}
    # Always a string, so that its type does not depend on its size.
    found["created_unix_ns"] = str(session.created_unix_ns) if session.created_unix_ns else None
    return {"kind": "session", **producer, "created": created(session), **found}


def fingerprint(device: Device) -> Any:
    """The device's properties as an object; as text where the capture's text is not one."""
    try:
        value = parse_json(device.fingerprint) if device.fingerprint else None
    except ValueError:
        return device.fingerprint
    return device.fingerprint if nested_deeper(value, MAX_NESTING) else value


def definition_rows(reader: CaptureReader) -> Iterator[Row]:
    """The session, then devices, kernels, generators, scopes, payloads, external files, ranges, recipes and attachments
    by id."""
    yield session_row(reader.session)
    names = [None, *(str(device) for device in reader.devices[1:])]
    for number, device in enumerate(reader.devices[1:], start=1):
        yield {
            "kind": "device",
            "id": number,
            "device": names[number],
            "type": device.kind,
            "index": device.index if device.index >= 0 else None,
            "name": device.name or None,
            "fingerprint": fingerprint(device),
        }
    for number, kernel in enumerate(reader.kernels[1:], start=1):
        yield {
            "kind": "kernel",
            "id": number,
            "name": kernel.name,
            "overload": kernel.overload,
            "schema": kernel.schema,
            "calls": reader.summary.kernel_calls.get(number, 0),
            "kernel_kind": kernel.kind.name,
            "attachments": list(kernel.attachments),
        }
    for number, generator in enumerate(reader.generators[1:], start=1):
        yield {"kind": "generator", "id": number, "device": names[generator.device], "default": generator.default}
    for number, scope in enumerate(reader.scopes[1:], start=1):
        yield {
            "kind": "scope",
            "id": number,
            "name": scope.name,
            "path": scope_path(reader, number),
            "parent": scope.parent or None,
        }
    for payload in reader.payloads:
        yield {
            "kind": "payload",
            "id": payload.id,
            "bytes": payload.raw_bytes,
            "digest": payload.digest,
            "range": payload_range(payload),
        }
    yield from file_rows(reader, FileNeeds(reader))
    yield from attachment_rows(reader)


def lines(rows: Iterator[Row]) -> Iterator[str]:
    chunk: list[str] = []
    length = 0
    for row in rows:
        chunk.append(encode(row) + "\n")
        length += len(chunk[-1])
        if length > 1 << 20:
            yield "".join(chunk)
            chunk, length = [], 0
    yield "".join(chunk)


_STORAGE_COLUMNS = ("number", "device", "bytes", "origin", "payload")
# What the id in the payload's column refers to, by origin.
_REFERS_TO = {StorageOrigin.external_file: "range", StorageOrigin.initializer: "recipe"}


def storage_lines(reader: CaptureReader, frame: RecordFrame, expander: Expander) -> Iterator[bytes]:
    """The rows of the storages that first appear in a frame, as JSON lines. There may be as many as ops."""
    count = len(frame.storage_bytes)
    columns: dict[str, Column] = {
        "number": Numbers(np.arange(frame.first_storage, frame.first_storage + count)),
        "device": Words(["null", *(quote(str(device)) for device in reader.devices[1:])], frame.storage_device),
        "bytes": Numbers(frame.storage_bytes, quoted=True),
        "origin": Words([quote(origin.name) for origin in StorageOrigin], frame.storage_origin),
        "payload": Numbers(frame.storage_payload, null=0),
    }
    start: list[Piece] = ['{"kind":"storage","id":', Slot("number"), ',"device":', Slot("device"), ',"bytes":']
    start += [Slot("bytes"), ',"origin":', Slot("origin"), ',"payload":']
    found, which = ranked(frame.storage_origin)
    templates = []
    for origin in map(StorageOrigin, found):
        name = _REFERS_TO.get(origin)
        other = "" if name is None else f'null,"{name}":'
        templates.append(expander.template([*start, other, Slot("payload"), "}\n"], _STORAGE_COLUMNS))
    longest = max(len(str(device)) for device in reader.devices) * 12 + 256
    yield from expander.lines(templates, which, Sheet(count, columns), max(1, CHUNK_CHARACTERS // longest))


def summary_text(reader: CaptureReader) -> str:
    """The summary as aligned lines, with an empty line after it."""
    return (
        "".join(f"{name:<14}{printable(value, SHOWN_LINE)}\n" for name, value in summary_facts(reader) if value) + "\n"
    )


def summary_facts(reader: CaptureReader) -> list[tuple[str, str]]:
    """The lines of the summary: names and texts, "" if there is nothing to report."""
    return [*_file_facts(reader), *_origin_facts(reader.session), *_content_facts(reader)]


def _file_facts(reader: CaptureReader) -> list[tuple[str, str]]:
    version = f"{reader.version[0]}.{reader.version[1]}"
    return [
        ("file", f"{reader.path}, {counted(reader.length, 'byte')}, format {version}"),
        ("complete", "yes" if reader.complete else f"no: {reader.incomplete_reason}"),
        *(("warning", warning) for warning in reader.warnings),
    ]


def _origin_facts(session: CaptureInfo) -> list[tuple[str, str]]:
    makers = [f"{session.producer} {session.producer_version}"]
    makers += [
        f"{name} {version}"
        for name, version in (("torch", session.torch_version), ("python", session.python_version))
        if version
    ]
    machine = (session.host, session.platform, session.cpu, session.cpu_capability)
    return [
        ("captured", " by ".join(filter(None, (created(session), ", ".join(makers))))),
        ("machine", ", ".join(filter(None, machine))),
        ("command", " ".join(session.argv)),
        (
            "policies",
            ", ".join(
                f"{name}={value}"
                for name, value in session.policies.items()
                if value is not None and value is not False
            ),
        ),
        ("rank", f"{session.rank} of {session.world_size}" if session.world_size > 1 else ""),
    ]


def _content_facts(reader: CaptureReader) -> list[tuple[str, str]]:
    summary = reader.summary
    devices = [f"{device} ({device.name})" if device.name else str(device) for device in reader.devices[1:]]
    ops = summary.records.get(RecordKind.op, 0)
    records = [f"{counted(ops, 'op')} of {counted(len(reader.kernels) - 1, 'kernel')}"]
    records += [
        f"{count:,} {kind.name}" for kind, count in sorted(summary.records.items()) if count and kind != RecordKind.op
    ]
    if summary.annotated:
        records.append(f"{summary.annotated:,} of them annotated")
    memory = [
        counted(summary.storages, "storage"),
        f"{counted(len(reader.payloads), 'payload')} of {counted(summary.storage_payload_bytes, 'byte')}",
    ]
    if summary.absent_storages:
        memory.append(f"{summary.absent_storages:,} without content")
    made_up = summary.absent_storages
    if recipes := summary.origins.get(StorageOrigin.initializer, 0):
        memory.append(f"{counted(recipes, 'storage')} synthesized by a recipe")
        made_up += recipes
    has, lacks = statement(contained(reader))
    code = code_in(reader)
    unsupported = [f"{count:,} {reason}" for reason, count in sorted(summary.unsupported.items())]
    against, uncompared = obstacles(reader), count_uncompared(reader)
    return [
        ("devices", ", ".join(devices)),
        ("records", ", ".join(records)),
        ("scopes", _scopes(reader)),
        ("memory", ", ".join(memory)),
        *_file_facts_outside(reader),
        ("contains", has),
        ("lacks", lacks),
        ("code", str(code) if code.attachments else ""),
        ("unsupported", ", ".join(unsupported) or "none"),
        (
            "strict replay",
            f"refused: {', '.join(against)}"
            if against
            else "nothing in the file prevents it"
            + ("; kernels with code of their own need --allow-code" if code.attachments else "")
            + ("; content that was not captured is synthesized" if made_up else "")
            + ("; child processes worked, which it does not hold" if CHILD_WORK in summary.unsupported else "")
            + (f"; it does not compare {counted(uncompared, 'result')}" if uncompared else ""),
        ),
    ]


def _scopes(reader: CaptureReader) -> str:
    """The outermost ones by name; how many there are with those inside them, where that is more."""
    outermost = [scope.name for scope in reader.scopes[1:] if not scope.parent]
    entered = reader.summary.records.get(RecordKind.scope_begin, 0)
    if not outermost or entered == len(outermost):
        return ", ".join(outermost)
    return f"{', '.join(outermost)}; {scope_count(len(reader.scopes) - 1, entered)} in all"


def _file_facts_outside(reader: CaptureReader) -> list[tuple[str, str]]:
    """The external files one by one, each with the location of its content and the state of its path."""
    needs = FileNeeds(reader)
    shown = []
    for number, file in enumerate(reader.files[1 : SHOWN_FILES + 1], start=1):
        where = needs.where(number)
        found = f", {state(file)}" if where == "external" else ""
        shown.append(
            (
                "file needed" if where == "external" else "file",
                f"{file.path}, {counted(file.bytes, 'byte')}, validated by {validation(file)}{_WHERE[where]}{found}",
            )
        )
    if needs.files > SHOWN_FILES:
        shown.append(("files", f"{needs.files - SHOWN_FILES:,} more"))
    return shown


_SHOWN_KERNELS = 50


def capture_html(reader: CaptureReader) -> str:
    """Two tables; of very many kernels only those called most."""
    calls = reader.summary.kernel_calls
    kernels = sorted(range(1, len(reader.kernels)), key=lambda number: (-calls.get(number, 0), number))
    facts = "".join(_row(name, value) for name, value in summary_facts(reader) if value)
    rows = "".join(
        _row(
            str(number),
            reader.kernels[number].qualified_name,
            f"{calls.get(number, 0):,}",
            reader.kernels[number].schema,
        )
        for number in kernels[:_SHOWN_KERNELS]
    )
    left = len(kernels) - _SHOWN_KERNELS
    more = f"<p>and {left:,} kernels that are called less</p>" if left > 0 else ""
    head = "".join(f"<th>{name}</th>" for name in ("id", "kernel", "calls", "schema"))
    return f"<table>{facts}</table><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _row(*cells: str) -> str:
    from html import escape  # a large table that no other output needs

    return "<tr>" + "".join(f"<td>{escape(printable(cell, SHOWN_LINE))}</td>" for cell in cells) + "</tr>"
