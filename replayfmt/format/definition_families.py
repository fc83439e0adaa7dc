"""The families of definitions, which records refer to by id: devices, kernels, scopes, tensor metadata, files and
others.

A family has its columns, stores a definition in them, reads it back, and checks them. `Family` is the protocol;
`TablesBody` is a body while it is checked. Signatures have a module of their own, signature_layout.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from . import flatbuffer_tables
from .codes import MAJOR_VERSION, MINOR_VERSION, DType, FileValidation, KernelKind, Layout, TensorFlag
from .flatbuffer_tables import TableLayout
from .frames import MAX_ATTACHMENTS, MAX_LENGTH
from .model import (
    Attachment,
    Device,
    ExternalFile,
    FileIdentity,
    FileRange,
    Generator,
    Kernel,
    Node,
    Recipe,
    Scope,
    Statistics,
    StreamPlacement,
    TensorMeta,
)
from .operator_schema import canonical_schema, name_problem


class TablesBody:
    """One Tables body. `strings` maps its strings to their ids, `columns` has its other columns, `counts` says how many
    ids each family has with it, `firsts` with which it begins."""

    def __init__(
        self,
        data: bytes,
        layout: TableLayout,
        minor: int,
        where: str,
        counts: Mapping[str, int],
        string_ids: Mapping[str, int],
        earlier: Callable[[str], np.ndarray],
        payload_bytes: np.ndarray,
    ) -> None:
        """`counts`, `string_ids` and `earlier` are what comes before: how many ids each family has, strings, columns.
        `payload_bytes` are the raw lengths of the payloads it may refer to, in order of their ids."""
        self._table = flatbuffer_tables.root(data, layout, where)
        self._layout = layout
        self._minor = minor
        self._where = where
        self._string_ids = string_ids
        self._earlier = earlier
        self._payload_bytes = payload_bytes
        self.firsts = {family: count + 1 for family, count in counts.items()}
        self.counts = dict(counts)
        self.columns: dict[str, np.ndarray] = {}
        self.strings: dict[str, int] = {}

    def take_strings(self) -> None:
        """Read the strings. Raises InvalidCapture for one that is defined twice."""
        strings = self._table.strings("strings")
        self._begin("string", len(strings))
        self.strings = dict(zip(strings, range(self.firsts["string"], self.counts["string"] + 1), strict=True))
        if len(self.strings) != len(strings) or not self._string_ids.keys().isdisjoint(strings):
            raise self.fail("defines a string twice")

    def take(self, family: str, names: tuple[str, ...], nested: tuple[str, ...], added: tuple[str, ...] = ()) -> None:
        """Read a family's columns; those of `added` are 0 in every row where they are absent. Raises InvalidCapture if
        they have different lengths."""
        lengths: list[int] = []
        for name in names:
            lengths.append(len(self._get(name, lengths[0] if name in added else 0)))
        if len(set(lengths)) != 1:
            raise self.fail(f"{family} columns have different lengths: {dict(zip(names, lengths, strict=True))}")
        self._begin(family, lengths[0])
        if nested:
            counted = int(self.columns[names[-1]].sum(dtype=np.int64))
            for name in nested:
                if len(self._get(name)) != counted:
                    raise self.fail(f"{name} has {len(self.columns[name])} elements, {names[-1]} adds up to {counted}")

    def _begin(self, family: str, rows: int) -> None:
        first = self._table.scalar(f"first_{family}")
        if rows and first != self.firsts[family]:
            raise self.fail(f"defines {family} {first} and on; expected {self.firsts[family]}")
        self.counts[family] += rows

    def _get(self, name: str, absent_rows: int = 0) -> np.ndarray:
        column = self._table.column(name)
        if column is None:
            column = np.zeros(absent_rows, self._layout.dtype(name))
        self.columns[name] = column
        return column

    def whole(self, name: str) -> np.ndarray:
        """All rows of a column, with those before this body."""
        return np.concatenate((self._earlier(name), self.columns[name]))

    def string_id(self, text: str) -> int:
        """The id of a string that is defined by now, 0 if it is not."""
        return self._string_ids.get(text) or self.strings.get(text, 0)

    def texts(self, numbers: set[int]) -> dict[int, str]:
        """The strings with these ids."""
        known = (self._string_ids, self.strings)
        return {number: text for ids in known if numbers for text, number in ids.items() if number in numbers}

    def fail(self, what: str) -> InvalidCapture:
        """The error that says what is wrong."""
        return InvalidCapture(f"{self._where}: {what}")

    @property
    def is_newer(self) -> bool:
        """Whether a newer minor version wrote it, which may have codes of its own."""
        return self._minor > MINOR_VERSION

    def too_new(self, what: str) -> UnsupportedVersion:
        """The error that says what this reader does not know."""
        return UnsupportedVersion(
            f"{self._where}: {what}, from format version {MAJOR_VERSION}.{self._minor}; "
            f"this reader knows {MAJOR_VERSION}.{MINOR_VERSION}"
        )

    def range(self, name: str, lowest: int, highest: int, owner: Callable[[int], str] = "row {}".format) -> None:
        """A column holds nothing beyond these bounds. `owner` says what a row of it belongs to."""
        column = self.columns[name]
        if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
            row = next(row for row, value in enumerate(column.tolist()) if not lowest <= value <= highest)
            raise self.fail(
                f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}; the first wrong "
                f"one is {int(column[row])}, of {owner(row)}"
            )

    def ids(self, name: str, family: str, lowest: int = 1) -> None:
        """A column holds ids of a family; `lowest` 0: or none."""
        self.range(name, lowest, self.counts[family])

    def code(self, name: str, highest: int, lowest: int = 1) -> None:
        """A column holds codes of an enumeration, which a newer minor version may have extended."""
        column = self.columns[name]
        if self.is_newer and len(column) and int(column.max()) > highest:
            raise self.too_new(f"{name} holds {int(column.max())}")
        self.range(name, lowest, highest)

    def zero_where(self, unset: np.ndarray, names: tuple[str, ...], what: str) -> None:
        """Columns are 0 in the rows of `unset`, which are `what`."""
        for name in names:
            if (self.columns[name][unset] != 0).any():
                raise self.fail(f"{name} of {what} is not 0")

    def payload_ids(self, name: str, lowest: int = 1) -> None:
        """A column holds payload ids; `lowest` 0: or none."""
        self.range(name, lowest, len(self._payload_bytes))

    def payloads(self, name: str, lengths: str, what: str) -> None:
        """A column holds payload ids or 0, and each payload is as long as another column says."""
        self.payload_ids(name, lowest=0)
        payloads, expected = self.columns[name], self.columns[lengths]
        rows = np.flatnonzero(payloads)
        wrong = self._payload_bytes[payloads[rows].astype(np.int64) - 1] != expected[rows]
        if wrong.any():
            row = int(rows[np.argmax(wrong)])
            found = int(self._payload_bytes[int(payloads[row]) - 1])
            raise self.fail(f"{what} of {int(expected[row])} bytes has payload {int(payloads[row])}, of {found}")


T = TypeVar("T")


class DefinitionRow(NamedTuple):
    """A definition as the columns hold it, texts not yet replaced by their ids. `nested` has the rows of the nested
    columns."""

    values: tuple[int | float | str, ...]
    nested: Sequence[tuple[int | str, ...]] = ()


class DefinedSoFar(Protocol):
    """What the writer has when a definition comes."""

    def require(self, family: str, number: int) -> None:
        """Raise ValueError where no definition of a family has this id."""

    def column(self, name: str) -> np.ndarray: ...

    def payload_bytes(self, number: int) -> int:
        """How long a payload's content is. Raises ValueError for an id that is none."""


class DefinitionColumns(Protocol):
    """What the reader makes definitions out of: columns that were checked, and strings by id."""

    strings: tuple[str | None, ...]
    leaves: dict[tuple[int, int, int], Node]  # of signatures, by their rows: lists repeat the same one many times

    def column(self, name: str) -> np.ndarray: ...

    def number(self, name: str, row: int) -> int: ...

    def text(self, name: str, row: int) -> str:
        """The string that a column refers to; "" for 0."""

    def nested(self, family: str, row: int) -> slice:
        """Where a definition's rows of nested columns are."""


class Family(ABC, Generic[T]):
    """One family. `fields` are its columns with a row for each id, in the schema's words and order; `nested_fields`
    those with any number of rows for each, of which the last of the former says how many. `added_fields` continue
    `fields`: columns of a later minor version, at the table's end with the nested ones. They are absent where all of
    them are 0."""

    name: ClassVar[str]
    fields: ClassVar[str]
    added_fields: ClassVar[str] = ""
    nested_fields: ClassVar[str] = ""
    shared: ClassVar[bool] = True  # the same content gets the same id
    frequent: ClassVar[bool] = False  # the same few come again and again, for single records

    def __init__(self) -> None:
        own, self.added_columns, self.nested_columns = (
            tuple(field.partition(":")[0] for field in fields.split())
            for fields in (self.fields, self.added_fields, self.nested_fields)
        )
        self.columns = (*own, *self.added_columns)

    @abstractmethod
    def row(self, definition: T) -> DefinitionRow:
        """How a definition is stored. Raises ValueError if the format cannot hold it."""

    def admit(self, definition: T, defined: DefinedSoFar) -> None:
        """Raise ValueError where a definition contradicts those that it refers to."""

    @abstractmethod
    def at(self, rows: DefinitionColumns, row: int) -> T:
        """The definition in a row."""

    @abstractmethod
    def check(self, body: TablesBody) -> None:
        """Raise what `body` makes of a fault where its columns, which are there and of equal length, break a rule."""


def whole(value: int, lowest: int, highest: int, what: str) -> int:
    """An integer within bounds. Raises ValueError for others."""
    if not lowest <= value <= highest:
        raise ValueError(f"{what} is {value}, allowed {lowest}..{highest}")
    return int(value)


_ROLE = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


class AttachmentFamily(Family[Attachment]):
    name = "attachment"
    fields = "attachment_role:[uint] attachment_name:[uint] attachment_payload:[uint]"

    def row(self, definition: Attachment) -> DefinitionRow:
        problem = _role_problem(definition.role)
        if problem:
            raise ValueError(problem)
        return DefinitionRow((definition.role, definition.name, definition.payload))

    def admit(self, definition: Attachment, defined: DefinedSoFar) -> None:
        defined.payload_bytes(definition.payload)

    def at(self, rows: DefinitionColumns, row: int) -> Attachment:
        return Attachment(
            rows.text("attachment_role", row), rows.text("attachment_name", row), rows.number("attachment_payload", row)
        )

    def check(self, body: TablesBody) -> None:
        body.ids("attachment_role", "string")
        body.ids("attachment_name", "string")
        body.payload_ids("attachment_payload")
        for role in body.texts(set(body.columns["attachment_role"].tolist())).values():
            problem = _role_problem(role)
            if problem:
                raise body.fail(problem)


def _role_problem(role: str) -> str:
    """Why `role` is not the role of an attachment; "" where it is."""
    if _ROLE.match(role):
        return ""
    return f"{role[:80]!a} is not an attachment's role, expected up to 64 lower-case letters, digits and underscores"


ATTACHMENTS = AttachmentFamily()


class DeviceFamily(Family[Device]):
    name = "device"
    fields = "device_kind:[uint] device_index:[int] device_name:[uint] device_fingerprint:[uint]"

    def row(self, definition: Device) -> DefinitionRow:
        return DefinitionRow((definition.kind, definition.index, definition.name, definition.fingerprint or 0))

    def at(self, rows: DefinitionColumns, row: int) -> Device:
        return Device(
            rows.text("device_kind", row),
            rows.number("device_index", row),
            rows.text("device_name", row),
            rows.text("device_fingerprint", row),
        )

    def check(self, body: TablesBody) -> None:
        body.ids("device_kind", "string")
        body.ids("device_name", "string")
        body.ids("device_fingerprint", "string", lowest=0)
        body.range("device_index", -1, 0x7FFFFFFF)


DEVICES = DeviceFamily()


class FileRangeFamily(Family[FileRange]):
    name = "range"
    fields = "range_file:[uint] range_offset:[ulong] range_bytes:[ulong] range_payload:[uint]"

    def row(self, definition: FileRange) -> DefinitionRow:
        return DefinitionRow((definition.file, definition.offset, definition.bytes, definition.payload))

    def admit(self, definition: FileRange, defined: DefinedSoFar) -> None:
        defined.require("file", definition.file)
        payload, length = definition.payload, definition.bytes
        if payload and defined.payload_bytes(payload) != length:
            raise ValueError(f"a range of {length} bytes with a payload of {defined.payload_bytes(payload)}")
        file_bytes = int(defined.column("file_bytes")[definition.file - 1])
        if definition.offset < 0 or length < 0 or definition.offset + length > file_bytes:
            raise ValueError(
                f"a range of {length} bytes at {definition.offset} of file {definition.file}, which has {file_bytes}"
            )

    def at(self, rows: DefinitionColumns, row: int) -> FileRange:
        return FileRange(*(rows.number(name, row) for name in self.columns))

    def check(self, body: TablesBody) -> None:
        body.ids("range_file", "file")
        body.range("range_offset", 0, MAX_LENGTH)
        body.range("range_bytes", 0, MAX_LENGTH)
        columns = body.columns
        ends = columns["range_offset"].astype(np.int64) + columns["range_bytes"].astype(np.int64)
        lengths = body.whole("file_bytes")[columns["range_file"].astype(np.int64) - 1].astype(np.int64)
        if (ends > lengths).any():
            row = int(np.argmax(ends > lengths))
            raise body.fail(f"a range ends at {int(ends[row])} of a file of {int(lengths[row])} bytes")
        body.payloads("range_payload", "range_bytes", "a range")


FILE_RANGES = FileRangeFamily()


_DIGEST = re.compile(r"[0-9a-f]{32}")
_HALF = 0xFFFFFFFFFFFFFFFF
_VALIDATIONS = int(sum(FileValidation))
_KNOWN_WITH = {
    FileValidation.identity: ("file_device", "file_inode", "file_mtime_ns"),
    FileValidation.digest: ("file_digest_low", "file_digest_high"),
}


class FileFamily(Family[ExternalFile]):
    name = "file"
    fields = """
        file_path:[uint] file_bytes:[ulong] file_validation:[ubyte]
        file_device:[ulong] file_inode:[ulong] file_mtime_ns:[long]
        file_digest_low:[ulong] file_digest_high:[ulong] file_payload:[uint] file_format:[uint]
    """

    def row(self, definition: ExternalFile) -> DefinitionRow:
        _check_path(definition.path)
        whole(definition.bytes, 0, MAX_LENGTH, "the length of an external file")
        identity, validation, digest = definition.identity, FileValidation(0), 0
        if identity is not None:
            validation |= FileValidation.identity
        if definition.digest is not None:
            if not _DIGEST.fullmatch(definition.digest):
                raise ValueError(f"a file digest of 32 hexadecimal digits was expected, got {definition.digest!r}")
            validation |= FileValidation.digest
            digest = int(definition.digest, 16)
        device, inode, mtime_ns = (identity.device, identity.inode, identity.mtime_ns) if identity else (0, 0, 0)
        return DefinitionRow(
            (
                definition.path,
                definition.bytes,
                int(validation),
                whole(device, 0, _HALF, "a file's device"),
                whole(inode, 0, _HALF, "a file's inode"),
                whole(mtime_ns, -(1 << 63), (1 << 63) - 1, "a file's mtime_ns"),
                digest & _HALF,
                digest >> 64,
                definition.payload,
                definition.format or 0,
            )
        )

    def admit(self, definition: ExternalFile, defined: DefinedSoFar) -> None:
        payload = definition.payload
        if payload and defined.payload_bytes(payload) != definition.bytes:
            raise ValueError(
                f"{definition.path} has {definition.bytes} bytes, its payload {defined.payload_bytes(payload)}"
            )

    def at(self, rows: DefinitionColumns, row: int) -> ExternalFile:
        validation = FileValidation(rows.number("file_validation", row))
        identity = digest = None
        if validation & FileValidation.identity:
            identity = FileIdentity(*(rows.number(name, row) for name in _KNOWN_WITH[FileValidation.identity]))
        if validation & FileValidation.digest:
            digest = f"{rows.number('file_digest_high', row):016x}{rows.number('file_digest_low', row):016x}"
        return ExternalFile(
            rows.text("file_path", row),
            rows.number("file_bytes", row),
            identity,
            digest,
            rows.number("file_payload", row),
            rows.text("file_format", row),
        )

    def check(self, body: TablesBody) -> None:
        body.code("file_validation", _VALIDATIONS, 0)
        body.ids("file_path", "string")
        body.ids("file_format", "string", lowest=0)
        body.range("file_bytes", 0, MAX_LENGTH)
        for flag, names in _KNOWN_WITH.items():
            body.zero_where((body.columns["file_validation"] & flag) == 0, names, f"a file without {flag.name}")
        body.payloads("file_payload", "file_bytes", "a file")


def _check_path(path: str) -> None:
    """Raise ValueError where a path cannot be stored so that it is found again."""
    if not path or "\0" in path:
        raise ValueError(f"an external file with the path {path!r}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"an external file whose path is not UTF-8: {path!r}; embed its content") from None


FILES = FileFamily()


class GeneratorFamily(Family[Generator]):
    name = "generator"
    fields = "generator_device:[uint] generator_default:[ubyte]"
    shared = False

    def row(self, definition: Generator) -> DefinitionRow:
        return DefinitionRow((definition.device, int(definition.default)))

    def admit(self, definition: Generator, defined: DefinedSoFar) -> None:
        defined.require("device", definition.device)

    def at(self, rows: DefinitionColumns, row: int) -> Generator:
        return Generator(rows.number("generator_device", row), bool(rows.number("generator_default", row)))

    def check(self, body: TablesBody) -> None:
        body.ids("generator_device", "device")
        body.range("generator_default", 0, 1)


GENERATORS = GeneratorFamily()


_LAST_KIND = int(max(KernelKind))
_LIMIT = f"the limit is {MAX_ATTACHMENTS}"


class KernelFamily(Family[Kernel]):
    name = "kernel"
    fields = "kernel_kind:[ubyte] kernel_name:[uint] kernel_overload:[uint] kernel_schema:[uint]"
    added_fields = "kernel_attachments:[uint]"
    nested_fields = "kernel_attachment:[uint]"
    frequent = True

    def row(self, definition: Kernel) -> DefinitionRow:
        name, overload, attachments = definition.name, definition.overload, definition.attachments
        problem = name_problem(name, overload) if definition.kind is not KernelKind.collective else ""
        if problem:
            raise ValueError(problem)
        if len(attachments) > MAX_ATTACHMENTS:
            raise ValueError(f"{definition.qualified_name} has {len(attachments)} attachments; {_LIMIT}")
        if len(set(attachments)) != len(attachments):
            raise ValueError(f"{definition.qualified_name} lists an attachment twice: {attachments}")
        values = (int(definition.kind), name, overload, definition.schema, len(attachments))
        return DefinitionRow(values, [(number,) for number in attachments])

    def admit(self, definition: Kernel, defined: DefinedSoFar) -> None:
        for number in definition.attachments:
            defined.require("attachment", number)

    def at(self, rows: DefinitionColumns, row: int) -> Kernel:
        return Kernel(
            rows.text("kernel_name", row),
            rows.text("kernel_overload", row),
            canonical_schema(rows.text("kernel_schema", row)),
            KernelKind(rows.number("kernel_kind", row)),
            tuple(rows.column("kernel_attachment")[rows.nested("kernel", row)].tolist()),
        )

    def check(self, body: TablesBody) -> None:
        body.code("kernel_kind", _LAST_KIND)
        for name in ("kernel_name", "kernel_overload", "kernel_schema"):
            body.ids(name, "string")
        called = body.columns["kernel_kind"] != KernelKind.collective
        names, overloads = (body.columns[name][called].tolist() for name in ("kernel_name", "kernel_overload"))
        texts = body.texts({*names, *overloads})
        for name, overload in zip(names, overloads, strict=True):
            problem = name_problem(texts[name], texts[overload])
            if problem:
                raise body.fail(problem)
        body.ids("kernel_attachment", "attachment")
        counts = body.columns["kernel_attachments"]
        if len(counts) and int(counts.max()) > MAX_ATTACHMENTS:
            raise body.fail(f"a kernel has {int(counts.max())} attachments; {_LIMIT}")
        listed = np.repeat(np.arange(len(counts)), counts) << 32 | body.columns["kernel_attachment"]
        listed.sort()
        if (listed[1:] == listed[:-1]).any():
            raise body.fail("a kernel lists an attachment twice")


KERNELS = KernelFamily()


_FLAGS = int(sum(TensorFlag))
_LAST_DTYPE, _LAST_LAYOUT = int(max(DType)), int(max(Layout))


class MetaFamily(Family[TensorMeta]):
    name = "meta"
    fields = "meta_dtype:[ubyte] meta_layout:[ubyte] meta_device:[uint] meta_flags:[ushort] meta_rank:[ushort]"
    nested_fields = "meta_sizes:[long] meta_strides:[long]"
    frequent = True

    def row(self, definition: TensorMeta) -> DefinitionRow:
        try:
            sizes, strides = tuple(map(index, definition.sizes)), tuple(map(index, definition.strides))
        except TypeError as error:
            raise ValueError(f"tensor metadata whose sizes or strides are not numbers: {definition}: {error}") from None
        if len(sizes) != len(strides):
            raise ValueError(f"tensor metadata with {len(sizes)} sizes and {len(strides)} strides")
        lengths = (*sizes, *strides, 0)
        if min(lengths) < 0 or max(lengths) > MAX_LENGTH:
            raise ValueError(f"tensor metadata with negative or impossible sizes or strides: {definition}")
        dtype, layout, flags = int(definition.dtype), int(definition.layout), int(definition.flags)
        if not (1 <= dtype <= _LAST_DTYPE and 1 <= layout <= _LAST_LAYOUT) or flags & ~_FLAGS:
            raise ValueError(f"tensor metadata with unknown codes: {definition}")
        return DefinitionRow(
            (dtype, layout, definition.device, flags, len(sizes)), tuple(zip(sizes, strides, strict=True))
        )

    def admit(self, definition: TensorMeta, defined: DefinedSoFar) -> None:
        defined.require("device", definition.device)

    def admit_columns(self, columns: Mapping[str, np.ndarray]) -> None:
        for name in ("meta_sizes", "meta_strides"):
            lengths = columns[name]
            if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= MAX_LENGTH:
                raise ValueError("tensor metadata with negative or impossible sizes or strides")

    def at(self, rows: DefinitionColumns, row: int) -> TensorMeta:
        dimensions = rows.nested("meta", row)
        return TensorMeta(
            DType(rows.number("meta_dtype", row)),
            Layout(rows.number("meta_layout", row)),
            rows.number("meta_device", row),
            tuple(rows.column("meta_sizes")[dimensions].tolist()),
            tuple(rows.column("meta_strides")[dimensions].tolist()),
            TensorFlag(rows.number("meta_flags", row)),
        )

    def check(self, body: TablesBody) -> None:
        body.code("meta_dtype", _LAST_DTYPE)
        body.code("meta_layout", _LAST_LAYOUT)
        body.ids("meta_device", "device")
        flags = body.columns["meta_flags"]
        if len(flags) and int(np.bitwise_or.reduce(flags)) & ~_FLAGS:
            body.code("meta_flags", _FLAGS, 0)
            raise body.fail("meta_flags has unknown bits")
        ends = np.cumsum(body.columns["meta_rank"], dtype=np.int64)

        def owner(row: int) -> str:
            return f"meta {body.firsts['meta'] + int(np.searchsorted(ends, row, 'right'))}"

        for name in self.nested_columns:
            body.range(name, 0, MAX_LENGTH, owner)


METAS = MetaFamily()


class PlacementFamily(Family[StreamPlacement]):
    name = "placement"
    fields = "placement_devices:[ushort]"
    nested_fields = "placement_device:[uint] placement_stream:[ulong]"
    frequent = True

    def row(self, definition: StreamPlacement) -> DefinitionRow:
        devices = [device for device, _stream in definition.streams]
        if not devices or devices != sorted(set(devices)):
            raise ValueError(f"a placement whose devices are not some, each once and in order: {devices}")
        for _device, stream in definition.streams:
            whole(stream, 1, MAX_LENGTH, "the number of a stream that is not its device's default one")
        return DefinitionRow((len(devices),), definition.streams)

    def admit(self, definition: StreamPlacement, defined: DefinedSoFar) -> None:
        for device, _stream in definition.streams:
            defined.require("device", device)

    def at(self, rows: DefinitionColumns, row: int) -> StreamPlacement:
        which = rows.nested("placement", row)
        devices, streams = (rows.column(name)[which].tolist() for name in ("placement_device", "placement_stream"))
        return StreamPlacement(tuple(zip(devices, streams, strict=True)))

    def check(self, body: TablesBody) -> None:
        body.range("placement_devices", 1, 0xFFFF)
        body.ids("placement_device", "device")
        body.range("placement_stream", 1, MAX_LENGTH)
        counts = body.columns["placement_devices"].astype(np.int64)
        devices = body.columns["placement_device"].astype(np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        if (np.diff(devices)[np.diff(owner) == 0] <= 0).any():
            raise body.fail("a placement's devices are not in ascending order")


PLACEMENTS = PlacementFamily()


_LAST_RECIPE_DTYPE = int(max(DType))
_SEED = 0xFFFFFFFFFFFFFFFF
_MOMENTS = ("mean", "std", "min", "max")
_COUNTS = ("zeros", "nans", "positive_infinities", "negative_infinities")


class RecipeFamily(Family[Recipe]):
    name = "recipe"
    fields = """
        recipe_dtype:[ubyte] recipe_elements:[ulong] recipe_seed:[ulong] recipe_statistics:[ubyte]
        recipe_mean:[double] recipe_std:[double] recipe_min:[double] recipe_max:[double]
        recipe_zeros:[ulong] recipe_nans:[ulong]
        recipe_positive_infinities:[ulong] recipe_negative_infinities:[ulong]
    """

    def row(self, definition: Recipe) -> DefinitionRow:
        if not 1 <= definition.dtype <= _LAST_RECIPE_DTYPE:
            raise ValueError(f"a recipe with the dtype {definition.dtype!r}")
        elements, known = definition.elements, definition.statistics
        whole(elements, 0, MAX_LENGTH, "a recipe's number of elements")
        whole(definition.seed, 0, _SEED, "a recipe's seed")
        moments = [float(getattr(known, name)) if known else 0.0 for name in _MOMENTS]
        counts = [whole(getattr(known, name), 0, elements, name) if known else 0 for name in _COUNTS]
        if sum(counts) > elements:
            raise ValueError(f"statistics that count {counts} special elements of {elements}")
        return DefinitionRow(
            (int(definition.dtype), elements, definition.seed, int(known is not None), *moments, *counts)
        )

    def at(self, rows: DefinitionColumns, row: int) -> Recipe:
        statistics = None
        if rows.number("recipe_statistics", row):
            mean, std, lowest, highest = (float(rows.column(f"recipe_{name}")[row]) for name in _MOMENTS)
            counts = (rows.number(f"recipe_{name}", row) for name in _COUNTS)
            statistics = Statistics(mean, std, lowest, highest, *counts)
        return Recipe(
            DType(rows.number("recipe_dtype", row)),
            rows.number("recipe_elements", row),
            rows.number("recipe_seed", row),
            statistics,
        )

    def check(self, body: TablesBody) -> None:
        body.code("recipe_dtype", _LAST_RECIPE_DTYPE)
        body.range("recipe_elements", 0, MAX_LENGTH)
        body.range("recipe_statistics", 0, 1)
        names = tuple(f"recipe_{name}" for name in (*_MOMENTS, *_COUNTS))
        body.zero_where(body.columns["recipe_statistics"] == 0, names, "a recipe without statistics")
        special = np.zeros(len(body.columns["recipe_elements"]), np.float64)
        for name in _COUNTS:
            special += body.columns[f"recipe_{name}"]
        if (special > body.columns["recipe_elements"]).any():
            raise body.fail("a recipe's statistics count more elements than it has")


RECIPES = RecipeFamily()


class ScopeFamily(Family[Scope]):
    name = "scope"
    fields = "scope_parent:[uint] scope_name:[uint]"

    def row(self, definition: Scope) -> DefinitionRow:
        return DefinitionRow((definition.parent, definition.name))

    def admit(self, definition: Scope, defined: DefinedSoFar) -> None:
        if definition.parent:
            defined.require("scope", definition.parent)

    def at(self, rows: DefinitionColumns, row: int) -> Scope:
        return Scope(rows.number("scope_parent", row), rows.text("scope_name", row))

    def check(self, body: TablesBody) -> None:
        body.ids("scope_name", "string")
        parents = body.columns["scope_parent"].astype(np.int64)
        # A parent comes before its children, so that paths are finite.
        if (parents >= np.arange(len(parents)) + body.firsts["scope"]).any():
            raise body.fail("a scope's parent is not defined before it")

    def repeats(self, column: Callable[[str], np.ndarray]) -> bool:
        """Whether one path has two ids, among all the scopes of a capture."""
        paths = np.stack([column(name) for name in self.columns], axis=1)
        return len(np.unique(paths, axis=0)) != len(paths)


SCOPES = ScopeFamily()
