"""The attachments of one kernel, by role: read, verified and limited before anybody uses them.

Nothing here looks into code. Metadata is parsed, because it says what the rest is.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from replayfmt.errors import InvalidCapture

from .codes import KernelKind
from .container.frames import MAX_NESTING
from .json_values import nested_deeper
from .model import Attachment, Kernel
from .reader import CaptureReader

SOURCE, METADATA, BODY = "source", "metadata", "body"
# How it was found what a kernel writes: from its intermediate code, source or parameters; by comparing what its
# arguments held before and after a call; or not, so that more counts as written than may be.
WRITES_KNOWN_BY = ("ir", "source", "signature", "compared", "assumed")
# What a replay may use, with the longest that it takes of each. Other roles are shown, and used for nothing.
MAX_BYTES = {
    SOURCE: 16 << 20,
    METADATA: 16 << 20,
    BODY: 256 << 20,
    "ttir": 64 << 20,
    "ttgir": 64 << 20,
    "llir": 64 << 20,
    "ptx": 64 << 20,
    "cubin": 256 << 20,
    "hsaco": 256 << 20,
    "object": 256 << 20,
}


def attachments_of(reader: CaptureReader, kernel: Kernel) -> list[Attachment]:
    """A kernel's attachments, in its order."""
    return [reader.attachments[number] for number in kernel.attachments]


def roles_of(reader: CaptureReader, kernel: Kernel) -> tuple[str, ...]:
    """The roles of a kernel's attachments, each once, in its order."""
    return tuple(dict.fromkeys(attachment.role for attachment in attachments_of(reader, kernel)))


def contents_of(reader: CaptureReader, kernel: Kernel) -> dict[str, bytes]:
    """The bytes of a kernel's attachments by role, verified against their hashes; those of unknown roles are left out.

    Raises InvalidCapture for a role that occurs twice, something longer than MAX_BYTES, metadata that is no JSON
    object, and damage. Nothing is read unless all of it may be.
    """
    attachments = [each for each in attachments_of(reader, kernel) if each.role in MAX_BYTES]
    where = f"{reader.path}: {kernel.qualified_name}"
    for role, count in Counter(attachment.role for attachment in attachments).items():
        if count > 1:
            raise InvalidCapture(f"{where} has {count} attachments of the role {role}, expected one")
    for attachment in attachments:
        length, most = reader.payload_info(attachment.payload).raw_bytes, MAX_BYTES[attachment.role]
        if length > most:
            raise InvalidCapture(f"{where} has a {attachment.role} of {length:,} bytes; the limit is {most:,}")
    found = {attachment.role: bytes(reader.payload(attachment.payload)) for attachment in attachments}
    if METADATA in found:
        parse_metadata(found[METADATA], where)
    return found


def how_writes_are_known(reader: CaptureReader, kernel: Kernel) -> str | None:
    """How it was found what a kernel with metadata writes: one of WRITES_KNOWN_BY, as these say, or `body` for a graph.
    None: they do not say, or cannot be read."""
    if kernel.kind is KernelKind.graph:
        return "body"  # a replay refuses a graph whose schema says less than that
    payloads = [each.payload for each in attachments_of(reader, kernel) if each.role == METADATA]
    if len(payloads) != 1 or reader.payload_info(payloads[0]).raw_bytes > MAX_BYTES[METADATA]:
        return None
    try:
        said = parse_metadata(bytes(reader.payload(payloads[0])), kernel.qualified_name).get("writes")
    except InvalidCapture:
        return None
    return said if said in WRITES_KNOWN_BY else None


def parse_metadata(text: bytes, where: str) -> dict[str, Any]:
    """An attachment of the role metadata. Raises InvalidCapture if it is no JSON object, or nested too deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCapture(f"{where}: its metadata is not JSON: {error}") from None
    if not isinstance(value, dict) or nested_deeper(value, MAX_NESTING):
        raise InvalidCapture(f"{where}: its metadata is not a JSON object that is nested at most {MAX_NESTING} deep")
    return value
