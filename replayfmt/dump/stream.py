"""The dump itself: a capture as a stream of text chunks, one frame at a time, so that memory does not grow with it.

Rows of JSON may go through a jq filter, which is compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import add
from typing import Any

import numpy as np

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.codes import UNKNOWN_NS
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.validation import printable, printable_json

from .contents import attachment_lines
from .definitions import Row, definition_rows, file_row, lines, storage_lines, summary_row, summary_text
from .record_rows import LEGEND, SHOWN_VALUES, JsonLines, SmallValues, TextRows
from .row_templates import Columns, Dialect
from .selection import Filter, Selection, selects_nothing

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
    """The capture as JSON lines (docs/rows.md), in chunks of whole lines.

    With a selection: the file, the summary and the selected records, without definitions and storages. The values of
    integer and bool tensors of at most `values` elements are shown where the capture holds them. Raises
    InvalidCapture when it comes to a damaged frame, and UsageError before the first chunk, for a selection that takes
    nothing, too.
    """
    if selection.everything and not summary_only:
        return _all_parts(reader, jsonl_parts(reader, values))
    head = lines(iter([file_row(reader), summary_row(reader)]))
    return head if summary_only else _selected(head, reader, JsonLines(reader), selection, values)


def text_chunks(
    reader: CaptureReader, selection: Selection, summary_only: bool = False, values: int = SHOWN_VALUES
) -> Iterator[str]:
    """The capture as text for people: the summary, then a line for each selected record. Raises as jsonl_chunks."""
    if selection.everything and not summary_only:
        return _all_parts(reader, text_parts(reader, values))
    head = [summary_text(reader)]
    return iter(head) if summary_only else _selected(iter([*head, LEGEND]), reader, TextRows(reader), selection, values)


def jsonl_parts(reader: CaptureReader, values: int) -> Callable[[int], Iterator[str]]:
    """A whole capture as JSON lines in parts, to be requested in order: first what stands before the records, then each
    frame. Nothing is computed before it is requested."""
    return _parts(reader, lines(_rows_before(reader)), JsonLines(reader), values, storage_lines)


def _rows_before(reader: CaptureReader) -> Iterator[Row]:
    yield file_row(reader)
    yield summary_row(reader)
    yield from definition_rows(reader)


def text_parts(reader: CaptureReader, values: int) -> Callable[[int], Iterator[str]]:
    """Likewise, as text for people."""
    return _parts(reader, _text_before(reader), TextRows(reader), values, lambda _reader, _frame: iter(()))


def _text_before(reader: CaptureReader) -> Iterator[str]:
    yield summary_text(reader)
    yield from attachment_lines(reader)
    yield LEGEND


def _parts(
    reader: CaptureReader,
    head: Iterator[str],
    dialect: Dialect,
    values: int,
    before: Callable[[CaptureReader, RecordFrame], Iterator[str]],
) -> Callable[[int], Iterator[str]]:
    every, small = Filter(reader, Selection()), SmallValues(reader, values, dialect.values)

    def part(number: int) -> Iterator[str]:
        if not number:
            yield from head
            return
        frame = reader.frame(number - 1)
        yield from before(reader, frame)
        yield from _records(dialect, number - 1, frame, every, small)

    return part


def _all_parts(reader: CaptureReader, part: Callable[[int], Iterator[str]]) -> Iterator[str]:
    return chain.from_iterable(map(part, range(1 + len(reader.record_frames))))


def _selected(
    head: Iterator[str], reader: CaptureReader, dialect: Dialect, selection: Selection, values: int
) -> Iterator[str]:
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


def _records(dialect: Dialect, number: int, frame: RecordFrame, chosen: Filter, small: SmallValues) -> Iterator[str]:
    """The selected records of one frame, a line each."""
    which = chosen.indices(frame)
    signatures = frame.signature[which].tolist()
    if not signatures:
        return
    if isinstance(which, slice):
        ordinals = list(range(frame.first_ordinal + which.start, frame.first_ordinal + which.stop))
    else:
        ordinals = (which + frame.first_ordinal).tolist()
    scopes = frame.scope[which].tolist()
    device_duration = frame.device_duration_ns
    columns = dialect.columns(frame)
    _add_values(dialect, frame, columns, small.of(number, frame))
    T, I, F, R, L, D = columns.T, columns.I, columns.F, columns.R, columns.L, columns.D  # noqa: E741
    records = zip(
        dialect.ordinals(ordinals),
        frame.thread[which].tolist(),
        dialect.integers(frame.start_ns[which]) if dialect.reader.session.has_times else repeat("null"),
        repeat("null") if frame.duration_ns is None else _durations(frame.duration_ns[which]),
        repeat("") if device_duration is None else dialect.device_durations(device_duration[which]),
        frame.tensor_first[:-1][which].tolist(),
        frame.int_first[:-1][which].tolist(),
        frame.float_first[:-1][which].tolist(),
        strict=False,
    )
    tail = dialect.tail(frame)
    placements = None if frame.placement is None else frame.placement[which].tolist()
    notes = None if frame.annotation is None else frame.annotation[which].tolist()
    at_once = dialect.rows_at_once(frame, signatures, columns)
    for first in range(0, len(signatures), at_once):
        functions = dialect.functions.of(signatures[first : first + at_once])
        paths = dialect.scopes.of(scopes[first : first + at_once])
        rows = [
            function(o, s, h, n, d, g, t, i, f, T, I, F, R, L, D)
            for function, s, (o, h, n, d, g, t, i, f) in zip(functions, paths, records, strict=False)
        ]
        if placements is not None:
            rows = list(map(add, rows, dialect.placements.of(placements[first : first + at_once])))
        if notes is not None and any(notes[first : first + at_once]):
            rows = list(map(add, rows, dialect.annotations(notes[first : first + at_once])))
        rows.append("")
        yield tail.join(rows)


def _durations(column: np.ndarray) -> list[Any]:
    durations = column.tolist()
    return (
        durations
        if not (column == UNKNOWN_NS).any()
        else ["null" if each == UNKNOWN_NS else each for each in durations]
    )


def _add_values(dialect: Dialect, frame: RecordFrame, columns: Columns, values: dict[int, str]) -> None:
    """Append their values to the texts of tensors. The same tensor with the same values is one text."""
    texts: dict[tuple[int, str], str] = {}
    length = 0
    for place, value in values.items():
        key = (columns.L[place], value)
        if key not in texts:
            texts[key] = columns.T[place] + value
            length += len(texts[key])
            dialect.check_room(frame, length, "the values")
        columns.T[place] = texts[key]
