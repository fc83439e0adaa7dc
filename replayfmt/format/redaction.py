"""Redaction: removes from a capture what reveals who made it and where, and says which attachments it keeps.

Host name, user, absolute paths, command line and stacks are removed. Attachments are kept as they are, redacted, or
without sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from replayfmt.errors import InvalidCapture

from .attachments import BODY, CONFIGURATIONS, MAX_BYTES, METADATA, SOURCE, open_body, parse_metadata
from .codes import RecordKind, StorageOrigin, ValueKind
from .model import CaptureInfo, ExternalFile, Node, Signature

REDACTED = "(redacted)"
_OPAQUE = "a string that was redacted"
_SHORTEST_WORD = 2  # letters stand alone in many texts
# Common user names reveal nothing, and may well be words in a message.
_COMMON_WORDS = frozenset({"root", "user", "home", "localhost", "ubuntu", "admin", "none", "main"})
_START = r"(?:/|~[\w.-]*[/\\]|[A-Za-z]:[/\\]|\\\\)"
# A path begins where no word or path goes on. Inside quotes it ends with them. Elsewhere it goes on after a blank as
# long as a separator follows before the next path: directories may have blanks in their names, and what is not part of
# the path goes with it.
_END = r"\s'\",;:()\[\]<>{}|"
_WORD = rf"[ \t]+(?!{_START})[^{_END}/\\]+"
_PATH = re.compile(
    rf"(?P<quote>['\"]){_START}.*?(?P=quote)"
    rf"|(?<![\w./\\~]){_START}[^{_END}]+(?:(?:{_WORD})+[/\\][^{_END}]*)*"
)
_HOME = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\]([^/\\]+)")
_USER = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\]([^/\\\s'\",;:]+)")
_STACK = re.compile(r"""File "[^"]*", line \d+|\w\.(?:py|pyx|cpp|cc|cu|h)(?::\d+|\(\d+\))""")


class Redaction:
    """Rewrites text that may reveal the machine and its user. `words` are further names to leave out wherever they
    appear.

    `session` is the session as it was; its host and the user its paths name are left out of other texts too.
    """

    def __init__(self, session: CaptureInfo, words: Iterable[str] = ()) -> None:
        self._session = session
        names = {*words, session.host or ""}
        for place in (session.working_directory or "", *session.argv):
            names.update(_HOME.findall(place))
        secret = sorted(
            (name for name in names if len(name) >= _SHORTEST_WORD and name.lower() not in _COMMON_WORDS),
            key=len,
            reverse=True,
        )
        self._words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, secret))})(?!\w)") if secret else None

    @property
    def session(self) -> CaptureInfo:
        """The session without host, command line and working directory; its policies say `redact`."""
        session = self._session
        return replace(
            session,
            host=None,
            argv=(),
            working_directory=None,
            libraries=self.values(session.libraries),
            settings=self.values(session.settings),
            policies={**self.values(session.policies), "redact": True},
        )

    def text(self, text: str) -> str:
        """A text for people with paths and names replaced by `(redacted)`."""
        text = _PATH.sub(REDACTED, text)
        return text if self._words is None else self._words.sub(REDACTED, text)

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON object (an annotation, settings) with every text in it rewritten, keys included."""
        return {self.text(key): self._value(value) for key, value in values.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self._value(each) for each in value]
        return self.values(value) if isinstance(value, dict) else value

    def signature(self, signature: Signature) -> Signature:
        """A signature with its texts rewritten; strings that an op takes stay as they are or become opaque."""
        is_op = signature.kind is RecordKind.op
        args = tuple(self._node(node, is_op) for node in signature.args)
        results = tuple(self._node(node, is_op) for node in signature.results)
        same = args == signature.args and results == signature.results
        return signature if same else replace(signature, args=args, results=results)

    def _node(self, node: Node, is_op: bool) -> Node:
        if node.kind in (ValueKind.string, ValueKind.opaque) and isinstance(node.constant, str):
            text = self.text(node.constant)
            if text == node.constant:
                return node
            if is_op and node.kind is ValueKind.string:
                return Node(ValueKind.opaque, node.name, _OPAQUE)
            return replace(node, constant=text)
        if not node.children:
            return node
        return replace(node, children=tuple(self._node(child, is_op) for child in node.children))

    def file(self, file: ExternalFile) -> ExternalFile:
        """A reference that names the file without its directory; a replay finds it there or by a remap."""
        return replace(file, path=self.text(re.split(r"[/\\]", file.path)[-1]) or REDACTED)


def has_path(text: str) -> bool:
    """Whether a text contains an absolute path that `Redaction.text` would replace."""
    return _PATH.search(text) is not None


def users_in(text: str) -> list[str]:
    """The users whose home directories a text names."""
    return [user for user in _USER.findall(text) if user != REDACTED]


def has_stack(text: str) -> bool:
    """Whether a text contains a location in a program, as stack traces do."""
    return _STACK.search(text) is not None


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
        if role in (METADATA, CONFIGURATIONS):
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
