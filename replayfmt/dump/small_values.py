"""The values of small integer and bool tensors that ops take, where the capture holds them.

Block tables, sequence lengths, offsets and positions determine what an operator of a serving engine does. They are
known for storages whose content came from outside, until an op writes them according to its schema. Frames are read in
order; those before a selection only if it has values to show.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from replayfmt.format.codes import DType, Layout, RecordKind, TensorFlag, ValueKind
from replayfmt.format.distinct import distinct
from replayfmt.format.model import PayloadValue, StorageValue, TensorMeta
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.records.values import decode_record
from replayfmt.format.slots import SlotLayout

SHOWN_VALUES = 64  # of a tensor with more elements, none is shown
MOST_VALUES = 4096  # that can be requested
_LARGEST_PAYLOAD = 1 << 24  # of content that is read, bytes
_KEPT_BYTES = 1 << 26  # of content that is kept at hand
_KEPT_TEXTS = 1 << 14
_NUMPY: dict[DType, str] = {
    **{
        getattr(DType, f"{kind}{bits}"): f"<{kind[0]}{bits // 8}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    DType.bool: "|b1",
}
_FLAGS = TensorFlag.conj | TensorFlag.neg | TensorFlag.zero


class SmallValues:
    """Returns the values of a frame's tensors as `write` puts them, by place in the frame's tensor column."""

    def __init__(self, reader: CaptureReader, most: int, write: Callable[[np.ndarray], str]) -> None:
        """`most` elements are written of a tensor, 0: none are."""
        self._reader, self._write = reader, write
        self._small = np.array([meta is not None and _is_small(meta, most) for meta in reader.metas], bool)
        self.shows = bool(most) and len(reader.payloads) > 0 and bool(self._small.any())
        if not self.shows:
            return
        self._kinds = np.array([0 if each is None else int(each.kind) for each in reader.signatures], np.int64)
        self._arguments = np.array(
            [
                reader.layouts[number].arg_tensors if kind == RecordKind.op else 0
                for number, kind in enumerate(self._kinds.tolist())
            ],
            np.int64,
        )
        self._written: dict[int, tuple[list[int], list[int]]] = {}
        self._payload: dict[int, int] = {}  # storage → the payload it holds, while it does
        self._ever = np.zeros(reader.storage_count + 1, bool)  # storages that ever held one
        self._any = False
        self._next = 0  # the first frame that was not looked through
        self._content: dict[int, np.ndarray] = {}
        self._texts: dict[tuple[int, int, int], str] = {}

    def of(self, index: int, frame: RecordFrame) -> dict[int, str]:
        """The values to show in a frame. Frames must be requested in order."""
        if not self.shows:
            return {}
        places = np.flatnonzero(self._small[frame.tensor_meta[frame.tensor_slots]])
        rows = np.searchsorted(frame.tensor_first, places, "right") - 1
        taken = places - frame.tensor_first[rows] < self._arguments[frame.signature[rows]]
        places, rows = places[taken], rows[taken]
        if index > self._next and not len(places):
            return {}
        while self._next < index:
            self._pass(self._reader.frame(self._next), np.zeros(0, np.int64), np.zeros(0, np.int64))
        return self._pass(frame, places, rows)

    def _pass(self, frame: RecordFrame, places: np.ndarray, rows: np.ndarray) -> dict[int, str]:
        """Follow what a frame's records do to contents; the values at `places`, as they are right before their rows."""
        found: dict[int, str] = {}
        events = self._events(frame)
        passed = 0
        storages = frame.tensor_storage[frame.tensor_slots[places]]
        for place, row, storage in zip(places.tolist(), rows.tolist(), storages.tolist(), strict=True):
            while passed < len(events) and events[passed][0] < row:
                self._change(*events[passed][1:])
                passed += 1
            held = self._payload.get(storage)
            text = "" if held is None else self._text(held, frame, int(frame.tensor_slots[place]))
            if text:
                found[place] = text
        for _row, storage, payload in events[passed:]:
            self._change(storage, payload)
        self._next += 1
        return found

    def _change(self, storage: int, payload: int) -> None:
        if payload:
            self._payload[storage] = payload
        else:
            self._payload.pop(storage, None)

    def _events(self, frame: RecordFrame) -> list[tuple[int, int, int]]:
        """(row, storage, the payload that it holds from then on, 0 for none), by row."""
        kinds = self._kinds[frame.signature]
        found = []
        for row in np.flatnonzero(kinds == RecordKind.storage_import).tolist():
            record = decode_record(frame, row, self._reader.definitions)
            storage, source = record.argument("storage"), record.argument("payload")
            assert isinstance(storage, StorageValue)
            payload = 0
            if isinstance(source, PayloadValue) and (
                self._reader.payload_info(source.id).raw_bytes <= _LARGEST_PAYLOAD
            ):
                payload = source.id
                self._ever[storage.id] = self._any = True
            found.append((row, storage.id, payload))
        if self._any:
            rows = np.flatnonzero((kinds == RecordKind.storage_resize) | (kinds == RecordKind.storage_release))
            ended = frame.ints[frame.int_first[rows]]  # the storage is their first argument
            at = np.flatnonzero(self._ever[ended])
            found += zip(rows[at].tolist(), ended[at].tolist(), [0] * len(at), strict=True)
            for number in distinct(frame.signature).tolist():
                tensors, storages = self._writes(number)
                if not tensors and not storages:
                    continue
                rows = np.flatnonzero(frame.signature == number)
                for slot in tensors:
                    written = frame.tensor_storage[frame.tensor_slots[frame.tensor_first[rows] + slot]]
                    at = np.flatnonzero(self._ever[written])
                    found += zip(rows[at].tolist(), written[at].tolist(), [0] * len(at), strict=True)
                for slot in storages:
                    found += [(int(row), int(frame.ints[frame.int_first[row] + slot]), 0) for row in rows]
        # An op's own writes come after its arguments were shown: an import at its row would be a separate record.
        return sorted(found)

    def _writes(self, number: int) -> tuple[list[int], list[int]]:
        """The tensor slots and the integer slots of storages that records of a signature may write."""
        if number not in self._written:
            self._written[number] = _written_slots(self._reader, self._reader.layouts[number])
        return self._written[number]

    # ----------------------------------------------------------------------------------------------------------- values

    def _text(self, payload: int, frame: RecordFrame, tensor: int) -> str:
        """The values of a tensor on a payload; "" where it does not lie in it."""
        key = (payload, int(frame.tensor_offset[tensor]), int(frame.tensor_meta[tensor]))
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= _KEPT_TEXTS:
                self._texts.clear()
            values = self._values(*key)
            text = self._texts[key] = "" if values is None else self._write(values)
        return text

    def _values(self, payload: int, offset: int, number: int) -> np.ndarray | None:
        meta, content = self._reader.metas[number], self._bytes(payload)
        dtype = np.dtype(_NUMPY[meta.dtype])
        span = sum((size - 1) * stride for size, stride in zip(meta.sizes, meta.strides, strict=True)) + 1
        if min(meta.strides, default=0) < 0 or (offset + span) * dtype.itemsize > len(content):
            return None
        strides = tuple(stride * dtype.itemsize for stride in meta.strides)
        return np.ndarray(meta.sizes, dtype, content, offset * dtype.itemsize, strides)

    def _bytes(self, payload: int) -> np.ndarray:
        content = self._content.get(payload)
        if content is None:
            if sum(map(len, self._content.values())) > _KEPT_BYTES:
                self._content.clear()
            content = self._content[payload] = np.frombuffer(self._reader.payload(payload), np.uint8)
        return content


def _is_small(meta: TensorMeta, most: int) -> bool:
    elements = 1
    for size in meta.sizes:
        elements *= size
    return meta.dtype in _NUMPY and meta.layout == Layout.strided and 0 < elements <= most and not meta.flags & _FLAGS


def _written_slots(reader: CaptureReader, layout: SlotLayout) -> tuple[list[int], list[int]]:
    signature = layout.signature
    if signature.kind is not RecordKind.op:
        return [], []
    kernel = reader.kernels[signature.kernel]
    try:
        arguments = parse_operator_schema(kernel.schema).arguments
        written = {argument.name for argument in arguments if argument.type.written}
    except ValueError:
        written = {node.name for node in signature.args}  # unknown
    places = [top for top in layout.args if top.node.name in written]
    storages = [place.int_slot for top in places for place in top.of_kind(ValueKind.storage)]
    return [slot for top in places for slot in top.tensors], storages
