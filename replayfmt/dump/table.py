"""A capture's ops as columns, one row for each, for tables of other libraries. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from replayfmt.format.codes import UNKNOWN_DEVICE_NS, RecordKind
from replayfmt.format.distinct import distinct
from replayfmt.format.model import calls_in
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signatures.groups import SignatureIndex

from .values import device_slot

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


def op_columns(reader: CaptureReader) -> dict[str, Any]:
    """The columns by name, in the order of COLUMNS: int64 arrays, object arrays of text, and for times a pair of an
    int64 array and a mask that is True where the time is not known."""
    parts: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for columns in op_column_frames(reader):
        for name, column in columns.items():
            parts[name].append(column)
    joined: dict[str, Any] = {}
    for name, pieces in parts.items():
        if name in NULLABLE_TIMES:
            values, missing = ([each[place] for each in pieces] for place in (0, 1))
            joined[name] = (_joined(values).astype(np.int64), _joined(missing).astype(bool))
        else:
            joined[name] = _joined(pieces)
    return joined


def op_column_frames(reader: CaptureReader, ordinals: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """The columns of `op_columns` for the ops of one frame after the other; with `ordinals` (ascending), only for
    these. Raises InvalidCapture for a damaged frame."""
    shared = _SharedColumns(reader)
    for index in range(len(reader.record_frames)):
        frame = reader.frame(index)
        rows = np.flatnonzero(shared.kind[frame.signature] == RecordKind.op)
        if ordinals is not None:
            rows = rows[np.isin(rows + frame.first_ordinal, ordinals, assume_unique=True)]
        if not len(rows):
            continue
        signatures = frame.signature[rows]
        yield {
            "ordinal": rows + frame.first_ordinal,
            "op": shared.op[signatures],
            "overload": shared.overload[signatures],
            "kernel": shared.kernel[signatures],
            "signature": shared.texts(frame, rows),
            "scope": shared.scope[frame.scope[rows]],
            "thread": frame.thread[rows].astype(np.int64),
            "device": shared.devices(frame, rows),
            "status": shared.status[signatures],
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


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


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


class _SharedColumns:
    """What all records of a signature or a scope have in common, by its id."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self._index = SignatureIndex(reader)
        self._signatures = reader.signatures
        self.kind = np.array([0, *(each.kind for each in reader.signatures[1:])], np.int64)
        self.kernel = np.array([0, *(each.kernel for each in reader.signatures[1:])], np.int64)
        kernels = [None if not number else reader.kernels[number] for number in self.kernel.tolist()]
        self.op = _texts([each and each.name for each in kernels])
        self.overload = _texts([each and each.overload for each in kernels])
        self.status = _texts([None, *(each.status.name for each in reader.signatures[1:])])
        self.scope = _texts([reader.scope_path(number) for number in range(len(reader.scopes))])
        self._device_slots = {
            number: device_slot(reader.layouts[number])
            for number, each in enumerate(reader.signatures)
            if each is not None and each.kind is RecordKind.op
        }
        self._meta_devices = _texts([None, *(str(reader.devices[meta.device]) for meta in reader.metas[1:])])

    def texts(self, frame: RecordFrame, rows: np.ndarray) -> np.ndarray:
        """The signatures of ops, as text."""
        made = np.empty(frame.count, object)
        start = frame.first_ordinal
        for ops in self._index.ops_by_key(None, start, start + frame.count):
            made[ops.ordinals - start] = self._index.text(ops.key, int(ops.ordinals[0]))
        return made[rows]

    def devices(self, frame: RecordFrame, rows: np.ndarray) -> np.ndarray:
        """The devices of ops; None for one without tensors."""
        made = np.empty(frame.count, object)
        for number in distinct(frame.signature[rows]).tolist():
            slot = self._device_slots[number]
            if slot is not None:
                chosen = rows[frame.signature[rows] == number]
                metas = frame.tensor_meta[frame.tensor_slots[frame.tensor_first[chosen] + slot]]
                made[chosen] = self._meta_devices[metas]
        return made[rows]
