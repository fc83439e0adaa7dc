"""The replay zip: refused or complete, its script runs where this library is not, and it imports back identically."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from opreplay_tools.export import cli

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import OutputExists, ReplayRefused, UsageError
from replayfmt.export.replay_zip import escaped, export_replay_zip
from replayfmt.format.codes import DType, RecordKind
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.signature_text import signature_of
from replayfmt.importers.tracelens import import_tracelens

from .observed import Mlp


def varied() -> None:
    """Calls with every kind of argument that the IR can say."""
    x = torch.randn(4, 6)
    shared = x[1:3]
    torch.add(x[0:2], shared, alpha=2)
    torch.mul(x, 0.5)
    torch.cat([x, x.t().contiguous().view(4, 6)], 1)
    x.to(torch.bfloat16).to(torch.float64)
    x[:, torch.tensor([0, 2])]
    torch.full((2, 3), 1 + 2j)
    torch.full((2,), complex(float("inf"), float("nan")))
    torch._foreach_mul([torch.full((2,), 1j)], [complex(0, -0.0)])
    x.to(torch.float8_e8m0fnu)
    torch.nn.functional.gelu(x, approximate="tanh")
    torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    torch.clamp(x, min=float("-inf"))
    torch.div(x, 3, rounding_mode="floor")
    torch.rand(3).bernoulli_(0.5)
    torch.view_as_complex(torch.randn(3, 2)).conj().resolve_conj()
    x.sum().item()


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "captured.opreplay"
    program = Mlp()
    with replayfmt.capture(path):
        varied()
        program.steps()
    return path


def calls(reader: CaptureReader) -> list[str]:
    """Every op's signature with its numbers, and where its tensors are."""
    found = []
    for record in reader.records():
        if record.kind is RecordKind.op:
            found.append(f"{signature_of(record, reader, values=True)} {_memory(record.args)}")
    return found


def _memory(values: Any, known: dict[int, int] | None = None) -> list[Any]:
    known = {} if known is None else known
    found: list[Any] = []
    for value in values:
        if isinstance(value, list):
            found.append(_memory(value, known))
        elif hasattr(value, "storage"):
            found.append((known.setdefault(value.storage, len(known)), value.offset, value.meta.flags & 3))
    return found


def export(path: Path, out: Path, **options: Any) -> Any:
    with open_capture(path) as reader:
        return export_replay_zip(reader, out, options.pop("wanted", OpSelection()), **options)


@pytest.mark.slow
def test_it_imports_back_identically(capture: Path, tmp_path: Path) -> None:
    exported = export(capture, tmp_path / "x.zip")
    report = import_tracelens(tmp_path / "x.zip", tmp_path / "back.opreplay")
    assert report.calls() == {"exact": exported.calls, "inferred": 0, "incomplete": 0}
    with open_capture(capture) as before, open_capture(tmp_path / "back.opreplay") as after:
        assert calls(before) == calls(after)


def test_calls_that_take_one_tensor_twice_come_back_as_a_valid_capture(tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay"):
        x = torch.randn(4, 4)
        torch.mul(x, x)
        torch.cat([x, x, x[:2], x[:2]])
        torch.add(x.t(), x.t())
        torch.addmm(x, x, x)
        torch._foreach_add([x, x[1]], [x[1], x])
    exported = export(tmp_path / "c.opreplay", tmp_path / "x.zip")
    import_tracelens(tmp_path / "x.zip", tmp_path / "back.opreplay")
    check_capture(tmp_path / "back.opreplay")
    with open_capture(tmp_path / "c.opreplay") as before, open_capture(tmp_path / "back.opreplay") as after:
        assert calls(before) == calls(after) and len(calls(after)) == exported.calls
        (mul,) = [
            record
            for record in after.records()
            if record.signature.kernel and after.kernels[record.signature.kernel].name == "aten::mul"
        ]
        assert mul.args[0] == mul.args[1], "one tensor"
    with replayfmt.Plan(tmp_path / "back.opreplay", devices=["cpu"]) as plan:
        assert plan.execute().outcome == "ok"


@pytest.mark.slow
def test_exporting_what_was_imported_gives_the_same_ir(capture: Path, tmp_path: Path) -> None:
    export(capture, tmp_path / "x.zip")
    import_tracelens(tmp_path / "x.zip", tmp_path / "back.opreplay")
    export(tmp_path / "back.opreplay", tmp_path / "y.zip")
    texts = [zipfile.ZipFile(tmp_path / name).read("event_replay_ir.json") for name in ("x.zip", "y.zip")]
    assert _without_lengths(json.loads(texts[0])) == _without_lengths(json.loads(texts[1]))


def _without_lengths(value: Any) -> Any:
    """A storage is at least as long as its views; how long it was in the program is in the first IR."""
    if isinstance(value, dict):
        return {key: _without_lengths(each) for key, each in value.items() if key != "storage_bytes"}
    return [_without_lengths(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_the_script_runs_where_this_library_is_not_installed(capture: Path, tmp_path: Path) -> None:
    exported = export(capture, tmp_path / "x.zip", unique=True)
    zipfile.ZipFile(tmp_path / "x.zip").extractall(tmp_path / "unpacked")
    # -I leaves out the working directory and the environment; the name itself is blocked as well.
    blocked = (
        "import sys, runpy; sys.modules['replayfmt'] = None; "
        "sys.argv = ['replay.py', '--benchmark-min-time=0s', '-v']; "
        "runpy.run_path('replay.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", blocked],
        cwd=tmp_path / "unpacked",
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    entries = exported.entries
    assert f"{entries} calls in the file, {entries} matched, {entries} attempted, {entries} successful, 0 failed" in (
        done.stdout
    )
    assert f"[{entries}/{entries}]" in done.stdout and " us in the workload" in done.stdout
    assert "mat2 Tensor: Tensor(shape=" in done.stdout


def test_the_script_takes_a_flag_once_and_a_filter_that_matches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from replayfmt.export.replay_script import flags, main

    for name in ("device", "op-filter", "op-limit", "benchmark-min-time"):
        with pytest.raises(SystemExit) as left:
            flags([f"--{name}=1", f"--{name}=2"])
        assert left.value.code == 2 and f"--{name} is given more than once" in capsys.readouterr().err
    assert (flags(["--op-limit=3"]).op_limit, flags([]).op_limit) == (3, None)
    path = tmp_path / "ir.json"
    path.write_text(json.dumps([{"op_name": "aten::relu", "replay_ir": {"list_pos_args": [], "list_kwargs": []}}]))
    assert main([str(path), "--op-filter=nothing"]) == 2
    assert "--op-filter=nothing: no operator's name in" in capsys.readouterr().err


def test_the_script_fails_where_a_call_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from replayfmt.export.replay_script import main

    item = {"arg_name": "self", "arg_type": "Tensor", "value": {"shape": [2], "dtype": "float", "strides": [1]}}
    good = {"op_name": "aten::relu", "replay_ir": {"list_pos_args": [item], "list_kwargs": []}, "count": 3}
    bad = {"op_name": "aten::mm", "replay_ir": {"list_pos_args": [item, item], "list_kwargs": []}}
    path = tmp_path / "ir.json"
    path.write_text(json.dumps([bad, good]))
    assert main([str(path), "--device=cpu", "--benchmark-min-time=0s"]) == 1
    assert "1 successful, 1 failed" in capsys.readouterr().out
    assert main([str(path), "--device=cpu", "--benchmark-min-time=0s", "--op-filter=relu"]) == 0
    assert "2 calls in the file, 1 matched, 1 attempted" in capsys.readouterr().out
    assert main([str(path), "--device=cpu", "--benchmark-min-time=0s", "--stop-on-error", "--op-limit=1"]) == 1
    assert "0 successful, 1 failed" in capsys.readouterr().out


def _ir(path: Path, *entries: Any) -> str:
    path.write_text(json.dumps(list(entries)))
    return str(path)


def test_the_script_runs_custom_operators_once_their_library_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from replayfmt.export.replay_script import main

    (tmp_path / "script_library.py").write_text(
        "import torch\nlibrary = torch.library.Library('script_library', 'FRAGMENT')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: x * 2, 'CompositeExplicitAutograd')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    item = {"arg_name": "x", "arg_type": "Tensor", "value": {"shape": [2], "dtype": "float", "strides": [1]}}
    entry = {
        "op_name": "script_library::twice",
        "replay_ir": {"list_pos_args": [item], "list_kwargs": []},
        "opreplay": {"overload": "default"},
    }
    flags = [_ir(tmp_path / "ir.json", entry), "--device=cpu", "--benchmark-min-time=0s", "-v"]
    assert main(flags) == 1
    assert "'script_library::twice.default' is registered; --import=MODULE" in capsys.readouterr().out
    try:
        assert main([*flags, "--import=script_library"]) == 0
        assert "result: Tensor(shape=(2,), strides=(1,), dtype=torch.float32, device=cpu)" in capsys.readouterr().out
    finally:
        sys.modules.pop("script_library").library._destroy()


def test_the_script_names_what_it_lacks_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from replayfmt.export.replay_script import main

    good = {"op_name": "aten::relu", "replay_ir": {"list_pos_args": [], "list_kwargs": []}}
    path = _ir(tmp_path / "ir.json", good)
    (tmp_path / "no.json").write_text("{")
    for flags, said in (
        ([str(tmp_path / "nowhere.json")], "No such file"),
        ([str(tmp_path / "no.json")], "Expecting"),
        ([_ir(tmp_path / "a.json", {"op_name": "aten::mm"})], "entry 1: expected op_name"),
        ([_ir(tmp_path / "b.json", good, 3)], "entry 2: expected op_name"),
        ([path, "--import=not_installed_here"], "--import=not_installed_here: ModuleNotFoundError"),
        ([path, "--device=nonsense"], "--device=nonsense: "),
    ):
        assert main(flags) == 2
        assert said in (err := capsys.readouterr().err) and err.count("\n") == 1
    item = {"arg_name": "self", "arg_type": "Tensor", "value": {"shape": [2], "dtype": "float7", "strides": [1]}}
    odd = {"op_name": "aten::relu", "replay_ir": {"list_pos_args": [item], "list_kwargs": []}}
    assert main([_ir(tmp_path / "c.json", odd), "--device=cpu"]) == 1
    assert "has no dtype 'float7'" in capsys.readouterr().out


def test_the_script_knows_every_dtype_that_an_export_writes() -> None:
    from replayfmt.export.replay_script import Inputs, dtype_of
    from replayfmt.export.replay_zip import DTYPE_NAMES
    from replayfmt.pytorch.tensors.memory import TORCH_DTYPE

    assert DTYPE_NAMES[DType.int16] == "short int" and DTYPE_NAMES[DType.int32] == "int", "as profilers print them"
    for dtype, name in DTYPE_NAMES.items():
        assert dtype_of(name) is dtype_of(str(TORCH_DTYPE[dtype])) is TORCH_DTYPE[dtype]
        for init in ("normal", "zeros", "ones"):
            made = Inputs("cpu", {}).tensor({"shape": [4], "dtype": name, "strides": [1], "init": init}, {}, "self")
            assert made.dtype is TORCH_DTYPE[dtype] and made.shape == (4,)
    plain = [dtype for dtype in TORCH_DTYPE if not dtype.name.startswith(("q", "bits"))]
    assert [dtype.name for dtype in plain if dtype not in DTYPE_NAMES] == []


def test_unique_counts_calls_with_the_same_arguments(capture: Path, tmp_path: Path) -> None:
    every, unique = (export(capture, tmp_path / f"{flag}.zip", unique=flag) for flag in (False, True))
    assert every.entries == every.calls == unique.calls
    assert unique.entries < every.entries
    entries = json.loads(zipfile.ZipFile(tmp_path / "True.zip").read("event_replay_ir.json"))
    assert sum(each["count"] for each in entries) == unique.calls


def test_a_selection_is_exported_alone(capture: Path, tmp_path: Path) -> None:
    exported = export(capture, tmp_path / "x.zip", wanted=OpSelection(kernel="aten::addmm"))
    assert exported.entries == 6
    with pytest.raises(UsageError):
        export(capture, tmp_path / "y.zip", wanted=OpSelection(kernel="aten::nothing"))


def test_what_the_ir_cannot_say_is_refused_with_all_of_it_listed(tmp_path: Path) -> None:
    path = tmp_path / "sparse.opreplay"
    with replayfmt.capture(path):
        sparse = torch.eye(3).to_sparse()
        torch.mm(sparse, torch.ones(3, 3))
        torch.rand(3, generator=torch.Generator().manual_seed(1))
        torch.ones(2) + 1
    out = tmp_path / "x.zip"
    with pytest.raises(ReplayRefused) as caught:
        export(path, out)
    findings = "\n".join(caught.value.findings)
    assert "generator of its own" in findings and "composite" in findings
    assert not out.exists()
    exported = export(path, out, partial=True)
    assert exported.left_out and exported.entries
    readme = zipfile.ZipFile(out).read("README.md").decode()
    assert "Left out" in readme and "generator of its own" in readme


def test_kernels_that_are_no_operators_are_not_in_an_archive_that_could_not_run_them(tmp_path: Path) -> None:
    captured = Path(__file__).parents[1] / "golden" / "everything-1.0.opreplay"
    out = tmp_path / "x.zip"
    with pytest.raises(ReplayRefused) as caught:
        export(captured, out)
    assert [finding for finding in caught.value.findings if "a kernel of the kind triton" in finding]
    assert not out.exists()
    assert export(captured, out, partial=True).entries == 1
    assert "triton" not in zipfile.ZipFile(out).read("event_replay_ir.json").decode()


def test_a_call_that_raised_is_no_call_to_repeat(tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay"):
        torch.zeros(3)
        with pytest.raises(RuntimeError):
            torch.mm(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ReplayRefused) as caught:
        export(tmp_path / "c.opreplay", tmp_path / "x.zip")
    assert [finding for finding in caught.value.findings if "aten::mm.default: it raised" in finding]
    assert export(tmp_path / "c.opreplay", tmp_path / "x.zip", partial=True).entries == 3


def test_an_existing_file_stays_without_force(capture: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.zip"
    out.write_text("mine")
    with pytest.raises(OutputExists):
        export(capture, out)
    assert out.read_text() == "mine"
    assert export(capture, out, force=True).entries


def test_the_capture_itself_is_never_replaced(capture: Path) -> None:
    before = capture.read_bytes()
    with pytest.raises(UsageError, match="is the capture that is exported"):
        export(capture, capture, force=True)
    assert capture.read_bytes() == before


def test_names_cannot_become_markup() -> None:
    assert escaped("a|b`c`\n# [x](y)") == "a\\|b\\`c\\`\\\\n\\# \\[x\\]\\(y\\)"


def test_the_tool_exports_and_lists_what_it_leaves_out(capture: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.zip"
    done = CliRunner().invoke(cli, [str(capture), str(out), "--format=replay-zip", "--unique", "--kernel=aten::mm"])
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.output and " calls" in done.output
    assert set(zipfile.ZipFile(out).namelist()) == {"event_replay_ir.json", "integers.json", "replay.py", "README.md"}
    assert "integers or booleans" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["none", "full"])
def test_the_scripts_integers_are_those_of_a_replay(payload: str, tmp_path: Path) -> None:
    path = tmp_path / "c.opreplay"
    places, table, lengths = torch.tensor([3, 7, 7, 1]), torch.randn(9, 5), torch.tensor([6, 4, 2])
    with replayfmt.capture(path, payload=payload):  # type: ignore[arg-type]
        torch.nn.functional.embedding(places, table)
        shifted = places + 100
        shifted.mul(2)
        torch._pack_padded_sequence(torch.randn(6, 3, 2), lengths, False)
        table[places[:2].expand(3, 2), torch.tensor([[0, 4]])]
        torch.cat([places[1:], places[:1]])
    exported = export(path, tmp_path / "x.zip")
    said = CliRunner().invoke(cli, [str(path), str(tmp_path / "x.zip"), "--force"]).output
    assert f"{exported.without_integers} arguments of integers or booleans are 0: ops of the capture comp" in said
    zipfile.ZipFile(tmp_path / "x.zip").extractall(tmp_path / "unpacked")
    run = (
        "import runpy; script = runpy.run_path('replay.py'); integers = script['integers_beside']('./x.json'); "
        "entries = script['entries_of']('event_replay_ir.json'); found = [];\n"
        "for index, entry in enumerate(entries):\n"
        "    given, named = script['arguments'](entry, 'cpu', integers.get(str(index), {}))\n"
        "    result = script['operator'](entry)(*given, **named)\n"
        "    plain = isinstance(result, script['torch'].Tensor) and not result.is_floating_point()\n"
        "    found.append(result.tolist() if plain else None)\n"
        "import json; print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", run],
        cwd=tmp_path / "unpacked",
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    with replayfmt.open(path) as capture:
        ops = list(capture.ops)
        names = [each.kernel.name for each in ops]
        for name in ("aten::add", "aten::cat", "aten::slice"):
            place = names.index(name)
            replayed = ops[place].replay(device="cpu")
            assert found[place] == replayed.tolist() and len(set(found[place])) > 1, name
    unknown = found[names.index("aten::mul")]
    assert unknown == [0, 0, 0, 0], "computed by an op: not known without a run"
    assert (
        f"{exported.without_integers} arguments of integers or booleans are 0"
        in (tmp_path / "unpacked" / "README.md").read_text()
    )


@pytest.mark.parametrize("text", ["[]", '{"0": []}', "{"])
def test_integers_that_are_none_are_an_error(
    text: str, capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from replayfmt.export.replay_script import main

    export(capture, tmp_path / "x.zip")
    zipfile.ZipFile(tmp_path / "x.zip").extractall(tmp_path)
    (tmp_path / "integers.json").write_text(text)
    assert main([str(tmp_path / "event_replay_ir.json")]) == 2
    assert str(tmp_path / "event_replay_ir.json") in capsys.readouterr().err


def test_content_of_another_length_is_refused() -> None:
    import base64
    import zlib

    from replayfmt.export.replay_script import content

    for data in (bytes(8), bytes(24), bytes(1 << 24)):
        with pytest.raises(ValueError, match="has not the 16 bytes of the tensor"):
            content(base64.b64encode(zlib.compress(data)).decode(), torch.int64, [2])
    for text in ("!", "AAAA", 3):
        with pytest.raises(ValueError, match=r"integers\.json"):
            content(text, torch.int64, [2])
