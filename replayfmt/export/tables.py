"""A capture's ops, signatures, kernels and device kernels as tables: CSV, Parquet, or pandas. Needs no PyTorch.

Ops are read as columns, one row for each.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from replayfmt.dump.listings import csv_cell, device_kernels
from replayfmt.dump.row_templates import device_metas
from replayfmt.errors import InvalidCapture, UsageError, optional_library
from replayfmt.format.codes import UNKNOWN_DEVICE_NS, RecordKind
from replayfmt.format.model import calls_in
from replayfmt.format.output import Output, same_file
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signature_text import SignatureIndex

if TYPE_CHECKING:
    import pandas


# In this order; the docstring of Capture.to_pandas says what each holds.
COLUMNS = (
    "ordinal",
    "op",
    "overload",
    "kernel",
    "signature",
    "scope",
    "thread",
    "device",
    "status",
    "calls",
    "start_ns",
    "duration_ns",
    "device_duration_ns",
)
DURATIONS = ("duration_ns", "device_duration_ns")
NULLABLE_TIMES = ("start_ns", *DURATIONS)


def op_column_frames(reader: CaptureReader, ordinals: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """The columns by name, in the order of COLUMNS, of the ops of one frame after the other: int64 arrays, object
    arrays of text, and for times a pair of an int64 array and a mask that is True where the time is not known. With
    `ordinals` (ascending), only for these. Raises InvalidCapture for a damaged frame."""
    index = SignatureIndex(reader)
    # What all records of a signature, a scope or a tensor's metadata have in common, by its id.
    kernel = np.array([0, *(each.kernel for each in reader.signatures[1:])], np.int64)
    kernels = [reader.kernels[number] if number else None for number in kernel.tolist()]
    op = _texts([each and each.name for each in kernels])
    overload = _texts([each and each.overload for each in kernels])
    status = _texts([None, *(each.status.name for each in reader.signatures[1:])])
    scope = _texts([reader.scope_path(number) for number in range(len(reader.scopes))])
    device = _texts([None, *(str(reader.devices[meta.device]) for meta in reader.metas[1:])])
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        rows = np.flatnonzero(reader.signature_kinds[frame.signature] == RecordKind.op)
        if ordinals is not None:
            rows = rows[np.isin(rows + frame.first_ordinal, ordinals, assume_unique=True)]
        if not len(rows):
            continue
        signatures = frame.signature[rows]
        texts = np.empty(frame.count, object)
        for ops in index.ops_by_key(None, frame.first_ordinal, frame.first_ordinal + frame.count):
            texts[ops.ordinals - frame.first_ordinal] = index.text(ops.key, int(ops.ordinals[0]))
        yield {
            "ordinal": rows + frame.first_ordinal,
            "op": op[signatures],
            "overload": overload[signatures],
            "kernel": kernel[signatures],
            "signature": texts[rows],
            "scope": scope[frame.scope[rows]],
            "thread": frame.thread[rows].astype(np.int64),
            "device": device[device_metas(reader, frame, rows)],
            "status": status[signatures],
            "calls": _calls(reader, frame, rows),
            "start_ns": (frame.start_ns[rows].astype(np.int64), np.full(len(rows), not reader.session.has_times)),
            **{name: _durations(getattr(frame, name), rows) for name in DURATIONS},
        }


def _calls(reader: CaptureReader, frame: RecordFrame, rows: np.ndarray) -> np.ndarray:
    """How many calls of the program each op stands for."""
    calls = np.ones(len(rows), np.int64)
    if frame.annotation is not None:
        for place in np.flatnonzero(frame.annotation[rows]).tolist():
            ordinal = frame.first_ordinal + int(rows[place])
            calls[place] = calls_in(reader.annotation(int(frame.annotation[rows[place]])), ordinal)
    return calls


def _durations(column: np.ndarray | None, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if column is None:
        return np.zeros(len(rows), np.int64), np.ones(len(rows), bool)
    values = column[rows].astype(np.uint64)
    absent = values == UNKNOWN_DEVICE_NS
    return np.where(absent, 0, values).astype(np.int64), absent


def _texts(values: list[str | None]) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


TableName = Literal["ops", "signatures", "kernels", "device-kernels"]
TABLES: tuple[TableName, ...] = get_args(TableName)
_TEXT = frozenset({"op", "overload", "signature", "scope", "device", "status", "kernel_kind", "schema"}) | {
    *("name", "category", "tier", "grid", "block")
}
_DEVICE_NUMBERS = ("stream", "bytes", "count", "untimed", "total_ns", "min_ns", "max_ns")
_TIMES = ("total_duration_ns", "timed_calls", "total_device_duration_ns", "device_timed_calls")
# In this order; docs/tables.md says what each holds.
TABLE_COLUMNS: dict[TableName, tuple[str, ...]] = {
    "ops": COLUMNS,
    "signatures": ("signature", "kernel", "op", "overload", "calls", "first_ordinal", *_TIMES),
    "kernels": ("kernel", "op", "overload", "kernel_kind", "schema", "calls", "signatures", "first_ordinal", *_TIMES),
    "device-kernels": ("name", "category", "tier", "device", "grid", "block", *_DEVICE_NUMBERS),
}
NULLABLE = frozenset({*NULLABLE_TIMES, "device", "total_duration_ns", "total_device_duration_ns"}) | {
    *("grid", "block", *_DEVICE_NUMBERS)
}
_MOST = np.iinfo(np.int64).max

Rows = dict[str, list[Any]]  # columns by name, of one length; None is null


@dataclass
class _Calls:
    """The ops of one signature or kernel so far."""

    first: dict[str, Any]
    calls: int = 0
    signatures: set[str] = field(default_factory=set)
    totals: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0] for name in DURATIONS})

    def add(self, calls: int, durations: Sequence[int | None]) -> None:
        self.calls += calls
        for name, duration in zip(DURATIONS, durations, strict=True):
            if duration is not None:
                self.totals[name][0] += duration * calls
                self.totals[name][1] += calls

    def row(self) -> dict[str, Any]:
        found = {**self.first, "calls": self.calls, "signatures": len(self.signatures)}
        for name, timed in zip(DURATIONS, ("timed_calls", "device_timed_calls"), strict=True):
            total, calls = self.totals[name]
            found |= {f"total_{name}": total if calls else None, timed: calls}
        return found


def table_rows(reader: CaptureReader, table: TableName, ordinals: np.ndarray | None = None) -> Iterator[Rows]:
    """The columns of a table, in pieces, under the names and in the order of TABLE_COLUMNS. With `ordinals`
    (ascending), of the ops that have these. Raises InvalidCapture for a damaged frame and for sums beyond 64 bits,
    UsageError for device kernels of some ops, or where the capture has none."""
    if table == "device-kernels":
        if ordinals is not None:
            raise UsageError("--table=device-kernels is of the whole trace: expected no selection of ops")
        found = device_kernels(reader)[1]
        yield {name: [csv_cell(row[name]) for row in found] for name in TABLE_COLUMNS[table]}
        return
    if table != "ops":
        yield _grouped(reader, table, ordinals)
        return
    for columns in op_column_frames(reader, ordinals):
        yield {name: _plain(column) for name, column in columns.items()}


def _plain(column: Any) -> list[Any]:
    if not isinstance(column, tuple):
        return column.tolist()
    values, missing = column
    return [None if absent else value for value, absent in zip(values.tolist(), missing.tolist(), strict=True)]


def _grouped(reader: CaptureReader, table: TableName, ordinals: np.ndarray | None) -> Rows:
    groups: dict[Any, _Calls] = {}
    key = "signature" if table == "signatures" else "kernel"
    for rows in table_rows(reader, "ops", ordinals):
        for place, name in enumerate(rows[key]):
            group = groups.get(name)
            if group is None:
                group = groups[name] = _Calls(_first(reader, rows, place))
            group.add(rows["calls"][place], [rows[each][place] for each in DURATIONS])
            group.signatures.add(rows["signature"][place])
    made = [group.row() for group in groups.values()]
    for row in made:
        if any(isinstance(value, int) and value > _MOST for value in row.values()):
            raise InvalidCapture(f"{reader.path}: the calls of {row['op']} add up to more than 64 bits hold")
    return {name: [row[name] for row in made] for name in TABLE_COLUMNS[table]}


def _first(reader: CaptureReader, rows: Rows, place: int) -> dict[str, Any]:
    """What the first op of a group says of all."""
    kernel = reader.kernels[rows["kernel"][place]]
    found = {name: rows[name][place] for name in ("kernel", "op", "overload", "signature")}
    return found | {"kernel_kind": kernel.kind.name, "schema": kernel.schema, "first_ordinal": rows["ordinal"][place]}


def export_table(
    reader: CaptureReader,
    out: str | os.PathLike[str],
    table: TableName,
    form: Literal["csv", "parquet"],
    ordinals: np.ndarray | None = None,
    *,
    force: bool = False,
) -> int:
    """Write a table of a capture to a file, completely or not at all. Returns the number of its rows.

    Raises UsageError if `out` is the capture, LibraryMissing if Parquet is asked for without pyarrow, OutputExists, and
    CaptureFailed if the file cannot be written.
    """
    refuse_capture(reader, out)
    write = _write_csv
    if form == "parquet":
        _pyarrow()
        write = _write_parquet
    with Output(out, force, doing="exporting") as output:
        return write(output, table_rows(reader, table, ordinals), TABLE_COLUMNS[table])


def refuse_capture(reader: CaptureReader, out: str | os.PathLike[str]) -> None:
    """Raises UsageError if the result would replace the capture."""
    if same_file(reader.path, out):
        raise UsageError(f"{os.fspath(out)}: is the capture that is exported; name another file")


def _write_csv(output: Output, pieces: Iterator[Rows], columns: Sequence[str]) -> int:
    """RFC 4180 with newlines as line ends: fields with quotes, commas and line breaks are quoted."""
    count = 0
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for rows in pieces:
        writer.writerows(zip(*(rows[name] for name in columns), strict=True))
        count += len(rows[columns[0]])
        output.write([text.getvalue().encode("utf-8", "backslashreplace")])
        text.seek(0)
        text.truncate()
    output.write([text.getvalue().encode("utf-8")])
    return count


def _write_parquet(output: Output, pieces: Iterator[Rows], columns: Sequence[str]) -> int:
    arrow = _pyarrow()
    from pyarrow import parquet

    schema = arrow.schema(
        [arrow.field(name, arrow.string() if name in _TEXT else arrow.int64(), name in NULLABLE) for name in columns]
    )
    count = 0
    with parquet.ParquetWriter(_Sink(output), schema) as writer:
        for rows in pieces:
            piece = arrow.table([arrow.array(rows[each.name], each.type) for each in schema], schema=schema)
            writer.write_table(piece)
            count += len(piece)
    return count


class _Sink(io.RawIOBase):
    """An Output as a file that can only be written."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write([bytes(data)])
        return len(data)

    def tell(self) -> int:
        return self._output.position


def _pyarrow() -> Any:
    advice = "pip install 'opreplay[tables]'; --format=csv works without it"
    return optional_library("pyarrow", "--format=parquet", advice)


def data_frame(reader: CaptureReader, table: TableName) -> pandas.DataFrame:
    """A table as a DataFrame; see Capture.to_pandas."""
    pandas = optional_library("pandas", "to_pandas()", "pip install 'opreplay[pandas]'")
    if table not in TABLES:
        raise UsageError(f"to_pandas({table!r}): expected {', '.join(map(repr, TABLES))}")
    columns: dict[str, list[Any]] = {name: [] for name in TABLE_COLUMNS[table]}
    for rows in table_rows(reader, table):
        for name, column in columns.items():
            column += rows[name]
    made: dict[str, Any] = {}
    for name, column in columns.items():
        values = np.empty(len(column), object)
        values[:] = column
        if name in _TEXT:
            made[name] = values
        elif name in NULLABLE:
            missing = np.array([each is None for each in column], bool)
            made[name] = pandas.arrays.IntegerArray(np.where(missing, 0, values).astype(np.int64), missing)
        else:
            made[name] = values.astype(np.int64)
    frame = pandas.DataFrame(made)
    index = {"ops": "ordinal", "kernels": "kernel"}.get(table)
    return frame if index is None else frame.set_index(index)
