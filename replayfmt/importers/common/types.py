"""Type names as traces print them, and enumerations that traces store as numbers.

Three families of names occur: C++ type names (`long int`, `c10::BFloat16`, `at::Half`: what the profiler prints),
PyTorch's scalar type names (`Long`, `BFloat16`) and Python's (`torch.int64`, `int64`). Execution traces wrap them:
`Tensor(long int)`, `GenericList[Tensor(float),Int]`. Numbers of enumerations are those of c10.
"""

from __future__ import annotations

from functools import lru_cache

from replayfmt.format.codes import DType, Layout, MemoryFormat

# fmt: off
_CPLUSPLUS = {
    "unsigned char": DType.uint8, "uint8_t": DType.uint8, "signed char": DType.int8, "char": DType.int8,
    "int8_t": DType.int8, "short": DType.int16, "short int": DType.int16, "int16_t": DType.int16, "int": DType.int32,
    "int32_t": DType.int32, "long": DType.int64, "long int": DType.int64, "long long": DType.int64,
    "long long int": DType.int64, "int64_t": DType.int64, "__int64": DType.int64, "half": DType.float16,
    "__half": DType.float16, "__nv_bfloat16": DType.bfloat16, "float": DType.float32, "double": DType.float64,
    "bool": DType.bool, "unsigned short": DType.uint16, "unsigned short int": DType.uint16,
    "short unsigned int": DType.uint16, "uint16_t": DType.uint16, "unsigned int": DType.uint32,
    "unsigned": DType.uint32, "uint32_t": DType.uint32, "unsigned long": DType.uint64,
    "long unsigned int": DType.uint64, "unsigned long int": DType.uint64, "unsigned long long": DType.uint64,
    "long long unsigned int": DType.uint64, "uint64_t": DType.uint64, "complex<half>": DType.complex32,
    "complex<float>": DType.complex64, "complex<double>": DType.complex128,
}
# fmt: on
# The names of c10::ScalarType, which some traces use where others use C++ names.
_SCALAR_TYPES = {
    "byte": DType.uint8,
    "char": DType.int8,
    "short": DType.int16,
    "int": DType.int32,
    "long": DType.int64,
    "half": DType.float16,
    "float": DType.float32,
    "double": DType.float64,
    "complexhalf": DType.complex32,
    "complexfloat": DType.complex64,
    "complexdouble": DType.complex128,
    "cfloat": DType.complex64,
    "cdouble": DType.complex128,
}
_BY_NAME = {dtype.name.lower(): dtype for dtype in DType if dtype}
_PREFIXES = ("c10::", "at::", "std::", "torch.", "thrust::", "const ", "::")


@lru_cache(maxsize=4096)
def dtype_of(name: str) -> DType | None:
    """The dtype of a type name, None if it is not a known dtype.

    >>> dtype_of("long int"), dtype_of("c10::Float8_e4m3fn"), dtype_of("BFloat16"), dtype_of("torch.int8")
    """
    text = " ".join(name.split())
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if text.startswith(prefix):
                text, stripped = text[len(prefix) :], True
    text = text.removesuffix(" const").replace("c10::", "").replace("at::", "").replace("std::", "")
    lowered = text.lower().replace("< ", "<").replace(" >", ">")
    return _CPLUSPLUS.get(lowered) or _BY_NAME.get(lowered) or _SCALAR_TYPES.get(lowered)


def wrapped(name: str) -> tuple[str, list[str]]:
    """A type name split into its parts: `Tensor(float)` is ("Tensor", ["float"]), `GenericList[Int,Tensor(c10::Half)]`
    is ("GenericList", ["Int", "Tensor(c10::Half)"]); a name that wraps nothing has no inner names."""
    text = name.strip()
    for opening, closing in ("()", "[]"):
        head, found, rest = text.partition(opening)
        if found and rest.endswith(closing) and head.isidentifier():
            return head, _split(rest[:-1])
    return text, []


def _split(text: str) -> list[str]:
    """Comma-separated names, not split at commas inside brackets."""
    parts: list[str] = []
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([<{":
            depth += 1
        elif character in ")]>}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def scalar_type(number: int) -> DType | None:
    """The dtype for a c10::ScalarType's number, None if there is none: the format's codes are those plus one."""
    return DType(number + 1) if 0 <= number < max(DType) else None


def layout(number: int) -> Layout | None:
    """The layout of a c10::Layout's number."""
    return Layout(number + 1) if 0 <= number < max(Layout) else None


def memory_format(number: int) -> MemoryFormat | None:
    """The memory format of a c10::MemoryFormat's number."""
    return MemoryFormat(number + 1) if 0 <= number < max(MemoryFormat) else None


def layout_of(name: str) -> Layout | None:
    """The layout for a name: `torch.strided`, `Strided`, `SparseCsr`."""
    text = name.removeprefix("torch.").lower().replace("_", "")
    text = {"sparse": "sparsecoo", "mkldnn": "mkldnn"}.get(text, text)
    return next((each for each in Layout if each and each.name.replace("_", "") == text), None)


def memory_format_of(name: str) -> MemoryFormat | None:
    """The memory format for a name: `torch.channels_last`, `ChannelsLast`, `Preserve`."""
    text = name.removeprefix("torch.").lower().replace("_", "").removesuffix("format")
    names = {each.name.replace("_", "").removesuffix("format"): each for each in MemoryFormat if each}
    return names.get(text)
