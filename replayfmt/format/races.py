"""Races: two ops on different streams that use the same memory, one of them writes it, and nothing orders them.

One pass over the records with vector clocks: each stream of each device counts its ops, and each stream, event and the
host knows how far the others had come. A clock never changes once it is made, so many may share it; time and memory for
them are bounded, and a pass that reaches a bound says so. Looked at is the memory of accelerators. What a kernel writes
is what its schema says. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .attachments import BODY, attachments_of, contents_of, open_body
from .codes import DType, KernelKind, RecordKind, StorageOrigin, ValueKind
from .model import StreamPlacement
from .operator_schema import parse_operator_schema
from .reader import CaptureReader
from .record_frames import RecordFrame
from .signature_layout import SlotLayout

MOST_STREAMS = 1024  # each op costs as much as there are streams
MOST_STEPS = 1 << 25  # entries of clocks that a pass reads: about two seconds
_STEPS_PER_RECORD = 64  # and as many more for each record: what 64 busy streams take
_ENTRIES_OF_A_CLOCK = 4  # what it takes besides its own
MOST_KEPT = 1 << 23  # entries of clocks that streams and events keep: about 400 MB
# Operators that wait for the device to know how large their result is, or what it says.
_WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
    )
)
_WAITING_FOR_MASKS = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
MASKS = (DType.bool, DType.uint8)
_SCALARS = frozenset({ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex})
_NO_STREAMS = StreamPlacement(())

Lane = tuple[int, int]  # a stream: device id, number
Clock = Mapping[Lane, int]  # how far streams have come, as somebody knows
_START: Clock = {}


class StorageUse(NamedTuple):
    """An op that uses a storage: its ordinal, its stream and the count of that stream's ops."""

    ordinal: int
    lane: Lane
    tick: int
    writes: bool


class Race(NamedTuple):
    """Two uses of a storage that nothing orders, in capture order."""

    storage: int
    first: StorageUse
    second: StorageUse

    def text(self, reader: CaptureReader) -> str:
        one, other = (self._named(reader, use) for use in (self.first, self.second))
        return f"{one} and {other} storage {self.storage}, and nothing orders them"

    @staticmethod
    def _named(reader: CaptureReader, use: StorageUse) -> str:
        kernel = reader.kernels[reader.record(use.ordinal).signature.kernel]
        device, stream = reader.devices[use.lane[0]], use.lane[1]
        where = f"stream {stream}" if stream else "the default stream"
        name = kernel.qualified_name if kernel is not None else "an op"
        return f"ordinal {use.ordinal} ({name}, {where} of {device}) {'writes' if use.writes else 'reads'}"


@dataclass
class _Storage:
    written: StorageUse | None = None
    read: dict[Lane, StorageUse] | None = None


@dataclass(frozen=True)
class Accesses:
    """What the records of a signature do: tensor slots that they read and write, and of results. The host waits for
    them in any case (`waits`), or where a tensor is on the host (`blocks`) or a mask (`masks`)."""

    kind: RecordKind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: tuple[int, ...]
    waits: bool
    blocks: bool
    masks: bool
    device: int


@dataclass
class Races:
    """Races of a capture and of the bodies of its graphs, in words; and why some may be missing ("": all were looked
    for)."""

    sentences: list[str] = field(default_factory=list)
    unjudged: str = ""


class _Bound(Exception):
    """More streams, steps or memory than a pass takes."""


def find_races(reader: CaptureReader, most: int = 100) -> list[Race]:
    """The first races of a capture, `most` at most, one for each storage. Empty where all work is on default streams
    of one device. Raises InvalidCapture for a damaged frame."""
    return _Pass(reader).run(most)


def judge_races(reader: CaptureReader, most: int = 100) -> Races:
    """The first races of a capture and of the bodies of its graphs, `most` at most, for people. A body that cannot be
    read has none: a replay refuses it. Raises InvalidCapture for a damaged frame."""
    judging = _Pass(reader)
    judged = Races([each.text(reader) for each in judging.run(most)], judging.stopped)
    steps = judging.steps
    seen: set[int] = set()  # many kernels may have one body
    for kernel in reader.kernels:
        if kernel is None or kernel.kind is not KernelKind.graph or not kernel.attachments:
            continue
        bodies = {each.payload for each in attachments_of(reader, kernel) if each.role == BODY}
        if bodies <= seen:
            continue
        if len(judged.sentences) >= most or judged.unjudged:
            break
        seen |= bodies
        try:
            body = open_body(contents_of(reader, kernel))
        except ValueError:
            continue
        with body:
            judging = _Pass(body, steps)
            races = judging.run(most - len(judged.sentences))
            steps = judging.steps
            inside = f"inside {kernel.qualified_name}: "
            judged.sentences += [f"{inside}{each.text(body)}" for each in races]
            judged.unjudged = judging.stopped and inside + judging.stopped
    return judged


class _Pass:
    """One pass. `steps`: entries of clocks read so far, in bodies of the same capture too."""

    def __init__(self, reader: CaptureReader, steps: int = 0) -> None:
        self._reader = reader
        self.steps = steps
        self.stopped = ""  # why the pass ended early
        self._kept = 0  # entries of the clocks of streams and events, and what each takes by itself
        self._clocks: dict[Lane, Clock] = {}
        self._host = _START
        self._events: dict[int, Clock] = {}
        self._storages: dict[int, _Storage] = {}
        self._racing: set[int] = set()
        self._shapes: dict[int, Accesses] = {}
        self._accelerators = reader.accelerators

    def run(self, most: int) -> list[Race]:
        """The first races, `most` at most."""
        placements = self._reader.placements
        if len(placements) < 2:
            return []
        streams = len({stream for placement in placements[1:] if placement for stream in placement.streams})
        if streams > MOST_STREAMS:
            self.stopped = (
                f"the capture has {streams:,} streams, and those of more than {MOST_STREAMS:,} are not looked at"
            )
            return []
        found: list[Race] = []
        try:
            for race in self.races():
                found.append(race)
                if len(found) == most:
                    break
        except _Bound as bound:
            self.stopped = str(bound)
        return found

    def races(self) -> Iterator[Race]:
        reader = self._reader
        steps = MOST_STEPS
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            signatures = frame.signature.tolist()
            steps += _STEPS_PER_RECORD * len(signatures)
            for row, signature in enumerate(signatures):
                if self.steps > steps or self._kept > MOST_KEPT:
                    raise _Bound(
                        f"from ordinal {frame.first_ordinal + row:,} on nothing is looked at: the streams and events "
                        "before it take too much time or memory"
                    )
                shape = self._shapes.get(signature) or self._shapes.setdefault(
                    signature, accesses_of(reader, signature)
                )
                if shape.kind is RecordKind.op:
                    yield from self._op(frame, row, shape)
                elif shape.kind in _HANDLED:
                    _HANDLED[shape.kind](self, shape, frame.ints_of(row).tolist())

    def _op(self, frame: RecordFrame, row: int, shape: Accesses) -> Iterator[Race]:
        slots = frame.slots_of(row).tolist()
        if not slots:
            return
        placement = _NO_STREAMS
        if frame.placement is not None and frame.placement[row]:
            placement = self._reader.placements[int(frame.placement[row])] or _NO_STREAMS
        metas = self._reader.metas
        devices = [metas[int(frame.tensor_meta[slot])].device for slot in slots]
        lanes = list(dict.fromkeys((each, placement.stream(each)) for each in devices if each in self._accelerators))
        if not lanes or not (shape.reads or shape.writes or shape.results):
            return
        clock = self._host
        for lane in lanes:
            clock = self._merged(clock, self._clocks.get(lane, _START))
        lane = lanes[0]
        tick = clock.get(lane, 0) + 1
        self.steps += len(clock)
        clock = {**clock, lane: tick}
        for each in lanes:
            self._keep(self._clocks, each, clock)
        ordinal = frame.first_ordinal + row
        arguments: set[int] = set()
        for places, writes in ((shape.reads, False), (shape.writes, True), (shape.results, True)):
            for place in places:
                storage = int(frame.tensor_storage[slots[place]])
                if not storage or devices[place] not in self._accelerators:
                    continue
                known = storage in arguments or storage in self._storages
                if places is shape.results and (
                    known or self._reader.storage(storage).origin is StorageOrigin.uninitialized
                ):
                    continue  # what it was given, or a view
                arguments.add(storage)
                race = self._use(storage, StorageUse(ordinal, lane, tick, writes), clock)
                if race is not None and storage not in self._racing:
                    self._racing.add(storage)
                    yield race
        masked = shape.masks and any(metas[int(frame.tensor_meta[slot])].dtype in MASKS for slot in slots[1:])
        if shape.waits or masked or (shape.blocks and any(each not in self._accelerators for each in devices)):
            self._host = self._merged(self._host, clock)

    def _use(self, number: int, use: StorageUse, clock: Clock) -> Race | None:
        storage = self._storages.setdefault(number, _Storage())
        before = [] if storage.written is None else [storage.written]
        if use.writes:
            before += (storage.read or {}).values()
            storage.written, storage.read = use, None
        else:
            storage.read = storage.read or {}
            storage.read[use.lane] = use
        unordered = [each for each in before if each.ordinal != use.ordinal and clock.get(each.lane, 0) < each.tick]
        return Race(number, unordered[0], use) if unordered else None

    def _merged(self, one: Clock, other: Clock) -> Clock:
        if one is other or not other:
            return one
        if not one:
            return other
        self.steps += len(other)
        ahead = {lane: tick for lane, tick in other.items() if one.get(lane, 0) < tick}
        if not ahead:
            return one
        self.steps += len(one)
        return {**one, **ahead}

    def _keep(self, clocks: dict[Any, Clock], key: Any, clock: Clock) -> None:
        before = clocks.get(key)
        self._kept += len(clock) - (len(before) if before is not None else -_ENTRIES_OF_A_CLOCK)
        clocks[key] = clock

    def _event_record(self, shape: Accesses, ints: list[int]) -> None:
        event, number = ints
        self._keep(self._events, event, self._clocks.get((shape.device, number), _START))

    def _event_wait(self, shape: Accesses, ints: list[int]) -> None:
        event, number = ints
        lane = shape.device, number
        clock = self._merged(self._clocks.get(lane, _START), self._events.get(event, _START))
        if clock:
            self._keep(self._clocks, lane, clock)

    def _synchronize(self, shape: Accesses, _ints: list[int]) -> None:
        self.steps += len(self._clocks)
        for lane, clock in self._clocks.items():
            if lane[0] == shape.device:
                self._host = self._merged(self._host, clock)

    def _synchronize_stream(self, shape: Accesses, ints: list[int]) -> None:
        self._host = self._merged(self._host, self._clocks.get((shape.device, ints[0]), _START))

    def _synchronize_event(self, _shape: Accesses, ints: list[int]) -> None:
        self._host = self._merged(self._host, self._events.get(ints[0], _START))

    def _forget(self, _shape: Accesses, ints: list[int]) -> None:
        self._storages.pop(ints[0], None)


def accesses_of(reader: CaptureReader, number: int) -> Accesses:
    layout = reader.layouts[number]
    signature = layout.signature
    device = next((each.node.constant for each in layout.args if each.node.name == "device"), 0)
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    waits = blocks = masks = False
    if signature.kind is RecordKind.op:
        kernel = reader.kernels[signature.kernel]
        assert kernel is not None
        reads, writes = accesses(layout, kernel.schema)
        results = tuple(slot for each in layout.results for slot in each.tensors)
        waits = kernel.name in _WAITING or any(each.node.kind in _SCALARS for each in layout.results)
        masks = kernel.name in _WAITING_FOR_MASKS
        blocks = not any(each.node.name == "non_blocking" and each.node.constant for each in layout.args)
    return Accesses(
        signature.kind, reads, writes, results, waits, blocks, masks, device if isinstance(device, int) else 0
    )


def accesses(layout: SlotLayout, schema_text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensor slots of arguments that an op reads, and those that it writes."""
    slots = {each.node.name: each.tensors for each in layout.args}
    try:
        schema = parse_operator_schema(schema_text)
    except ValueError:  # then nothing is known, and it may write what it is given
        every = tuple(slot for taken in slots.values() for slot in taken)
        return every, every
    written = {each.name for each in schema.arguments if each.type.written}
    if schema.returns and not written and all(each.alias for each in schema.returns):
        return (), ()  # looks at the memory in another way, and reads none of it
    # What makes a tensor like another one looks at its sizes alone.
    alike = schema.base_name.endswith("_like") or schema.base_name.startswith("new_")
    unread = schema.arguments[0].name if alike and schema.arguments else None
    reads = tuple(slot for name, taken in slots.items() if name not in written and name != unread for slot in taken)
    return reads, tuple(slot for name in written for slot in slots.get(name, ()))


_HANDLED = {
    RecordKind.event_record: _Pass._event_record,
    RecordKind.event_wait: _Pass._event_wait,
    RecordKind.synchronize: _Pass._synchronize,
    RecordKind.stream_synchronize: _Pass._synchronize_stream,
    RecordKind.event_synchronize: _Pass._synchronize_event,
    # Content that enters from outside, and memory that is gone: what used it before does not matter any more.
    RecordKind.storage_import: _Pass._forget,
    RecordKind.storage_release: _Pass._forget,
}
