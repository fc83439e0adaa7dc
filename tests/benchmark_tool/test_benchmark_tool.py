"""opreplay-benchmark on real captures: every flag has its effect, every bad input its exit code."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.benchmark import measure
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.model import CaptureInfo, Node, Signature
from replayfmt.format.reader import open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.writer import CaptureWriter
from replayfmt.replay.plan import Plan

from .conftest import STEPS


@pytest.fixture
def bench(tools):
    """Runs the tool on three replays without warm-up, unless told otherwise."""

    def run(capture, *flags):
        given = {str(flag).partition("=")[0] for flag in flags}
        short = ["--benchmark-min-time=3x", "--benchmark-warmup=0"]
        return tools("benchmark", capture, *(flag for flag in short if flag.partition("=")[0] not in given), *flags)

    return run


@pytest.fixture
def executed(monkeypatch):
    """How each replay of the test was asked to verify."""
    calls = []
    original = Plan.execute

    def execute(self, verify="none", *args, **kwargs):
        calls.append(verify)
        return original(self, verify, *args, **kwargs)

    monkeypatch.setattr(Plan, "execute", execute)
    return calls


def rows(bench, capture, *flags):
    assert bench(capture, *flags, "--benchmark-format=json").code == 0, bench
    return json.loads(bench(capture, *flags, "--benchmark-format=json").out)["benchmarks"]


@pytest.mark.slow
def test_the_whole_capture_is_one_row_with_every_iterations_times(bench, captured, executed):
    assert bench(captured, "--benchmark-format=json").code == 0
    document = json.loads(bench(captured, "--benchmark-format=json").out)
    (row,) = document["benchmarks"]
    assert row["name"] == "BM_replay" and row["iterations"] == 3 and row["time_unit"] == "ns"
    assert len(row["samples"]["real_time"]) == len(row["samples"]["cpu_time"]) == 3
    assert all(time > 0 for time in row["samples"]["real_time"])
    assert row["real_time"] == pytest.approx(sum(row["samples"]["real_time"]) / 3)
    with open_capture(captured) as reader:
        assert row["ops"] == reader.summary.records[RecordKind.op]
        assert document["context"]["capture_session"] == reader.session.session_id
    assert document["context"]["torch_version"] == torch.__version__
    assert document["context"]["torch_num_threads"] == 1 and document["context"]["devices"] == ["cpu"]
    assert row["captured_time"] > 0
    assert executed == ["auto", "none", "none", "none", "auto"] * 2


@pytest.mark.slow
def test_markdown_is_a_table_for_a_pull_request(bench, tools, captured, tmp_path):
    out = tmp_path / "before.json"
    assert bench(captured, "--scope=step", f"--benchmark-out={out}").code == 0
    done = bench(captured, "--scope=step", f"--baseline={out}", "--benchmark-format=markdown")
    assert done.code == 0
    head, ruler, *lines = done.out.splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == [
        "what", "median", "at least", "at most", "before", "ratio", "verdict"
    ]  # fmt: skip
    assert ruler.count("---") == 7 and len(lines) == len(json.loads(out.read_text())["benchmarks"])
    assert all(line.startswith("| `BM_replay/scope:") and line.count(" | ") == 6 for line in lines)
    per_op = ["--per-op", "--benchmark-min-time=3x", "--op-limit=2", "--benchmark-format=markdown"]
    plain = tools("benchmark", captured, *per_op).out.splitlines()
    assert plain[0] == "| what | median | at least | at most |" and len(plain) == 4
    assert len(tools("benchmark", captured, *per_op, "--top=1").out.splitlines()) == 3
    for flag in ("--memory", "--reconcile"):
        assert bench(captured, flag, "--benchmark-format=markdown").code == 2


@pytest.mark.slow
def test_a_scope_is_reported_in_place_of_the_whole_and_its_passes_add_up(bench, captured):
    document = json.loads(bench(captured, "--scope=step", "--benchmark-format=json").out)
    (row,) = document["benchmarks"]
    assert row["name"] == "BM_replay/scope:step" and row["passes"] == STEPS
    forward, execute = rows(bench, captured, "--scope=execute/step/forward", "--scope=execute")
    assert forward["passes"] == STEPS and execute["passes"] == 1
    assert forward["ops"] < row["ops"] <= execute["ops"]
    for inner, outer in zip(forward["samples"]["real_time"], execute["samples"]["real_time"], strict=True):
        assert inner < outer  # of the same replay: a part of it


@pytest.mark.slow
def test_repetitions_make_rows_and_aggregates(bench, captured):
    made = rows(
        bench, captured, "--benchmark-repetitions=2", "--benchmark-min-time=0.001s", "--benchmark-precision=off"
    )
    assert [row["name"] for row in made] == ["BM_replay"] * 2 + [
        f"BM_replay_{name}" for name in ("mean", "median", "stddev", "cv")
    ]
    assert made[0]["iterations"] == made[1]["iterations"] >= 1


def test_an_interrupt_keeps_the_complete_repetitions(tools, captured, tmp_path, monkeypatch):
    repetition, out = measure._Runner.repetition, tmp_path / "out.json"

    def interrupted(runner, iterations):
        if len(runner.whole_samples) == 2:
            raise KeyboardInterrupt
        repetition(runner, iterations)

    monkeypatch.setattr(measure._Runner, "repetition", interrupted)
    flags = ["--benchmark-min-time=2x", "--benchmark-repetitions=5", "--benchmark-format=jsonl"]
    ran = tools("benchmark", *flags, f"--benchmark-out={out}", captured)
    *rows, context = map(json.loads, ran.out.splitlines())
    assert ran.code == 130 and [row["repetition_index"] for row in rows if row["run_type"] == "iteration"] == [0, 1]
    assert "interrupted after 2 of 5 repetitions" in context["context"]["warnings"]
    assert len(json.loads(out.read_text())["benchmarks"]) == len(rows)


def test_warm_up_replays_come_before_each_repetition(bench, captured, executed):
    bench(captured, "--benchmark-warmup=4", "--benchmark-min-time=1x", "--benchmark-repetitions=2")
    assert executed == ["auto", *["none"] * 10, "auto"]


@pytest.mark.slow
def test_seconds_are_timed_until_they_have_passed(bench, captured):
    (row,) = rows(bench, captured, "--benchmark-min-time=0.01s")
    assert sum(row["samples"]["real_time"]) >= 0.01e9 or row["iterations"] >= 1


@pytest.mark.slow
def test_the_verification_asked_for_is_what_is_done(bench, captured, executed):
    text = bench(captured, "--verify=bitwise").out
    assert "verified  before and after timing, bitwise" in text and executed.count("bitwise") == 2
    executed.clear()
    text = bench(captured, "--verify=none").out
    assert "\nnot verified: --verify=none" in text and "WARNING: nothing was verified" in text
    assert executed == ["none"] * 3


_counter = [0]


@torch.library.custom_op("opreplay_benchmark_test::differs", mutates_args=())
def differs(value: torch.Tensor) -> torch.Tensor:
    """Gives another result at each call: what was captured cannot be replayed."""
    _counter[0] += 1
    return value + _counter[0]


@pytest.mark.slow
def test_ops_that_do_not_match_are_not_said_to_be_verified(tools, tmp_path):
    path = tmp_path / "differs.opreplay"
    with replayfmt.capture(path, digests="ops"):
        differs(torch.ones(3))
    ran = tools("benchmark", path, "--per-op", "--benchmark-min-time=1x")
    assert ran.code == 1
    assert "verified  differs: " in ran.out


def test_a_replay_that_does_not_match_gives_exit_code_1_and_no_results(bench, tmp_path):
    path, out = tmp_path / "differs.opreplay", tmp_path / "out.json"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        result = differs(torch.ones(3))
        assert result.tolist()
    done = bench(path, f"--benchmark-out={out}")
    assert done.code == 1 and done.out == "" and not out.exists() and list(tmp_path.iterdir()) == [path]
    assert done.err.startswith("DATA_LOSS: the replay did not match the capture before timing, so there are no times")
    assert "host read by tolist" in done.err and "scope execute" in done.err


@torch.library.custom_op("opreplay_benchmark_test::fails_later", mutates_args=())
def fails_later(value: torch.Tensor) -> torch.Tensor:
    """Works once, when it is captured."""
    _counter[0] += 1
    if _counter[0] > 1:
        raise RuntimeError("no more")
    return value.clone()


@pytest.mark.parametrize("name", ["benchmark", "run"])
def test_the_trace_is_written_when_the_replay_fails(tools, tmp_path, name):
    path, out = tmp_path / "fails.opreplay", tmp_path / "trace.json"
    _counter[0] = 0
    with replayfmt.capture(path), replayfmt.scope("execute"):
        fails_later(torch.ones(3).cosh())
    ran = tools(name, path, "--device-profiling-mode=host-ops", f"--device-profiling-output={out}")
    assert ran.code == 1 and "fails_later" in ran.err and len(ran.err.splitlines()) == 1
    assert {"aten::cosh", "execute"} <= {event["name"] for event in trace(out)}


def test_results_are_written_in_google_benchmarks_json_whatever_is_printed(bench, captured, tmp_path):
    out = tmp_path / "out.json"
    done = bench(captured, f"--benchmark-out={out}", "--benchmark-format=csv")
    document = json.loads(out.read_text())
    (printed,) = csv.DictReader(io.StringIO(done.out))
    assert document["context"]["json_schema_version"] == 1
    assert printed["name"] == document["benchmarks"][0]["name"] == "BM_replay"
    assert float(printed["real_time"]) == document["benchmarks"][0]["real_time"]
    assert "WARNING: BM_replay: only 3 iterations" in done.err


def test_an_existing_result_is_refused_early_and_force_overwrites_it(bench, captured, tmp_path, executed):
    out = tmp_path / "out.json"
    out.write_text("old")
    assert bench(captured, f"--benchmark-out={out}").code == 1
    assert out.read_text() == "old" and executed == [] and "--force" in bench(captured, f"--benchmark-out={out}").err
    assert bench(captured, f"--benchmark-out={out}", "--force").code == 0
    assert json.loads(out.read_text())["benchmarks"]


def test_a_result_that_cannot_be_written_is_found_out_before_anything_runs(bench, captured, tmp_path, executed):
    done = bench(captured, f"--benchmark-out={tmp_path}/missing/out.json")
    assert done.code == 1 and "there is no directory" in done.err and executed == []


def test_the_capture_itself_is_never_the_result(bench, captured, tmp_path, executed):
    path = tmp_path / "copy.opreplay"
    path.write_bytes(captured.read_bytes())
    (tmp_path / "link").hardlink_to(path)
    for flags in (["--benchmark-out={}"], ["--device-profiling-mode=host-ops", "--device-profiling-output={}"]):
        for name in ("copy.opreplay", "link"):
            done = bench(path, *(flag.format(tmp_path / name) for flag in flags), "--force")
            assert done.code == 2 and "is the capture; name another file" in done.err and executed == []
    assert path.read_bytes() == captured.read_bytes()


@pytest.mark.slow
def test_the_console_is_the_default_and_csv_and_json_are_alone_on_stdout(bench, captured):
    assert "Real mean" in bench(captured).out and bench(captured).err == ""
    assert bench(captured, "--benchmark-format=csv").out.startswith("name,iterations,")
    assert json.loads(bench(captured, "--benchmark-format=json").out)


def test_the_device_asked_for_is_used_or_refused(bench, captured):
    assert "run on    cpu;" in bench(captured, "--device=cpu").out
    assert bench(captured, "--device=cuda:77").code == 2


def test_an_incomplete_capture_is_refused_without_the_flag_and_marked_with_it(bench, captured, tmp_path):
    path = tmp_path / "cut.opreplay"
    path.write_bytes(captured.read_bytes()[:-64])
    done = bench(path)
    assert done.code == 1 and done.out == "" and "--allow-incomplete" in done.err
    done = bench(path, "--allow-incomplete")
    assert done.code == 0 and "WARNING: the capture is incomplete" in done.out


def trace(path):
    return json.loads(Path(path).read_text())["traceEvents"]


def test_a_trace_of_one_replay_is_written_beside_the_results(bench, captured, tmp_path, executed):
    path = tmp_path / "trace.json"
    done = bench(captured, "--device-profiling-mode=host-ops,shapes", f"--device-profiling-output={path}")
    assert done.code == 0 and "BM_replay" in done.out and executed == ["auto", "none", "none", "none", "auto", "none"]
    events = trace(path)
    multiplied = [event for event in events if event["name"] == "aten::mm" and event.get("cat") == "cpu_op"]
    with open_capture(captured) as reader:
        calls = sum(
            count for kernel, count in reader.summary.kernel_calls.items() if reader.kernels[kernel].name == "aten::mm"
        )
    assert len(multiplied) == calls and all("Input Dims" in event["args"] for event in multiplied)
    annotations = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sorted(annotations) == ["execute", *["execute/step"] * STEPS, *["execute/step/forward"] * STEPS, "init"]


def test_run_writes_the_same_kind_of_trace(tools, captured, tmp_path):
    path = tmp_path / "trace.json"
    ran = tools("run", captured, "--device-profiling-mode=memory", f"--device-profiling-output={path}")
    assert ran.code == 0
    names = {(event.get("cat"), event["name"]) for event in trace(path)}
    assert {("user_annotation", "execute/step"), ("cpu_instant_event", "[memory]")} <= names
    ran = tools("run", captured, "--device-profiling-mode=memory", f"--device-profiling-output={path}")
    assert ran.code == 1
    ran = tools("run", captured, "--device-profiling-mode=memory")
    assert ran.code == 2


@pytest.mark.parametrize(
    "flags, code",
    [
        (["--device-profiling-mode=host-ops"], 2),
        (["--device-profiling-output=trace.json"], 2),
        (["--device-profiling-mode=nothing", "--device-profiling-output=trace.json"], 2),
        (["--device-profiling-mode=device-kernels", "--device-profiling-output=trace.json"], 2),
        (["--device-profiling-mode=host-ops", "--device-profiling-output=there.json"], 1),
        (["--device-profiling-mode=host-ops", "--device-profiling-output=nowhere/trace.json"], 1),
        (["--device-profiling-mode=host-ops", "--device-profiling-output="], 1),
        (["--device-profiling-mode=host-ops", "--device-profiling-output=same.json", "--benchmark-out=same.json"], 2),
    ],
)
def test_a_trace_that_cannot_be_is_refused_early(bench, captured, tmp_path, monkeypatch, executed, flags, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("old")
    assert bench(captured, *flags).code == code and executed == [] and bench(captured, *flags).out == ""
    assert os.listdir(tmp_path) == ["there.json"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--benchmark-min-time=fast"],
        ["--benchmark-min-time=0x"],
        ["--benchmark-warmup=-1"],
        ["--benchmark-repetitions=0"],
        ["--benchmark-format=xml"],
        ["--verify=maybe"],
        ["--scope=nowhere"],
        ["--no-such-flag"],
        ["second.opreplay"],
    ],
)
def test_wrong_usage_gives_exit_code_2(bench, captured, flags, executed):
    done = bench(captured, *flags)
    assert done.code == 2 and done.out == "" and done.err and executed == []


def test_a_scope_that_the_capture_lacks_is_answered_with_those_it_has(bench, captured):
    assert "it has 'init', 'execute', 'execute/step', 'execute/step/forward'" in bench(captured, "--scope=x").err


@pytest.mark.parametrize(
    "kinds, words",
    [
        (["scope_begin"], "begins at ordinal 0 or later and does not end"),
        (["scope_end", "scope_begin", "scope_end"], "ordinal 0: scope 'step' ends before it begins"),
    ],
)
def test_a_scope_without_both_ends_is_refused_with_exit_code_1(bench, tmp_path, executed, kinds, words):
    path = tmp_path / "open.opreplay"
    writer = CaptureWriter(path, CaptureInfo("00112233-4455-6677-8899-aabbccddeeff", "test", "0"))
    scope = writer.scope(0, "step")
    signatures = [
        writer.signature(Signature(RecordKind[kind], args=(Node(ValueKind.string, "name", "step"),))) for kind in kinds
    ]
    none = np.zeros(0, dtype=np.uint64)
    writer.records(
        RecordColumns(
            signature=np.array(signatures),
            scope=np.full(len(kinds), scope),
            thread=np.zeros(len(kinds), dtype=np.uint16),
            start_ns=np.arange(len(kinds)),
            duration_ns=None,
            tensors=none,
            ints=none,
            floats=none,
            tensor_definitions={},
        )
    )
    writer.close(100)
    done = bench(path, "--scope=step")
    assert done.code == 1 and words in done.err and done.out == "" and executed == []


def damage(content, kind):
    if kind == "truncated head":
        return content[:40]
    if kind == "flipped preamble":
        return content[:9] + bytes([content[9] ^ 1]) + content[10:]
    if kind == "flipped everywhere":
        return bytes(byte ^ (0x40 if place % 97 == 50 else 0) for place, byte in enumerate(content))
    return {"empty": b"", "text": b"hello\n" * 100}[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "truncated head", "flipped preamble", "flipped everywhere"])
def test_a_file_that_is_no_valid_capture_gives_exit_code_3_and_one_line(bench, captured, tmp_path, kind):
    path = tmp_path / "bad.opreplay"
    path.write_bytes(damage(captured.read_bytes(), kind))
    done = bench(path)
    assert done.code == 3 and done.out == "" and done.err.startswith(("DATA_LOSS: ", "UNIMPLEMENTED: "))
    assert len(done.err.splitlines()) == 1 and str(path) in done.err


def test_a_missing_file_and_a_directory_give_exit_code_3(bench, tmp_path):
    for path in (tmp_path / "missing.opreplay", tmp_path):
        assert bench(path).code == 3 and bench(path).err.startswith("NOT_FOUND: ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_and_nowhere_else(bench, captured, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert bench(captured, "--benchmark-format=json").code == 0
    assert "repetition 1 of 1" in screen.getvalue() and json.loads(bench(captured, "--benchmark-format=json").out)
    monkeypatch.undo()
    assert bench(captured).err == ""


@pytest.mark.slow
def test_the_console_script_runs_and_ends_quietly_when_its_reader_goes_away(captured):
    script = Path(sys.executable).with_name("opreplay-benchmark")
    command = f"'{script}' '{captured}' --benchmark-min-time=2x --benchmark-warmup=0 --benchmark-format=json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 1"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "{")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--per-op", "--kernel=aten::mm*"]])
def test_the_results_are_in_their_file_whether_or_not_somebody_reads_the_table(captured, tmp_path, commands, flags):
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    if not flags:
        flags = ["--device-profiling-mode=host-ops", f"--device-profiling-output={trace}"]
    command = [commands / "opreplay-benchmark", captured, "--benchmark-min-time=2x", f"--benchmark-out={out}", *flags]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    tool.stdout.close()
    said = tool.stderr.read()
    tool.stderr.close()
    assert tool.wait(600) == 0 and "Traceback" not in said
    assert json.loads(out.read_text())["benchmarks"] and trace.exists() == ("--per-op" not in flags)
