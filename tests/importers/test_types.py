"""Names and numbers of types as traces print them."""

from __future__ import annotations

import pytest
import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.importers.common import arguments
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, LAYOUT_CODE, MEMORY_FORMAT_CODE


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("long int", DType.int64),
        ("unsigned char", DType.uint8),
        ("signed char", DType.int8),
        ("short int", DType.int16),
        ("int", DType.int32),
        ("float", DType.float32),
        ("double", DType.float64),
        ("bool", DType.bool),
        ("c10::BFloat16", DType.bfloat16),
        ("c10::Half", DType.float16),
        ("at::Half", DType.float16),
        ("c10::complex<float>", DType.complex64),
        ("c10::complex<double>", DType.complex128),
        ("c10::complex<c10::Half>", DType.complex32),
        ("c10::Float8_e4m3fn", DType.float8_e4m3fn),
        ("c10::Float8_e5m2", DType.float8_e5m2),
        ("c10::Float8_e4m3fnuz", DType.float8_e4m3fnuz),
        ("c10::Float8_e5m2fnuz", DType.float8_e5m2fnuz),
        ("c10::Float8_e8m0fnu", DType.float8_e8m0fnu),
        ("c10::qint8", DType.qint8),
        ("c10::quint8", DType.quint8),
        ("unsigned short", DType.uint16),
        ("unsigned int", DType.uint32),
        ("unsigned long", DType.uint64),
        ("long unsigned int", DType.uint64),
        ("BFloat16", DType.bfloat16),
        ("Long", DType.int64),
        ("Byte", DType.uint8),
        ("ComplexFloat", DType.complex64),
        ("torch.int8", DType.int8),
        ("torch.float8_e4m3fn", DType.float8_e4m3fn),
        ("bfloat16", DType.bfloat16),
        ("Scalar", None),
        ("TensorList", None),
        ("", None),
        ("c10::Unheard_of", None),
    ],
)
def test_type_names_are_dtypes(name: str, dtype: DType | None) -> None:
    assert arguments.dtype_of(name) == dtype


def test_every_dtype_of_torch_is_found_by_the_name_that_torch_prints() -> None:
    for dtype, code in DTYPE_CODE.items():
        assert arguments.dtype_of(str(dtype)) == code


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2fnuz,
        torch.uint16,
    ],
)
def test_numbers_of_enumerations_are_those_that_torch_passes_to_operators(dtype: torch.dtype) -> None:
    graph = torch._C.Graph()  # values do not keep their graph alive
    number = int(graph.insertConstant(dtype).toIValue())
    assert arguments.scalar_type(number) == DTYPE_CODE[dtype]


def test_layouts_and_memory_formats_are_numbered_as_in_c10() -> None:
    assert [arguments.layout(n) for n in range(3)] == [Layout.strided, Layout.sparse_coo, Layout.sparse_csr]
    assert [arguments.memory_format(n) for n in range(4)] == [
        MemoryFormat.contiguous_format,
        MemoryFormat.preserve_format,
        MemoryFormat.channels_last,
        MemoryFormat.channels_last_3d,
    ]
    assert arguments.scalar_type(99) is None and arguments.layout(-1) is None and arguments.memory_format(9) is None


def test_layouts_and_memory_formats_are_known_by_name() -> None:
    for layout, code in LAYOUT_CODE.items():
        assert arguments.layout_of(str(layout).replace("_mkldnn", "mkldnn")) == code
    for memory_format, code in MEMORY_FORMAT_CODE.items():
        assert arguments.memory_format_of(str(memory_format)) == code
    assert arguments.layout_of("Strided") == Layout.strided and arguments.memory_format_of("ChannelsLast") == (
        MemoryFormat.channels_last
    )
    assert arguments.layout_of("tiled") is None and arguments.memory_format_of("") is None


def test_wrapped_names_are_taken_apart() -> None:
    assert arguments.wrapped("Tensor(long int)") == ("Tensor", ["long int"])
    assert arguments.wrapped("GenericList[Tensor(c10::complex<float>),Int,GenericList[Int,Int]]") == (
        "GenericList",
        ["Tensor(c10::complex<float>)", "Int", "GenericList[Int,Int]"],
    )
    assert arguments.wrapped("GenericList[]") == ("GenericList", [])
    assert arguments.wrapped("c10::BFloat16") == ("c10::BFloat16", [])
