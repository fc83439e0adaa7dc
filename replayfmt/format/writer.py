"""Writing a capture: frames in order while the program runs, index and trailer at the end.

`CaptureWriter` takes whole frames of records. `RecordBuilder` takes records one by one and gathers them into frames:
importers write captures with it, and so does what copies them.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from replayfmt.errors import CaptureFailed, OutputExists

from .codes import UNKNOWN_DEVICE_NS, UNKNOWN_NS, FrameKind, RecordKind, StorageOrigin
from .contents import Tally, encode_session
from .definition_families import (
    ATTACHMENTS,
    DEVICES,
    FILE_RANGES,
    FILES,
    GENERATORS,
    KERNELS,
    METAS,
    PLACEMENTS,
    RECIPES,
    SCOPES,
    Family,
)
from .definition_tables import InternedDefinitions
from .frame_output import Buffer, FrameOutput, PayloadOutput
from .frames import MAX_BODY_BYTES, MAX_NESTING, pack_preamble
from .model import (
    Attachment,
    CaptureInfo,
    Device,
    ExternalFile,
    FileRange,
    Generator,
    Kernel,
    Recipe,
    Scope,
    Signature,
    StreamPlacement,
    Summary,
    TensorMeta,
)
from .output import Output, Uninterrupted
from .record_columns import OF_STORAGES, Bounds, RecordColumns, ReferenceBounds, encode_records, pieces
from .redaction import KeptAttachments
from .signature_layout import SIGNATURES
from .validation import nested_deeper

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode
_TEXT_FLUSH_BYTES = 32 << 20  # that many bytes of new strings are written before more come


class CaptureWriter:
    """One capture being written, to `path` plus `.partial` until `close` completes it.

    Every method raises CaptureFailed once a write has failed, always with the first failure's message; definitions and
    records raise ValueError, and change nothing, where they break a rule of the format.
    """

    def __init__(
        self, path: str | os.PathLike[str], session: CaptureInfo, *, force: bool = False, doing: str = ""
    ) -> None:
        """Create the file and write its head. Raises OutputExists, or CaptureFailed if it cannot be written.

        `doing` says what makes a capture from another file (`trimming`): of such a one nothing is left where it cannot
        be completed, whereas what a program did stays in the `.partial`.
        """
        head = encode_session(session)
        preamble = pack_preamble(session.session_id)
        self._output = Output(path, force, doing=doing)
        self._frames = FrameOutput(self._output)
        self._payloads = PayloadOutput(self._frames)
        self._definitions = InternedDefinitions(self._whole, self._payloads.length)
        self._tally = Tally()
        self.keeps = KeptAttachments()  # what `attach` writes
        self.summary: Summary | None = None  # of all that the capture holds, once it is closed
        self._closed = False
        with self._whole():
            self._output.write([preamble])
            self._frames.write(FrameKind.head, head)

    @property
    def path(self) -> str:
        return self._output.path

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Everything inside happens, or the capture ends there: nothing that comes later builds on half a step.

        Costs some 10 us, so what only looks something up stays outside.
        """
        self._output.check()
        with Uninterrupted():
            try:
                yield
            except (ValueError, CaptureFailed, OutputExists):
                raise
            except BaseException as error:
                raise self._output.fail(f"{type(error).__name__} while it was being written: {error}") from error

    def string(self, text: str) -> int:
        """The id of a string. Characters that UTF-8 does not have (lone surrogates) are escaped."""
        self._output.check()
        return self._spilled(self._definitions.string(text))

    def _define(self, family: Family[T], definition: T) -> int:
        self._output.check()
        return self._spilled(self._definitions.define(family, definition))

    def device(self, device: Device) -> int:
        return self._define(DEVICES, device)

    def attachment(self, attachment: Attachment) -> int:
        """The id of an attachment, for Kernel.attachments. Raises ValueError for a role that is no identifier, or if
        there is no such payload."""
        return self._define(ATTACHMENTS, attachment)

    def attach(self, attachments: Iterable[tuple[str, str, bytes | memoryview]]) -> tuple[int, ...]:
        """The ids of attachments, each given by role, name and content, for Kernel.attachments: of those that this
        capture keeps, in the form in which it keeps them."""
        forms = ((role, self.keeps.form(role, name, content)) for role, name, content in attachments)
        kept = (
            self.attachment(Attachment(role, form[0], self.payload(form[1])))
            for role, form in forms
            if form is not None
        )
        return tuple(dict.fromkeys(kept))

    def kernel(self, kernel: Kernel) -> int:
        """The id of a kernel. Raises ValueError for a name that no operator can have, or an attachment that is not
        defined."""
        return self._define(KERNELS, kernel)

    def scope(self, parent: int, name: str) -> int:
        """The id of the scope `name` inside scope `parent` (0: top level)."""
        return self._define(SCOPES, Scope(parent, name))

    def meta(self, meta: TensorMeta) -> int:
        """The id of tensor metadata. Raises ValueError if the format cannot hold it."""
        return self._define(METAS, meta)

    def new_metas(self, **columns: np.ndarray) -> None:
        """Give tensor metadata the next ids: the columns of the schema, with rows that are all different and new.
        Raises ValueError if the format cannot hold one."""
        with self._whole():
            self._definitions.extend(METAS, columns)

    def signature(self, signature: Signature) -> int:
        """The id of a signature. Raises ValueError if it breaks a rule of the format."""
        return self._define(SIGNATURES, signature)

    def generator(self, generator: Generator) -> int:
        """A new generator id; generators have no content that could be the same."""
        return self._define(GENERATORS, generator)

    def file(self, file: ExternalFile) -> int:
        """The id of an external file. Raises ValueError if the format cannot hold it: for a path that is not UTF-8,
        or a payload of another length."""
        return self._define(FILES, file)

    def range(self, given: FileRange) -> int:
        """The id of a range of a file. Raises ValueError if it does not lie in the file, or its payload is not as
        long."""
        return self._define(FILE_RANGES, given)

    def embed_range(self, number: int, payload: int) -> bool:
        """Give a range that is in use already the bytes that it refers to. False if there are too many definitions for
        that: the last frame of definitions, which holds all of them, says so."""
        if self._definitions.encoded_bytes > MAX_BODY_BYTES:
            return False
        self._definitions.give_payload(number, payload)
        return True

    def recipe(self, recipe: Recipe) -> int:
        """The id of a recipe. Raises ValueError if its statistics count more elements than it has."""
        return self._define(RECIPES, recipe)

    def placement(self, placement: StreamPlacement) -> int:
        """The id of a placement. Raises ValueError for none, or one that names a device twice or its default stream."""
        return self._define(PLACEMENTS, placement)

    def annotation(self, content: Mapping[str, Any]) -> int:
        """The id of what is said about one record, for RecordColumns.annotation. Raises ValueError if it is not
        JSON, or empty: a record without annotation has id 0."""
        try:
            text = _encode(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"an annotation that is not JSON: {error}") from None
        if not content or (text.count("[") + text.count("{") > MAX_NESTING and nested_deeper(content, MAX_NESTING)):
            raise ValueError(f"an annotation that is empty, or nested deeper than {MAX_NESTING}")
        return self.string(text)

    def _spilled(self, number: int) -> int:
        """`number`, after new strings were written if many wait: one Tables frame must hold them."""
        if self._definitions.new_text_bytes > _TEXT_FLUSH_BYTES:
            self.flush()
        return number

    def payload(self, data: Buffer) -> int:
        """The id of this content. Written at once, a small one with the next ones, at the latest before the next
        records. The buffer is not kept; if it changes during the call, some mixture is stored."""
        self._output.check()
        return self._payloads.add(data, self._whole)

    def records(self, columns: RecordColumns) -> None:
        """Write one frame of records (several, where the format's limits ask for it), and before it the definitions and
        payloads it may use. No records: no frame.

        Raises ValueError if the columns contradict each other, CaptureFailed if the file cannot be written.
        """
        deque(self.records_in_parts(columns), maxlen=0)

    def records_in_parts(self, columns: RecordColumns) -> Iterator[None]:
        """Likewise, and yields between parts of the work: then all but records may be written."""
        self._output.check()
        for piece in pieces(columns, self._definitions.slots):
            yield from self._write_records(piece)

    def _write_records(self, columns: RecordColumns) -> Iterator[None]:
        definitions = self._definitions
        # Copies, because an array cannot grow while someone still looks at it.
        contents = ReferenceBounds(
            self._payloads.count,
            *(definitions.column(name).copy() for name in ("range_bytes", "recipe_dtype", "recipe_elements")),
        )
        bounds = Bounds(
            definitions.count("signature"),
            definitions.count("scope"),
            definitions.count("meta"),
            definitions.count("device"),
            definitions.count("string"),
            definitions.count("placement"),
            self._frames.next_storage,
            contents,
        )
        encoded = yield from encode_records(columns, bounds, definitions.slots)
        if not encoded.count:
            if encoded.storages:
                raise ValueError("storages without a record that bears them")
            return
        if len(encoded.body) > MAX_BODY_BYTES:
            raise ValueError(
                f"{encoded.count} records take {len(encoded.body)} bytes in one frame; the limit is {MAX_BODY_BYTES}"
            )
        compressed = yield from self._frames.compress(encoded.body)
        with self._whole():
            self._payloads.flush()
            self._write_definitions()
            self._frames.write(
                FrameKind.records, encoded.body, compressed, count=encoded.count, storages=encoded.storages
            )
            self._output.begun()
            self._tally.add(encoded.signature, encoded.storage_origin, encoded.storage_bytes, encoded.annotation)

    def flush(self) -> None:
        """Write payloads and definitions that wait."""
        with self._whole():
            self._payloads.flush()
            self._write_definitions()

    def _write_definitions(self) -> None:
        if self._definitions.pending():
            self._frames.write(FrameKind.tables, self._definitions.encode())

    def close(self, ended_ns: int) -> None:
        """Complete the capture and give it its final name. `ended_ns` counts from the session's start, 0 means not
        known. Closing twice does nothing. Raises CaptureFailed if the file could not be completed."""
        if self._closed:
            return
        with self._whole():
            self._payloads.flush()
            self._write_definitions()
            self.summary = self._tally.summary(self._definitions, self._payloads.raw_bytes, ended_ns)
            self._frames.finish(self._definitions.encode_all(), self.summary, self._payloads.rows())
            self._output.finish()
            self._closed = True

    def withdraw(self) -> None:
        """Remove the capture again after `close`, where no other has taken its name."""
        self._output.withdraw()

    def discard(self) -> None:
        """Close the descriptor and remove what was not completed."""
        self._output.discard()

    def abandon(self) -> None:
        """Close the descriptor and leave the `.partial` as it is."""
        self._output.release()


_FRAME_RECORDS = 16_384


class Moment(NamedTuple):
    """Where and when a record belongs. Times are in nanoseconds; `start_ns` counts from the session's start."""

    start_ns: int = 0
    duration_ns: int | None = None
    thread: int = 0
    scope: int = 0
    device_duration_ns: int | None = None
    placement: int = 0


@dataclass
class RecordSlots:
    """The slots of one record, in order; `tensors` are ids."""

    tensors: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


# The columns of the frame that is being filled, as array.array keeps them.
_TYPE_CODES = {
    **dict.fromkeys(("signature", "scope", "thread", "annotation", "placement"), "I"),
    **dict.fromkeys(("storage_device", "storage_payload"), "I"),
    **dict.fromkeys(("start_ns", "duration_ns", "ints"), "q"),
    **dict.fromkeys(("device_duration_ns", "tensors", "storage_bytes"), "Q"),
    "floats": "d",
    "storage_origin": "B",
}


class RecordBuilder:
    """Gathers records for `writer`, and writes a frame of them as soon as it is full. Raises what the writer raises."""

    def __init__(self, writer: CaptureWriter) -> None:
        self._writer = writer
        self._next_storage = self._next_tensor = 1
        self._begin()
        self.count = 0  # records so far: the next one's ordinal

    def _begin(self) -> None:
        self._first_storage = self._next_storage
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _TYPE_CODES.items()}
        self._tensors: dict[int, tuple[int, int, int]] = {}  # by id: storage, offset, meta
        self._timed = False

    def bear(self, length: int, device: int, origin: StorageOrigin, content: int = 0) -> int:
        """The id of a new storage of `length` bytes. `content` is the id of its first content, of the family that
        `origin` says."""
        for name, value in zip(OF_STORAGES, (length, device, origin, content), strict=True):
            self._columns[name].append(value)
        self._next_storage += 1
        return self._next_storage - 1

    def tensor(self, views: dict[tuple[int, int], int], storage: int, offset: int, meta: int) -> int:
        """The id of a tensor that the next record uses. What lies alike on the same memory is one tensor, however often
        it is taken: `views` keeps the ids of those on this storage (0: without memory), by offset and meta."""
        number = views.setdefault((offset, meta), self._next_tensor)
        self._next_tensor += number == self._next_tensor
        self._tensors[number] = (storage, offset, meta)
        return number

    def add(self, signature: int, kind: RecordKind, moment: Moment, slots: RecordSlots, annotation: int = 0) -> int:
        """Add a record; returns its ordinal."""
        columns, duration, device = self._columns, moment.duration_ns, moment.device_duration_ns
        columns["signature"].append(signature)
        columns["scope"].append(moment.scope)
        columns["thread"].append(moment.thread)
        columns["start_ns"].append(moment.start_ns)
        if duration is None:
            columns["duration_ns"].append(UNKNOWN_NS if kind is RecordKind.op else 0)
        else:
            columns["duration_ns"].append(duration)
            self._timed = True
        columns["device_duration_ns"].append(UNKNOWN_DEVICE_NS if device is None else device)
        columns["annotation"].append(annotation)
        columns["placement"].append(moment.placement)
        columns["tensors"].extend(slots.tensors)
        columns["ints"].extend(slots.ints)
        columns["floats"].extend(slots.floats)
        self.count += 1
        if len(columns["signature"]) >= _FRAME_RECORDS:
            self.flush()
        return self.count - 1

    @property
    def bears_nothing_but_storages(self) -> bool:
        """Whether storages wait without a record that bears them, which no frame can hold."""
        return bool(self._columns["storage_bytes"]) and not self._columns["signature"]

    def flush(self) -> None:
        """Write what waits as a frame."""
        columns: dict[str, Any] = {**self._columns}
        if not self._timed:
            columns["duration_ns"] = None
        for name, unset in (("device_duration_ns", UNKNOWN_DEVICE_NS), ("annotation", 0), ("placement", 0)):
            if (np.asarray(columns[name]) == unset).all():
                columns[name] = None
        given = RecordColumns(**columns, tensor_definitions=self._tensors, first_storage=self._first_storage)
        self._begin()
        self._writer.records(given)
