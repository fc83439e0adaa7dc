"""Flags of opreplay-capture, each with its effect on the capture."""

import re
import sys
from pathlib import Path

import pytest
from opreplay_tools.capture import main as capture_main

from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.output import identity
from replayfmt.recording import supervisor
from replayfmt.recording.supervisor import _say

from .running import LOSSES, Captured, capture

# ------------------------------------------------------------------------------------------------------------- scopes


@pytest.mark.slow
def test_marks_and_module_scopes_name_regions_of_the_program(folder):
    done = capture(
        folder,
        "-o",
        "marked.opreplay",
        "--mark=__main__:step=step",
        "--module-scopes",
        "--mark=torch.nn.functional:relu=activation",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    captured = Captured(folder / "marked.opreplay")
    scopes = [scope for scope in captured.scopes() if "#" not in scope]
    one_step = [
        "+step",
        "+Sequential",
        "+0",
        "-0",
        "+1",
        "+activation",
        "-activation",
        "-1",
        "+2",
        "-2",
        "-Sequential",
        "-step",
    ]
    assert scopes == one_step * 3
    assert "step/Sequential/1/activation" in captured.scope_paths
    assert re.search(r" kernels, \d+ scopes entered \d+ times, [\d,]+ bytes; unsupported: none$", done.stderr.strip())


@pytest.mark.slow
def test_a_mark_that_finds_nothing_fails_the_capture_and_keeps_the_file(folder, ordinary):
    done = capture(
        folder,
        "-o",
        "unmatched.opreplay",
        "--mark=__main__:step=step",
        "--mark=package.other:run=run",
        "--mark=__main__:step.gone=x",
        "train.py",
    )
    assert (done.returncode, done.stdout) == (1, f"{LOSSES.match(ordinary[0])[0]} []\n")
    assert "--mark=package.other:run=run: the program never imported package.other" in done.stderr
    assert "--mark=__main__:step.gone=x: step has no gone" in done.stderr
    assert Captured(folder / "unmatched.opreplay").scopes()[0] == "+step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "scopes"),
    [
        # The program's own scopes, and nothing around them, even where this package comes before torch.
        (
            "from replayfmt import scope\nimport torch\ntorch.ones(1)\nwith scope('mine'):\n    torch.ones(2)\n",
            ["+mine", "-mine"],
        ),
        # Named only later: what came before is the implicit scope.
        (
            "import torch\ntorch.ones(1)\ndef main():\n    import replayfmt\n    with replayfmt.scope('mine'):\n"
            "        torch.ones(2)\n    torch.ones(3)\nmain()\n",
            ["+execute", "-execute", "+mine", "-mine"],
        ),
        # Opened before the first op.
        (
            "def main():\n    import replayfmt\n    with replayfmt.scope('mine'):\n        import torch\n"
            "        torch.ones(2)\nmain()\n",
            ["+mine", "-mine"],
        ),
        # The first op is another thread's.
        (
            "import torch, threading\nthread = threading.Thread(target=torch.ones, args=(1,))\nthread.start()\n"
            "thread.join()\ntorch.ones(2)\n",
            ["+execute", "-execute"],
        ),
    ],
)
def test_a_program_with_scopes_of_its_own_has_only_those(tmp_path, source, scopes):
    (tmp_path / "scoped.py").write_text(source)
    done = capture(tmp_path, "-o", "scoped.opreplay", "scoped.py")
    assert done.returncode == 0, done.stderr
    captured = Captured(tmp_path / "scoped.opreplay")
    assert captured.scopes() == scopes
    if scopes == ["+execute", "-execute"]:
        assert set(captured.scope_paths) == {"execute"}


# -------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.slow
def test_payload_none_embeds_nothing_and_says_so(folder, ordinary):
    full, none = folder / "plain.opreplay", folder / "none.opreplay"
    assert capture(folder, "-o", none, "--payload=none", "train.py").returncode == 0
    captured = ordinary[2], Captured(none)
    origins = [{storage.origin for storage in _storages(path)} for path in (full, none)]
    assert StorageOrigin.payload in origins[0] and StorageOrigin.absent not in origins[0]
    assert StorageOrigin.absent in origins[1] and StorageOrigin.payload not in origins[1]
    assert [c.session.policies["payload"] for c in captured] == ["full", "none"]
    assert [c.count(RecordKind.digest) > 0 for c in captured] == [True, False]


def _storages(path):
    from replayfmt.format.reader import open_capture

    reader = open_capture(path)
    count = reader.summary.storages
    storages = [reader.storage(number) for number in range(1, count + 1)]
    reader.close()
    return storages


@pytest.mark.slow
def test_digests_of_every_op_of_what_lives_or_of_nothing(folder, ordinary):
    assert ordinary[2].session.policies["digests"] == "live"
    counts = {"live": ordinary[2].count(RecordKind.digest)}
    for digests in ("ops", "none"):
        path = folder / f"digests-{digests}.opreplay"
        assert capture(folder, "-o", path, f"--digests={digests}", "train.py").returncode == 0
        captured = Captured(path)
        assert captured.session.policies["digests"] == digests
        counts[digests] = captured.count(RecordKind.digest)
    assert counts["ops"] > counts["live"] > counts["none"] == 0


@pytest.mark.slow
def test_audit_sees_what_was_written_behind_the_recorders_back(tmp_path):
    (tmp_path / "outside.py").write_text("""
import ctypes, torch
x = torch.zeros(4)
x.add_(1)
ctypes.memset(torch._C.StorageBase.data_ptr(x.untyped_storage()), 0, 16)
print(x.sum().item())
""")
    imports = {}
    for flags in ((), ("--audit",)):
        done = capture(tmp_path, "-o", "outside.opreplay", "--force", *flags, "outside.py")
        assert (done.returncode, done.stdout) == (0, "0.0\n")
        captured = Captured(tmp_path / "outside.opreplay")
        assert captured.session.policies["audit"] is bool(flags)
        imports[flags] = [
            record.argument("reason") for record in captured.records if record.kind is RecordKind.storage_import
        ]
    assert imports == {(): [], ("--audit",): ["outside_write"]}


LOOP = """
import sys, torch
weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(int(sys.argv[1])):
    optimizer.zero_grad()
    (weight * torch.full((3,), float(number))).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_steps_of_a_training_loop_are_recorded_and_steps_that_never_came_are_said(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    done = capture(tmp_path, "-o", "steps.opreplay", "--steps=10:12", "loop.py", "20")
    assert done.returncode == 0, done.stderr
    captured = Captured(tmp_path / "steps.opreplay")
    assert captured.op_names.count("aten::full.default") == 2
    assert {path.partition("/")[0] for path in captured.scope_paths} == {"execute"}
    assert captured.session.policies["steps"] == "10:12"
    done = capture(tmp_path, "-o", "late.opreplay", "--steps=10:12", "loop.py", "11")
    assert done.returncode == 1
    assert "--steps=10:12: 11 steps ended; a step ends when the step() of an optimizer" in done.stderr
    assert "--start-scope=NAME#N" in done.stderr


@pytest.mark.slow
def test_start_and_stop_limit_what_is_recorded(folder, ordinary):
    everything = ordinary[2].op_names
    assert capture(folder, "-o", "part.opreplay", "--start-op=10", "--stop-op=25", "train.py").returncode == 0
    captured = Captured(folder / "part.opreplay")
    assert captured.op_names == everything[10:25]
    assert {path.partition("/")[0] for path in captured.scope_paths} == {"execute"}
    assert (captured.session.policies["start_op"], captured.session.policies["stop_op"]) == (10, 25)
    done = capture(
        folder,
        "-o",
        "scoped.opreplay",
        "--mark=__main__:step=step",
        "--mark=torch.nn.functional:relu=relu",
        "--start-scope=step",
        "--stop-scope=relu",
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    captured = Captured(folder / "scoped.opreplay")
    assert [scope for scope in captured.scopes() if "#" not in scope] == ["+step", "+relu", "-relu", "-step"]
    assert captured.op_names[-1].startswith(("aten::relu", "aten::detach"))
    done = capture(
        folder,
        "-o",
        "all.opreplay",
        "--stop-scope=nowhere",
        "--opaque-result=aten::nothing",
        "--opaque-result=aten::relu:1",
        "train.py",
    )
    assert done.returncode == 1, "a scope that was never left has stopped nothing"
    assert "--stop-scope=nowhere: no scope of that name was left while recording; all that followed" in done.stderr
    assert "--opaque-result=aten::nothing: no operator aten::nothing is called" in done.stderr
    assert "--opaque-result=aten::relu:1: aten::relu has 1 results, counted from 0" in done.stderr
    assert Captured(folder / "all.opreplay").op_names == everything
    done = capture(folder, "-o", "modules.opreplay", "--module-scopes", "--start-scope=1", "--stop-scope=2", "train.py")
    assert done.returncode == 0, done.stderr
    assert Captured(folder / "modules.opreplay").scopes() == ["+Sequential", "+1", "-1", "+2", "-2", "-Sequential"]


COMPILED = """
import torch
@torch.compile
def function(x):
    return (x.sin() * 2).sum()
print(round(function(torch.ones(4)).item(), 4))
"""


@pytest.mark.slow
def test_compiled_regions_are_recorded_inside_or_kept_or_run_as_operators(tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    outcomes = {}
    for compiled in ("kernels", "keep", "eager"):
        asked = [] if compiled == "kernels" else [f"--compiled={compiled}"]  # the first is the default
        done = capture(tmp_path, "-o", "c.opreplay", "--force", *asked, "compiled.py")
        assert (done.returncode, done.stdout) == (0, "6.7318\n"), done.stderr
        captured = Captured(tmp_path / "c.opreplay")
        assert captured.session.policies["compiled"] == compiled
        outcomes[compiled] = (
            captured.summary.unsupported,
            "aten::sin.default" in captured.op_names,
            "(1 with code: a replay needs --allow-code)" in done.stderr,
            done.stderr.strip().rpartition("unsupported: ")[2],
        )
    assert outcomes == {
        "kernels": ({}, False, True, "none"),
        "keep": ({"compiled_region": 1}, False, False, "compiled_region 1"),
        "eager": ({}, True, False, "none"),
    }


@pytest.mark.slow
def test_triton_launches_are_recorded(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "launch.py").write_text("""
import torch, triton, triton.language as tl
@triton.jit
def double(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)
x = torch.ones(4)
double[(1,)](x, n=4)
print(x.sum().item())
""")
    done = capture(tmp_path, "-o", "t.opreplay", "launch.py", TRITON_INTERPRET="1", PYTHONPATH=":".join(sys.path))
    assert (done.returncode, done.stdout) == (0, "8.0\n"), done.stderr
    captured = Captured(tmp_path / "t.opreplay")
    assert not captured.summary.unsupported
    names = [name.partition(".")[0] for name in captured.op_names]
    assert names == ["aten::ones", "triton::double", "aten::sum", "aten::_local_scalar_dense"]


HALVED = """
import torch

library = torch.library.Library("flags", "DEF")
library.define("halved(Tensor x) -> Tensor")
library.impl("halved", lambda x: x / 2, "CompositeExplicitAutograd")
torch.ops.flags.halved(torch.ones(2))
"""


@pytest.mark.slow
def test_operators_may_be_recorded_inside_or_whole(tmp_path):
    (tmp_path / "halved.py").write_text(HALVED)
    done = capture(tmp_path, "-o", "inside.opreplay", "--inside=flags::h*", "halved.py")
    assert done.returncode == 0, done.stderr
    assert Captured(tmp_path / "inside.opreplay").op_names == ["aten::ones.default", "aten::div.Tensor"]
    done = capture(tmp_path, "-o", "whole.opreplay", "--whole=flags::halved", "--inside=flags::doubled", "halved.py")
    assert done.returncode == 1
    assert "--inside=flags::doubled: no operator of that name was called while recording" in done.stderr
    assert Captured(tmp_path / "whole.opreplay").op_names[-1] == "flags::halved.default"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "train.py", "train.py"],
        ["-o", "../{folder}/train.py", "train.py"],
        ["-o", "w.bin", "--file=w.bin", "train.py"],
    ],
)
def test_a_capture_takes_no_place_of_the_program_or_of_a_file_that_it_reads(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "w.bin").write_bytes(bytes(64))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    given = [each.replace("{folder}", tmp_path.name) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["opreplay-capture", "--force", *given])
    with pytest.raises(SystemExit) as ended:
        capture_main()
    assert ended.value.code == 2 and "would take the place of what it is made from" in capsys.readouterr().err
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_name_does_not_steer_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STDERR", identity(2))  # pytest's own
    _say(f"opreplay-capture: {tmp_path}/a\x1b[31m: no op was captured")
    assert "a\\x1b[31m: no op" in capfd.readouterr().err
