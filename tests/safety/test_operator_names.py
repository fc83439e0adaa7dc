"""Operators' names in a capture: looked up in the dispatcher's registry and nowhere else, wherever one is used."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failure.table import recorded
from format.reseal import rename_kernel
from in_process import Tools

from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.errors import InvalidCapture, ReplayRefused, UsageError
from replayfmt.export import replay_script
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter
from replayfmt.importers.common.operators import Operators
from replayfmt.importers.common.results import infer
from replayfmt.pytorch.overloads import find_overload, overloads_of, parse_schema
from replayfmt.replay.plan import Plan
from replayfmt.replay.substitution.loading import find_operator

NO_NAMES = [
    ("aten::exp\n", "default"),
    ("aten", "default"),
    ("::", ""),
    ("", ""),
    ("aten::", "default"),
    ("::exp", "default"),
    ("aten::exp; import os", "default"),
    ("aten::ехр", "default"),
    ("aten::" + "x" * 100_000, "default"),
    ("aten::exp", "default.out"),
    ("aten::exp.out", "default"),
    ("aten::exp", ""),
    ("aten::exp", "x y"),
    ("aten::exp::out", "default"),
    ("aten::exp\x1b[2J", "default"),
    ("aten::1", "default"),
    ("aten::exp", "out()"),
    ("aten::exp", "out\n"),
    ("a b::exp", "default"),
    ("aten-x::exp", "default"),
    ("aten.x::exp", "default"),
]
# Attributes of Python objects under `torch.ops`, names of modules, of TorchScript's operators, of nothing.
UNREGISTERED = [
    ("load_library::__call__", "default"),
    ("load_library::__func__", "__call__"),
    ("import_module::__call__", "default"),
    ("aten::name", "__add__"),
    ("loaded_libraries::add", "default"),
    ("load_library::so", "default"),
    ("__class__::__init__", "default"),
    ("__import__::os", "default"),
    ("os::system", "default"),
    ("torch::load", "default"),
    ("_C::_load", "default"),
    ("builtins::exec", "default"),
    ("torch::save", "default"),
    ("aten::__class__", "default"),
    ("aten::__getattr__", "__call__"),
    ("aten::_dir", "append"),
    ("aten::exp", "__class__"),
    ("aten::exp", "_op"),
    ("aten::exp", "__call__"),
    ("aten::exp", "decompose"),
    ("aten::exp", "op"),
    ("aten::exp", "overloads"),
    ("aten::save", "default"),
    ("aten::add", "str"),
    ("higher_order::cond", "default"),
    ("_ops::aten", "exp"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("source"), lambda: torch.ones(3).exp())


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions that a name could reach among the attributes of `torch.ops` are never called."""
    called: list[Any] = []
    for name in ("load_library", "import_module"):
        monkeypatch.setattr(type(torch.ops), name, lambda *args: called.append(args))
    yield
    assert not called


def _renamed(source: Path, folder: Path, name: str, overload: str) -> Path:
    path = folder / "hostile.opreplay"
    shutil.copyfile(source, path)
    rename_kernel(path, "aten::exp", name=name, overload=overload)
    return path


@pytest.mark.guarantee("dispatcher-only")
@pytest.mark.parametrize(("name", "overload"), NO_NAMES, ids=range(len(NO_NAMES)))
def test_a_name_that_is_none_is_refused_when_it_is_read(source: Path, tmp_path: Path, name: str, overload: str) -> None:
    path = _renamed(source, tmp_path, name, overload)
    with pytest.raises(InvalidCapture, match="is not an operator name|an operator's name of"):
        open_capture(path)
    assert find_overload(name, overload) is None
    with open_capture(source) as reader:
        session = reader.session
    writer = CaptureWriter(tmp_path / "written.opreplay", session)
    with pytest.raises(ValueError, match="operator"):
        writer.kernel(Kernel(name, overload, "aten::exp(Tensor self) -> Tensor"))
    writer.abandon()


@pytest.mark.guarantee("dispatcher-only")
def test_every_tool_refuses_a_name_that_is_none(source: Path, tmp_path: Path, tools: Tools) -> None:
    path = _renamed(source, tmp_path, "aten::exp()", "default")
    for command in (("run",), ("benchmark", "--per-op"), ("check",), ("dump",)):
        done = tools(*command, path)
        assert done.code == 3 and "is not an operator name" in done.err and len(done.err.splitlines()) == 1
    for command in (
        ("trim", "--ops=0:9", path, tmp_path / "out"),
        ("trim", "--ops=0:9", f"--script={tmp_path / 'out'}", path),
        ("export", path, tmp_path / "out"),
    ):
        done = tools(*command)
        assert done.code == 3 and "is not an operator name" in done.err
        assert not (tmp_path / "out").exists()


@pytest.mark.guarantee("dispatcher-only")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "overload"), UNREGISTERED, ids=[f"{name}.{each}" for name, each in UNREGISTERED])
def test_an_operator_is_what_the_dispatcher_knows_or_nothing(
    source: Path, tmp_path: Path, name: str, overload: str
) -> None:
    path = _renamed(source, tmp_path, name, overload)
    modules = set(sys.modules)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    (finding,) = refused.value.findings
    assert "does not exist in torch" in finding
    with Plan(path, keep_going=True) as plan:
        assert plan.execute(keep_going=True).totals()["refused"] == 1
        assert [verdict.verdict for verdict in plan.examine(lambda op: None)].count("refused") == 1
    assert {each for each in set(sys.modules) - modules if not each.startswith(("torch", "replayfmt"))} == set()
    assert find_overload(name, overload) is None
    assert not isinstance(find_operator(f"{name}.{overload}"), torch._ops.OpOverload)


@pytest.mark.guarantee("generated-names")
@pytest.mark.parametrize(("name", "overload"), UNREGISTERED, ids=[f"{name}.{each}" for name, each in UNREGISTERED])
def test_an_exported_script_calls_what_the_dispatcher_knows_or_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, overload: str
) -> None:
    target = tmp_path / "written"
    argument = {"arg_name": "x", "arg_type": "str", "value": str(target)}
    for own in ({"overload": overload}, None):
        if own is None and overloads_of(name):
            continue
        entry = {
            "op_name": name,
            "replay_ir": {"list_pos_args": [argument], "list_kwargs": []},
            **({"opreplay": own} if own else {}),
        }
        file = tmp_path / "event_replay_ir.json"
        file.write_text(json.dumps([entry]))
        assert replay_script.main([str(file)]) == 1
        assert "is registered" in capsys.readouterr().out
    assert not target.exists()


def test_an_exported_script_calls_registered_operators_with_and_without_their_overload() -> None:
    x = torch.ones(3)
    for entry in ({"op_name": "aten::exp", "opreplay": {"overload": "default"}}, {"op_name": "aten::exp"}):
        assert torch.equal(replay_script.operator(entry)(x), x.exp())


@pytest.mark.guarantee("generated-names")
@pytest.mark.parametrize(("name", "overload"), UNREGISTERED, ids=[f"{name}.{each}" for name, each in UNREGISTERED])
def test_a_skeleton_has_an_operator_of_the_registry_or_does_not_run(
    source: Path, tmp_path: Path, name: str, overload: str
) -> None:
    path = _renamed(source, tmp_path, name, overload)
    rename_kernel(path, name, schema=f"{name}{'' if overload == 'default' else '.' + overload}(str path) -> ()")
    with open_capture(path) as reader:
        number = next(id for id, kernel in enumerate(reader.kernels) if kernel and kernel.name == name)
        try:
            text = kernel_skeleton(reader, number)
        except UsageError as error:
            assert "no skeleton can be written" in str(error)
            return
    names: dict[str, Any] = {}
    exec(compile(text, "skeleton", "exec"), names)
    with pytest.raises(RuntimeError, match="Could not find schema"):
        names["original"]("/no/such/file")


@pytest.mark.guarantee("generated-names")
@pytest.mark.parametrize(("name", "overload"), UNREGISTERED, ids=[f"{name}.{each}" for name, each in UNREGISTERED])
def test_a_script_of_a_part_has_no_such_operator(
    source: Path, tmp_path: Path, tools: Tools, name: str, overload: str
) -> None:
    path = _renamed(source, tmp_path, name, overload)
    done = tools("trim", "--ops=1:5", f"--script={tmp_path / 'part.py'}", path)
    assert done.code == 1 and "does not exist in torch" in done.err, done
    assert not (tmp_path / "part.py").exists()


@pytest.mark.guarantee("generated-names")
def test_an_import_looks_names_up_in_the_registry_alone() -> None:
    for name, overload in UNREGISTERED:
        assert not [
            each for each in Operators().candidates(name)[0] if each.dispatched and each.overload == overload
        ], name
        if "__" not in overload:  # PyTorch's parser refuses those itself
            schema = parse_schema(f"{name}{'' if overload == 'default' else '.' + overload}(int x) -> Tensor")
            assert infer(schema, [("x", 1)]).values is None


def test_a_program_whose_operator_has_no_name_to_hold_is_told_so_and_readable(tmp_path: Path) -> None:
    """A library may call its namespace anything."""
    with torch.library._scoped_library("a namespace", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        twice = getattr(torch.ops, "a namespace").twice.default
        path = recorded(tmp_path, lambda: (twice(torch.ones(3)), torch.ones(2).exp()))
    with open_capture(path) as reader:
        assert reader.summary.unsupported
        assert any("exp" in kernel.name for kernel in reader.kernels[1:] if kernel)
    with pytest.raises(ReplayRefused, match="1 reason") as refused:
        Plan(path)
    assert "a namespace::twice" in refused.value.findings[0]


def test_registered_operators_are_found_in_every_namespace() -> None:
    """Every operator that the dispatcher has, but those that have no Python object."""
    missing = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if find_overload(name, overload or "default") is None:
            missing.add(full)
    assert not missing, sorted(missing)[:10]
