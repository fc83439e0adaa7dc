"""What a capture contains beside its records: attachments of kernels, external files, and what its owner may not want
to share.

The last is determined from all of its content, not from its policies.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.attachments import CONFIGURATIONS, DEVICE_KERNELS_ROLE, SOURCE
from replayfmt.format.codes import Codec, RecordKind, ValueKind
from replayfmt.format.model import ExternalFile, FileIdentity
from replayfmt.format.reader import CaptureReader
from replayfmt.format.record_frames import distinct
from replayfmt.format.redaction import has_path, has_stack, users_in
from replayfmt.format.source import PayloadInfo
from replayfmt.format.validation import counted, printable, some_of

_SHOWN_KERNELS = 3
_SHOWN_ATTACHMENT_NAME = 80


_TABLES = (CONFIGURATIONS, DEVICE_KERNELS_ROLE)  # which are no code


@dataclass(frozen=True)
class CodeCounts:
    """How much code a capture holds: kernels that have attachments, attachments, how many of them are sources, and the
    bytes of all before compression, those of equal content counted once."""

    kernels: int
    attachments: int
    sources: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{counted(self.kernels, 'kernel')}, {counted(self.attachments, 'attachment')} of "
            f"{counted(self.bytes, 'byte')}: runs only with --allow-code"
        )


def code_in(reader: CaptureReader) -> CodeCounts:
    """The code in a capture, whether an op calls it or not."""
    column = reader.definitions.column
    is_code = np.array([each is not None and each.role not in _TABLES for each in reader.attachments], bool)
    payloads = distinct(column("attachment_payload")[is_code[1:]])
    source = reader.strings.index(SOURCE) if SOURCE in reader.strings else -1
    return CodeCounts(
        kernels=int(np.count_nonzero(column("kernel_attachments"))),
        attachments=int(np.count_nonzero(is_code)),
        sources=int(np.count_nonzero(column("attachment_role") == source)),
        bytes=sum(reader.payload_info(number).raw_bytes for number in payloads.tolist()),
    )


def payload_range(payload: PayloadInfo) -> dict[str, Any]:
    """Where a payload's bytes are in the file, and their compression."""
    return {"offset": payload.offset, "length": payload.stored_bytes, "compression": Codec(payload.codec).name}


def attachment_rows(reader: CaptureReader) -> Iterator[dict[str, Any]]:
    column = reader.definitions.column
    listed = column("kernel_attachment")
    owners = np.repeat(np.arange(1, len(reader.kernels)), column("kernel_attachments"))[
        np.argsort(listed, kind="stable")
    ]
    ends = np.cumsum(np.bincount(listed, minlength=len(reader.attachments)))
    for number, attachment in enumerate(reader.attachments):
        if attachment is None:
            continue
        payload = reader.payload_info(attachment.payload)
        yield {
            "kind": "attachment",
            "id": number,
            "role": attachment.role,
            "name": attachment.name,
            "kernels": owners[ends[number - 1] : ends[number]].tolist(),
            "bytes": payload.raw_bytes,
            "digest": payload.digest,
            "payload": payload.id,
            "range": payload_range(payload),
        }


def attachment_lines(reader: CaptureReader) -> Iterator[str]:
    """The same as lines for people, with an empty one at the end; nothing without attachments."""
    for row in attachment_rows(reader):
        place, kernels = row["range"], row["kernels"]
        stored = "" if place["compression"] == Codec.none.name else f", {place['compression']} {place['length']:,}"

        def name(kernel: int) -> str:
            return printable(reader.kernels[kernel].qualified_name, _SHOWN_ATTACHMENT_NAME)

        yield (
            f"attachment {row['id']}: {row['role']} {printable(row['name'], _SHOWN_ATTACHMENT_NAME)!r}, "
            f"{counted(row['bytes'], 'byte')} at {place['offset']:#x}{stored}, {row['digest']}, of "
            f"{some_of(kernels, _SHOWN_KERNELS, name) or 'no kernel'}\n"
        )
    if len(reader.attachments) > 1:
        yield "\n"


def attachment_content(reader: CaptureReader, which: str) -> bytes | memoryview:
    """The bytes of an attachment, by its id as text, verified against their hash. Raises UsageError if there is none,
    InvalidCapture if they are damaged."""
    count = len(reader.attachments) - 1
    if not re.fullmatch("[0-9]{1,18}", which) or not 1 <= int(which) <= count:
        there = f"the attachments 1 to {count}" if count else "no attachments"
        raise UsageError(f"--attachment={which}: {reader.path} has {there}")
    return reader.payload(reader.attachments[int(which)].payload)


Row = dict[str, Any]


def validation(file: ExternalFile) -> str:
    """What identifies the captured file: `digest`, `identity` or `none`."""
    return "digest" if file.digest is not None else "identity" if file.identity is not None else "none"


class FileNeeds:
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


def file_rows(reader: CaptureReader, needs: FileNeeds) -> Iterator[Row]:
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


def files_row(reader: CaptureReader, needs: FileNeeds) -> Row:
    """The summary's keys about external files."""
    counts, lengths = needs.count()
    validations = [validation(file) for file in reader.files[1:]]
    return {
        "files": counts,
        "file_bytes": lengths,
        "file_validation": {**{name: validations.count(name) for name in ("identity", "digest", "none")}, "unknown": 0},
    }


_AT_ONCE = 1024
_SHOWN_USER_NAME = 40
_MARKS = ("/", "\\", "~", ".py", ".c", ".h", 'File "')  # every path and every place in a program has one of them
_NUMBERS = (ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex)


@dataclass(frozen=True)
class Contained:
    """The findings. Numbers count what they are named after; `recipes` those with statistics."""

    content_bytes: int
    digests: int
    scalar_results: int
    recipe_statistics: int
    argument_strings: int
    opaque_descriptions: int
    scope_names: int
    external_file_paths: int
    other_paths: int
    stacks: int
    host_name: bool
    user_names: tuple[str, ...]
    working_directory: bool
    command_line: bool
    code_bytes: int
    code_sources: int

    def row(self) -> dict[str, Any]:
        return {**vars(self), "user_names": list(self.user_names)}


def contained(reader: CaptureReader) -> Contained:
    """Look through a capture's definitions, totals and session."""
    session = reader.session
    file_paths = {file.path for file in reader.files[1:]}
    texts = [text for text in (*reader.definitions.strings[1:], *_session_texts(reader)) if text]
    # A capture may have very many texts, few of which reveal anything: check many at once first.
    pages = ["\n".join(texts[first : first + _AT_ONCE]) for first in range(0, len(texts), _AT_ONCE)]
    telling = [
        text
        for number, page in enumerate(pages)
        if _may_tell(page)
        for text in texts[number * _AT_ONCE : (number + 1) * _AT_ONCE]
    ]
    users = {user for text in telling for user in users_in(text)}
    nodes, code = _Nodes(reader), code_in(reader)
    return Contained(
        content_bytes=reader.summary.storage_payload_bytes - code.bytes,
        digests=reader.summary.records.get(RecordKind.digest, 0)
        + (reader.summary.records.get(RecordKind.host_read, 0) if nodes.host_reads_with_digest() else 0),
        scalar_results=sum(reader.summary.kernel_calls.get(kernel, 0) for kernel in nodes.scalar_kernels()),
        recipe_statistics=int(np.count_nonzero(reader.definitions.column("recipe_statistics"))),
        argument_strings=nodes.distinct_texts(ValueKind.string),
        scope_names=len(reader.scopes) - 1,
        opaque_descriptions=nodes.distinct_texts(ValueKind.opaque),
        external_file_paths=len(file_paths),
        other_paths=sum(has_path(text) for text in telling if text not in file_paths),
        stacks=sum(map(has_stack, telling)),
        host_name=session.host is not None,
        user_names=tuple(sorted(users)),
        working_directory=session.working_directory is not None,
        command_line=bool(session.argv),
        code_bytes=code.bytes,
        code_sources=code.sources,
    )


def _may_tell(page: str) -> bool:
    """Whether a text can contain a path, a stack or a user. The plain marks are searched first, because that is
    fast."""
    return any(map(page.__contains__, _MARKS)) and (has_path(page) or has_stack(page) or bool(users_in(page)))


def _session_texts(reader: CaptureReader) -> Iterator[str]:
    session = reader.session
    yield from filter(None, (session.working_directory, session.platform, *session.argv))
    for values in (session.libraries, session.settings, session.policies):
        yield from (value for value in values.values() if isinstance(value, str))


class _Nodes:
    """The values of a capture's signatures as columns: which are arguments of ops, and which results."""

    def __init__(self, reader: CaptureReader) -> None:
        column = reader.definitions.column
        sizes = column("signature_nodes").astype(np.int64)
        self._kind = column("node_kind")
        self._constant = column("node_constant")
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._signature_kind = column("signature_kind")
        self._kernels = column("signature_kernel")
        self._results = column("signature_results")
        self._ends = np.cumsum(sizes)

    def distinct_texts(self, kind: ValueKind) -> int:
        """The number of distinct texts of a kind among the arguments of ops."""
        chosen = (self._kind == kind) & (self._signature_kind[self._owner] == RecordKind.op)
        return len(distinct(self._constant[chosen]))

    def scalar_kernels(self) -> list[int]:
        """The kernels that returned a number somewhere, as their only or last result: `item` and its like."""
        rows = np.flatnonzero((self._signature_kind == RecordKind.op) & (self._results > 0))
        last = self._kind[self._ends[rows] - 1]
        found: list[int] = distinct(self._kernels[rows[np.isin(last, _NUMBERS)]]).tolist()
        return found

    def host_reads_with_digest(self) -> bool:
        """Whether any host read has a digest."""
        sizes = np.diff(self._ends, prepend=0)
        return bool((sizes[self._signature_kind == RecordKind.host_read] > 2).any())


def statement(found: Contained) -> tuple[str, str]:
    """What the capture contains and what it does not, as two lists for people."""
    names = [name if len(name) <= _SHOWN_USER_NAME else name[:_SHOWN_USER_NAME] + "…" for name in found.user_names]
    facts = [
        (found.content_bytes, f"{counted(found.content_bytes, 'byte')} of content", "content"),
        (found.code_bytes, f"{counted(found.code_bytes, 'byte')} of kernels' code", ""),
        (found.code_sources, f"{counted(found.code_sources, 'source')} of kernels", ""),
        (found.digests, f"{counted(found.digests, 'digest')} of content, with up to 64 elements each", "digests"),
        (found.scalar_results, f"values that {counted(found.scalar_results, 'op')} returned", "values of results"),
        (found.recipe_statistics, f"statistics of {counted(found.recipe_statistics, 'tensor')}", "statistics"),
        (
            found.argument_strings,
            f"{counted(found.argument_strings, 'string')} as arguments of ops",
            "strings as arguments",
        ),
        (found.opaque_descriptions, f"{counted(found.opaque_descriptions, 'description')} of other arguments", ""),
        (
            found.external_file_paths,
            f"{counted(found.external_file_paths, 'path')} of external files",
            "paths of external files",
        ),
        (found.other_paths, f"{counted(found.other_paths, 'text')} with absolute paths", "other absolute paths"),
        (found.host_name, "host name", "host name"),
        (
            names,
            f"user {'name' if len(names) == 1 else 'names'} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})",
            "user name",
        ),
        (found.working_directory, "working directory", "working directory"),
        (found.command_line, "command line", "command line"),
        (found.stacks, f"{counted(found.stacks, 'text')} with stack information", "stack information"),
    ]
    return (
        ", ".join(text for there, text, _name in facts if there),
        ", ".join(name for there, _text, name in facts if not there and name),
    )
