"""A job as execution traces of MLCommons Chakra, one file a rank, as ASTRA-sim and other simulators take them.

The schema is et_def.proto of github.com/mlcommons/chakra. A file is a GlobalMetadata message and a Node message for
each op, import, host read and collective, each behind its length. What only views memory is no work, and is left out.

A node depends on those before it for one of these reasons, and on no others, so that there is no cycle:
- data: it reads bytes that a node wrote (`data_deps`), or writes bytes that one read or wrote (`ctrl_deps`);
- order: it follows on its stream, on its host thread, on its process group, or from the same rank to the same;
- waits: it comes after the program waited for a collective, an event, a stream or a device.

Needs no PyTorch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from replayfmt.errors import InvalidCapture, OpReplayError, ReplayRefused, UsageError
from replayfmt.format.codes import ITEM_BYTES, RecordKind
from replayfmt.format.model import Record, StreamPlacement, TensorMeta, TensorValue
from replayfmt.format.output import new_folder
from replayfmt.format.races import MASKS, Accesses, accesses_of
from replayfmt.format.rank_files import (
    LAUNCH,
    WAIT,
    come_in_pairs,
    describe_all,
    events_of,
    judge,
    members_of,
    rank_file,
    world_size,
)
from replayfmt.format.reader import CaptureReader, RecordFrame, open_capture
from replayfmt.format.record_frames import decode_record
from replayfmt.report.measurements import IsolatedTimes
from replayfmt.report.ops import UNKNOWN, captured_ops
from replayfmt.report.timelines import isolated_ns

PREFIX, GROUPS = "chakra", "comm_groups.json"
_EVERYONE = "0"  # the group of all ranks
_VERSION = "0.0.4"  # of the schema, as its own converters write it
_MOST_ACCESSES = 32  # parts of one storage that are told apart

_MEM_LOAD, _MEM_STORE, _COMP, _SEND, _RECEIVE, _COLLECTIVE = range(2, 8)  # NodeType
# CollectiveCommType by what operators are called; the first that fits.
_COLLECTIVES = (
    (("allreduce", "all_reduce"), 0),
    (("reduce_scatter",), 7),
    (("allgather", "all_gather"), 2),
    (("alltoall", "all_to_all"), 6),
    (("reduce",), 1),
    (("gather",), 3),
    (("scatter",), 4),
    (("broadcast",), 5),
    (("barrier",), 9),
)
_SIMULATED = (0, 2, 5, 6, 7)  # by ASTRA-sim
# Field number and type of what is used of each message; "*": repeated.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "*AttributeProto")},
    "IOInfo": {"values": (1, "string"), "shapes": (2, "string"), "types": (3, "string")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),  # an enumeration, which is written as one
        "ctrl_deps": (4, "*uint64"),
        "data_deps": (5, "*uint64"),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "inputs": (8, "IOInfo"),
        "outputs": (9, "IOInfo"),
        "attr": (10, "*AttributeProto"),
    },
}


@cache
def _classes() -> dict[str, Any]:
    """The classes of the messages, by name. Raises OpReplayError without protobuf."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise OpReplayError(
            f"--format=chakra needs protobuf, which is not installed ({error}): pip install protobuf"
        ) from None
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            added = declared.field.add(name=name, number=number, label=label)
            if kind in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if name.endswith("_val"):  # present even where it is 0, as one of the message's values
                if not declared.oneof_decl:
                    declared.oneof_decl.add(name="value")
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in _MESSAGES
    }


def _write(out: BinaryIO, message: Any) -> None:
    """A message behind its length, as the format's readers expect."""
    body = message.SerializeToString()
    length, prefix = len(body), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    out.write(bytes(prefix) + body)


def _attributes(values: dict[str, Any]) -> list[Any]:
    """Attributes by name. What simulators read as a rank or a tag is an int32, as their own converters write it."""
    made = []
    for name, value in values.items():
        if isinstance(value, bool):
            kind = "bool_val"
        elif isinstance(value, str):
            kind = "string_val"
        else:
            kind = "int32_val" if name in ("comm_src", "comm_dst", "comm_tag") else "int64_val"
        made.append(_classes()["AttributeProto"](name=name, **{kind: value}))
    return made


class _Bytes(NamedTuple):
    storage: int
    first: int
    end: int


@dataclass
class _Accesses:
    """The nodes that last wrote and since read parts of one storage: (first byte, end, node)."""

    writes: list[tuple[int, int, int]] = field(default_factory=list)
    reads: list[tuple[int, int, int]] = field(default_factory=list)


class _Order:
    """What each node has to wait for. A lane is a stream of a device, a host thread or a process group."""

    def __init__(self) -> None:
        self._storages: dict[int, _Accesses] = {}
        self._last: dict[Any, int] = {}  # the last node of a lane
        self._joined: dict[Any, set[int]] = {}  # nodes that the next one of a lane waits for
        self._host: list[int] = []  # nodes that the host has waited for: everything later comes after them
        self._absorbed: dict[Any, int] = {}  # how many of these a lane has waited for

    def add(
        self, node: int, lanes: Sequence[Any], reads: Iterable[_Bytes], writes: Iterable[_Bytes]
    ) -> tuple[list[int], list[int]]:
        """A new node, whose number is larger than those before: its data dependencies, and the others."""
        data: set[int] = set()
        order: set[int] = set()
        reads, writes = list(reads), list(writes)
        for each in reads:
            data.update(
                node_of for first, end, node_of in self._of(each).writes if first < each.end and each.first < end
            )
        for each in writes:
            self._writes(node, each, order)
        for each in reads:
            self._of(each).reads.append((each.first, each.end, node))
        for lane in lanes:
            if lane in self._last:
                order.add(self._last[lane])
            order |= self._joined.pop(lane, set())
            order.update(self._host[self._absorbed.get(lane, 0) :])
            self._absorbed[lane] = len(self._host)
            self._last[lane] = node
        order -= {node}
        return sorted(data - {node}), sorted(order - data)

    def _of(self, part: _Bytes) -> _Accesses:
        return self._storages.setdefault(part.storage, _Accesses())

    def _writes(self, node: int, part: _Bytes, order: set[int]) -> None:
        known = self._of(part)
        whole = len(known.writes) + len(known.reads) > _MOST_ACCESSES  # then it waits for all, and stands for them
        for listed in (known.writes, known.reads):
            order.update(other for first, end, other in listed if whole or (first < part.end and part.first < end))
            listed[:] = [each for each in listed if not (whole or (part.first <= each[0] and each[1] <= part.end))]
        known.writes.append((0, 1 << 62, node) if whole else (part.first, part.end, node))

    def last(self, lane: Any) -> int | None:
        return self._last.get(lane)

    def join(self, lane: Any, node: int | None) -> None:
        """The next node of a lane waits for a node."""
        if node is not None:
            self._joined.setdefault(lane, set()).add(node)

    def host_waits(self, node: int | None) -> None:
        """All nodes from here on come after a node."""
        if node is not None:
            self._host.append(node)

    def lanes(self) -> list[Any]:
        return list(self._last)

    def forget(self, storage: int) -> None:
        self._storages.pop(storage, None)


@dataclass
class ChakraCounts:
    """What was written: nodes by kind; `untimed` ops without a known duration; `unsimulated` collectives, by operator,
    that ASTRA-sim does not know; `unknown`: work that the captures themselves lack, by reason."""

    ranks: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    views: int = 0
    untimed: int = 0
    unsimulated: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)


class _Rank:
    def __init__(
        self,
        reader: CaptureReader,
        groups: dict[Any, str],
        times: IsolatedTimes | None,
        counts: ChakraCounts,
        out: BinaryIO,
    ) -> None:
        self._reader, self._groups, self._counts, self._out = reader, groups, counts, out
        self._order = _Order()
        self._node = 0
        self._works: dict[int, tuple[int, bool]] = {}  # of collectives: the node, and whether the host waits for it
        self._events: dict[int, int | None] = {}
        self._left_ns: dict[Any, int] = {}  # by lane: nanoseconds that its microseconds lack so far
        self._shapes: dict[int, Accesses] = {}
        self._issued: dict[Any, int | None] = {}  # by lane: the host's node that it waits for already
        self._accelerators = reader.accelerators
        self._durations = _durations(reader, times)

    def write(self) -> None:
        reader, session = self._reader, self._reader.session
        about = {"rank": session.rank, "world_size": session.world_size, "capture": session.session_id}
        _write(self._out, _classes()["GlobalMetadata"](version=_VERSION, attr=_attributes(about)))
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            for row, signature in enumerate(frame.signature.tolist()):
                layout = reader.layouts[signature]
                kind = layout.signature.kind
                if kind is RecordKind.op:
                    kernel = reader.kernels[layout.signature.kernel]
                    assert kernel is not None
                    if kernel.name in (LAUNCH, WAIT):
                        record = decode_record(frame, row, reader.definitions)
                        (self._launch if kernel.name == LAUNCH else self._wait)(frame, row, record)
                    else:
                        self._op(frame, row, signature)
                elif kind in _RECORDS:
                    _RECORDS[kind](self, frame, row, decode_record(frame, row, reader.definitions))

    def _op(self, frame: RecordFrame, row: int, signature: int) -> None:
        shape = self._shapes.get(signature) or self._shapes.setdefault(signature, accesses_of(self._reader, signature))
        slots = frame.slots_of(row).tolist()
        reads, writes = (
            _known(self._bytes(frame, slots[at]) for at in listed) for listed in (shape.reads, shape.writes)
        )
        given = {int(frame.tensor_storage[slots[at]]) for at in range(len(slots)) if at not in shape.results}
        made = _known(self._bytes(frame, slots[at]) for at in shape.results)
        writes += [each for each in made if each.storage not in given]
        if not (reads or writes):
            self._counts.views += 1
            return
        metas = [self._meta(frame, slot) for slot in slots]
        devices = [meta.device for meta in metas]
        on_host = self._accelerators.isdisjoint(devices)
        lanes = self._lanes(frame, row, [] if on_host else devices)
        ordinal = frame.first_ordinal + row
        duration = self._durations.get(ordinal)
        self._counts.untimed += duration is None
        length = sum(each.end - each.first for each in (*reads, *writes))
        about = {"is_cpu_op": on_host, "ordinal": ordinal, "tensor_size": length}
        inputs, outputs = (
            self._io([metas[at] for at in listed]) for listed in (shape.reads, (*shape.writes, *shape.results))
        )
        name = self._reader.kernels[self._reader.layouts[signature].signature.kernel].qualified_name
        node = self._add(
            frame, row, _COMP, name, lanes, reads, writes, about, duration=duration, inputs=inputs, outputs=outputs
        )
        masked = shape.masks and any(meta.dtype in MASKS for meta in metas[1:])
        copies = shape.blocks and any(meta.device not in self._accelerators and meta.sizes for meta in metas)
        if not on_host and (shape.waits or masked or copies):
            self._order.host_waits(node)

    def _lanes(self, frame: RecordFrame, row: int, devices: Iterable[int]) -> list[Any]:
        """The streams of devices, and the host thread where there are none."""
        placement = None
        if frame.placement is not None and frame.placement[row]:
            placement = self._reader.placements[int(frame.placement[row])]
        placement = placement or StreamPlacement(())
        streams = [(each, placement.stream(each)) for each in dict.fromkeys(devices) if each in self._accelerators]
        return streams or [("thread", int(frame.thread[row]))]

    def _add(
        self,
        frame: RecordFrame,
        row: int,
        kind: int,
        name: str,
        lanes: list[Any],
        reads: Iterable[_Bytes],
        writes: Iterable[_Bytes],
        about: dict[str, Any],
        *,
        duration: int | None = None,
        **io: Any,
    ) -> int:
        """Write a node; its number."""
        self._node += 1
        thread = ("thread", int(frame.thread[row]))
        issued = self._order.last(thread)  # work of the host before it in the program
        for lane in lanes:
            if lane != thread and self._issued.get(lane) != issued:
                self._order.join(lane, issued)
                self._issued[lane] = issued
        data, order = self._order.add(self._node, lanes, reads, writes)
        micros = 0
        if duration is not None:
            micros, self._left_ns[lanes[0]] = divmod(duration + self._left_ns.get(lanes[0], 0), 1000)
            about["duration_ns"] = duration
        scope = self._reader.scope_path(int(frame.scope[row]))
        if scope:
            about["scope"] = scope
        _write(
            self._out,
            _classes()["Node"](
                id=self._node,
                name=name,
                type=kind,
                ctrl_deps=order,
                data_deps=data,
                start_time_micros=int(frame.start_ns[row]) // 1000,
                duration_micros=micros,
                attr=_attributes(about),
                **io,
            ),
        )
        self._counts.nodes[_KINDS[kind]] += 1
        return self._node

    def _meta(self, frame: RecordFrame, slot: int) -> TensorMeta:
        meta = self._reader.metas[int(frame.tensor_meta[slot])]
        assert meta is not None
        return meta

    def _bytes(self, frame: RecordFrame, slot: int) -> _Bytes | None:
        """Where a tensor lies; None if it has no memory."""
        storage, meta = int(frame.tensor_storage[slot]), self._meta(frame, slot)
        return _span(storage, int(frame.tensor_offset[slot]), meta) if storage else None

    def _io(self, metas: list[TensorMeta]) -> Any:
        shapes = json.dumps([list(meta.sizes) for meta in metas])
        types = json.dumps([f"Tensor({meta.dtype.name})" for meta in metas])
        return _classes()["IOInfo"](shapes=shapes, types=types)

    def _launch(self, frame: RecordFrame, row: int, record: Record) -> None:
        operator = str(record.argument("operator"))
        base = operator.rpartition("::")[2]
        ranks = members_of(str(record.argument("ranks")))
        inputs, outputs = (_tensors(record.argument(name)) for name in ("inputs", "outputs"))
        reads, writes = ([_span(each.storage, each.offset, each.meta) for each in some] for some in (inputs, outputs))
        # Of a broadcast, a rank has one or the other; of a scatter, only the outputs are alike on all ranks.
        sent = outputs if base.startswith("scatter") else inputs or outputs
        length = sum(each.meta.bytes for each in sent)
        group = self._groups[str(record.argument("ranks")), record.argument("instance")]
        about: dict[str, Any] = {"is_cpu_op": False, "ordinal": record.ordinal, "comm_size": length, "pg_name": group}
        if come_in_pairs(operator):
            me, peer = self._reader.session.rank, ranks[int(record.argument("peer"))]  # type: ignore[arg-type]
            kind = _SEND if "send" in base else _RECEIVE
            source, target = (me, peer) if kind == _SEND else (peer, me)
            about |= {"comm_src": source, "comm_dst": target, "comm_tag": record.argument("tag")}
            lane: Any = ("pair", group, source, target)  # the other direction, and other ranks, need not wait for it
        else:
            kind, lane = _COLLECTIVE, ("group", group)
            about["comm_type"] = next(
                (code for names, code in _COLLECTIVES if any(each in base for each in names)), None
            )
            if about["comm_type"] is None:
                raise InvalidCapture(f"record {record.ordinal}: {operator!r} is no collective that Chakra has")
            if about["comm_type"] not in _SIMULATED:
                self._counts.unsimulated[operator] += 1
            if int(record.argument("peer")) >= 0:  # type: ignore[arg-type]
                about["root"] = ranks[int(record.argument("peer"))]  # type: ignore[arg-type]
        devices = [each.meta.device for each in (*inputs, *outputs)]
        current = self._lanes(frame, row, devices)
        for each in current:  # it begins when what was issued before it is done
            self._order.join(lane, self._order.last(each))
        node = self._add(frame, row, kind, operator, [lane], reads, writes, about)
        on_device = not self._accelerators.isdisjoint(devices)
        self._works[int(record.argument("work"))] = node, not on_device  # type: ignore[arg-type]

    def _wait(self, frame: RecordFrame, row: int, record: Record) -> None:
        """What comes later on this thread, or on the current stream, comes after the collective."""
        node, blocks = self._works[int(record.argument("work"))]  # type: ignore[arg-type]
        devices = [each.meta.device for each in _tensors(record.argument("outputs"))]
        for lane in self._lanes(frame, row, [] if blocks else devices):
            self._order.join(lane, node)

    def _import(self, frame: RecordFrame, row: int, record: Record) -> None:
        storage = record.argument("storage").id  # type: ignore[union-attr]
        length = self._reader.storage(storage).bytes
        about = {"is_cpu_op": True, "ordinal": record.ordinal, "tensor_size": length}
        thread = [("thread", record.thread)]
        self._add(frame, row, _MEM_LOAD, "storage_import", thread, [], [_Bytes(storage, 0, max(length, 1))], about)

    def _host_read(self, frame: RecordFrame, row: int, record: Record) -> None:
        (tensor,) = _tensors(record.argument("tensor"))
        length = tensor.meta.bytes
        about = {"is_cpu_op": True, "ordinal": record.ordinal, "tensor_size": length}
        for lane in self._lanes(frame, row, [tensor.meta.device]):
            self._order.join(("thread", record.thread), self._order.last(lane))
        read = [_span(tensor.storage, tensor.offset, tensor.meta)]
        thread = [("thread", record.thread)]
        self._order.host_waits(self._add(frame, row, _MEM_STORE, "host_read", thread, read, [], about))

    def _event_record(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._events[int(record.argument("event"))] = self._order.last(_stream(record))  # type: ignore[arg-type]

    def _event_wait(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._order.join(_stream(record), self._events.get(int(record.argument("event"))))  # type: ignore[arg-type]

    def _synchronize(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        device = record.argument("device").id  # type: ignore[union-attr]
        for lane in self._order.lanes():
            if lane[0] == device:
                self._order.host_waits(self._order.last(lane))

    def _synchronize_stream(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._order.host_waits(self._order.last(_stream(record)))

    def _synchronize_event(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._order.host_waits(self._events.get(int(record.argument("event"))))  # type: ignore[arg-type]

    def _release(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._order.forget(record.argument("storage").id)  # type: ignore[union-attr]

    def _unknown(self, _frame: RecordFrame, _row: int, record: Record) -> None:
        self._counts.unknown[f"{record.argument('reason')}: {record.argument('op')}"] += 1


_KINDS = {
    _MEM_LOAD: "loads",
    _MEM_STORE: "stores",
    _COMP: "ops",
    _SEND: "sends",
    _RECEIVE: "receives",
    _COLLECTIVE: "collectives",
}
_RECORDS = {
    RecordKind.storage_import: _Rank._import,
    RecordKind.storage_release: _Rank._release,
    RecordKind.host_read: _Rank._host_read,
    RecordKind.event_record: _Rank._event_record,
    RecordKind.event_wait: _Rank._event_wait,
    RecordKind.synchronize: _Rank._synchronize,
    RecordKind.stream_synchronize: _Rank._synchronize_stream,
    RecordKind.event_synchronize: _Rank._synchronize_event,
    RecordKind.unsupported: _Rank._unknown,
}


def _durations(reader: CaptureReader, times: IsolatedTimes | None) -> dict[int, int]:
    """Nanoseconds of ops by ordinal, where they are known: measured ones, else on the device, else on the host."""
    ops = captured_ops(reader)
    found = np.where(ops.device_ns == UNKNOWN, ops.duration_ns, ops.device_ns)
    if times is not None:
        measured = isolated_ns(ops, reader, times)
        found = np.where(np.isnan(measured), found, np.round(np.nan_to_num(measured)).astype(np.int64))
    known = found != UNKNOWN
    return dict(zip(ops.ordinal[known].tolist(), found[known].tolist(), strict=True))


def _stream(record: Record) -> tuple[int, Any]:
    return record.argument("device").id, record.argument("stream")  # type: ignore[union-attr]


def _tensors(value: Any) -> list[TensorValue]:
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, TensorValue)]


def _known(parts: Iterable[_Bytes | None]) -> list[_Bytes]:
    return [each for each in parts if each is not None]


def _span(storage: int, offset: int, meta: TensorMeta) -> _Bytes:
    """The bytes from a tensor's first element to its last."""
    item = ITEM_BYTES[meta.dtype]
    last = sum((size - 1) * stride for size, stride in zip(meta.sizes, meta.strides, strict=False) if size > 0)
    return _Bytes(storage, offset * item, (offset + last + 1) * item)


def export_chakra(
    source: str,
    out: str,
    *,
    times: Callable[[CaptureReader], IsolatedTimes | None] = lambda _reader: None,
    force: bool = False,
) -> ChakraCounts:
    """Write `chakra.RANK.et` of each rank and the groups' ranks into a new folder. `source` is the folder of all ranks,
    or the capture of a program of one; `times` finds measured durations.

    Raises ReplayRefused where the files of the ranks do not fit together or a receive does not say from whom,
    OutputExists, UsageError, and CaptureFailed if something cannot be written.
    """
    _classes()
    if os.path.isdir(source):
        world = world_size(source)
        paths = [rank_file(source, rank) for rank in range(world)]
        said = describe_all(source, world)
        problems, events = judge(said), [each["events"] for each in said]
    else:
        paths, problems = [source], []
        with open_capture(source) as reader:
            if reader.session.world_size > 1:
                raise UsageError(
                    f"{source}: is one of {reader.session.world_size} ranks, and a simulator needs all of them; name "
                    "the folder"
                )
            events = [list(events_of(reader))]
    launched = [(rank, event) for rank, each in enumerate(events) for event in each if "wait" not in event]
    problems += [
        f"rank {rank}: {event['operator']} takes what comes, so that its sender is not known"
        for rank, event in launched
        if come_in_pairs(event["operator"]) and event["peer"] < 0
    ]
    if problems:
        raise ReplayRefused(f"{source}: cannot be simulated", tuple(problems))
    groups = _groups(len(paths), (event for _rank, event in launched))
    counts = ChakraCounts(len(paths))
    with new_folder(out, force, "a folder of Chakra traces", _is_export) as folder:
        for rank, path in enumerate(paths):
            with open_capture(path) as reader, open(folder / f"{PREFIX}.{rank}.et", "wb") as file:
                _Rank(reader, groups, times(reader), counts, file).write()
        named = {name: list(members_of(ranks)) for (ranks, _instance), name in groups.items()}
        named.pop(_EVERYONE, None)
        (folder / GROUPS).write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")
    return counts


def _groups(world: int, events: Iterable[dict[str, Any]]) -> dict[Any, str]:
    """What simulators call each group, by its ranks and instance: numbers from 1 on, which are the same on all ranks,
    and for the first group of all ranks the number that needs no definition."""
    first = ",".join(map(str, range(world))), 0
    others = sorted({(event["ranks"], event["instance"]) for event in events} - {first})
    return {first: _EVERYONE, **{key: str(number) for number, key in enumerate(others, start=1)}}


def _is_export(folder: Path) -> bool:
    return (folder / GROUPS).is_file() and all(each.suffix == ".et" or each.name == GROUPS for each in folder.iterdir())
