"""opreplay-dump as a command: what it prints where, its exit codes, what it does with captures that are not whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import Tool

from replayfmt.format.reader import open_capture

from . import captures


def test_text_is_the_default_and_jsonl_is_asked_for(run: Tool, plain: Path) -> None:
    default, text, jsonl = run(plain), run("--format=text", plain), run("--format=jsonl", plain)
    assert default == text and default.code == 0 and default.out.startswith("file ") and default.err == ""
    rows = [json.loads(line) for line in jsonl.out.splitlines()]
    assert rows[0]["kind"] == "file" and rows[-1] == {**rows[-1], "kind": "scope_end", "ordinal": 101}


def test_jq_implies_jsonl_and_contradicts_text(run: Tool, plain: Path) -> None:
    assert run("--jq", 'select(.kind=="op") | .op', "--ops=1:3", plain).out == '"aten::add"\n"aten::mul"\n'
    assert run("--format=jsonl", "--jq", ".kind", "--summary", plain).out == '"file"\n"summary"\n'
    wrong = run("--format=text", "--jq", ".", plain)
    assert (wrong.code, wrong.out) == (2, "") and "--jq" in wrong.err


def test_summary_is_the_first_part_of_either_format(run: Tool, plain: Path) -> None:
    assert run(plain).out.startswith(run("--summary", plain).out)
    assert [json.loads(line)["kind"] for line in run("--summary", "--format=jsonl", plain).out.splitlines()] == [
        "file",
        "summary",
    ]


def test_selections_reach_the_records(run: Tool, plain: Path) -> None:
    count = 'select(.kind=="op") | .ordinal'
    assert run("--ops=3:5", "--jq", count, plain).out == "3\n4\n"
    assert run("--kernel=aten::mul", "--ops=:5", "--jq", count, plain).out == "2\n4\n"
    assert len(run("--scope=execute", "--jq", count, plain).out.splitlines()) == 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ops=1"],
        ["--ops=9:1"],
        ["--ops=x:y"],
        ["--jq", ".["],
        ["--format=xml"],
        ["--no-such-flag"],
        ["--ops"],
        ["--summary", "--ops=1:2"],
        ["--summary", "--scope=execute"],
        ["--summary", "--kernel=aten::mm"],
    ],
)
def test_wrong_usage_is_exit_code_2(run: Tool, plain: Path, arguments: list[str]) -> None:
    for ran in (run(*arguments, plain), run(*arguments[:1], *arguments[1:], "missing.opreplay")):
        assert (ran.code, ran.out) == (2, "") and "Traceback" not in ran.err


def test_a_missing_argument_is_exit_code_2(run: Tool) -> None:
    assert run().code == 2


def test_what_cannot_be_done_with_this_capture_is_one_line(run: Tool, plain: Path) -> None:
    for arguments, code in (
        (["--scope=nowhere"], 2),
        (["--kernel=aten::nothing"], 2),
        (["--ops=900:"], 2),
        (["--signatures", "--kernel=aten::nothing"], 2),
        (["--jq", ".kind + 1"], 1),
    ):
        ran = run(*arguments, plain)
        assert ran.code == code and ran.err.startswith("INVALID_ARGUMENT: ") and ran.err.count("\n") == 1


def test_a_capture_that_was_never_closed_is_shown_with_the_reason(run: Tool, tmp_path: Path) -> None:
    b = captures.Builder(tmp_path / "killed.opreplay")
    scope = b.writer.scope(0, "execute")
    begin = captures.Signature(captures.RecordKind.scope_begin, (captures.Node(captures.V.string, "name", "execute"),))
    b.record(begin, scope=scope)
    b.frame()
    b.writer.abandon()
    ran = run("--format=jsonl", f"{b.path}.partial")
    assert (ran.code, ran.err) == (0, "")
    rows = {row["kind"]: row for row in map(json.loads, ran.out.splitlines())}
    assert rows["file"]["complete"] is False and rows["file"]["incomplete_reason"]
    assert rows["summary"]["strict_replay_supported"] is False and rows["summary"]["duration_ns"] is None
    assert rows["scope_begin"]["name"] == "execute"
    shown = run(f"{b.path}.partial").out
    assert "\ncomplete      no: " in shown and "refused: incomplete" in shown and "[scope_begin]" in shown


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_a_capture_that_is_none_is_exit_code_3_and_one_line(run: Tool, tmp_path: Path, plain: Path, form: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_text("not a capture")
    newer = bytearray(plain.read_bytes())
    newer[8] = 9
    (tmp_path / "damaged").write_bytes(newer)
    for name in ("empty", "other", "damaged", "missing", "."):
        ran = run(f"--format={form}", tmp_path / name)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.count("\n") == 1 and str(tmp_path) in ran.err


def test_damage_in_the_middle_ends_the_dump_where_it_is_met(run: Tool, tmp_path: Path, plain: Path) -> None:
    with open_capture(plain) as reader:
        offset = reader.record_frames[4].offset
    data = bytearray(plain.read_bytes())
    data[offset + 64 + 5] ^= 1
    (tmp_path / "damaged.opreplay").write_bytes(data)
    ran = run("--format=jsonl", tmp_path / "damaged.opreplay")
    assert ran.code == 3 and ran.err.startswith("DATA_LOSS: ") and ran.err.count("\n") == 1
    assert f"{offset:#x}" in ran.err
    assert json.loads(ran.out.splitlines()[-1])["ordinal"] == 39
    assert run("--ops=:40", tmp_path / "damaged.opreplay").code == 0


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_tool_quietly(tmp_path: Path) -> None:
    path = captures.plain(tmp_path / "long.opreplay", ops=20_000, frame=5000)
    for arguments in ("--format=jsonl", "--format=text", "--jq=."):
        command = [sys.executable, "-m", "opreplay_tools.dump", arguments, str(path)]
        tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert tool.stdout is not None and tool.stderr is not None
        tool.stdout.readline()
        tool.stdout.close()
        assert tool.wait(600) == 0
        assert tool.stderr.read() == b""
        tool.stderr.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error(plain: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "opreplay_tools.dump", str(plain)]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert ran.returncode == 1
    assert ran.stderr == "FAILED_PRECONDITION: the output could not be written: No space left on device\n"


@pytest.mark.slow
def test_the_dump_works_where_torch_cannot_be_imported(plain: Path) -> None:
    program = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from opreplay_tools.dump import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "--jq", 'select(.kind=="op") | .ordinal', "--ops=98:", str(plain)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "98\n99\n100\n", "")


@pytest.mark.slow
def test_output_is_utf_8_whatever_the_locale(every: Path) -> None:
    command = [sys.executable, "-m", "opreplay_tools.dump", "--ops=6:7", str(every)]
    environment = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PATH": ""}
    ran = subprocess.run(command, capture_output=True, env=environment, timeout=600)
    assert ran.returncode == 0 and 'say "é"' in ran.stdout.decode()


def test_raw_and_slurped_queries_make_lines_for_other_tools(run: Tool, plain: Path) -> None:
    filter_ = 'map(select(.kind == "op")) | group_by(.op)[] | [.[0].op, length] | @tsv'
    done = run("--jq", filter_, "-r", "-s", plain)
    assert done.code == 0, done.err
    counts = [line.split("\t") for line in done.out.splitlines()]
    assert sum(int(count) for _name, count in counts) == 100
    assert run("--jq", filter_, "--raw-output", "--slurp", plain).out == done.out
    for flag in ("-r", "-s"):
        wrong = run(flag, plain)
        assert wrong.code == 2 and "is for --jq" in wrong.err
