"""The distinct signatures of a capture's ops, with how often each is called: `opreplay-dump --signatures`.

Their text is explained in docs/signatures.md; it selects calls for other tools.
"""

from __future__ import annotations

from collections.abc import Iterator

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.groups import SignatureGroup, SignatureIndex

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
    widths = [
        max([len(head), *(len(str(value)) for value in column)])
        for head, column in (
            ("calls", [group.calls for group in groups]),
            ("first at", [group.first for group in groups]),
            ("kernel", [group.kernel for group in groups]),
        )
    ]
    yield f"{'calls':>{widths[0]}}  {'first at':>{widths[1]}}  {'kernel':>{widths[2]}}  signature\n"
    for group in groups:
        yield f"{group.calls:>{widths[0]}}  {group.first:>{widths[1]}}  {group.kernel:>{widths[2]}}  {group.text}\n"
