"""The zip artifact: event_replay_ir.json, a script that replays it with only PyTorch, and a README.

The whole selection is checked before anything is written: a call that the IR cannot express is refused with its reason,
or left out on request, and then the README says so.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from replayfmt.errors import CaptureFailed, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.container.output import check_place, remove_unfinished, same_file
from replayfmt.format.model import Record
from replayfmt.format.printable import counted, printable
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.operators import refused_names
from replayfmt.trim.selection import Wanted, resolve

from .event_replay_ir import OWN, EntryMaker, Inexpressible
from .integers import Integers, Texts

IR_NAME, SCRIPT_NAME, README_NAME = "event_replay_ir.json", "replay.py", "README.md"
INTEGERS_NAME = "integers.json"
_TIMELESS = (1980, 1, 1, 0, 0, 0)  # the same capture produces the same bytes
_EXECUTABLE = 0o755 << 16
_SHOWN = 20


@dataclass
class Exported:
    """The outcome of an export. `left_out` has a sentence and a count for each reason; `without_integers` counts the
    arguments of integers and booleans whose content is unknown, and `no_integers` says why none is."""

    entries: int = 0
    calls: int = 0
    without_integers: int = 0
    no_integers: str = ""
    left_out: Counter[str] = field(default_factory=Counter)


def export_replay_zip(
    reader: CaptureReader,
    out: str | os.PathLike[str],
    wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    *,
    unique: bool = False,
    partial: bool = False,
    force: bool = False,
    on_record: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the selected ops of a capture as a zip artifact.

    With `unique`, calls with the same arguments become one entry with their count. With `partial`, calls that the IR
    cannot express are left out; otherwise they are refused. `on_record(done, total)` is called with the progress.

    Raises UsageError if nothing is selected or `out` is the capture, ReplayRefused with a finding for each reason,
    OutputExists, and CaptureFailed if the file cannot be written.
    """
    if same_file(reader.path, out):
        raise UsageError(f"{os.fspath(out)}: is the capture that is exported; name another file")
    check_place(out, force)
    exported = Exported()
    with Integers(reader) as integers:
        entries, content = _entries(reader, wanted, unique, exported, on_record, integers)
        exported.without_integers, exported.no_integers = integers.missing, integers.problem
    if exported.left_out and not partial:
        reasons = tuple(f"{reason}: {counted(count, 'call')}" for reason, count in exported.left_out.most_common())
        raise ReplayRefused(
            f"{reader.path}: {sum(exported.left_out.values()):,} of {counted(exported.calls, 'call')} cannot be "
            f"expressed in EventReplay IR; nothing was written; --partial leaves them out",
            reasons,
        )
    texts = {
        IR_NAME: json.dumps(entries, indent=1),
        INTEGERS_NAME: json.dumps(content, indent=1),
        SCRIPT_NAME: _script(),
        README_NAME: _readme(reader, wanted, entries, exported),
    }
    _write(out, texts)
    return exported


def _script() -> str:
    """The script, with what it refuses to run."""
    text = files(__package__).joinpath("replay_script.py").read_text(encoding="utf-8")
    for name, refused in zip(("REFUSED_NAMESPACES", "REFUSED_OPERATORS"), refused_names(), strict=True):
        empty, filled = f"{name}: tuple[str, ...] = ()\n", ",\n    ".join(map(repr, refused))
        assert text.count(empty) == 1
        text = text.replace(empty, f"{name}: tuple[str, ...] = (\n    {filled},\n)\n")
    return text


def _entries(
    reader: CaptureReader,
    wanted: Wanted,
    unique: bool,
    exported: Exported,
    on_record: Callable[[int, int], None] | None,
    integers: Integers,
) -> tuple[list[dict[str, Any]], dict[int, Texts]]:
    """The entries, and by their numbers the content of their integer arguments."""
    maker = EntryMaker(reader)
    found: dict[str, dict[str, Any]] = {}
    entries: list[dict[str, Any]] = []
    content: dict[int, Texts] = {}
    kept = resolve(reader, wanted)
    for done, ordinal in enumerate(kept.ordinals.tolist()):
        if on_record is not None and not done % 1024:
            on_record(done, len(kept.ordinals))
        record = reader.record(ordinal)
        if record.kind not in (RecordKind.op, RecordKind.unsupported, RecordKind.collective):
            continue
        count = record.calls
        exported.calls += count
        try:
            entry = _entry(maker, record, count)
        except Inexpressible as error:
            exported.left_out[str(error)] += count
            continue
        key = json.dumps({**entry, "count": 0}) if unique else ""
        known = found.get(key) if unique else None
        if known is not None:
            known["count"] += count
            continue
        found[key] = entry
        if texts := integers.of(record):
            content[len(entries)] = texts
        entries.append(entry)
    exported.entries = len(entries)
    if entries and (devices := maker.devices()):
        entries[0][OWN]["devices"] = devices  # the IR is a list: it has no place for data about all of it
    return entries, content


def _entry(maker: EntryMaker, record: Record, count: int) -> dict[str, Any]:
    if record.kind is RecordKind.op:
        try:
            return maker.entry(record, count)
        except Inexpressible as error:
            raise Inexpressible(f"{maker.name(record)}: {error}") from None
    if record.kind is RecordKind.collective:
        raise Inexpressible("a collective")
    raise Inexpressible(
        f"{record.argument('op') or 'a call'}: it is unsupported in the capture, {record.argument('reason')}"
    )


def _write(out: str | os.PathLike[str], texts: dict[str, str]) -> None:
    """All or nothing: the file appears under its name once it is complete."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            info = zipfile.ZipInfo(name, _TIMELESS)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = _EXECUTABLE if name == SCRIPT_NAME else 0o644 << 16
            archive.writestr(info, text)
    partial = Path(f"{os.fspath(out)}.{os.getpid()}.partial")  # another export may be writing to the same path
    try:
        partial.write_bytes(buffer.getvalue())
        os.replace(partial, out)
    except OSError as error:
        remove_unfinished(partial)
        raise CaptureFailed(f"{os.fspath(out)}: cannot be written: {error.strerror}") from error


def escaped(text: str) -> str:
    """Text from a capture for Markdown: on one line, and nothing in it is markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+-.!|" else c for c in printable(text))


def _readme(reader: CaptureReader, wanted: Wanted, entries: list[dict[str, Any]], exported: Exported) -> str:
    names = Counter[str]()
    for entry in entries:
        names[entry["op_name"]] += entry["count"]
    torch_version = reader.session.torch_version or "an unknown version"
    lines = [
        "# Operator calls to replay",
        "",
        f"{exported.entries} entries for {sum(names.values())} operator calls, exported from "
        f"{escaped(Path(reader.path).name)} (PyTorch {escaped(torch_version)}; selection: {escaped(wanted.text)}).",
        "",
        f"- `{IR_NAME}`: the calls as TraceLens EventReplay IR: operators, arguments, dtypes, shapes, strides, counts.",
        f"- `{INTEGERS_NAME}`: integers and booleans that the calls take, by entry number and argument: "
        f"captured, or synthesized to fit the calls (zlib in base64).",
        f"- `{SCRIPT_NAME}`: creates inputs and runs every call on its own. It needs only PyTorch.",
        "",
        "```sh",
        f"python {SCRIPT_NAME}                    # every call, where it was recorded",
        f"python {SCRIPT_NAME} --device=cpu --verbose --op-filter=mm",
        "```",
        "",
        "It prints the time of each call, times its count, and exits with 1 if a call failed.",
        "",
        "Not included: other contents (floating-point inputs are normally distributed), results, what one call passed",
        "to the next, random generators' states, numeric settings. `opreplay` members hold what the IR has no place",
        "for: overloads, devices, offsets, memory that arguments of one call share. `opreplay-import` reads the",
        "archive back.",
        "",
        *([escaped(without_integers(exported)), ""] if exported.without_integers else ()),
        "| operator | calls |",
        "| --- | --- |",
        *(f"| {escaped(name)} | {count} |" for name, count in names.most_common(_SHOWN)),
    ]
    others = names.most_common()[_SHOWN:]
    if others:
        lines.append(f"| {len(others)} more | {sum(count for _name, count in others)} |")
    if exported.left_out:
        lines += [
            "",
            "Left out, because the IR cannot express it:",
            "",
            *(f"- {escaped(reason)}: {counted(count, 'call')}" for reason, count in exported.left_out.most_common()),
        ]
    return "\n".join(lines) + "\n"


def without_integers(exported: Exported) -> str:
    """The note on integers whose content is unknown, "" if there are none."""
    if not exported.without_integers:
        return ""
    why = (
        f"the capture cannot be prepared for a replay here: {exported.no_integers}"
        if exported.no_integers
        else "ops of the capture computed them, no initializer is for them, or they are large"
    )
    return f"{exported.without_integers} arguments of integers or booleans are 0: {why}"
