"""What a kernel may write: found from its source, and from Triton's intermediate code. What is not found is not
written, whatever way the pointer takes."""

from __future__ import annotations

import importlib.util
import linecache
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.language import pointer_type as pointer_to

from replayfmt.pytorch.triton.accesses import NotRead, accesses_of, ir_accesses
from replayfmt.pytorch.triton.sources import NotStandalone, load_source, standalone_source
from tests.triton_kernels import writing_kernels
from tests.triton_kernels.writing_kernels import KERNELS, POINTERS


def ttir(kernel: Any, types: dict[str, str], constants: dict[tuple[int, ...], Any] | None = None) -> str:
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
    return str(ASTSource(kernel, types, constants).make_ir(target, options, codegen, modules, context))


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
def with_a_pointer_by_another_name(a, b):
    tl.store(tl.load(a).to(pointer_to(tl.float32)), 1.0)


@triton.jit
def with_a_comment(a: tl.pointer_type, b):  # of tl.pointer_type, as generated kernels say
    tl.store(a, tl.load(b))


def test_what_is_said_of_pointers_is_told_from_what_makes_them() -> None:
    accesses = accesses_of(standalone_source(with_a_comment))
    assert (accesses.makes_pointers, accesses.written) == (False, {"a"})
    assert accesses_of(standalone_source(with_a_pointer_by_another_name)).makes_pointers


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


@triton.jit
def loading(p):
    return tl.load(p)


@triton.jit
def with_branches(a, b, c, n, MODE: tl.constexpr, KIND: tl.constexpr, CHANGED: tl.constexpr):
    CHANGED = CHANGED + 0
    if MODE and KIND == "sum":
        tl.store(c, tl.load(a))
    elif not MODE or KIND is None:
        tl.store(c, loading(b))
    if CHANGED:
        tl.atomic_add(c, 1.0)


@pytest.mark.parametrize(
    ("constants", "read"),
    [
        ({}, {"a", "b", "c"}),
        ({"MODE": True, "KIND": "sum", "CHANGED": 0}, {"a", "c"}),
        ({"MODE": 1, "KIND": "most"}, {"c"}),
        ({"MODE": True, "KIND": None}, {"b", "c"}),
        ({"MODE": False}, {"b", "c"}),
        ({"KIND": "most"}, {"b", "c"}),
    ],
)
def test_constants_decide_what_is_read(constants: dict[str, Any], read: set[str]) -> None:
    """What is written is what any launch may write, and a variable that is assigned is no constant."""
    source = standalone_source(with_branches)
    assert accesses_of(source, constants).read == read
    assert accesses_of(source).written == {"c"}


@triton.jit
def with_an_option(a, b, c, HAS_B: tl.constexpr):
    value = tl.load(a)
    if HAS_B:
        value += loading(b)
    tl.store(c, value)


@triton.jit
def adding_up(a, b, c, HAS_B: tl.constexpr):
    tl.atomic_add(c if HAS_B else a, tl.load(b))


@pytest.mark.parametrize(
    ("kernel", "has_b", "read"),
    [
        (with_an_option, True, {"a", "b"}),
        (with_an_option, False, {"a"}),
        (adding_up, True, {"b", "c"}),
        (adding_up, False, {"a", "b"}),
    ],
)
def test_reads_are_found_in_the_intermediate_code(kernel: Any, has_b: bool, read: set[str]) -> None:
    types = {"a": "*fp32", "b": "*fp32", "c": "*fp32", "HAS_B": "constexpr"}
    found = ir_accesses(ttir(kernel, types, {(3,): has_b})).read
    assert {list(types)[place] for place in found} == read
    assert read <= (accesses_of(standalone_source(kernel), {"HAS_B": has_b}).read or set())


def test_what_triton_cannot_read_is_an_error() -> None:
    with pytest.raises(NotRead, match="cannot read its own intermediate code"):
        ir_accesses("module { tt.func @f() { nothing } }")


def test_a_module_has_no_line_of_its_programs_modules() -> None:
    for case in KERNELS.values():
        assert not re.search("^(from|import) (?!triton)", standalone_source(case.kernel).text, re.MULTILINE)


def loaded_again(name: str) -> Any:
    """A module of Triton's, as libraries load it that look for a function in several places."""
    specification = importlib.util.find_spec(name)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


rsqrt = loaded_again("triton.language.extra.libdevice").rsqrt


@triton.jit
def with_a_copy_of_tritons(a):
    tl.store(a, rsqrt(tl.load(a)))


def test_a_function_of_tritons_is_imported_from_where_it_is() -> None:
    source = standalone_source(with_a_copy_of_tritons)
    assert "from triton.language.extra.libdevice import rsqrt\n" in source.text
    assert accesses_of(source).written == {"a"}


@gluon.jit
def in_gluon(a):
    gluon_language.store(a, 1.0)


def test_a_kernel_that_is_written_in_gluon_is_refused() -> None:
    with pytest.raises(NotStandalone, match="in_gluon is written in Gluon"):
        standalone_source(in_gluon)


package, inner = ModuleType("package"), ModuleType("package.inner")
vars(package)["inner"] = inner
vars(inner).update(FACTOR=tl.constexpr(2.0), loading=loading)


@triton.jit
def with_a_module_in_a_module(a):
    tl.store(a, package.inner.loading(a) * package.inner.FACTOR)


def test_a_module_inside_a_module_has_what_is_used_of_it() -> None:
    module = vars(load_source(standalone_source(with_a_module_in_a_module).text, "test"))
    assert module["package"].inner.FACTOR.value == 2.0 and module["package"].inner.loading is module["loading"]


def unwrapped(given):
    return given.value if isinstance(given, tl.constexpr) else given


@tl.constexpr
def bits_of(dtype: tl.constexpr) -> tl.dtype:
    return tl.core.get_int_dtype(unwrapped(dtype).primitive_bitwidth, False)


@triton.jit
def with_a_function_of_python(a):
    tl.store(a, tl.load(a).to(bits_of(tl.float32), bitcast=True).to(tl.float32))


def test_functions_of_python_that_triton_calls_are_in_the_module() -> None:
    module = vars(load_source(standalone_source(with_a_function_of_python).text, "test"))
    codes = [ttir(each, {"a": "*fp32"}) for each in (with_a_function_of_python, module["with_a_function_of_python"])]
    plain = [re.sub(r" loc\(.*\)|#loc.*", "", code) for code in codes]
    assert plain[0] == plain[1] and "arith.uitofp" in plain[0]


EDITED = """import triton, triton.language as tl
@tl.constexpr
def one(n):
    return 1
@triton.jit
def kernel(a):
    tl.store(a, one(0))
"""


def test_a_function_of_python_whose_file_was_edited_since_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text(EDITED)
    module = runpy.run_path(str(file))
    assert "return 1" in standalone_source(module["kernel"]).text
    file.write_text(EDITED.replace("return 1", "return 1000"))
    linecache.checkcache(str(file))
    with pytest.raises(NotStandalone, match="the text of one is not that of the function"):
        standalone_source(module["kernel"])


FACTORS = [1.0, 2.0]


@triton.jit
def with_a_list(a):
    tl.store(a, FACTORS[0])


def test_a_list_that_was_changed_in_place_is_noticed() -> None:
    source = standalone_source(with_a_list)
    assert source.holds() and "FACTORS = [1.0, 2.0]" in source.text
    FACTORS[0] = 3.0
    assert not source.holds() and "FACTORS = [3.0, 2.0]" in standalone_source(with_a_list).text
