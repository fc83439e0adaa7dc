"""The distinct ops of a capture: calls of the same kernel on the same shapes, strides and numbers, counted together.

One pass over the records; no tensor is made. What the capture says about how long calls took is added up on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.graphs import only_inside
from replayfmt.format.model import Kernel, Record
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.text import signature_of

from ..scopes import scopes_inside

Clock = Literal["device", "host"]


@dataclass
class OpGroup:
    """Ops with one signature. `count` is how often the workload ran them: an imported record may stand for many calls.

    `by_scope` has the same count by the id of the innermost scope, 0 for none. `device_ns` and `host_ns` are totals
    over the captured calls with known times, which `device_calls` and `host_calls` count; a record that stands for many
    calls has their mean.
    """

    signature: str
    kernel: Kernel
    first_ordinal: int
    count: int = 0
    by_scope: Counter[int] = field(default_factory=Counter)
    device_ns: int = 0
    device_calls: int = 0
    host_ns: int = 0
    host_calls: int = 0

    def add(self, record: Record) -> None:
        """Count one more op. Raises InvalidCapture if the record does not say how many calls it stands for."""
        calls = record.calls
        self.count += calls
        self.by_scope[record.scope] += calls
        if record.device_duration_ns is not None:
            self.device_ns += record.device_duration_ns * calls
            self.device_calls += calls
        if record.duration_ns is not None:
            self.host_ns += record.duration_ns * calls
            self.host_calls += calls

    @property
    def captured_ns(self) -> float | None:
        """The mean time of a call when captured; None if the capture does not say."""
        if self.device_calls:
            return self.device_ns / self.device_calls
        return self.host_ns / self.host_calls if self.host_calls else None

    @property
    def captured_clock(self) -> Clock | None:
        """Which clock `captured_ns` is from: the device's if known, otherwise the recording host's."""
        return "device" if self.device_calls else "host" if self.host_calls else None


@dataclass
class Unsupported:
    """Captured work that no replay does: number of calls by reason, and their device time."""

    calls: Counter[str] = field(default_factory=Counter)
    device_ns: int = 0

    def add(self, record: Record) -> None:
        self.calls[str(record.argument("reason"))] += record.calls
        self.device_ns += (record.device_duration_ns or 0) * record.calls


@dataclass(frozen=True)
class Chosen:
    """The ops to measure. `by_ordinal` has the group of every op that may be measured; `total` and `matched` count the
    groups in the file, and those that match scopes and filter; `everything` is True if no op of the file is left out.
    `unsupported` is the matching work that no replay does. `device_ns` is the captured device time of all ops and all
    unsupported work in the scopes together."""

    groups: list[OpGroup]
    by_ordinal: dict[int, OpGroup]
    total: int
    matched: int
    everything: bool
    unsupported: Unsupported
    device_ns: int


def choose(
    reader: CaptureReader,
    *,
    pattern: str | None = None,
    limit: int | None = None,
    every: bool = False,
    scopes: tuple[str, ...] = (),
    progress: Callable[[str, int, int | None], None],
) -> Chosen:
    """Group a capture's ops, in order of first appearance.

    `pattern` is a shell pattern for operator names, with or without overload; `scopes` are names or full paths, and ops
    outside them are left out; `limit` takes only the first groups; with `every`, each op is a separate group. Raises
    UsageError if nothing is left.
    """
    inside = scopes_inside(reader, scopes) if scopes else None
    seen: set[str | int] = set()
    groups: dict[str | int, OpGroup] = {}
    taken: dict[int, OpGroup] = {}  # by first ordinal
    by_ordinal: dict[int, OpGroup] = {}
    unsupported = Unsupported()
    matched = ops = unsupported_device_ns = 0
    for record in reader.records():
        if not record.ordinal & 0x3FFF:
            progress("reading ops", record.ordinal, reader.record_count)
        if record.kind not in (RecordKind.op, RecordKind.unsupported):
            continue
        outside = inside is not None and record.scope not in inside
        if record.kind is RecordKind.unsupported:
            if not outside:
                unsupported_device_ns += (record.device_duration_ns or 0) * record.calls
                if pattern is None or fnmatchcase(str(record.argument("op")), pattern):
                    unsupported.add(record)
            continue
        ops += 1
        signature = str(signature_of(record, reader, values=True))
        key = record.ordinal if every else signature
        seen.add(key)
        if outside:
            continue
        group = groups.get(key)
        if group is None:
            kernel = reader.kernels[record.signature.kernel]
            group = groups[key] = OpGroup(signature, kernel, record.ordinal)
            if pattern is None or kernel.fits(pattern):
                matched += 1
                if limit is None or len(taken) < limit:
                    taken[group.first_ordinal] = group
        group.add(record)
        if group.first_ordinal in taken:
            by_ordinal[record.ordinal] = group
    if not seen:
        raise UsageError(f"{reader.path}: there is no op in it to measure")
    within = f"in {', '.join(f'--replay-scope={name}' for name in scopes)} of {reader.path}" if scopes else reader.path
    if not groups:
        raise UsageError(f"there is no op {within}")
    if not matched:
        in_bodies = only_inside(reader, lambda name: fnmatchcase(name, str(pattern)))
        raise UsageError(
            f"--op-filter={pattern}: no op {within if scopes else f'of {within}'} has such a name"
            + (f"; {in_bodies}" if in_bodies else "")
        )
    device_ns = unsupported_device_ns + sum(group.device_ns for group in groups.values())
    return Chosen(list(taken.values()), by_ordinal, len(seen), matched, len(by_ordinal) == ops, unsupported, device_ns)
