"""Copies definitions and records of one capture into another, where they get new ids.

New ids are assigned in order of first use, so data that the result does not need leaves no trace in it. Storages are
defined at their first use. Needs no torch; the caller decides on the content of storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from replayfmt.errors import InvalidCapture
from replayfmt.format.attachments import CONFIGURATIONS, METADATA, attachments_of
from replayfmt.format.codes import KernelKind, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import (
    Attachment,
    CompositeValue,
    ExternalFile,
    GeneratorValue,
    Node,
    PayloadValue,
    RangeValue,
    RecipeValue,
    Record,
    Signature,
    StorageValue,
    StreamPlacement,
    TensorValue,
    Value,
)
from replayfmt.format.reader import CaptureReader
from replayfmt.format.redaction import KeptAttachments, Redaction
from replayfmt.format.validation import counted
from replayfmt.format.writer import CaptureWriter, Moment, RecordBuilder, RecordSlots

Values = tuple[Value, ...]

_CONTENT = frozenset({ValueKind.payload, ValueKind.range, ValueKind.recipe})


class Copier:
    """Writes records of `reader` to `writer`. With `redaction`, texts are rewritten on the way.

    `rewrite` may change the form of a record's signature, arguments and results; it depends on the signature alone.
    """

    def __init__(
        self, reader: CaptureReader, writer: CaptureWriter, redaction: Redaction | None = None, *, sources: bool = True
    ) -> None:
        """`sources`: whether sources of kernels are kept."""
        self.reader = reader
        self.writer = writer
        self.writer.keeps = KeptAttachments(redaction if sources else redaction or Redaction(reader.session), sources)
        self.code_kept = self.attachments_left_out = 0  # of all kernels together
        self._redaction = redaction
        self.rewrite: Callable[[Signature, Values, Values], tuple[Signature, Values, Values]] | None = None
        self._builder = RecordBuilder(writer)
        self.storages: dict[int, int] = {}  # storage of the reader → storage of the writer
        self._devices: dict[int, int] = {}
        self._kernels: dict[int, int] = {}
        self._configurations: tuple[int, ...] | None = None  # of autotuners, kept with the first Triton kernel
        self._scopes: dict[int, int] = {0: 0}
        self._placements: dict[int, int] = {0: 0}
        self._metas: dict[int, int] = {}
        self._meta_ids: dict[int, int] = {}  # id() of a TensorMeta of the reader → meta of the writer
        self._signatures: dict[int, int] = {}
        self._generators: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._names: Counter[str] = Counter()  # of files, redacted
        self._ranges: dict[int, int] = {}
        self._embedded: dict[int, int] = {}  # payload of the writer → its length
        self._views: dict[int, dict[tuple[int, int], int]] = {}  # by storage of the writer (RecordBuilder.tensor)
        for number in range(1, len(reader.devices)):
            self.device(number)  # all of them: --device refers to them by number

    def _text(self, text: str) -> str:
        return text if self._redaction is None else self._redaction.text(text)

    def device(self, number: int) -> int:
        if number not in self._devices:
            self._devices[number] = self.writer.device(self.reader.devices[number])
        return self._devices[number]

    def kernel(self, number: int) -> int:
        if number not in self._kernels:
            kernel = self.reader.kernels[number]
            if kernel.kind is KernelKind.triton and self._configurations is None:
                tables = (each for each in self.reader.attachments if each and each.role == CONFIGURATIONS)
                self._configurations = self._attach(tables)
            attachments = self._attach(attachments_of(self.reader, kernel))
            roles = [each.role for each in attachments_of(self.reader, kernel)]
            self.code_kept += max(len(attachments) - roles.count(METADATA), 0)
            self.attachments_left_out += len(kernel.attachments) - len(attachments)
            self._kernels[number] = self.writer.kernel(replace(kernel, attachments=attachments))
        return self._kernels[number]

    def _attach(self, attachments: Iterable[Attachment]) -> tuple[int, ...]:
        return self.writer.attach((each.role, each.name, self.reader.payload(each.payload)) for each in attachments)

    def scope(self, number: int) -> int:
        if number not in self._scopes:
            scope = self.reader.scopes[number]
            self._scopes[number] = self.writer.scope(self.scope(scope.parent), self._text(scope.name))
        return self._scopes[number]

    def placement(self, number: int) -> int:
        if number not in self._placements:
            placement = self.reader.placements[number]
            streams = tuple(sorted((self.device(device), stream) for device, stream in placement.streams))
            self._placements[number] = self.writer.placement(StreamPlacement(streams))
        return self._placements[number]

    def generator(self, number: int) -> int:
        if number not in self._generators:
            generator = self.reader.generators[number]
            self._generators[number] = self.writer.generator(replace(generator, device=self.device(generator.device)))
        return self._generators[number]

    def range(self, number: int) -> int:
        """Copy a range of an external file. Of embedded content, only the bytes of the range are copied."""
        if number not in self._ranges:
            given = self.reader.file_ranges[number]
            payload, embedded = 0, self.reader.embedded_range(number)
            if embedded is not None:
                whole = memoryview(self.reader.payload(embedded[0]))
                payload = self.content(whole[embedded[1] : embedded[1] + given.bytes])
            self._ranges[number] = self.writer.range(replace(given, file=self._file(given.file), payload=payload))
        return self._ranges[number]

    def _file(self, number: int) -> int:
        if number not in self._files:
            file = self.reader.files[number]
            file = replace(file, payload=0)
            self._files[number] = self.writer.file(file if self._redaction is None else self._redacted(file))
        return self._files[number]

    def _redacted(self, file: ExternalFile) -> ExternalFile:
        """A file without its directory. A second file of that name becomes `2/NAME`, so that a remap can distinguish
        them."""
        assert self._redaction is not None
        redacted = self._redaction.file(file)
        self._names[redacted.path] += 1
        count = self._names[redacted.path]
        return redacted if count == 1 else replace(redacted, path=f"{count}/{redacted.path}")

    def payload(self, number: int) -> int:
        return self.content(self.reader.payload(number))

    def content(self, data: bytes | memoryview) -> int:
        """Embed bytes of a storage. Equal content is embedded once."""
        number = self.writer.payload(data)
        self._embedded[number] = memoryview(data).nbytes
        return number

    @property
    def count(self) -> int:
        """How many records have been written: the next one's ordinal."""
        return self._builder.count

    @property
    def embedded_bytes(self) -> int:
        return sum(self._embedded.values())

    def recipe(self, number: int) -> int:
        return self.writer.recipe(self.reader.recipes[number])

    def signature(self, signature: Signature) -> int:
        """The id of one of the reader's signatures, or of one made from its nodes."""
        if signature.kernel:
            signature = replace(signature, kernel=self.kernel(signature.kernel))
        signature = replace(signature, args=self._nodes(signature.args), results=self._nodes(signature.results))
        return self.writer.signature(signature if self._redaction is None else self._redaction.signature(signature))

    def _nodes(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(self._node(node) for node in nodes)

    def _node(self, node: Node) -> Node:
        if node.kind is ValueKind.device:
            assert isinstance(node.constant, int)
            return replace(node, constant=self.device(node.constant))
        return replace(node, children=self._nodes(node.children)) if node.children else node

    def _meta(self, value: TensorValue) -> int:
        known = self._meta_ids.get(id(value.meta))  # the reader keeps its metas, so an id() stays valid
        if known is None:
            meta = replace(value.meta, device=self.device(value.meta.device))
            known = self._meta_ids[id(value.meta)] = self.writer.meta(meta)
        return known

    def _tensor(self, value: TensorValue) -> int:
        storage = self.storages.get(value.storage, 0) if value.storage else 0
        if value.storage and not storage:
            raise InvalidCapture(
                f"{self.reader.path}: storage {value.storage} is used by a record that cannot be the first to use it"
            )
        return self._builder.tensor(self._views.setdefault(storage, {}), storage, value.offset, self._meta(value))

    def bear(self, storage: int, length: int, origin: StorageOrigin, content: int = 0) -> int:
        """Add a storage of the reader to the result; returns its id there. `length` is in bytes; `content` is the
        writer's id of its first content, of the kind given by `origin`."""
        device = self.device(self.reader.storage(storage).device)
        number = self.storages[storage] = self._builder.bear(length, device, origin, content)
        return number

    def copy(self, record: Record, annotation: Mapping[str, Any] | None = None) -> int:
        """Write a record of the reader whose storages have all been added. Returns its ordinal."""
        signature, args, results = record.signature, record.args, record.results
        if self.rewrite is not None:
            signature, args, results = self.rewrite(signature, args, results)
        if any(node.kind in _CONTENT for node in signature.nodes):
            args, results = self._with_content(args), self._with_content(results)
        number = self._signatures.get(record.signature_id)
        if number is None:
            number = self.signature(signature)
            if record.signature_id:  # else the record was changed, and its signature with it
                self._signatures[record.signature_id] = number
        note = {**(record.annotation or {}), **(annotation or {})}
        if note and self._redaction is not None:
            note = self._redaction.values(note)
        return self._add(number, record.kind, record, (*args, *results), self.writer.annotation(note) if note else 0)

    def _with_content(self, values: Values) -> Values:
        """The values with the writer's ids of content."""
        return tuple(self._own(value) for value in values)

    def _own(self, value: Value) -> Value:
        if isinstance(value, PayloadValue):
            return PayloadValue(self.payload(value.id))
        if isinstance(value, RangeValue):
            return RangeValue(self.range(value.id))
        if isinstance(value, RecipeValue):
            return RecipeValue(self.recipe(value.id))
        if isinstance(value, list):
            return [self._own(each) for each in value]
        if isinstance(value, tuple):
            return tuple(self._own(each) for each in value)
        if isinstance(value, CompositeValue):
            return CompositeValue(value.form, self._with_content(value.parts))
        return value

    def add(
        self,
        near: Record,
        kind: RecordKind,
        nodes: Sequence[Node],
        values: Sequence[Value] = (),
        scope: int | None = None,
    ) -> int:
        """Write a new record with the time, thread and scope of one of the reader's."""
        placed = near if scope is None else replace(near, scope=scope)
        placed = replace(placed, duration_ns=None, device_duration_ns=None)
        return self._add(self.signature(Signature(kind, tuple(nodes))), kind, placed, values, 0)

    def _add(self, signature: int, kind: RecordKind, record: Record, values: Sequence[Value], annotation: int) -> int:
        slots = RecordSlots()
        for value in values:
            self._take(value, slots)
        moment = Moment(
            record.start_ns,
            record.duration_ns,
            record.thread,
            self.scope(record.scope),
            record.device_duration_ns,
            self.placement(record.placement),
        )
        return self._builder.add(signature, kind, moment, slots, annotation)

    def _take(self, value: Value, slots: RecordSlots) -> None:
        """Collect the slots of one value. Enumerations are ints too, but constants: hence the exact types."""
        ints, floats = slots.ints, slots.floats
        kind = type(value)
        if kind is TensorValue:
            slots.tensors.append(self._tensor(value))  # type: ignore[arg-type]
        elif kind is int:
            ints.append(value)  # type: ignore[arg-type]
        elif kind is float:
            floats.append(value)  # type: ignore[arg-type]
        elif kind is complex:
            floats += (value.real, value.imag)  # type: ignore[union-attr]
        elif isinstance(value, list | tuple):
            for each in value:
                self._take(each, slots)
        elif isinstance(value, CompositeValue):
            for each in value.parts:
                self._take(each, slots)
        elif isinstance(value, StorageValue):
            if value.id not in self.storages:
                raise InvalidCapture(f"{self.reader.path}: storage {value.id} is named before anything uses it")
            ints.append(self.storages[value.id])
        elif isinstance(value, GeneratorValue):
            ints.append(self.generator(value.id))
        elif isinstance(value, PayloadValue | RangeValue | RecipeValue):
            ints.append(value.id)  # already the writer's

    def flush(self) -> None:
        """Write the buffered records as a frame."""
        if self._builder.bears_nothing_but_storages:
            raise InvalidCapture(f"{self.reader.path}: storages without a record that uses them")
        self._builder.flush()


def notes_on_code(copier: Copier, *, redacted: bool) -> list[str]:
    """What a user has to know about the code that a copy holds, or does not."""
    kept, left_out = copier.code_kept, copier.attachments_left_out
    notes = []
    if left_out:
        notes.append(
            f"{counted(left_out, 'attachment')} of kernels left out (source, and what names files): a replay takes a "
            "binary that fits its machine, and refuses a kernel without one"
        )
    if redacted and kept:
        notes.append(
            f"{counted(kept, 'attachment')} of kernels kept: code is as it was written, with the names and paths in it"
            + ("" if left_out else "; --no-sources leaves source out")
        )
    return notes
