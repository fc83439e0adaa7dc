"""Attachments of kernels in a dump: their rows, how much there is of them, and one of them as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.attachments import SOURCE
from replayfmt.format.codes import Codec
from replayfmt.format.container.payload_input import PayloadInfo
from replayfmt.format.device_kernels import ROLE
from replayfmt.format.distinct import distinct
from replayfmt.format.printable import counted, printable
from replayfmt.format.reader import CaptureReader

_SHOWN_KERNELS = 3
_SHOWN_NAME = 80


@dataclass(frozen=True)
class Code:
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


def code_in(reader: CaptureReader) -> Code:
    """The code in a capture, whether an op calls it or not."""
    column = reader.definitions.column
    is_code = np.array([each is not None and each.role != ROLE for each in reader.attachments], bool)
    payloads = distinct(column("attachment_payload")[is_code[1:]])
    source = reader.strings.index(SOURCE) if SOURCE in reader.strings else -1
    return Code(
        kernels=int(np.count_nonzero(column("kernel_attachments"))),
        attachments=int(np.count_nonzero(is_code)),
        sources=int(np.count_nonzero(column("attachment_role") == source)),
        bytes=sum(reader.payload_info(number).raw_bytes for number in payloads.tolist()),
    )


def payload_range(payload: PayloadInfo) -> dict[str, Any]:
    """Where a payload's bytes are in the file, and their compression."""
    return {"offset": payload.offset, "length": payload.stored_bytes, "compression": Codec(payload.codec).name}


def attachment_rows(reader: CaptureReader) -> Iterator[dict[str, Any]]:
    """The rows of attachments, by id."""
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
        names = [reader.kernels[kernel].qualified_name for kernel in kernels[:_SHOWN_KERNELS]]
        more = f" and {len(kernels) - _SHOWN_KERNELS:,} more" if len(kernels) > _SHOWN_KERNELS else ""
        yield (
            f"attachment {row['id']}: {row['role']} {printable(row['name'], _SHOWN_NAME)!r}, "
            f"{counted(row['bytes'], 'byte')} at {place['offset']:#x}{stored}, {row['digest']}, of "
            f"{', '.join(printable(name, _SHOWN_NAME) for name in names) + more if names else 'no kernel'}\n"
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
