"""Which attachments of kernels a capture keeps, and in which form: all of them as they are, redacted, without sources.

Code is kept as it is or left out: its hash is in its metadata, so that it cannot be rewritten.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from replayfmt.errors import InvalidCapture

from .attachments import BODY, MAX_BYTES, METADATA, SOURCE, parse_metadata
from .codes import StorageOrigin
from .graphs import open_body
from .redaction import Redaction, has_path

BINARIES = frozenset({"cubin", "hsaco", "object"})
WITHOUT_SOURCES = {"no-sources": True}  # among a session's policies
_INTERMEDIATE = frozenset({"ttir", "ttgir", "llir", "ptx"})


@dataclass(frozen=True)
class KeptAttachments:
    """What is kept. With `redaction`, names and metadata are rewritten. `sources` False leaves out sources,
    intermediate code that names a file, and what has a role that is not known; it needs a redaction."""

    redaction: Redaction | None = None
    sources: bool = True

    def form(self, role: str, name: str, content: bytes | memoryview) -> tuple[str, bytes | memoryview] | None:
        """Name and content of an attachment as it is kept; None if it is left out."""
        if not self.sources and not self._is_free_of_source(role, content):
            return None
        if self.redaction is None:
            return name, content
        if role == BODY and not self._reveals_nothing(bytes(content)):
            return None
        if role == METADATA:
            redacted = _redacted(self.redaction, bytes(content))
            return None if redacted is None else (self.redaction.text(name), redacted)
        return self.redaction.text(name), content

    def _is_free_of_source(self, role: str, content: bytes | memoryview) -> bool:
        if role in _INTERMEDIATE:
            return len(content) <= MAX_BYTES[role] and not has_path(bytes(content).decode(errors="replace"))
        if role == BODY:
            return self._holds_no_source(bytes(content))
        return role != SOURCE and role in MAX_BYTES

    def _reveals_nothing(self, body: bytes) -> bool:
        """Whether the body of a graph has neither content nor a text that would be rewritten."""
        assert self.redaction is not None
        try:
            with open_body({BODY: body}) as reader:
                content = (reader.summary.origins or {}).get(StorageOrigin.payload)
                return not content and all(self.redaction.text(text) == text for text in reader.strings if text)
        except ValueError:
            return False

    def _holds_no_source(self, body: bytes) -> bool:
        """Whether the kernels that the body of a graph calls have no source in it."""
        try:
            with open_body({BODY: body}) as reader:
                inside = [each for each in reader.attachments if each is not None]
                # A body in a body is none that a replay would run.
                return all(
                    each.role != BODY and self._is_free_of_source(each.role, reader.payload(each.payload))
                    for each in inside
                )
        except ValueError:
            return False


def _redacted(redaction: Redaction, content: bytes) -> bytes | None:
    """Metadata without names and paths; None if they are not metadata."""
    if len(content) > MAX_BYTES[METADATA]:
        return None
    try:
        metadata = parse_metadata(content, METADATA)
    except InvalidCapture:
        return None
    redacted = redaction.values(metadata)
    return content if redacted == metadata else json.dumps(redacted, indent=1).encode()
