"""Functions in the place of operators that nobody registered: imported by recorded types, replayed where allowed."""

from __future__ import annotations

import json
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfmt.errors import ReplayRefused
from replayfmt.export.replay_script import main
from replayfmt.export.replay_zip import export_replay_zip
from replayfmt.format.reader import open_capture
from replayfmt.importers.importing import import_trace
from replayfmt.pytorch import op_libraries
from replayfmt.pytorch.op_libraries import OpLibraries, register_op_library
from replayfmt.replay.plan import Plan

from .conftest import Import, Imported
from .traces import NONE, numbers, op, scalar, tensor

CALL = op(
    "plain_lib::scaled_sum", 10, 10, [tensor("float", 4, 8), tensor("float", 8), scalar("2.5"), numbers("[1, 2]"), NONE]
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with functions and no operators."""
    name = f"plain_library_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        from os import system
        from torch import relu
        calls = []
        def scaled_sum(x, weight, scale, dims, bias=None):
            calls.append((tuple(x.shape), tuple(weight.shape), scale, dims, bias))
            return (x * weight * scale).sum(), [x]
        class attention:
            pass
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def imported_call(imported: Import, library: str) -> Imported:
    return imported([CALL], libraries=OpLibraries(registered={"plain_lib": (library,)}))


def test_a_call_is_made_by_its_recorded_types_and_the_report_says_so(imported: Import, library: str) -> None:
    result = imported_call(imported, library)
    assert result.ops == ["plain_lib::scaled_sum.callable"]
    kernel = next(each for each in result.reader.kernels if each is not None)
    assert kernel.schema == "plain_lib::scaled_sum.callable(Tensor x, Tensor weight, float scale, int[] dims) -> Any"
    row = next(row for row in result.report.rows() if row["kind"] == "op")
    assert row["found"] == "a module's attribute" and row["status"] == "inferred"
    assert f"{library}.scaled_sum is called by the recorded types; 1 arguments are left" in row["assumed"][0]


def test_it_is_replayed_where_the_user_allows_the_library(imported: Import, library: str) -> None:
    path = imported_call(imported, library).reader.path
    with Plan(path, allow_imports=[library], keep_going=True) as plan:
        assert any("plain_lib" in finding for finding in plan.findings), "a namespace that no library is known for"
    register_op_library("plain_lib", library)
    try:
        with Plan(path) as plan:
            assert plan.execute().outcome == "ok"
    finally:
        op_libraries._registered.pop("plain_lib")
    assert ((4, 8), (8,), 2.5, [1, 2], None) in sys.modules[library].calls


def test_it_is_refused_where_nobody_named_the_library(imported: Import, library: str) -> None:
    path = imported_call(imported, library).reader.path
    sys.modules.pop(library, None)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    assert "plain_lib::scaled_sum is a function without a schema" in refused.value.findings[0]
    assert library not in sys.modules


@pytest.mark.parametrize("name", ["system", "relu", "attention", "calls", "missing"])
def test_only_functions_that_the_library_itself_defines_are_called(name: str, imported: Import, library: str) -> None:
    event = op(f"plain_lib::{name}", 10, 10, [tensor("float", 4)])
    result = imported([event], libraries=OpLibraries(registered={"plain_lib": (library,)}))
    assert not result.ops and str(result.of("unsupported")[0].argument("reason")) == "no_schema"


def test_pytorchs_own_modules_are_not_looked_into_unasked() -> None:
    assert OpLibraries().callable("inductor", "list_mode_options") is None


def test_a_call_without_tensors_is_none(imported: Import, library: str) -> None:
    event = op("plain_lib::scaled_sum", 10, 10, [scalar("1"), scalar("2")])
    result = imported([event], libraries=OpLibraries(registered={"plain_lib": (library,)}))
    assert "without tensors" in str(result.of("unsupported")[0].argument("detail"))


def exported(imported: Import, library: str, tmp_path: Path) -> tuple[str, Path]:
    """The IR of a capture with a call of a plain function: as the export writes it, and as TraceLens does."""
    path = imported_call(imported, library).reader.path
    with open_capture(path) as reader:
        assert export_replay_zip(reader, tmp_path / "x.zip").entries == 1
    zipfile.ZipFile(tmp_path / "x.zip").extract("event_replay_ir.json", tmp_path)
    return path, tmp_path / "event_replay_ir.json"


def test_an_ir_entry_of_a_function_is_imported_by_its_types(imported: Import, library: str, tmp_path: Path) -> None:
    path, ir = exported(imported, library, tmp_path)
    entries = json.loads(ir.read_text())
    for entry in entries:  # TraceLens writes neither overloads nor schemas
        del entry["opreplay"]
        entry["replay_ir"]["list_pos_args"] = [
            {name: value for name, value in each.items() if name != "opreplay"}
            for each in entry["replay_ir"]["list_pos_args"]
        ]
    plain = tmp_path / "plain_ir.json"
    plain.write_text(json.dumps(entries))
    with open_capture(path) as reader:
        wanted = [each.schema for each in reader.kernels[1:]]  # type: ignore[union-attr]
    for source in (ir, plain):
        out = tmp_path / "back.opreplay"
        import_trace(source, out, libraries=OpLibraries(registered={"plain_lib": (library,)}), force=True)
        with open_capture(out) as reader:
            assert [each.schema for each in reader.kernels[1:]] == wanted  # type: ignore[union-attr]


def test_an_exported_function_runs_in_the_script_once_its_library_is_named(
    imported: Import, library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _path, ir = exported(imported, library, tmp_path)
    flags = [str(ir), "--device=cpu", "--benchmark-min-time=0s", "-v"]
    assert main(flags) == 1
    assert "is a plain function; --op-library=plain_lib=MODULE names" in capsys.readouterr().out
    assert main([*flags, f"--op-library=other={library}"]) == 1
    capsys.readouterr()
    assert main([*flags, f"--op-library=plain_lib={library}"]) == 0
    out = capsys.readouterr().out
    assert "  Successfully executed plain_lib::scaled_sum.\n" in out
    assert "Tensor(shape=(4, 8), strides=(8, 1), dtype=torch.float32, device=cpu)" in out


def test_what_an_ir_gives_by_name_is_given_by_name(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / f"{library}.py", "a", encoding="utf-8") as file:
        file.write("def mix(xs, scale=1.0, dims=None, *, bias=None):\n    calls.append((len(xs), scale, dims, bias))\n")
    x = {"shape": [3, 4], "dtype": "float", "strides": [4, 1], "init": "zeros"}

    def entry(*keywords: tuple[str, str, object]) -> dict[str, object]:
        named = [{"arg_name": name, "arg_type": kind, "value": value} for name, kind, value in keywords]
        given = [{"arg_name": "xs", "arg_type": "Tensor[]", "value": [x, x]}]
        return {"op_name": "plain_lib::mix", "replay_ir": {"list_pos_args": given, "list_kwargs": named}, "count": 1}

    entries = [entry(("dims", "int[]", [1, 2]), ("bias", "float", 0.5)), entry(("nothing", "int", 1))]
    (tmp_path / "mix_ir.json").write_text(json.dumps(entries))
    out = tmp_path / "mix.opreplay"
    report = import_trace(tmp_path / "mix_ir.json", out, libraries=OpLibraries(registered={"plain_lib": (library,)}))
    assert [each.status for each in report.entries.values()] == ["inferred", "incomplete"]
    assert "unexpected keyword argument 'nothing'" in list(report.entries.values())[1].detail
    with Plan(out, devices=["cpu"], allow_imports=[f"plain_lib={library}"], keep_going=True) as plan:
        plan.execute(keep_going=True)
    assert sys.modules[library].calls[-1] == (2, 1.0, [1, 2], 0.5)
    with open_capture(out) as reader:
        export_replay_zip(reader, tmp_path / "mix.zip", partial=True)
    zipfile.ZipFile(tmp_path / "mix.zip").extract("event_replay_ir.json", tmp_path)
    flags = ["--device=cpu", "--benchmark-min-time=0s", f"--op-library=plain_lib={library}"]
    assert main([str(tmp_path / "event_replay_ir.json"), *flags]) == 0, capsys.readouterr().out
    assert sys.modules[library].calls[-1] == (2, 1.0, [1, 2], 0.5)
