"""Captures made for the tests, written record by record through the library's own writer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from replayfmt.format.codes import (
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

SESSION = CaptureInfo(
    session_id="11111111-2222-3333-4444-555555555555",
    producer="opreplay",
    producer_version="0.1.0",
    created_unix_ns=1_790_000_000_123_456_789,
    torch_version="2.13.0",
    python_version="3.11.7",
    platform="Linux x86_64",
    host="bench",
    cpu="A processor",
    cpu_capability="AVX512",
    argv=("train.py", "--steps", "2"),
    working_directory="/srv",
    libraries={"mkl": "2024.2"},
    settings={"num_threads": 2, "deterministic": False, "float32_matmul_precision": "highest", "scale": 0.5, "x": None},
    policies={"payload": "full", "digests": "live"},
)

# Text that would do harm, or break a line, if it ever became code, a format string, JSON or a terminal's input.
HOSTILE = [
    "\"+__import__('os').system('touch injected')+\"",
    "{__import__('os')}",
    "{0}{}{{}}",
    "'''\"\"\"\\",
    "\\",
    "a\nb\r\tc\0d",
    "%s%n$(id)`id`",
    "é∀😀\u2028\u202e",
    "\x1b[31mred",
    "</script>",
    "k0",
    "f'{o}'",
    "}" * 5,
]

STRIDED = Layout.strided
V = ValueKind


def tensors(*names: str) -> tuple[Node, ...]:
    return tuple(Node(V.tensor, name) for name in names)


class Builder:
    """A capture under construction. Frames end where `frame` is called."""

    def __init__(self, path: Path, session: CaptureInfo = SESSION) -> None:
        self.path = path
        self.writer = CaptureWriter(path, session)
        self.definitions: dict[int, tuple[int, int, int]] = {}
        self.known: dict[tuple[int, int, int], int] = {}
        self.next_storage = 1
        self.ordinal = 0
        self._clear()

    def _clear(self) -> None:
        self.signatures: list[int] = []
        self.scopes: list[int] = []
        self.threads: list[int] = []
        self.starts: list[int] = []
        self.tensors: list[int] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.born: list[tuple[int, int, int, int]] = []
        self.annotations: list[int] = []
        self.placements: list[int] = []

    def storage(self, size: int, device: int, origin: StorageOrigin = StorageOrigin.op, payload: int = 0) -> int:
        self.born.append((size, device, origin, payload))
        self.next_storage += 1
        return self.next_storage - 1

    def tensor(self, storage: int, meta: int, offset: int = 0) -> int:
        definition = (storage, offset, meta)
        number = self.known.setdefault(definition, len(self.known) + 1)
        self.definitions[number] = definition
        return number

    def record(
        self,
        signature: Signature,
        tensors: Sequence[int] = (),
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        scope: int = 0,
        thread: int = 0,
        annotation: int = 0,
        placement: int = 0,
    ) -> int:
        self.signatures.append(self.writer.signature(signature))
        self.scopes.append(scope)
        self.threads.append(thread)
        self.starts.append(1000 + 250 * self.ordinal)
        self.tensors += tensors
        self.ints += ints
        self.floats += floats
        self.annotations.append(annotation)
        self.placements.append(placement)
        self.ordinal += 1
        return self.ordinal - 1

    def frame(self, durations: bool | list[int] = True, device_durations: list[int] | None = None) -> None:
        """Write what was collected as one frame."""
        count, born = len(self.signatures), np.array(self.born, np.int64).reshape(-1, 4)
        self.writer.records(
            RecordColumns(
                signature=np.array(self.signatures, np.uint32),
                scope=np.array(self.scopes, np.uint32),
                thread=np.array(self.threads, np.uint16),
                start_ns=np.array(self.starts, np.int64),
                duration_ns=np.array(list(range(100, 100 + count)) if durations is True else durations, np.uint32)
                if durations
                else None,
                tensors=np.array(self.tensors, np.uint64),
                ints=np.array(self.ints, np.int64),
                floats=np.array(self.floats, np.float64),
                tensor_definitions=self.definitions,
                first_storage=self.next_storage - len(born),
                storage_bytes=born[:, 0].astype(np.uint64),
                storage_device=born[:, 1].astype(np.uint32),
                storage_origin=born[:, 2].astype(np.uint8),
                storage_payload=born[:, 3].astype(np.uint32),
                placement=np.array(self.placements, np.uint32) if any(self.placements) else None,
                annotation=np.array(self.annotations, np.uint32) if any(self.annotations) else None,
                device_duration_ns=None if device_durations is None else np.array(device_durations, np.uint64),
            )
        )
        self._clear()

    def close(self) -> Path:
        self.writer.close(ended_ns=5_000_000)
        return self.path


def every_kind(path: Path) -> Path:
    """A capture with every kind of record and of value in it, in four frames."""
    b = Builder(path)
    w = b.writer
    cpu = w.device(Device("cpu", -1, "A processor"))
    cuda = w.device(Device("cuda", 0, "A GPU", '{"capability":[9,0],"memory":151397597184}'))
    f32 = w.meta(TensorMeta(DType.float32, STRIDED, cpu, (16, 64), (64, 1)))
    flags = TensorFlag.conj | TensorFlag.requires_grad
    column = w.meta(TensorMeta(DType.float32, STRIDED, cpu, (64, 16), (1, 64), flags))
    scalar = w.meta(TensorMeta(DType.int64, STRIDED, cpu, (), ()))
    indices = w.meta(TensorMeta(DType.int64, STRIDED, cpu, (2, 5), (5, 1)))
    sparse = w.meta(TensorMeta(DType.float32, Layout.sparse_coo, cpu, (4, 4), (0, 0)))
    half = w.meta(TensorMeta(DType.bfloat16, STRIDED, cuda, (8,), (1,)))
    execute = w.scope(0, "execute")
    step = w.scope(execute, "step 3")
    generator = w.generator(Generator(cpu, True))
    data, state = w.payload(bytes(range(256)) * 16), w.payload(b"generator state")

    model = w.file(
        ExternalFile(
            "/nowhere/model.safetensors",
            2**54,
            FileIdentity(2**63, 7, -5),
            "00112233445566778899aabbccddeeff",
            format="safetensors",
        )
    )
    tokens = w.file(ExternalFile("tokens.bin", len(HOSTILE[0]), payload=w.payload(HOSTILE[0].encode())))
    piece, other_piece = w.range(FileRange(model, 2**53 + 1, 64)), w.range(FileRange(tokens, 3, 5))
    noise = w.recipe(Recipe(DType.bfloat16, 50, 2**64 - 1, Statistics(0.5, 1.25, -math.inf, math.nan, 7, 2, 1, 0)))
    note = w.annotation(
        {"import": "inferred", "assumed": HOSTILE, "count": 3, "large": 2**70, "deep": {"x": [1.5, None]}}
    )

    text = Node(V.string, "name", "execute")
    b.record(Signature(RecordKind.scope_begin, (text,)), scope=execute)
    weight = b.storage(4096, cpu, StorageOrigin.payload, data)
    b.record(
        Signature(
            RecordKind.storage_import,
            (
                Node(V.storage, "storage"),
                Node(V.payload, "payload"),
                Node(V.int, "version"),
                Node(V.string, "reason", "first_use"),
            ),
        ),
        ints=[weight, data, 0],
        scope=execute,
    )
    absent = b.storage(64, cpu, StorageOrigin.absent)
    b.record(
        Signature(
            RecordKind.storage_import,
            (
                Node(V.storage, "storage"),
                Node(V.none, "payload"),
                Node(V.int, "version"),
                Node(V.string, "reason", "outside_write"),
            ),
        ),
        ints=[absent, 2],
        scope=execute,
    )
    w_row, w_column = b.tensor(weight, f32), b.tensor(weight, column, 128)
    mm = w.kernel(Kernel("aten::mm", "default", "aten::mm(Tensor self, Tensor mat2) -> Tensor"))
    out = b.storage(1024, cpu, StorageOrigin.op)
    product = b.tensor(out, f32)
    call = Signature(RecordKind.op, tensors("self", "mat2"), (Node(V.tensor),), mm, OpStatus.ok)
    for thread in (0, 1):
        b.record(call, [w_row, w_column, product], scope=step, thread=thread, annotation=note * thread)
    b.record(Signature(RecordKind.op, tensors("self", "mat2"), (), mm, OpStatus.raised), [w_row, w_row], scope=step)
    b.frame(device_durations=[0, 0, 0, 7, 2**64 - 1, 12])

    other, at, placed = b.tensor(0, sparse), b.tensor(out, indices), b.tensor(out, half)
    every = w.kernel(Kernel("test::every", "out", "test::every(...) -> ..."))
    number = Node(V.int)
    b.record(
        Signature(
            RecordKind.op,
            (
                Node(V.none, "none"),
                Node(V.bool, "yes", 1),
                Node(V.bool, "no", 0),
                Node(V.int, "small"),
                Node(V.int, "large"),
                Node(V.int, "smallest"),
                Node(V.float, "tenth"),
                Node(V.float, "nan"),
                Node(V.float, "inf"),
                Node(V.float, "minus"),
                Node(V.complex, "complex"),
                Node(V.string, "text", 'say "é"\n'),
                Node(V.dtype, "dtype", DType.float8_e4m3fn),
                Node(V.layout, "layout", Layout.sparse_csr),
                Node(V.memory_format, "memory", MemoryFormat.channels_last),
                Node(V.device, "device", cuda),
                Node(V.storage, "storage"),
                Node(V.generator, "generator"),
                Node(V.process_group, "group", "default_pg"),
                Node(V.opaque, "opaque", "ScriptObject of c10d::Work"),
                Node(V.payload, "payload"),
                Node(V.range, "range"),
                Node(V.recipe, "recipe"),
                Node(V.list, "empty"),
                Node(V.tuple, "pair", None, (number, Node(V.tensor))),
                Node(V.list, "sizes", None, (number,) * 12),
                Node(V.list, "one", None, (number,)),
                Node(V.list, "ratios", None, (Node(V.float),) * 3),
                Node(V.list, "complexes", None, (Node(V.complex),) * 2),
                Node(V.list, "flags", None, (Node(V.bool, "", 1), Node(V.bool, "", 0))),
                Node(V.list, "nones", None, (Node(V.none), Node(V.none))),
                Node(V.list, "optional", None, (Node(V.tensor), Node(V.none), Node(V.tensor))),
                Node(V.list, "many", None, (Node(V.tensor),) * 5),
                Node(
                    V.list,
                    "nested",
                    None,
                    (Node(V.list, "", None, (number, number)), Node(V.list, "", None, (Node(V.float),))),
                ),
                Node(V.list, "generators", None, (Node(V.generator), Node(V.generator))),
                Node(
                    V.composite,
                    "matrix",
                    "sparse_coo",
                    (Node(V.tensor), Node(V.tensor), Node(V.list, "", None, (number, number))),
                ),
            ),
            (
                Node(V.tensor),
                Node(V.list, "", None, (Node(V.tensor), Node(V.tensor))),
                Node(V.int),
                Node(V.bool, "", 1),
            ),
            every,
            OpStatus.ok,
        ),
        [w_row, w_row, product, w_row, w_column, product, other, placed, at, product, placed, w_row, w_column],
        [
            7,
            2**63 - 1,
            -(2**63),
            weight,
            generator,
            state,
            piece,
            noise,
            3,
            *range(10),
            2**53,
            2**53 + 1,
            5,
            8,
            9,
            generator,
            generator,
            4,
            4,
            -1,
        ],
        [0.1, math.nan, math.inf, -math.inf, 1.5, -2.5, 1e-300, 1e300, -0.0, 1.0, 2.0, math.nan, 4.0, 0.5],
        scope=step,
    )
    b.frame(durations=False)

    item = b.tensor(out, scalar)
    digest = TensorDigest(2**64 - 1, 0x9F, 3, 1, 0, -1.0, math.inf, math.nan, 2.5, (1.0, math.nan, -1.0))
    read = (Node(V.string, "method", "tolist"), Node(V.tensor, "tensor"))
    b.record(Signature(RecordKind.host_read, (*read, *digest.nodes())), [product], *digest.slots(), scope=step)
    b.record(Signature(RecordKind.host_read, read), [item], scope=step)
    whole = TensorDigest(1, 2**63, 2, 0, 0, None, None, None, None, (2**60, -3))
    of = (Node(V.int, "of"), Node(V.int, "result"))
    ints, floats = whole.slots()
    arguments = (Node(V.tensor, "tensor"), *of, *whole.nodes())
    b.record(Signature(RecordKind.digest, arguments), [item], [3, 0, *ints], floats)
    waves = TensorDigest(5, 6, 2, 0, 0, None, None, 1.0, 2.0, (1 + 2j, complex(math.nan, math.inf)))
    ints, floats = waves.slots()
    arguments = (Node(V.tensor, "tensor"), *of, *waves.nodes())
    b.record(Signature(RecordKind.digest, arguments), [product], [-1, -1, *ints], floats)
    b.record(Signature(RecordKind.storage_resize, (Node(V.storage, "storage"), Node(V.int, "bytes"))), ints=[out, 2048])
    b.record(Signature(RecordKind.storage_release, (Node(V.storage, "storage"),)), ints=[out])
    b.record(
        Signature(RecordKind.generator_state, (Node(V.generator, "generator"), Node(V.payload, "payload"))),
        ints=[generator, state],
    )
    b.record(
        Signature(
            RecordKind.global_state,
            (
                Node(V.bool, "grad_enabled", 0),
                Node(V.int, "num_threads"),
                Node(V.float, "min"),
                Node(V.string, "precision", "high"),
                Node(V.none, "nothing"),
            ),
        ),
        ints=[2],
        floats=[0.25],
    )
    b.record(Signature(RecordKind.synchronize, (Node(V.device, "device", cuda),)))
    b.record(
        Signature(
            RecordKind.unsupported,
            (
                Node(V.string, "reason", "compiled_region"),
                Node(V.string, "op", "CompiledFxGraph"),
                Node(V.string, "detail", "fused kernels are not seen"),
            ),
        ),
        scope=step,
    )
    b.frame()

    for hostile in HOSTILE:
        kernel = w.kernel(Kernel(hostile, hostile, hostile, KernelKind.collective))
        scope = w.scope(step, hostile)
        b.record(Signature(RecordKind.scope_begin, (Node(V.string, "name", hostile),)), scope=scope)
        arguments = (
            Node(V.tensor, hostile),
            Node(V.string, hostile + "2", hostile),
            Node(V.opaque, "o", hostile),
            Node(V.process_group, "g", hostile),
            Node(V.composite, "c", hostile, (Node(V.tensor),)),
            Node(V.list, "l", None, (Node(V.string, "", hostile),) * 2),
        )
        b.record(Signature(RecordKind.op, arguments, (), kernel, OpStatus.ok), [w_row, w_row], scope=scope)
        b.record(Signature(RecordKind.global_state, (Node(V.string, hostile, hostile),)), scope=scope)
        b.record(
            Signature(
                RecordKind.unsupported, tuple(Node(V.string, name, hostile) for name in ("reason", "op", "detail"))
            ),
            scope=scope,
        )
        b.record(Signature(RecordKind.scope_end, (Node(V.string, "name", hostile),)), scope=scope)
    for origin, kind, number in (
        (StorageOrigin.external_file, V.range, piece),
        (StorageOrigin.external_file, V.range, other_piece),
        (StorageOrigin.initializer, V.recipe, noise),
    ):
        size = 100 if kind == V.recipe else 64 if number == piece else 5
        b.record(
            Signature(
                RecordKind.storage_import,
                (
                    Node(V.storage, "storage"),
                    Node(kind, "payload"),
                    Node(V.int, "version"),
                    Node(V.string, "reason", "first_use"),
                ),
            ),
            ints=[b.storage(size, cpu, origin, number), number, 0],
            annotation=note if number == piece else 0,
        )
    aside = w.placement(StreamPlacement(((cuda, 2),)))
    stream = (Node(V.device, "device", cuda), Node(V.int, "stream"))
    event = Node(V.int, "event")
    b.record(Signature(RecordKind.event_record, (event, *stream)), ints=[1, 0])
    b.record(Signature(RecordKind.event_wait, (event, *stream)), ints=[1, 2])
    b.record(call, [w_row, w_column, product], placement=aside)
    b.record(Signature(RecordKind.stream_use, (Node(V.tensor, "tensor"), *stream)), [w_row], [2], placement=aside)
    b.record(Signature(RecordKind.stream_synchronize, stream), ints=[2])
    b.record(Signature(RecordKind.event_synchronize, (event,)), ints=[1])
    b.record(Signature(RecordKind.scope_end, (text,)), scope=execute)
    b.frame()
    return b.close()


def plain(path: Path, ops: int = 100, frame: int = 10) -> Path:
    """A capture that a strict replay supports: a scope around `ops` calls of two kernels, `frame` records a frame."""
    b = Builder(path)
    w = b.writer
    cpu = w.device(Device("cpu"))
    meta = w.meta(TensorMeta(DType.float32, STRIDED, cpu, (4,), (1,)))
    scope = w.scope(0, "execute")
    kernels = [
        w.kernel(Kernel(name, "Tensor", f"{name}.Tensor(Tensor self, Tensor other) -> Tensor"))
        for name in ("aten::add", "aten::mul")
    ]
    calls = [
        Signature(RecordKind.op, (*tensors("self", "other"),), (Node(V.tensor),), kernel, OpStatus.ok)
        for kernel in kernels
    ]
    data = w.payload(bytes(16))
    last = b.tensor(b.storage(16, cpu, StorageOrigin.payload, data), meta)
    b.record(Signature(RecordKind.scope_begin, (Node(V.string, "name", "execute"),)), scope=scope)
    for number in range(ops):
        made = b.tensor(b.storage(16, cpu), meta)
        b.record(calls[number % 2], [last, last, made], scope=scope)
        last = made
        if b.ordinal % frame == 0:
            b.frame()
    b.record(Signature(RecordKind.scope_end, (Node(V.string, "name", "execute"),)), scope=scope)
    b.frame()
    return b.close()
