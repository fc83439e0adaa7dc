"""The dump itself: a capture as a stream of text chunks, one frame at a time, so that memory does not grow with it.

Rows of JSON may go through a jq filter, which is compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.validation import printable, printable_json

from . import SHOWN_VALUES
from .contents import attachment_lines
from .definitions import definition_rows, file_row, lines, storage_lines, summary_row, summary_text
from .expansion import Expander, InCpp, InPython, encoded
from .record_rows import LEGEND, JsonLines, SmallValues, TextRows
from .row_templates import Dialect
from .selection import Filter, Selection, selects_nothing

_WORTH_LOADING = 10_000  # records, whose rows take Python about a tenth of a second

# jq itself prints the results: as Python objects they would have lost the sign of -0 and the digits of long integers.
# An empty line comes first, because a comment that ends in a backslash continues on the next line.
_PRINTED = "\n\n| tojson"
_PRINTED_RAW = '\n\n| if type == "string" then [., true] else [tojson, false] end'


class FilterFailed(OpReplayError):
    """A jq filter raised an error on a row."""

    status = "INVALID_ARGUMENT"


class Query:
    """A compiled jq filter."""

    def __init__(self, text: str, *, raw: bool = False, slurp: bool = False) -> None:
        """Raises UsageError, with jq's own message, if the filter does not compile."""
        # Only here, so that a dump without a filter works where the binding is missing.
        import jq  # type: ignore[import-not-found]

        try:
            jq.compile(text)
        except ValueError as error:
            raise UsageError(f"--jq: {message(error)}") from None
        self._raw, self._slurp = raw, slurp
        self._program = jq.compile(text + (_PRINTED_RAW if raw else _PRINTED))

    def apply(self, chunks: Iterable[str]) -> Iterator[str]:
        """Chunks of rows as chunks of results, a line each. Raises FilterFailed at the first row that it fails on."""
        if self._slurp:
            rows = [row for chunk in chunks for row in chunk.splitlines()]
            chunks = [f"[{','.join(rows)}]\n"]
        for chunk in chunks:
            results: list[str] = []
            for row in chunk.splitlines():
                try:
                    # One row at a time, so that an error belongs to a row. It costs no more than many at once.
                    results += (f"{self._printed(result)}\n" for result in self._program.input_text(row))
                except ValueError as error:
                    yield "".join(results)
                    what = "the array of all rows" if self._slurp else "this row"
                    raise FilterFailed(
                        f"--jq: {message(error)}; the filter failed on {what}: {abridged(row)}"
                    ) from None
            yield "".join(results)

    def _printed(self, result: Any) -> str:
        if not self._raw:
            return printable_json(result)
        text, is_string = result
        # Lines and columns are the filter's own; whatever else a terminal would act on comes from a capture.
        return (
            "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
            if is_string
            else (printable_json(text))
        )


def message(error: ValueError) -> str:
    """jq's message on one line, without its count of errors and the mark it puts below the place it quotes."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(
        line.removeprefix("jq: error: ")
        for line in lines
        if line.strip("^") and not re.fullmatch(r"jq: \d+ compile errors?", line)
    )


def abridged(row: str) -> str:
    """Enough of a row to find it."""
    return row if len(row) <= 200 else row[:200] + "…"


def jsonl_chunks(
    reader: CaptureReader, selection: Selection, summary_only: bool = False, values: int = SHOWN_VALUES
) -> Iterator[str]:
    """What `jsonl_lines` writes, as text."""
    return map(_decoded, jsonl_lines(reader, selection, summary_only, values))


def text_chunks(
    reader: CaptureReader, selection: Selection, summary_only: bool = False, values: int = SHOWN_VALUES
) -> Iterator[str]:
    """What `text_lines` writes, as text."""
    return map(_decoded, text_lines(reader, selection, summary_only, values))


def _decoded(chunk: bytes) -> str:
    return str(chunk, "utf-8")


def jsonl_lines(
    reader: CaptureReader,
    selection: Selection,
    summary_only: bool = False,
    values: int = SHOWN_VALUES,
    expander: Expander | None = None,
) -> Iterator[bytes]:
    """The capture as JSON lines (docs/rows.md), in chunks of whole lines: use each up before asking for the next.

    With a selection: the file, the summary and the selected records, without definitions and storages. The values of
    integer and bool tensors of at most `values` elements are shown where the capture holds them. `expander`: instead of
    the one that suits so many records. Raises InvalidCapture when it comes to a damaged frame, and UsageError before
    the first chunk, for a selection that takes nothing, too.
    """
    whole = selection.everything and not summary_only
    head = map(encoded, lines(chain([file_row(reader), summary_row(reader)], definition_rows(reader) if whole else ())))
    if summary_only:
        return head
    expander = expander or _expander(reader, selection)
    if whole:
        return _everything(head, reader, JsonLines(reader, expander), values, storage_lines)
    return _selected(head, reader, JsonLines(reader, expander), selection, values)


def text_lines(
    reader: CaptureReader,
    selection: Selection,
    summary_only: bool = False,
    values: int = SHOWN_VALUES,
    expander: Expander | None = None,
) -> Iterator[bytes]:
    """As `jsonl_lines`, but text for people: the summary, then a line for each selected record."""
    whole = selection.everything and not summary_only
    head = map(encoded, _text_before(reader, whole, summary_only))
    if summary_only:
        return head
    dialect = TextRows(reader, expander or _expander(reader, selection))
    if whole:
        return _everything(head, reader, dialect, values, lambda _reader, _frame, _expander: iter(()))
    return _selected(head, reader, dialect, selection, values)


def _text_before(reader: CaptureReader, whole: bool, summary_only: bool) -> Iterator[str]:
    yield summary_text(reader)
    if whole:
        yield from attachment_lines(reader)
    if not summary_only:
        yield LEGEND


def _expander(reader: CaptureReader, selection: Selection) -> Expander:
    """The one that writes so many rows soonest."""
    stop = reader.record_count if selection.stop is None else min(selection.stop, reader.record_count)
    if stop - selection.start < _WORTH_LOADING:
        return InPython()
    from replayfmt.native.building import NotAvailable, say

    try:
        return InCpp()
    except NotAvailable as problem:
        say(f"the same rows take longer: a part in C++ is missing ({problem})")
        return InPython()


def _everything(
    head: Iterator[bytes],
    reader: CaptureReader,
    dialect: Dialect,
    values: int,
    before: Callable[[CaptureReader, RecordFrame, Expander], Iterator[bytes]],
) -> Iterator[bytes]:
    """The head, then each frame: what stands before its records, and those."""
    every, small = Filter(reader, Selection()), SmallValues(reader, values, dialect.values)
    yield from head
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        yield from before(reader, frame, dialect.expander)
        yield from _records(dialect, number, frame, every, small)


def _selected(
    head: Iterator[bytes], reader: CaptureReader, dialect: Dialect, selection: Selection, values: int
) -> Iterator[bytes]:
    """The head, then the selected records. Raises UsageError before the first chunk if there is none of them."""
    chosen, small = Filter(reader, selection), SmallValues(reader, values, dialect.values)
    records = chain.from_iterable(
        _records(dialect, number, frame, chosen, small) for number, frame in _frames(reader, chosen)
    )
    first = next(records, None)
    if first is None:
        raise selects_nothing(reader, selection)
    return chain(head, [first], records)


def _frames(reader: CaptureReader, chosen: Filter) -> Iterator[tuple[int, RecordFrame]]:
    """The frames that hold a selected ordinal, with their numbers; no other frame is read here."""
    for number, info in enumerate(reader.record_frames):
        if info.first_ordinal < chosen.stop and info.first_ordinal + info.count > chosen.start:
            yield number, reader.frame(number)


def _records(dialect: Dialect, number: int, frame: RecordFrame, chosen: Filter, small: SmallValues) -> Iterator[bytes]:
    """The selected records of one frame, a line each."""
    which = chosen.indices(frame)
    if len(frame.signature[which]):
        yield from dialect.rows(frame, which, small.of(number, frame))
