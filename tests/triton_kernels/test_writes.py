"""What a kernel may write: found from its source, and from Triton's intermediate code. What is not found is not
written, whatever way the pointer takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from replayfmt.pytorch.triton.accesses import accesses_of
from replayfmt.pytorch.triton.ir_writes import NotRead, ir_accesses
from replayfmt.pytorch.triton.sources import standalone_source
from tests.triton_kernels import writing_kernels
from tests.triton_kernels.writing_kernels import KERNELS, POINTERS


def ttir(kernel: Any, types: dict[str, str]) -> str:
    """Triton's first intermediate code of a kernel."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", 80, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(ASTSource(kernel, types).make_ir(target, options, codegen, modules, context))


@pytest.mark.parametrize("name", KERNELS)
def test_no_write_is_missed_in_the_source(name: str) -> None:
    case = KERNELS[name]
    accesses = accesses_of(standalone_source(case.kernel))
    assert accesses.written is not None and not accesses.makes_pointers
    assert accesses.written - {"n"} == case.written | case.in_source


@pytest.mark.parametrize("name", KERNELS)
def test_no_write_is_missed_in_the_intermediate_code(name: str) -> None:
    case = KERNELS[name]
    accesses, places = ir_accesses(ttir(case.kernel, case.types)), list(case.types)
    assert accesses.count == len(places) and not accesses.makes_pointers
    assert {places[place] for place in accesses.written} - {"n"} == case.written | case.in_ir


def test_pointers_made_of_integers_are_seen() -> None:
    first, second = writing_kernels.makes_pointers, writing_kernels.makes_pointers_like_another
    assert accesses_of(standalone_source(first)).makes_pointers
    assert accesses_of(standalone_source(second)).casts_to == {"b"}
    for kernel in (first, second):
        assert ir_accesses(ttir(kernel, {name: POINTERS[name] for name in kernel.arg_names})).makes_pointers


@triton.jit
def with_an_unknown_function(a, b, function: tl.constexpr):
    function(a)


@triton.jit
def with_a_name_of_python(a, b):
    for p, q in zip((a,), (b,)):  # noqa: B905
        tl.store(p, tl.load(q))


@triton.jit
def with_a_function_inside(a, b):
    tl.store((lambda p: p)(a), tl.load(b))


def test_what_is_not_followed_counts_as_written() -> None:
    assert accesses_of(standalone_source(with_an_unknown_function)).written == {"a", "function"}
    assert accesses_of(standalone_source(with_a_name_of_python)).written == {"a", "b"}
    assert accesses_of(standalone_source(with_a_function_inside)).written is None


def test_what_triton_cannot_read_is_an_error() -> None:
    with pytest.raises(NotRead, match="cannot read its own intermediate code"):
        ir_accesses("module { tt.func @f() { nothing } }")


def test_a_module_has_no_line_of_its_programs_modules() -> None:
    for case in KERNELS.values():
        assert not re.search("^(from|import) (?!triton)", standalone_source(case.kernel).text, re.MULTILINE)
