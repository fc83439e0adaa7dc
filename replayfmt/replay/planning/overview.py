"""What a capture holds, by its records: what each one is called, how much work there is, how much can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.reader import CaptureReader

from .scan import Scan

SCALARS = (ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex)


def describe(reader: CaptureReader, ordinal: int) -> tuple[str, str]:
    """What the record at an ordinal is, and the path of its scope."""
    record = reader.record(ordinal)
    scope = reader.scope_path(record.scope)
    if record.kind is RecordKind.op:
        kernel = reader.kernels[record.signature.kernel]
        return (kernel.qualified_name if kernel is not None else "op"), scope
    if record.kind is RecordKind.host_read:
        return f"host read by {record.argument('method')}", scope
    if record.kind is RecordKind.digest:
        return "a tensor that is alive here", scope
    return record.kind.name, scope


_OF_STREAMS = (
    RecordKind.event_record,
    RecordKind.event_wait,
    RecordKind.stream_synchronize,
    RecordKind.event_synchronize,
)


def orders_streams(reader: CaptureReader) -> bool:
    """Whether the capture has work on other streams than the default ones, or says what orders streams."""
    return len(reader.placements) > 1 or any(
        signature is not None and signature.kind in _OF_STREAMS for signature in reader.signatures
    )


def unseen_before(reader: CaptureReader, stop: int) -> Iterator[int]:
    """The records before an ordinal that may have written anything, the last one first."""
    unseen = np.array([signature is not None and signature.unseen for signature in reader.signatures])
    if stop < 1 or not unseen.any():
        return
    for index in range(reader.frame_of(stop - 1), -1, -1):
        frame = reader.frame(index)
        rows = np.flatnonzero(unseen[frame.signature[: stop - frame.first_ordinal]])
        yield from (rows[::-1] + frame.first_ordinal).tolist()


@dataclass(frozen=True)
class Work:
    """How many ops, different kernels and scopes there are; `comparable` are the digests, host reads and scalars that a
    replay can be compared with, `unsupported` the records of work that no replay does."""

    ops: int
    kernels: int
    scopes: int
    comparable: int
    unsupported: int


def count_work(reader: CaptureReader, scan: Scan) -> Work:
    """Everything that a scan saw."""
    ops = scopes = comparable = unsupported = 0
    kernels: set[int] = set()
    for number, signature in enumerate(reader.signatures):
        calls = int(scan.signature_calls[number])
        if signature is None or not calls:
            continue
        if signature.kind is RecordKind.op:
            ops += calls
            kernels.add(signature.kernel)
            comparable += calls * sum(node.kind in SCALARS for node in signature.results)
        elif signature.kind is RecordKind.scope_begin:
            scopes += calls
        elif signature.kind in (RecordKind.digest, RecordKind.host_read):
            comparable += calls if any(node.name == "hash_low" for node in signature.args) else 0
        elif signature.unseen:
            unsupported += calls
    return Work(ops, len(kernels), scopes, comparable, unsupported)
