"""Where operators are found, and which libraries may be imported for them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import DType
from replayfmt.importers.common.arguments import TensorSpec, of_tensor
from replayfmt.importers.common.operators import ATTRIBUTE, REGISTRY, Operators
from replayfmt.pytorch import op_libraries
from replayfmt.pytorch.op_libraries import KNOWN_LIBRARIES, OpLibraries, modules_registering, parse_op_library

T = of_tensor(TensorSpec(DType.float32, (4,), (1,)))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that registers operators of the namespace `importer_tests` once it is imported."""
    name = f"importer_tests_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import torch
        library = torch.library.Library("importer_tests", "FRAGMENT")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        def thrice(x):
            return x * 3
        not_callable = 3
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    module = sys.modules.pop(name, None)
    if module is not None:
        module.library._destroy()  # at once, not when somebody collects it: the next test may want to be without it


def test_a_registered_operator_is_found_in_the_registry() -> None:
    candidates, why = Operators().candidates("aten::mm")
    assert not why and {each.overload for each in candidates if each.dispatched} == {
        "default",
        "out",
        "dtype",
        "dtype_out",
    }
    assert {each.found for each in candidates} == {REGISTRY}


@pytest.mark.parametrize("name", ["", "mm", "aten::", "::mm", "aten::no such", "ProfilerStep#3", "a::b::c"])
def test_what_is_no_operator_name_is_none(name: str) -> None:
    assert Operators().candidates(name)[0] == []


def test_aliases_that_traces_print_lead_to_the_registered_operator() -> None:
    choice = Operators().choose("detach", [T])
    assert choice.operator is not None and choice.operator.name == "aten::detach"
    assert "table of aliases" in choice.assumed[0]


def test_a_library_is_imported_only_where_the_user_allows_it(library: str) -> None:
    unknown = Operators().choose("importer_tests_unknown::twice", [T])
    assert unknown.reason == "no_schema" and "--op-library importer_tests_unknown=MODULE" in unknown.detail
    libraries = OpLibraries()
    libraries.register("importer_tests", library)
    assert library not in sys.modules
    choice = Operators(libraries).choose("importer_tests::twice", [T])
    assert library in sys.modules
    assert choice.operator is not None and choice.operator.found == REGISTRY
    assert torch.ops.importer_tests.twice(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_known_library_needs_the_users_leave_and_the_message_says_which_flag(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_LIBRARIES, "importer_tests_known", (library,))
    refused = OpLibraries().load("importer_tests_known")
    assert not refused.modules and f"--allow-import {library}" in refused.problem
    assert library not in sys.modules
    for allowed in (library, "importer_tests_known"):
        assert OpLibraries([allowed]).load("importer_tests_known").modules[0].__name__ == library


def test_a_name_from_a_trace_is_never_imported_by_itself(library: str) -> None:
    assert Operators(OpLibraries(["importer_tests", library])).choose(f"{library}::twice", [T]).reason == "no_schema"
    assert library not in sys.modules


def test_a_library_that_fails_to_import_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "importer_tests_broken.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = OpLibraries(registered={"broken": ("importer_tests_broken",)}).load("broken")
    assert not loaded.modules and "no driver" in loaded.problem


def test_a_callable_of_the_operators_name_is_found_in_a_module_that_may_be_imported(library: str) -> None:
    operators = Operators(OpLibraries(registered={"importer_tests_plain": (library,)}))
    found = operators.attribute("importer_tests_plain::thrice")
    assert found is not None and found(torch.ones(1)).item() == 3.0
    assert operators.attribute("importer_tests_plain::not_callable") is None
    assert operators.attribute("importer_tests_plain::missing") is None
    assert ATTRIBUTE == "a module's attribute"


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose operators are no longer in the module that the table knows."""
    package = f"moved_{tmp_path.name}"
    files = {
        "__init__.py": "",
        "ops/__init__.py": "",
        "ops/__main__.py": "raise SystemExit('run')  # custom_op('moved_ns::found'",
        "ops/broken.py": "raise RuntimeError('no driver')  # register_custom_op(op_name='found'",
        "ops/place.py": "import torch\nlibrary = torch.library.Library('moved_ns', 'FRAGMENT')\n"
        "library.define('found(Tensor x) -> Tensor')\n"
        "library.impl('found', lambda x: x * 2, 'CompositeExplicitAutograd')\n",
        "ops/talk.py": "raise RuntimeError('imported')  # found, custom_op",
        "tests/test_it.py": "raise SystemExit('a test')  # Library( custom_op('moved_ns::found'",
        "plain.py": "def plain(x):\n    return x\n",
    }
    for name, text in files.items():
        path = tmp_path / package / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(KNOWN_LIBRARIES, "moved_ns", (f"{package}.attention.layer", f"{package}.plain"))
    yield package
    place = sys.modules.get(f"{package}.ops.place")
    if place is not None:
        place.library._destroy()
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        del sys.modules[name]


def test_an_operator_that_moved_within_its_library_is_found_where_it_registers(moved: str) -> None:
    assert "may not be imported" in Operators().choose("moved_ns::found", [T]).detail
    assert not any(name.startswith(moved) for name in sys.modules)
    operators = Operators(OpLibraries([moved]))
    choice = operators.choose("moved_ns::found", [T])
    assert choice.operator is not None and choice.operator.found == REGISTRY
    assert f"{moved}.ops.place" in sys.modules and f"{moved}.ops.talk" not in sys.modules
    lacking = operators.choose("moved_ns::nowhere", [T]).detail
    assert f"though {moved}.plain is imported" in lacking
    assert lacking.endswith("name that with --op-library moved_ns=MODULE")


def test_what_may_be_imported_is_not_widened_by_where_an_operator_registers(moved: str) -> None:
    detail = Operators(OpLibraries(registered={"moved_ns": (f"{moved}.plain",)})).choose("moved_ns::found", [T]).detail
    assert f"name it with --op-library moved_ns={moved}.ops." in detail
    assert f"{moved}.ops.place" not in sys.modules


def test_a_plain_function_is_named_with_the_only_flag_that_lets_it_be_called(moved: str) -> None:
    detail = Operators(OpLibraries([moved])).choose("moved_ns::plain", [T]).detail
    assert f"{moved}.plain has a function of that name" in detail
    assert f"--op-library moved_ns={moved}.plain" in detail
    operators = Operators(OpLibraries(registered={"moved_ns": (f"{moved}.plain",)}))
    assert operators.attribute("moved_ns::plain") is not None


def test_a_replay_finds_a_moved_operator_too(moved: str, tmp_path: Path) -> None:
    path = tmp_path / "moved.opreplay"
    assert Operators(OpLibraries([moved])).choose("moved_ns::found", [T]).operator is not None
    with replayfmt.capture(path):
        kept = torch.ops.moved_ns.found(torch.ones(2))
    assert kept.tolist() == [2.0, 2.0]
    sys.modules.pop(f"{moved}.ops.place").library._destroy()
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.Plan(path)
    assert f"--allow-import={moved}" in str(refused.value.findings)
    with replayfmt.Plan(path, allow_imports=[moved]) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_extension_modules_are_searched_for_the_operators_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "with_extension"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"\0with_ns\0twice(Tensor x) -> Tensor\0")
    (package / f"_D{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert modules_registering("with_extension", "with_ns", "twice") == ["with_extension._C"]
    assert modules_registering("with_extension", "with_ns", "thrice") == []
    assert modules_registering("not_installed_anywhere", "with_ns", "twice") == []


def test_entry_points_register_libraries(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("importer_tests_entry", library, op_libraries.ENTRY_POINT_GROUP)
    monkeypatch.setattr(op_libraries, "_entry_points", None)
    monkeypatch.setattr(op_libraries, "entry_points", lambda group: [entry])
    assert OpLibraries().modules_for("importer_tests_entry") == (library,)
    assert not OpLibraries().load("importer_tests_entry").modules
    assert OpLibraries([library]).load("importer_tests_entry").modules
    monkeypatch.setattr(op_libraries, "_entry_points", None)


def test_op_library_flags_are_checked() -> None:
    assert parse_op_library("mylib=mylib.ops") == ("mylib", "mylib.ops")
    for wrong in ("mylib", "=x", "a b=c", "mylib=", "mylib=os;system"):
        with pytest.raises(UsageError, match="NAMESPACE=MODULE"):
            parse_op_library(wrong)


def test_the_namespaces_of_common_libraries_are_known() -> None:
    for namespace in (
        "vllm",
        "_C",
        "_C_cache_ops",
        "_moe_C",
        "_rocm_C",
        "aiter",
        "sgl_kernel",
        "flash_attn",
        "xformers",
        "torchvision",
        "fbgemm",
        "quantized",
    ):
        assert OpLibraries().modules_for(namespace)
