"""What a capture contains that its owner may not want to share, determined from all of its content, not from its
policies.

Content is what payloads (those of kernels' code apart), digests and recorded values hold; the rest reveals who made the
capture and where. Paths, users and stacks are what redaction.py takes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.distinct import distinct
from replayfmt.format.printable import counted
from replayfmt.format.reader import CaptureReader
from replayfmt.format.redaction import has_path, has_stack, users_in

from .attachments import code_in

_AT_ONCE = 1024
_SHOWN_NAME = 40
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
    names = [name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "…" for name in found.user_names]
    facts = [
        (found.content_bytes, _bytes(found.content_bytes), "content"),
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


def _bytes(number: int) -> str:
    return f"{counted(number, 'byte')} of content"
