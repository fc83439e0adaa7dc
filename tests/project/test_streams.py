"""What the tools do where their output cannot be written: the exit code and the files do not depend on who reads, and
nothing but a regular file is ever replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from replayfmt.format.model import CaptureInfo
from replayfmt.format.writer import CaptureWriter

_TOOL = """
import click, sys
from opreplay_tools.command import emit, reader_may_leave, run_tool, stdout, tool
from replayfmt.errors import InvalidCapture

@tool("opreplay-toy")
@click.option("--fail", is_flag=True)
@click.option("--whole", is_flag=True)
def cli(fail, whole):
    if fail:
        raise InvalidCapture("it is damaged")
    if whole:
        with reader_may_leave():
            emit("word " * 100_000)
        return 1
    emit("word " * 100_000)
    return 1

run_tool(cli)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(_TOOL)
    return path


def _shell(command: str) -> tuple[int, str]:
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=600)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


@pytest.mark.slow
@_full
@pytest.mark.parametrize("arguments", ["", "--whole", "--help", "--version", "--agents-md"])
def test_a_full_disk_under_stdout_is_one_error_whatever_is_printed(toy: Path, arguments: str) -> None:
    if arguments == "--agents-md":
        toy.write_text(_TOOL.replace("opreplay-toy", "opreplay-run"))
    assert _shell(f"'{sys.executable}' '{toy}' {arguments} >/dev/full") == (
        1,
        "FAILED_PRECONDITION: the output could not be written: No space left on device\n",
    )


@pytest.mark.slow
def test_without_stdout_or_stderr_a_tool_does_its_work_and_exits_as_ever(toy: Path) -> None:
    python = f"'{sys.executable}' '{toy}'"
    assert _shell(f"{python} >&-") == (1, "") and _shell(f"{python} --help >&-") == (0, "")
    for nowhere in ("2>&-", "2>/dev/full") if Path("/dev/full").exists() else ("2>&-",):
        assert _shell(f"{python} --fail {nowhere}")[0] == 3
        assert _shell(f"{python} --no-such-flag {nowhere}")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_of_stdout_cannot_say_is_escaped(toy: Path, encoding: str) -> None:
    toy.write_text(
        _TOOL.replace('"word " * 100_000', "chr(0x2026)", 1).replace(
            'emit("word " * 100_000)', "stdout().write(chr(0x2026))"
        )
    )
    spoken = {**os.environ, "PYTHONIOENCODING": encoding}
    for argument in ("", "--whole"):  # by the stream itself, and by click
        done = subprocess.run([sys.executable, toy, *argument.split()], env=spoken, capture_output=True, timeout=600)
        said = (b"\\u2026", b"?", b"\xe2\x80\xa6") if argument else (b"\\u2026",)  # click chooses as it likes
        assert (done.returncode, done.stderr) == (1, b"") and done.stdout.strip() in said


def _left_alone(command: list[str]) -> tuple[int, str]:
    """Run with a stdout whose reader has gone away before anything is written; the exit code and stderr."""
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tool.stdout is not None and tool.stderr is not None
    tool.stdout.close()
    said = tool.stderr.read()
    tool.stderr.close()
    return tool.wait(600), said


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_tool_with_0_and_where_a_result_is_there_with_the_results_code(
    toy: Path,
) -> None:
    assert _left_alone([sys.executable, str(toy)]) == (0, "")
    assert _left_alone([sys.executable, str(toy), "--whole"]) == (1, "")


@pytest.mark.slow
def test_an_error_whose_reader_has_gone_away_still_has_its_exit_code(toy: Path) -> None:
    for argument, code in (("--fail", 3), ("--no-such-flag", 2)):
        tool = subprocess.Popen([sys.executable, str(toy), argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert tool.stdout is not None
        tool.stdout.close()
        assert tool.wait(600) == code


@pytest.mark.slow
def test_an_invalid_capture_is_invalid_whoever_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    CaptureWriter(path, CaptureInfo("00112233-4455-6677-8899-aabbccddeeff", "test", "0")).close(0)
    path.write_bytes(path.read_bytes()[:-1])
    code, said = _left_alone([str(Path(sys.executable).with_name("opreplay-check")), str(path)])
    assert code == 3 and said.startswith("DATA_LOSS: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "opreplay-capture --force -o pipe program.py",
        "opreplay-check --recover pipe --force a.opreplay",
        "opreplay-trim --payload=none --force a.opreplay pipe",
        "opreplay-trim --ops=0:1 --script=pipe --force a.opreplay",
        "opreplay-export --force a.opreplay pipe",
        "opreplay-import --force -o pipe trace.json",
        "opreplay-import --force -o b.opreplay --report=pipe trace.json",
    ],
)
def test_a_device_or_a_pipe_is_never_replaced_by_a_file_not_even_with_force(tmp_path: Path, command: str) -> None:
    CaptureWriter(tmp_path / "a.opreplay", CaptureInfo("00112233-4455-6677-8899-aabbccddeeff", "test", "0")).close(0)
    (tmp_path / "program.py").write_text("import torch\ntorch.ones(1) + 1\n")
    (tmp_path / "trace.json").write_text('{"traceEvents": [], "schemaVersion": 1}')
    os.mkfifo(tmp_path / "pipe")
    name, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(name), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "pipe: is a device or a pipe; name a file to write to" in done.stderr and done.returncode == 1, done
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
