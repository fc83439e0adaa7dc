"""The numbers of the format, as enumerations. schema/opreplay.fbs is their source; a test compares the two."""

from __future__ import annotations

from enum import IntEnum, IntFlag

MAJOR_VERSION = 1
MINOR_VERSION = 0
UNKNOWN_NS = -1  # in a column of durations, as it is handed to the writer and by the reader: not known
UNKNOWN_DEVICE_NS = 0xFFFFFFFFFFFFFFFF  # likewise in a column of device durations, and in the file


class FrameKind(IntEnum):
    none = 0
    head = 1
    tables = 2
    records = 3
    payload = 4
    summary = 5
    index = 6


class Codec(IntEnum):
    none = 0
    zstd = 1


class RecordKind(IntEnum):
    none = 0
    op = 1
    scope_begin = 2
    scope_end = 3
    storage_import = 4
    storage_resize = 5
    storage_release = 6
    generator_state = 7
    global_state = 8
    host_read = 9
    digest = 10
    synchronize = 11
    collective = 12
    unsupported = 13
    event_record = 14
    event_wait = 15
    stream_use = 16
    stream_synchronize = 17
    event_synchronize = 18


class KernelKind(IntEnum):
    none = 0
    operator = 1
    triton = 2
    collective = 3
    inductor_cpp = 4
    graph = 5
    native = 6


class OpStatus(IntEnum):
    none = 0
    ok = 1
    raised = 2


class ValueKind(IntEnum):
    none = 0
    bool = 1
    int = 2
    float = 3
    complex = 4
    string = 5
    dtype = 6
    layout = 7
    memory_format = 8
    device = 9
    tensor = 10
    storage = 11
    list = 12
    generator = 13
    process_group = 14
    opaque = 15
    payload = 16
    composite = 17
    tuple = 18
    range = 19
    recipe = 20


class DType(IntEnum):
    none = 0
    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float16 = 6
    float32 = 7
    float64 = 8
    complex32 = 9
    complex64 = 10
    complex128 = 11
    bool = 12
    qint8 = 13
    quint8 = 14
    qint32 = 15
    bfloat16 = 16
    quint4x2 = 17
    quint2x4 = 18
    bits1x8 = 19
    bits2x4 = 20
    bits4x2 = 21
    bits8 = 22
    bits16 = 23
    float8_e5m2 = 24
    float8_e4m3fn = 25
    float8_e5m2fnuz = 26
    float8_e4m3fnuz = 27
    uint16 = 28
    uint32 = 29
    uint64 = 30
    uint1 = 31
    uint2 = 32
    uint3 = 33
    uint4 = 34
    uint5 = 35
    uint6 = 36
    uint7 = 37
    int1 = 38
    int2 = 39
    int3 = 40
    int4 = 41
    int5 = 42
    int6 = 43
    int7 = 44
    float8_e8m0fnu = 45
    float4_e2m1fn_x2 = 46


class Layout(IntEnum):
    none = 0
    strided = 1
    sparse_coo = 2
    sparse_csr = 3
    mkldnn = 4
    sparse_csc = 5
    sparse_bsr = 6
    sparse_bsc = 7
    jagged = 8


class MemoryFormat(IntEnum):
    none = 0
    contiguous_format = 1
    preserve_format = 2
    channels_last = 3
    channels_last_3d = 4


class TensorFlag(IntFlag):
    conj = 1
    neg = 2
    requires_grad = 4
    zero = 8


class StorageOrigin(IntEnum):
    none = 0
    op = 1
    uninitialized = 2
    payload = 3
    absent = 4
    external_file = 5
    initializer = 6


class FileValidation(IntFlag):
    identity = 1
    digest = 2


ITEM_BYTES: dict[DType, int] = {
    **{d: 1 for d in DType},  # everything not listed below is one byte an element
    **{d: 2 for d in (DType.int16, DType.float16, DType.bfloat16, DType.uint16, DType.bits16)},
    **{d: 4 for d in (DType.int32, DType.float32, DType.complex32, DType.qint32, DType.uint32)},
    **{d: 8 for d in (DType.int64, DType.float64, DType.complex64, DType.uint64)},
    DType.complex128: 16,
}
