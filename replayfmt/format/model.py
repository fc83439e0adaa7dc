"""The parts of a capture as plain values: definitions, signatures, records, digests of tensors.

Also the keys of a capture's policies that several parts of the library know. A trimmed capture keeps the environment of
the capture it comes from; the policies say what its content was computed by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from replayfmt.errors import InvalidCapture

from .codes import (
    ITEM_BYTES,
    DType,
    KernelKind,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    StorageOrigin,
    TensorFlag,
    ValueKind,
)


@dataclass(frozen=True)
class CaptureInfo:
    """What the capture says of its origin. `settings`, `libraries` and `policies` map names to JSON scalars."""

    session_id: str
    producer: str
    producer_version: str
    created_unix_ns: int = 0
    torch_version: str | None = None
    python_version: str | None = None
    platform: str | None = None
    host: str | None = None
    cpu: str | None = None
    cpu_capability: str | None = None
    argv: tuple[str, ...] = ()
    working_directory: str | None = None
    rank: int = 0
    world_size: int = 1
    libraries: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)

    @property
    def has_times(self) -> bool:
        """Whether the records say when they began. Imports of execution traces and of TraceLens IR do not: their traces
        hold no times, and each record has 0."""
        return self.policies.get("import") not in ("execution-trace", "tracelens")


@dataclass(frozen=True)
class Device:
    """A captured device. `index` is -1 where the kind has only one; `fingerprint` is a JSON object as text, or ""."""

    kind: str
    index: int = -1
    name: str = ""
    fingerprint: str = ""

    def __str__(self) -> str:
        return self.kind if self.index < 0 else f"{self.kind}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        return self.kind not in ("cpu", "meta")


@dataclass(frozen=True)
class Attachment:
    """Something that belongs to kernels: source, intermediate code, a binary, metadata. `role` says which (FORMAT.md
    lists them; readers show others and do not use them), `name` is for people, `payload` is the payload id of the
    bytes. It is data: nothing reads, compiles, imports or runs it unless the user allows that."""

    role: str
    name: str
    payload: int


@dataclass(frozen=True)
class Kernel:
    """What an op calls: `name` is `namespace::name`, `schema` the full schema as PyTorch prints it. `attachments` are
    attachment ids: the kernel's source, its binaries and what else belongs to it."""

    name: str
    overload: str
    schema: str
    kind: KernelKind = KernelKind.operator
    attachments: tuple[int, ...] = ()

    @property
    def qualified_name(self) -> str:
        """`aten::mm.default`: what names exactly one overload."""
        return f"{self.name}.{self.overload}"

    def fits(self, pattern: str) -> bool:
        """Whether the name, with or without the overload, matches a shell pattern."""
        return fnmatchcase(self.name, pattern) or fnmatchcase(self.qualified_name, pattern)


@dataclass(frozen=True)
class Generator:
    """A random generator; `default` marks the device's default one. `device` is a device id."""

    device: int
    default: bool


@dataclass(frozen=True)
class Scope:
    """A named region. `parent` is a scope id, 0 at top level. Ids stand for paths, not for passes through them."""

    parent: int
    name: str


@dataclass(frozen=True)
class StreamPlacement:
    """The streams that are current where a record is issued, as pairs of a device id and the stream's number on that
    device, from 1, by ascending device. Of devices that are not there the default stream, number 0, is current."""

    streams: tuple[tuple[int, int], ...]

    def stream(self, device: int) -> int:
        """The number of the current stream of a device."""
        return self._numbers.get(device, 0)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return dict(self.streams)


@dataclass(frozen=True)
class TensorMeta:
    """Everything of a tensor but its storage and offset. `device` is a device id; strides are in elements."""

    dtype: DType
    layout: Layout
    device: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    flags: TensorFlag = TensorFlag(0)

    @property
    def bytes(self) -> int:
        """What its elements take, each once."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileIdentity:
    """What distinguishes a file from another of the same name: device and inode from stat, and its modification time in
    nanoseconds since 1970."""

    device: int
    inode: int
    mtime_ns: int


@dataclass(frozen=True)
class ExternalFile:
    """A file that the capture refers to by path. `bytes` is its length; `digest` its file digest in 32
    hexadecimal digits. Where there is a digest it decides, else the identity; None if it was not taken.

    `payload` is the payload id of the file's whole content, 0 if that is not embedded. `format` is informative:
    `safetensors`, `torch`, `raw`, or "" where it is unknown.
    """

    path: str
    bytes: int
    identity: FileIdentity | None = None
    digest: str | None = None
    payload: int = 0
    format: str = ""


@dataclass(frozen=True)
class FileRange:
    """`bytes` bytes of an external file (by id) from `offset` on. `payload` is the payload id of just these bytes, 0 if
    they are in the file alone, or in the payload of the whole file."""

    file: int
    offset: int
    bytes: int
    payload: int = 0


@dataclass(frozen=True)
class Statistics:
    """What is known of synthesized elements. `mean`, `std`, `min` and `max` are of the finite elements alone, NaN where
    none is finite; the others count elements."""

    mean: float
    std: float
    min: float
    max: float
    zeros: int
    nans: int
    positive_infinities: int
    negative_infinities: int


@dataclass(frozen=True)
class Recipe:
    """How a storage whose bytes are not in the capture is synthesized: `elements` values of `dtype`, from a 64-bit
    seed, that resemble the statistics where those are known."""

    dtype: DType
    elements: int
    seed: int
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Node:
    """One value's place in a signature: its kind, its schema name, and what of it is constant.

    `constant` is 0 or 1 for bool, the code for dtype, layout and memory_format, a device id for device, and the text
    for string, process_group, opaque and composite (the form); None for every other kind, whose value is in slots.
    """

    kind: ValueKind
    name: str = ""
    constant: int | str | None = None
    children: tuple[Node, ...] = ()

    @classmethod
    def scalar(cls, name: str, value: bool | int | float | str | None) -> Node:
        """The node of a plain value. That of an int or a float takes a slot."""
        if value is None:
            return cls(ValueKind.none, name)
        if isinstance(value, bool):
            return cls(ValueKind.bool, name, int(value))
        if isinstance(value, str):
            return cls(ValueKind.string, name, value)
        return cls(ValueKind.int if isinstance(value, int) else ValueKind.float, name)

    def preorder(self) -> Iterator[Node]:
        """This node and everything below it, in pre-order."""
        yield self
        for child in self.children:
            yield from child.preorder()


MAPPED_FILE = "mapped_file"  # the reason of a first import whose storage was a map of the file with its content
CHILD_WORK = "child_work"  # the reason of unsupported records about child processes


@dataclass(frozen=True)
class Signature:
    """The constant part of a record. `kernel` is a kernel id for ops, otherwise 0."""

    kind: RecordKind
    args: tuple[Node, ...] = ()
    results: tuple[Node, ...] = ()
    kernel: int = 0
    status: OpStatus = OpStatus.none

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node of arguments, then results, in pre-order."""
        return tuple(node for top in (*self.args, *self.results) for node in top.preorder())

    @cached_property
    def unseen(self) -> bool:
        """Whether its records are of work that no replay does, and that may have written any memory. What child
        processes do (`child_work`) writes none of the memory in the capture."""
        if self.kind is RecordKind.unsupported:
            return not any(node.name == "reason" and node.constant == CHILD_WORK for node in self.args)
        return self.kind is RecordKind.collective

    @cached_property
    def compares_nothing(self) -> bool:
        """Whether its records are digests or host reads that carry no digest."""
        checks = self.kind in (RecordKind.digest, RecordKind.host_read)
        return checks and all(node.name != "hash_low" for node in self.args)


# None, bool, int, float, complex, str, DType, Layout, MemoryFormat, list and tuple stand for themselves.


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor as one record used it. `offset` is in elements; `storage` is a storage id, 0 if it has none."""

    id: int
    storage: int
    offset: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class StorageValue:
    id: int


@dataclass(frozen=True, slots=True)
class GeneratorValue:
    id: int


@dataclass(frozen=True, slots=True)
class PayloadValue:
    id: int


@dataclass(frozen=True, slots=True)
class RangeValue:
    """A range of an external file, by its id."""

    id: int


@dataclass(frozen=True, slots=True)
class RecipeValue:
    """A recipe that content is synthesized by, by its id."""

    id: int


@dataclass(frozen=True, slots=True)
class DeviceValue:
    id: int


@dataclass(frozen=True, slots=True)
class ProcessGroupValue:
    name: str


@dataclass(frozen=True, slots=True)
class OpaqueValue:
    """Something that could not be captured; `text` describes it."""

    text: str


@dataclass(frozen=True, slots=True)
class CompositeValue:
    """A tensor made of component values; `form` names the layout or quantization, FORMAT.md lists the components."""

    form: str
    parts: tuple[Any, ...]


Value = (
    None
    | bool
    | int
    | float
    | complex
    | str
    | list
    | tuple
    | DType
    | Layout
    | MemoryFormat
    | TensorValue
    | StorageValue
    | GeneratorValue
    | PayloadValue
    | RangeValue
    | RecipeValue
    | DeviceValue
    | ProcessGroupValue
    | OpaqueValue
    | CompositeValue
)


def nested_values(values: Iterable[Value]) -> Iterator[Value]:
    """The values and everything in them, in order."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from nested_values(value)
        elif isinstance(value, CompositeValue):
            yield from nested_values(value.parts)


def tensors_of(values: Iterable[Value]) -> Iterator[TensorValue]:
    """The tensors among and inside of these values, in the order of their slots."""
    return (value for value in nested_values(values) if isinstance(value, TensorValue))


def spanned(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie between a tensor's first and its last one in memory, with both; 0 if it has none."""
    return 0 if 0 in sizes else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements fill their memory without gaps, each once, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def calls_in(annotation: dict[str, Any] | None, ordinal: int) -> int:
    """How many calls the record at an ordinal stands for. Raises InvalidCapture where the annotation has no number."""
    count = (annotation or {}).get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1 << 60:
        raise InvalidCapture(
            f"ordinal {ordinal}: its annotation has count={count!r:.40}; expected a whole number above 0"
        )
    return count


@dataclass(frozen=True, slots=True)
class Record:
    """One record, decoded. `args` and `results` are in the order of `signature.args` and `signature.results`."""

    ordinal: int
    signature_id: int
    signature: Signature
    scope: int
    thread: int
    start_ns: int
    duration_ns: int | None  # None: not measured
    device_duration_ns: int | None  # None: not measured
    args: tuple[Value, ...]
    results: tuple[Value, ...]
    frame_offset: int
    placement: int = 0  # placement id; 0: the default streams are current
    annotation: dict[str, Any] | None = None  # what is said about this record alone; FORMAT.md lists the keys

    @property
    def kind(self) -> RecordKind:
        return self.signature.kind

    @property
    def calls(self) -> int:
        """How many calls of the program this record stands for: an import may keep one of many that were the same.

        Raises InvalidCapture if the annotation has no such number.
        """
        return calls_in(self.annotation, self.ordinal)

    def argument(self, name: str) -> Value:
        """The top-level argument of that name. Raises KeyError if the record has none."""
        for node, value in zip(self.signature.args, self.args, strict=True):
            if node.name == name:
                return value
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of the program. `bytes` is its length when born. `payload` is its first content: a payload id if
    `origin` is payload, a range id if it is external_file, a recipe id if it is initializer, otherwise 0."""

    id: int
    bytes: int
    device: int
    origin: StorageOrigin
    payload: int


@dataclass(frozen=True)
class Summary:
    """Totals over a whole capture. Counts are keyed by what they count."""

    ended_ns: int | None
    recovered: bool
    records: dict[RecordKind, int]
    kernel_calls: dict[int, int]
    storages: int
    storage_payload_bytes: int
    absent_storages: int
    unsupported: dict[str, int]
    origins: dict[StorageOrigin, int]  # storages
    origin_bytes: dict[StorageOrigin, int]  # their lengths when born
    annotated: int  # records with an annotation


TRACED_DEVICE_NS = "traced-device-ns"  # device time of the whole trace that an import read
OPAQUE_RESULTS = "opaque-results"  # OPERATOR[:INDEX], separated by spaces
RECORDED_FROM = "recorded-from"  # session id of the capture that a replay was recorded of: the same ops in order
TRIMMED_FROM = "trimmed-from"  # session id of the capture it all comes from
TRIMMED_SELECTION = "trimmed-selection"  # the flags that selected it; of several trims, in order
TRIMMED_VERIFIED = "trimmed-verified"  # how the replay that gave its content was verified: bitwise, close, none
TRIMMED_ELSEWHERE = (
    "trimmed-elsewhere"  # why that replay need not equal the capture: another machine, nondeterministic ops
)
TRIMMED_SYNTHESIZED = "trimmed-synthesized"  # that replay synthesized content that the capture does not hold: why


SAMPLE_ELEMENTS = 64
_INT64_WRAP = 1 << 64
Sample = tuple[int | float | complex, ...]


def sample_positions(elements: int) -> list[int]:
    """Which logical elements (row-major) a digest samples: all up to 64, otherwise 64 evenly spaced, ends included."""
    if elements <= SAMPLE_ELEMENTS:
        return list(range(elements))
    return [index * (elements - 1) // (SAMPLE_ELEMENTS - 1) for index in range(SAMPLE_ELEMENTS)]


def signed(value: int) -> int:
    """An unsigned 64-bit number as the two's complement that an int slot holds."""
    return value - _INT64_WRAP if value >= 1 << 63 else value


class TensorDigest(NamedTuple):
    """Digest of one tensor's logical elements, in row-major order.

    `hash_low` and `hash_high` are the halves of the hash of their bytes: XXH3-128, of more than 8 MiB that of their
    chunks' hashes (FORMAT.md). Statistics are over the finite elements and None if there are none or the dtype has no
    order (bool, bits; complex has only `mean` and `l2`, of absolute values). `sample` holds the elements at
    `sample_positions`, unless the dtype has no such value (bits).
    """

    hash_low: int
    hash_high: int
    elements: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    l2: float | None
    sample: Sample

    @property
    def hex(self) -> str:
        """The hash as 32 hexadecimal digits, high half first."""
        return f"{self.hash_high:016x}{self.hash_low:016x}"

    def nodes(self) -> tuple[Node, ...]:
        kinds = {int: ValueKind.int, float: ValueKind.float, complex: ValueKind.complex}
        statistics = ((name, getattr(self, name)) for name in ("min", "max", "mean", "l2"))
        return (
            *(Node(ValueKind.int, name) for name in ("hash_low", "hash_high", "elements", "nan", "inf")),
            *(Node(ValueKind.none if value is None else ValueKind.float, name) for name, value in statistics),
            Node(ValueKind.list, "sample", None, tuple(Node(kinds[type(value)]) for value in self.sample)),
        )

    def slots(self) -> tuple[list[int], list[float]]:
        """The int and float slots, in the order of `nodes`."""
        low, high, *counts = self[:5]
        ints = [signed(low), signed(high), *counts]
        floats = [value for value in self[5:9] if value is not None]
        kinds = set(map(type, self.sample))
        if kinds == {float}:
            return ints, [*floats, *self.sample]  # type: ignore[list-item]  # all are floats
        if kinds == {int}:
            return [*ints, *self.sample], floats  # type: ignore[list-item]  # all are ints
        for value in self.sample:
            if isinstance(value, complex):
                floats += (value.real, value.imag)
            elif isinstance(value, float):
                floats.append(value)
            else:
                ints.append(value)
        return ints, floats

    @classmethod
    def from_record(cls, record: Record) -> TensorDigest | None:
        """The digest that a digest or host_read record carries; None if it carries none."""
        fields: dict[str, Value] = {
            node.name: value for node, value in zip(record.signature.args, record.args, strict=True)
        }
        if "hash_low" not in fields:
            return None

        def whole(name: str) -> int:
            value = fields[name]
            assert isinstance(value, int)
            return value

        def real(name: str) -> float | None:
            value = fields[name]
            return value if isinstance(value, float) else None

        sample = fields["sample"]
        assert isinstance(sample, list)
        return cls(
            whole("hash_low") % _INT64_WRAP,
            whole("hash_high") % _INT64_WRAP,
            whole("elements"),
            whole("nan"),
            whole("inf"),
            real("min"),
            real("max"),
            real("mean"),
            real("l2"),
            tuple(sample),
        )
