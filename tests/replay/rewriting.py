"""Captures with something changed on purpose: what a replay has to notice. Everything else keeps its ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import CaptureInfo, Device, Kernel, Recipe, Record, Signature, TensorMeta
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter

# Changes a record's int and float slots in place; returns False to leave the record out.
Change = Callable[[Record, list[int], list[float]], bool | None]
# From a frame's columns of storage origins and first contents to others.
Births = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def rewrite(
    source: Path,
    target: Path,
    *,
    change: Change | None = None,
    payload: Callable[[int, bytes], bytes] | None = None,
    kernel: Callable[[Kernel], Kernel] | None = None,
    device: Callable[[Device], Device] | None = None,
    signature: Callable[[Signature], Signature] | None = None,
    scope: Callable[[str], str] | None = None,
    meta: Callable[[TensorMeta], TensorMeta] | None = None,
    session: dict[str, Any] | None = None,
    records: int | None = None,
    drop_results_of: int | None = None,
    storage_bytes: int | None = None,
    tensor_offset: int | None = None,
    close: bool = True,
    prepare: Callable[[CaptureReader, CaptureWriter], None] | None = None,
    births: Births | None = None,
    recipe: Callable[[Recipe], Recipe] | None = None,
) -> Path:
    """Copy a capture, changed. `records` stops after that many; without `close` it is left as a killed recorder would.

    The op at `drop_results_of` loses its result tensors, for a `signature` that takes them away. `storage_bytes` and
    `tensor_offset` replace every storage's length and every tensor's offset. `prepare` may write more definitions,
    `births` gives other origins and payload columns.

    Returns where the result is: `target`, or its `.partial` where it was not closed.
    """
    with open_capture(source) as reader:
        changed: CaptureInfo = replace(reader.session, **(session or {}))
        writer = CaptureWriter(target, changed)
        for text in reader.strings[1:]:
            writer.string(text)
        for each in reader.devices[1:]:
            assert each is not None
            writer.device(device(each) if device else each)
        for info in reader.payloads:
            content = bytes(reader.payload(info.id))
            writer.payload(payload(info.id, content) if payload else content)
        for attachment in reader.attachments[1:]:
            assert attachment is not None
            writer.attachment(attachment)
        for kind in reader.kernels[1:]:
            assert kind is not None
            writer.kernel(kernel(kind) if kernel else kind)
        for each_scope in reader.scopes[1:]:
            writer.scope(each_scope.parent, scope(each_scope.name) if scope else each_scope.name)
        for each_meta in reader.metas[1:]:
            assert each_meta is not None
            writer.meta(meta(each_meta) if meta else each_meta)
        for one in reader.signatures[1:]:
            assert one is not None
            writer.signature(signature(one) if signature else one)
        for generator in reader.generators[1:]:
            writer.generator(generator)
        for placement in reader.placements[1:]:
            assert placement is not None
            writer.placement(placement)
        for known in reader.recipes[1:]:
            assert known is not None
            writer.recipe(recipe(known) if recipe else known)
        if prepare is not None:
            prepare(reader, writer)
        stop = reader.record_count if records is None else records
        _copy_records(reader, writer, change, stop, drop_results_of, storage_bytes, tensor_offset, births)
        if close:
            writer.close(0)
            return target
        writer.flush()
        writer.abandon()
        return target.with_name(target.name + ".partial")


def _copy_records(
    reader: CaptureReader,
    writer: CaptureWriter,
    change: Change | None,
    stop: int,
    drop_results_of: int | None,
    storage_bytes: int | None,
    tensor_offset: int | None,
    births: Births | None,
) -> None:
    def length(captured: np.ndarray) -> np.ndarray:
        return captured if storage_bytes is None else np.full_like(captured, storage_bytes)

    moved: dict[int, int] = {}  # where records are now: digests name the op they belong to by its ordinal
    for index, frame_info in enumerate(reader.record_frames):
        frame = reader.frame(index)
        columns: dict[str, list[Any]] = {name: [] for name in ("signature", "scope", "thread", "start", "placement")}
        tensors, ints, floats = array("Q"), array("q"), array("d")
        for row in range(frame.count):
            if frame.first_ordinal + row >= stop:
                break
            record = reader.record(frame_info.first_ordinal + row)
            own_ints = frame.ints[frame.int_first[row] : frame.int_first[row + 1]].tolist()
            own_floats = frame.floats[frame.float_first[row] : frame.float_first[row + 1]].tolist()
            if change is not None and change(record, own_ints, own_floats) is False:
                continue
            moved[record.ordinal] = len(moved)
            if record.kind is RecordKind.digest:
                own_ints[0] = moved.get(own_ints[0], -1)
            columns["signature"].append(int(frame.signature[row]))
            columns["scope"].append(int(frame.scope[row]))
            columns["thread"].append(int(frame.thread[row]))
            columns["start"].append(int(frame.start_ns[row]))
            columns["placement"].append(record.placement)
            slots = frame.tensor_slots[frame.tensor_first[row] : frame.tensor_first[row + 1]]
            if record.ordinal == drop_results_of:
                slots = slots[: len(slots) - len(record.results)]
            tensors.extend(frame.tensor_id[slots].tolist())
            ints.extend(own_ints)
            floats.extend(own_floats)
        definitions = {
            int(tensor): (int(storage), int(offset) if tensor_offset is None else tensor_offset, int(meta))
            for tensor, storage, offset, meta in zip(
                frame.tensor_id, frame.tensor_storage, frame.tensor_offset, frame.tensor_meta, strict=True
            )
        }
        origins, first_contents = frame.storage_origin, frame.storage_payload
        if births is not None:
            origins, first_contents = births(origins, first_contents)
        writer.records(
            RecordColumns(
                signature=np.array(columns["signature"], np.uint32),
                scope=np.array(columns["scope"], np.uint32),
                thread=np.array(columns["thread"], np.uint16),
                start_ns=np.array(columns["start"], np.int64),
                duration_ns=None,
                tensors=tensors,
                ints=ints,
                floats=floats,
                tensor_definitions=definitions,
                first_storage=frame.first_storage,
                storage_bytes=length(frame.storage_bytes),
                storage_device=frame.storage_device,
                storage_origin=origins,
                storage_payload=first_contents,
                placement=np.array(columns["placement"], np.uint32),
            )
        )
