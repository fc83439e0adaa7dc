"""Captures for the tests: a builder that takes records one by one, and small captures that have everything in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from replayfmt.format.codes import (
    UNKNOWN_NS,
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
from replayfmt.format.model import (
    Attachment,
    CaptureInfo,
    Device,
    ExternalFile,
    FileIdentity,
    FileRange,
    Generator,
    Kernel,
    Node,
    Recipe,
    Signature,
    Statistics,
    StreamPlacement,
    TensorDigest,
    TensorMeta,
)
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter

V = ValueKind
SESSION = CaptureInfo(
    session_id="00112233-4455-6677-8899-aabbccddeeff",
    producer="opreplay",
    producer_version="0.1.0",
    created_unix_ns=1_700_000_000_000_000_000,
    torch_version="2.13.0",
    python_version="3.11.7",
    platform="Linux x86_64",
    host="host",
    cpu="a processor",
    cpu_capability="AVX512",
    argv=("train.py", "--steps", "2"),
    working_directory="/work",
    rank=1,
    world_size=4,
    libraries={"mkl": "2024.2", "mkldnn": "3.7.1"},
    settings={"threads": 4, "deterministic": False, "matmul_precision": "highest", "seed": None, "scale": 0.5},
    policies={"payload": "full"},
)
ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


@dataclass
class Records:
    """Rows of one frame, and the storages born in it."""

    writer: CaptureWriter
    tensors: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    ids: dict[tuple[int, int, int], int] = field(default_factory=dict)
    next_storage: int = 1
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    slots: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    born: list[tuple[int, int, int, int]] = field(default_factory=list)
    annotations: list[int] = field(default_factory=list)
    placements: list[int] = field(default_factory=list)

    def tensor(self, storage: int, offset: int, meta: int) -> int:
        """The global tensor id of these."""
        definition = (storage, offset, meta)
        number = self.ids.setdefault(definition, len(self.ids) + 1)
        self.tensors[number] = definition
        return number

    def storage(self, length: int, device: int, origin: StorageOrigin, payload: int = 0) -> int:
        self.born.append((length, device, origin, payload))
        return self.next_storage + len(self.born) - 1

    def add(
        self,
        signature: Signature,
        tensors: tuple[int, ...] = (),
        ints: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        scope: int = 0,
        thread: int = 0,
        start: int | None = None,
        duration: int = 0,
        annotation: int = 0,
        placement: int = 0,
    ) -> None:
        start = 1000 * len(self.rows) if start is None else start
        self.rows.append((self.writer.signature(signature), scope, thread, start, duration))
        self.annotations.append(annotation)
        self.placements.append(placement)
        for column, values in zip(self.slots, (tensors, ints, floats), strict=True):
            column.extend(values)

    def write(self) -> None:
        rows, born = np.array(self.rows, np.int64).reshape(-1, 5), np.array(self.born, np.int64).reshape(-1, 4)
        self.writer.records(
            RecordColumns(
                *(rows[:, i] for i in range(5)),
                np.array(self.slots[0], np.uint64),
                np.array(self.slots[1], np.int64),
                np.array(self.slots[2], np.float64),
                self.tensors,
                self.next_storage,
                *(born[:, i] for i in range(4)),
                annotation=self.annotations if any(self.annotations) else None,
                placement=self.placements if any(self.placements) else None,
            )
        )
        self.next_storage += len(self.born)
        self.rows, self.slots, self.born, self.annotations, self.placements = [], ([], [], []), [], [], []


def op(
    kernel: int, args: tuple[Node, ...], results: tuple[Node, ...] = (), status: OpStatus = OpStatus.ok
) -> Signature:
    return Signature(RecordKind.op, args, results, kernel, status)


def marker(kind: RecordKind, name: str) -> Signature:
    return Signature(kind, (Node(V.string, "name", name),))


IMPORT = Signature(
    RecordKind.storage_import,
    (
        Node(V.storage, "storage"),
        Node(V.payload, "payload"),
        Node(V.int, "version"),
        Node(V.string, "reason", "first_use"),
    ),
)
IMPORT_WITHOUT_CONTENT = Signature(
    RecordKind.storage_import,
    (
        Node(V.storage, "storage"),
        Node(V.none, "payload"),
        Node(V.int, "version"),
        Node(V.string, "reason", "outside_write"),
    ),
)
IMPORT_RANGE = Signature(
    RecordKind.storage_import,
    (
        Node(V.storage, "storage"),
        Node(V.range, "payload"),
        Node(V.int, "version"),
        Node(V.string, "reason", "first_use"),
    ),
)
IMPORT_RECIPE = Signature(
    RecordKind.storage_import,
    (
        Node(V.storage, "storage"),
        Node(V.recipe, "payload"),
        Node(V.int, "version"),
        Node(V.string, "reason", "first_use"),
    ),
)
RELEASE = Signature(RecordKind.storage_release, (Node(V.storage, "storage"),))
TENSOR_DIGEST = TensorDigest(
    0x1122334455667788, 0xFFEEDDCCBBAA9988, 3, 1, 0, -1.5, 2.5, 0.5, 3.0, (-1.5, 2.5, float("nan"))
)


def write_everything(path: Path) -> None:
    """A capture with every kind of record and value, two frames of records, payloads small, large and compressed."""
    writer = CaptureWriter(path, SESSION)
    cpu = writer.device(Device("cpu", -1, "a processor"))
    cuda = writer.device(Device("cuda", 0, "a GPU", '{"capability": [9, 0]}'))
    add = writer.kernel(Kernel("aten::add", "Tensor", ADD))
    odd = writer.kernel(Kernel("mylib::odd", "default", "mylib::odd(...) -> Tensor[]"))
    spun = writer.kernel(Kernel("triton::spun", "default", "spun(...)", KernelKind.triton))
    matrix = writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2, 3), (3, 1)))
    flagged = writer.meta(
        TensorMeta(DType.complex64, Layout.strided, cuda, (3,), (2,), TensorFlag.conj | TensorFlag.requires_grad)
    )
    scalar = writer.meta(TensorMeta(DType.int64, Layout.strided, cpu, (), ()))
    run = writer.scope(0, "execute")
    step = writer.scope(run, "step 1 – größer")
    default, own = writer.generator(Generator(cpu, True)), writer.generator(Generator(cpu, False))

    small = writer.payload(np.arange(6, dtype=np.float32).data)
    empty = writer.payload(b"")
    tokens = writer.payload((np.arange(5000, dtype=np.int64) % 11).data)
    large = writer.payload(np.random.default_rng(7).random(9000).data)
    assert writer.payload(np.arange(6, dtype=np.float32).data) == small

    known = writer.file(
        ExternalFile(
            "/models/größer.safetensors",
            9000 * 8,
            FileIdentity(0xFD01, 1 << 60, 1_700_000_000_123_456_789),
            "00112233445566778899aabbccddeeff",
            large,
            "safetensors",
        )
    )
    digested = writer.file(ExternalFile("checkpoint.pt", 1 << 35, digest="ffeeddccbbaa99887766554433221100"))
    named = writer.file(ExternalFile("/data/tokens.bin", 48))
    in_file = writer.range(FileRange(known, 4096, 512))
    in_both = writer.range(FileRange(digested, (1 << 34) + 5, 24, small))
    empty_range = writer.range(FileRange(named, 48, 0))
    noise = writer.recipe(
        Recipe(DType.bfloat16, 100, 0xFFFFFFFFFFFFFFFF, Statistics(0.5, 1.25, -3.0, 1e30, 7, 2, 1, 0))
    )
    blanks = writer.recipe(Recipe(DType.int64, 0, 0, Statistics(*[float("nan")] * 4, 0, 0, 0, 0)))
    assumed = writer.recipe(Recipe(DType.float32, 6, 3))
    source = writer.attachment(Attachment("source", "twice.py", writer.payload(b"def twice(x):\n    ...\n")))
    cubin = writer.attachment(Attachment("cubin", "", writer.payload(b"\x7fELF\x00" * 5000)))
    future = writer.attachment(Attachment("from_the_future", "später.bin", empty))
    twice = "triton::twice.v1(Tensor(a!) x) -> ()"
    writer.kernel(Kernel("triton::twice", "v1", twice, KernelKind.triton, (source, cubin, future)))
    fused = "inductor_cpp::fused.v1() -> ()"
    writer.kernel(Kernel("inductor_cpp::fused", "v1", fused, KernelKind.inductor_cpp, (source,)))

    records = Records(writer)
    weight = records.storage(24, cpu, StorageOrigin.payload, small)
    result = records.storage(24, cpu, StorageOrigin.op)
    blank = records.storage(0, cuda, StorageOrigin.uninitialized)
    unknown = records.storage(4096, cuda, StorageOrigin.absent)
    a, b, c = records.tensor(weight, 0, matrix), records.tensor(result, 0, matrix), records.tensor(unknown, 2, flagged)
    nowhere = records.tensor(0, 0, scalar)

    records.add(marker(RecordKind.scope_begin, "execute"), scope=run, start=10)
    records.add(
        Signature(
            RecordKind.global_state,
            (
                Node(V.bool, "deterministic", 1),
                Node(V.int, "threads"),
                Node(V.float, "scale"),
                Node(V.string, "matmul_precision", "high"),
                Node(V.none, "seed"),
            ),
        ),
        ints=(2,),
        floats=(0.25,),
        scope=run,
        start=20,
    )
    records.add(IMPORT, ints=(weight, small, 0), scope=run, start=20)
    records.add(IMPORT_WITHOUT_CONTENT, ints=(unknown, 1), scope=run, start=21)
    records.add(marker(RecordKind.scope_begin, "step 1 – größer"), scope=step, start=22)
    records.add(
        op(add, (Node(V.tensor, "self"), Node(V.tensor, "other"), Node(V.int, "alpha")), (Node(V.tensor),)),
        (a, a, b),
        (3,),
        scope=step,
        start=30,
        duration=700,
    )
    everything = tuple(
        Node(kind, name, constant, children)
        for kind, name, constant, children in (
            (V.none, "nothing", None, ()),
            (V.bool, "no", 0, ()),
            (V.int, "whole", None, ()),
            (V.float, "real", None, ()),
            (V.complex, "both", None, ()),
            (V.string, "text", "", ()),
            (V.dtype, "dtype", int(DType.bfloat16), ()),
            (V.layout, "layout", int(Layout.sparse_coo), ()),
            (V.memory_format, "memory_format", int(MemoryFormat.channels_last), ()),
            (V.device, "device", cuda, ()),
            (V.tensor, "tensor", None, ()),
            (V.storage, "storage", None, ()),
            (
                V.list,
                "list",
                None,
                (Node(V.tensor), Node(V.list, "", None, (Node(V.int), Node(V.none))), Node(V.float)),
            ),
            (V.generator, "generator", None, ()),
            (V.process_group, "group", "world", ()),
            (V.opaque, "opaque", "a ScriptObject", ()),
            (V.payload, "payload", None, ()),
            (V.composite, "composite", "sparse_coo", (Node(V.tensor), Node(V.tensor), Node(V.bool, "", 1))),
            (V.range, "range", None, ()),
            (V.recipe, "recipe", None, ()),
            (V.tuple, "tuple", None, (Node(V.string, "", "x"), Node(V.tuple, "", None, ()))),
        )
    )
    records.add(
        op(odd, everything, (Node(V.list, "", None, (Node(V.tensor), Node(V.tensor))), Node(V.bool, "", 1))),
        (c, a, b, nowhere, b, c),
        (-(1 << 63), blank, (1 << 63) - 1, own, large, in_file, assumed),
        (float("inf"), -0.0, float("nan"), 1e-310),
        scope=step,
        thread=3,
        start=25,
        duration=1 << 40,
    )
    remark = writer.annotation({"import": "inferred", "assumed": ["größer", "no strides"], "count": 3})
    records.add(
        op(spun, (), (), OpStatus.raised), scope=step, start=6_000_000_000, duration=UNKNOWN_NS, annotation=remark
    )
    records.write()

    records.add(
        Signature(RecordKind.storage_resize, (Node(V.storage, "storage"), Node(V.int, "bytes"))),
        ints=(blank, 128),
        scope=step,
        start=7_000_000_000,
    )
    state = writer.payload(bytes(range(256)) * 20)
    fresh = records.storage(8, cpu, StorageOrigin.payload, empty)
    records.add(
        Signature(RecordKind.generator_state, (Node(V.generator, "generator"), Node(V.payload, "payload"))),
        ints=(default, state),
        scope=step,
        start=20_000_000_000,
    )
    ints, floats = TENSOR_DIGEST.slots()
    read = Signature(
        RecordKind.host_read, (Node(V.string, "method", "item"), Node(V.tensor, "tensor"), *TENSOR_DIGEST.nodes())
    )
    records.add(read, (b,), tuple(ints), tuple(floats), scope=step, start=20_000_000_001)
    records.add(
        Signature(RecordKind.host_read, (Node(V.string, "method", "tolist"), Node(V.tensor, "tensor"))),
        (b,),
        scope=step,
        start=20_000_000_001,
    )
    digest = Signature(
        RecordKind.digest, (Node(V.tensor, "tensor"), Node(V.int, "of"), Node(V.int, "result"), *TENSOR_DIGEST.nodes())
    )
    records.add(digest, (b,), (5, 0, *ints), tuple(floats), scope=step, start=20_000_000_002)
    records.add(digest, (a,), (-1, -1, *ints), tuple(floats), scope=step, start=20_000_000_003)
    records.add(IMPORT, ints=(fresh, tokens, 0), scope=step, start=20_000_000_004)
    records.add(Signature(RecordKind.synchronize, (Node(V.device, "device", cuda),)), scope=step, start=20_000_000_005)
    aside = writer.placement(StreamPlacement(((cuda, 1),)))
    apart = writer.placement(StreamPlacement(((cpu, 7), (cuda, 2))))
    stream = (Node(V.device, "device", cuda), Node(V.int, "stream"))
    event = Node(V.int, "event")
    for kind, tensors, whole in (
        (RecordKind.event_record, (), (1, 0)),
        (RecordKind.event_wait, (), (1, 1)),
        (RecordKind.stream_use, (c,), (1,)),
        (RecordKind.stream_synchronize, (), (1,)),
        (RecordKind.event_synchronize, (), (1,)),
    ):
        nodes = {
            RecordKind.stream_use: (Node(V.tensor, "tensor"), *stream),
            RecordKind.stream_synchronize: stream,
            RecordKind.event_synchronize: (event,),
        }.get(kind, (event, *stream))
        records.add(
            Signature(kind, nodes),
            tensors,
            whole,
            scope=step,
            start=20_000_000_005,
            placement=aside if tensors else apart,
        )
    records.add(Signature(RecordKind.collective, (Node(V.process_group, "group", "world"),)), scope=step)
    for reason in ("compiled_region", "compiled_region", "triton_launch"):
        records.add(
            Signature(
                RecordKind.unsupported,
                (Node(V.string, "reason", reason), Node(V.string, "op", "forward"), Node(V.string, "detail", "kept")),
            ),
            scope=step,
            start=20_000_000_006,
        )
    mapped = records.storage(512, cpu, StorageOrigin.external_file, in_file)
    short = records.storage(24, cuda, StorageOrigin.external_file, in_both)
    nothing = records.storage(0, cpu, StorageOrigin.external_file, empty_range)
    filled = records.storage(201, cpu, StorageOrigin.initializer, noise)
    none = records.storage(7, cpu, StorageOrigin.initializer, blanks)
    for storage, place in ((mapped, in_file), (short, in_both), (nothing, empty_range)):
        records.add(IMPORT_RANGE, ints=(storage, place, 0), scope=step, start=20_000_000_006)
    for storage, recipe in ((filled, noise), (none, blanks), (weight, assumed)):
        records.add(IMPORT_RECIPE, ints=(storage, recipe, 0), scope=step, start=20_000_000_006)
    records.add(RELEASE, ints=(weight,), scope=step, start=20_000_000_007)
    records.add(marker(RecordKind.scope_end, "step 1 – größer"), scope=step, start=20_000_000_008)
    records.add(marker(RecordKind.scope_end, "execute"), scope=run, start=20_000_000_009)
    records.write()
    writer.close(21_000_000_000)


def write_small(path: Path, frames: int = 2, close: bool = True) -> CaptureWriter:
    """A capture of a kilobyte or three: `frames` frames of two records, a payload in each."""
    writer = CaptureWriter(path, CaptureInfo("01234567-89ab-cdef-0123-456789abcdef", "opreplay", "0.1.0"))
    cpu = writer.device(Device("cpu"))
    add = writer.kernel(Kernel("aten::add", "Tensor", ADD))
    meta = writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2,), (1,)))
    records = Records(writer)
    for frame in range(frames):
        payload = writer.payload(np.array([frame, frame + 0.5], np.float32).data)
        scope = writer.scope(0, f"step {frame}")
        source = records.storage(8, cpu, StorageOrigin.payload, payload)
        result = records.storage(8, cpu, StorageOrigin.op)
        x, y = records.tensor(source, 0, meta), records.tensor(result, 0, meta)
        records.add(IMPORT, ints=(source, payload, 0), scope=scope, start=frame * 1000)
        records.add(
            op(add, (Node(V.tensor, "self"), Node(V.tensor, "other"), Node(V.int, "alpha")), (Node(V.tensor),)),
            (x, x, y),
            (frame,),
            scope=scope,
            start=frame * 1000 + 5,
            duration=42,
        )
        records.write()
    if close:
        writer.close(9999)
    return writer


def write_everything_again(path: Path) -> None:
    path.unlink()
    write_everything(path)
