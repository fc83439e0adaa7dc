"""Scripts: they run with torch alone, give bit for bit what the replay of the same ops gives, and run nothing else."""

from __future__ import annotations

import ast
import hashlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from unseen import write_unseen

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import OutputExists, ReplayRefused, UsageError
from replayfmt.format.codes import OpStatus, RecordKind, ValueKind
from replayfmt.format.model import CaptureInfo, Kernel, Node, Signature
from replayfmt.format.reader import open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.tensors.memory import row_major_bytes
from replayfmt.replay.plan import Plan
from replayfmt.trim.script import ScriptResult, script_with_data, synthesized_script
from replayfmt.trim.script_triton import argument, comment, identifier, scalar

from .conftest import Captured
from .trimmed import ops


def with_data(path: Path, folder: Path, **wanted: str) -> tuple[Path, ScriptResult]:
    out, data = folder / "script.py", folder / "data.safetensors"
    with Plan(path, keep_going=True) as plan:
        return out, script_with_data(plan, str(out), str(data), OpSelection(**wanted), force=True)


def run_here(script: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Run a script in this process, which costs no new torch; what it says of each result: digest, or number."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert not left.value.code
    return results(capsys.readouterr().out)


def run(script: Path) -> dict[str, str]:
    """Run a script where only torch can be imported; what it says of each result: digest, or number."""
    guard = (
        "import sys, runpy\n"
        "sys.modules.update(replayfmt=None, safetensors=None, transformers=None, opreplay_tools=None)\n"
        f"sys.argv = [{str(script)!r}]\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", guard], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return results(done.stdout)


def results(printed: str) -> dict[str, str]:
    assert "CAPTURED" not in printed
    assert " ops: median " in printed
    found = {}
    for line in printed.splitlines():
        name, _, rest = line.partition(": ")
        if "sha256 " in rest:
            found[name] = rest.rpartition("sha256 ")[2]
        elif name.startswith("value_"):
            found[name] = rest
    return found


def everything_a_script_can_do() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 6)
    weight, bias = torch.randn(6, 6), torch.randn(6)
    with replayfmt.scope("part"):
        y = F.dropout(F.linear(x, weight, bias), 0.3)
        y.t_()
        y.mul_(2).unsqueeze_(0)
        parts = y.squeeze(0).split(2)
        torch._foreach_add_(list(parts), 1.5)
        z = torch.cat([parts[0], parts[2]]).to(torch.bfloat16)
        c = torch.complex(x, x).conj().imag.mul(3)
        out = torch.empty(0)
        torch.add(x, float("inf"), out=out)
        x.random_(0, 5)
        n = torch.nn.functional.layer_norm(y, (4,))
        i = x.long().clamp(0, 3)
        picked = weight[i[0]]
        own = torch.Generator().manual_seed(9)
        noise = torch.rand(3, generator=own)
        x.sum().item()
    _ = (z, c, out, n, picked, noise)


def expected_of(path: Path, first: int, stop: int) -> set[str]:
    """SHA-256 of the results of every op in a range, by a replay of each."""
    found = set()
    with replayfmt.open(str(path)) as capture:
        for ordinal in range(first, stop):
            if ordinal in capture.ops.by_ordinal:
                results = capture.ops.by_ordinal[ordinal].replay()
                for value in results if isinstance(results, tuple | list) else [results]:
                    if isinstance(value, torch.Tensor):
                        found.add(hashlib.sha256(row_major_bytes(value)).hexdigest())
    return found


@pytest.mark.slow
def test_a_script_with_data_gives_bit_for_bit_what_a_replay_gives(captured: Captured, tmp_path: Path) -> None:
    path = captured(everything_a_script_can_do)
    out, result = with_data(path, tmp_path, scope="part")
    assert result.verified.startswith("bitwise")
    with open_capture(path) as reader:
        inside = [record for record in ops(reader) if reader.scope_path(record.scope) == "part"]
        read = inside[-1].results[0]
    printed = run(out)
    values = {name: text for name, text in printed.items() if name.startswith("value_")}
    assert values == {f"value_{inside[-1].ordinal}_0": repr(read)}
    digests = set(printed.values()) - set(values.values())
    assert len(digests) >= 5
    assert digests <= expected_of(path, inside[0].ordinal, inside[-1].ordinal)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten::addmm", "aten::bernoulli_*", "aten::native_layer_norm", "aten::random_*"])
def test_one_op_as_a_script(
    kernel: str, captured: Captured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = captured(everything_a_script_can_do)
    with open_capture(path) as reader:
        name = kernel.rstrip("*")
        ordinal = next(record.ordinal for record in ops(reader) if reader.kernels[record.signature.kernel].name == name)
    out, result = with_data(path, tmp_path, ops=f"{ordinal}:{ordinal + 1}")
    assert result.ops == 1
    printed = run_here(out, capsys)
    assert printed and set(printed.values()) <= expected_of(path, ordinal, ordinal + 1)
    lines = [line for line in out.read_text().splitlines() if f"# {ordinal}: " in line]
    assert len(lines) == 1 and f"torch.ops.{name.replace('::', '.')}" in lines[0]


def test_data_is_a_safetensors_file_that_others_read(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        a, b = torch.arange(6.0).view(2, 3), torch.ones(3, 2, dtype=torch.float32)
        (a @ b).to(torch.bfloat16)
        torch.ones(4, dtype=torch.bool).logical_not()

    path = captured(program)
    with open_capture(path) as reader:
        first = next(
            record.ordinal for record in ops(reader) if reader.kernels[record.signature.kernel].name == "aten::mm"
        )
    with_data(path, tmp_path, ops=f"{first}:{first + 1}")
    loaded = load_file(tmp_path / "data.safetensors")
    assert {tuple(each.shape) for each in loaded.values()} == {(6,), (3, 2)} or {
        tuple(each.shape) for each in loaded.values()
    } == {(2, 3), (3, 2)}
    assert any(torch.equal(each.view(2, 3), torch.arange(6.0).view(2, 3)) for each in loaded.values())


@pytest.mark.slow
def test_a_script_without_data_makes_inputs_of_the_captured_shapes_up(
    captured: Captured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = captured(everything_a_script_can_do), tmp_path / "script.py"
    with open_capture(path) as reader:
        result = synthesized_script(reader, str(out), OpSelection(scope="part"))
    assert (result.data_path, result.verified) == (None, "")
    first, again = run(out), run_here(out, capsys)
    assert first and first == again, "the same every time"
    text = out.read_text()
    assert "synthesize(" in text and "EXPECTED = {\n}" in text


def test_a_script_of_work_on_content_that_changes_between(
    captured: Captured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        x, y = torch.ones(4), torch.ones(4)
        for _ in range(3):
            with replayfmt.scope("kept"):
                x.add_(y)
            y.mul_(2)
        torch.set_default_dtype(torch.float64)
        with replayfmt.scope("kept"):
            torch.ones(2).add(x.sum())
        torch.set_default_dtype(torch.float32)

    path = captured(program)
    out, _result = with_data(path, tmp_path, scope="kept")
    text = out.read_text()
    assert text.count("    load(s") == 2 and "torch.set_default_dtype(torch.float64)" in text
    assert run_here(out, capsys)
    torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------- what cannot be one


def test_what_a_script_cannot_express_is_refused_by_name(captured: Captured, tmp_path: Path) -> None:
    def sparse() -> None:
        torch.eye(3).to_sparse().coalesce()

    def raising() -> None:
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)

    def unseen() -> None:
        written = torch.empty(3)
        write_unseen(written)
        written.sum()

    out = tmp_path / "script.py"
    cases: list[tuple[Callable[[], Any], str]] = [
        (sparse, "sparse_coo tensor"),
        (raising, "raised an exception"),
        (unseen, "unsupported"),
    ]
    for number, (program, said) in enumerate(cases):
        path = captured(program, f"case{number}")
        with open_capture(path) as reader, pytest.raises(ReplayRefused, match=said):
            synthesized_script(reader, str(out), OpSelection())
        assert not any(each.name.startswith("script") for each in tmp_path.iterdir())


def test_too_many_ops_and_existing_files_are_refused(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = captured(lambda: torch.ones(3).add(1).mul(2)), tmp_path / "script.py"
    monkeypatch.setattr("replayfmt.trim.script.MOST_OPS", 2)
    with open_capture(path) as reader, pytest.raises(UsageError, match="too many for a script"):
        synthesized_script(reader, str(out), OpSelection())
    out.write_text("mine")
    with open_capture(path) as reader:
        with pytest.raises(OutputExists):
            synthesized_script(reader, str(out), OpSelection(ops="0:1"))
        with pytest.raises(UsageError, match="is the capture itself"):
            synthesized_script(reader, str(path), OpSelection(ops="0:1"), force=True)
    assert out.read_text() == "mine"


HOSTILE = "\n__import__('os').system('touch owned')\n\"\"\"'''\\"


@pytest.mark.guarantee("written-python")
def test_names_and_strings_of_a_capture_never_become_code(tmp_path: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "script.py"
    session = CaptureInfo("01234567-89ab-cdef-0123-456789abcdef", "opreplay", "1", torch_version=HOSTILE)
    writer = CaptureWriter(path, session)
    kernel = writer.kernel(Kernel("aten::ones", "default", str(torch.ops.aten.ones.default._schema)))
    scope = writer.scope(0, HOSTILE)
    begin = writer.signature(Signature(RecordKind.scope_begin, (Node(ValueKind.string, "name", HOSTILE),)))
    op = writer.signature(Signature(RecordKind.op, (Node(ValueKind.string, "size", HOSTILE),), (), kernel, OpStatus.ok))
    writer.records(
        RecordColumns(
            signature=[begin, op],
            scope=[scope] * 2,
            thread=[0, 0],
            start_ns=[0, 1],
            duration_ns=None,
            tensors=[],
            ints=[],
            floats=[],
            tensor_definitions={},
        )
    )
    writer.close(2)
    with open_capture(path) as reader:
        synthesized_script(reader, str(out), OpSelection(scope=HOSTILE))
    tree = ast.parse(out.read_text())
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "__import__" not in calls
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert HOSTILE in strings, "as the literal that the op was given"
    for bad in ("a b", "a;b", "lambda", "x\n", "é", "", "1a", "a.b"):
        with pytest.raises(ReplayRefused):
            identifier(bad)
    with pytest.raises(ReplayRefused):
        argument("a=1, b", "0")
    assert argument("from", "0") == "**{'from': 0}"
    assert "\n" not in comment(HOSTILE) and comment("\x1b[2J") == r"\x1b[2J"
    assert [scalar(value) for value in (float("nan"), float("-inf"), -0.0, 1e300, complex(0, float("inf")), True)] == [
        'float("nan")',
        'float("-inf")',
        "-0.0",
        "1e+300",
        'complex(0.0, float("inf"))',
        "True",
    ]


def test_an_operator_that_is_not_torchs_own_is_refused(captured: Captured, tmp_path: Path) -> None:
    library = torch.library.Library("trimscript", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    path = captured(lambda: torch.ops.trimscript.twice(torch.ones(3)))
    with open_capture(path) as reader, pytest.raises(ReplayRefused, match="not an operator of torch's own"):
        synthesized_script(reader, str(tmp_path / "script.py"), OpSelection(kernel="trimscript::*"))
    assert json.dumps(sorted(each.name for each in tmp_path.iterdir())) == '["capture.opreplay"]'
