"""Memory of the host that a device still copies to or from: what the host does with it waits until that is done.

A copy that nobody waits for (`non_blocking`) is under way when the next op is issued. The program waited before it used
the memory, in some way: by a record that the replay waits at, too, or by one that the capture does not have (PyTorch
tells nothing of an event that is asked whether it is done, nor, on some devices, of events while there are only default
streams). So an op of the host that needs the memory waits for the copy's stream, unless a record before it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Signature
from replayfmt.format.races import accesses
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import is_accelerator

from ..planning.devices import DeviceMap
from .operations import Synchronize
from .streams import Pass, ReplayStreams, ints_and_device

_LATE_KINDS = (KernelKind.graph, KernelKind.triton)


@dataclass(eq=False)
class _LateCopy:
    """A copy under way: the memory of the host, its stream, and whether it writes there."""

    storage: int
    device: int
    stream: int
    writes: bool


@dataclass(frozen=True)
class _TensorSlots:
    """Tensor slots of an op. `late`: the op returns before it has used them."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    late: bool


def _is_late(reader: CaptureReader, signature: Signature | None) -> bool:
    if signature is None or signature.kind is not RecordKind.op:
        return False
    kernel = reader.kernels[signature.kernel]
    named = any(node.name == "non_blocking" and node.constant for node in signature.args)
    return named or (kernel is not None and kernel.kind in _LATE_KINDS)


def copies_late(reader: CaptureReader) -> bool:
    """Whether a capture has ops that may return before they have used memory of the host."""
    return any(_is_late(reader, signature) for signature in reader.signatures[1:])


class LateCopies:
    """Writes the waits of one pass through the records."""

    def __init__(self, lowering: Pass, devices: DeviceMap, streams: ReplayStreams | None) -> None:
        """`streams`: as many as were captured; None: the ops run on the current ones."""
        self._lowering = lowering
        self._devices = devices
        self._streams = streams
        self._copies: dict[int, list[_LateCopy]] = {}  # by storage
        self._recorded: dict[int, list[_LateCopy]] = {}  # by event: the copies before it, on its stream
        self._uses = cache(self._uses_of)
        self._waits: dict[int, Callable[[int], None]] = {
            RecordKind.event_record: self._record,
            RecordKind.event_synchronize: self._synchronize_event,
            RecordKind.stream_synchronize: self._synchronize_stream,
            RecordKind.synchronize: self._synchronize,
        }

    def before_op(self, row: int, ordinal: int) -> None:
        """An op's line follows."""
        frame = self._lowering.frame
        uses = self._uses(frame.signatures[row])
        if uses.late:
            self._begin(row, uses, ordinal)
        elif self._copies:
            first = frame.tensor_first[row]
            for slots, writes in ((uses.reads, False), (uses.writes, True)):
                for slot in slots:
                    self._wait(frame.storages[first + slot], writes, ordinal)

    def before_reading(self, slot: int, ordinal: int) -> None:
        """A line that reads a tensor on the host follows."""
        self._wait(self._lowering.frame.storages[slot], False, ordinal)

    def after_record(self, kind: int, row: int) -> None:
        """The replay has done what another record says."""
        done = self._waits.get(kind)
        if done is not None:
            done(row)

    def _uses_of(self, number: int) -> _TensorSlots:
        layout = self._lowering.scan.layout(number)
        kernel = self._lowering.reader.kernels[layout.signature.kernel]
        reads, writes = accesses(layout, "" if kernel is None else kernel.schema)
        results = tuple(slot for each in layout.results for slot in each.tensors)
        late = _is_late(self._lowering.reader, layout.signature)
        return _TensorSlots(
            reads, (*writes, *results) if late else writes, late
        )  # other results are new memory, or views

    def _begin(self, row: int, uses: _TensorSlots, ordinal: int) -> None:
        lowering, frame = self._lowering, self._lowering.frame
        first, metas = frame.tensor_first[row], lowering.reader.metas
        placement = lowering.reader.placements[frame.placement(row)] if frame.placement(row) else None
        lanes, host = [], []
        for slots, writes in ((uses.reads, False), (uses.writes, True)):
            for slot in slots:
                meta = metas[frame.metas[first + slot]]
                assert meta is not None
                if is_accelerator(self._devices.target(meta.device)):
                    number = placement.stream(meta.device) if placement is not None and self._streams else 0
                    lanes.append((meta.device, number))
                elif lowering.scan.last_use_of(frame.storages[first + slot]) > ordinal:
                    host.append((frame.storages[first + slot], writes))
        for storage, writes in host:
            for device, number in lanes[:1]:
                self._copies.setdefault(storage, []).append(_LateCopy(storage, device, number, writes))

    def _wait(self, storage: int, writes: bool, ordinal: int) -> None:
        for copy in list(self._copies.get(storage, ())):
            if (copy.writes or writes) and copy in self._copies.get(storage, ()):
                device, text = self._devices.target(copy.device), self._lowering.text
                stream = self._streams.stream(copy.device, copy.stream) if self._streams else None
                if stream is not None:
                    name = text.shared(("stream", stream.device_index, stream.stream_id), stream)
                    text.line(ordinal, f"{name}.synchronize()")
                else:
                    text.line(ordinal, f"{text.shared(('synchronize', str(device)), Synchronize(device))}()")
                self._on_stream_done(copy.device, copy.stream)

    # ---------------------------------------------------------------------------------------- waits that were captured

    def _record(self, row: int) -> None:
        (event, number), device = ints_and_device(self._lowering, row)
        self._recorded[event] = self._on_stream(device, number if self._streams else 0)

    def _synchronize_event(self, row: int) -> None:
        (event,), _device = ints_and_device(self._lowering, row)
        self._done(self._recorded.get(event, []))

    def _synchronize_stream(self, row: int) -> None:
        (number,), device = ints_and_device(self._lowering, row)
        self._on_stream_done(device, number if self._streams else 0)

    def _synchronize(self, row: int) -> None:
        _none, device = ints_and_device(self._lowering, row)
        self._done([copy for copies in self._copies.values() for copy in copies if copy.device == device])

    def _on_stream(self, device: int, number: int) -> list[_LateCopy]:
        every = (copy for copies in self._copies.values() for copy in copies)
        return [copy for copy in every if (copy.device, copy.stream) == (device, number)]

    def _on_stream_done(self, device: int, number: int) -> None:
        self._done(self._on_stream(device, number))

    def _done(self, copies: list[_LateCopy]) -> None:
        for copy in copies:
            left = [each for each in self._copies.get(copy.storage, ()) if each is not copy]
            if left:
                self._copies[copy.storage] = left
            else:
                self._copies.pop(copy.storage, None)
