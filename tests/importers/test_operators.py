"""Where operators are found, and which libraries may be imported for them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from replayfmt.errors import UsageError
from replayfmt.format.codes import DType
from replayfmt.importers.arguments import TensorSpec, of_tensor
from replayfmt.importers.operators import ATTRIBUTE, REGISTRY, Operators
from replayfmt.pytorch import op_libraries
from replayfmt.pytorch.op_libraries import KNOWN_LIBRARIES, OpLibraries, parse_op_library

T = of_tensor(TensorSpec(DType.float32, (4,), (1,)))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that registers operators of the namespace `importer_tests` once it is imported."""
    name = f"importer_tests_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent("""
        import torch
        library = torch.library.Library("importer_tests", "FRAGMENT")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        def thrice(x):
            return x * 3
        not_callable = 3
    """))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    module = sys.modules.pop(name, None)
    if module is not None:
        module.library._destroy()  # at once, not when somebody collects it: the next test may want to be without it


def test_a_registered_operator_is_found_in_the_registry() -> None:
    candidates, why = Operators().candidates("aten::mm")
    assert not why and {each.overload for each in candidates if each.dispatched} == {"default", "out", "dtype",
                                                                                      "dtype_out"}
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
        library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_LIBRARIES, "importer_tests_known", (library,))
    refused = OpLibraries().load("importer_tests_known")
    assert not refused.modules and f"--allow-import {library}" in refused.problem
    assert library not in sys.modules
    for allowed in (library, "importer_tests_known"):
        assert OpLibraries([allowed]).load("importer_tests_known").modules[0].__name__ == library


def test_a_name_from_a_trace_is_never_imported_by_itself(library: str) -> None:
    assert Operators(OpLibraries(["importer_tests", library])).choose(f"{library}::twice", [T]).reason == "no_schema"
    assert library not in sys.modules


def test_a_library_that_fails_to_import_is_a_reason_and_no_crash(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
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
    for namespace in ("vllm", "_C", "_C_cache_ops", "_moe_C", "_rocm_C", "aiter", "sgl_kernel", "flash_attn",
                      "xformers", "torchvision", "fbgemm", "quantized"):
        assert OpLibraries().modules_for(namespace)
