"""opreplay-check as a command: what it prints where, and its exit codes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import Tool

from replayfmt.format.frames import HEADER_BYTES
from replayfmt.format.model import CaptureInfo, ExternalFile, FileIdentity
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .reading import read_all
from .samples import SESSION, write_everything, write_small


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "a.opreplay"
    write_everything(path)
    return path


def test_a_valid_capture_exits_with_0_and_says_what_is_in_it(run: Tool, capture: Path) -> None:
    ran = run(capture)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{capture}: capture of format 1.0, {capture.stat().st_size:,} bytes, complete"
    assert lines[-1] == "valid"
    text = "\n".join(lines)
    for part in (
        SESSION.session_id,
        "opreplay 0.1.0 with torch 2.13.0",
        "1 head",
        "2 records",
        "5 kernel",
        "3 op",
        "3 unsupported",
        "storages     10",
        "3 file",
        "3 range",
        "3 recipe",
        "1 annotated",
        "3 attachment",
        "payloads     7 with 142,166 bytes",
    ):
        assert part in text


def test_damage_exits_with_3_and_the_first_finding(run: Tool, capture: Path) -> None:
    offset = open_capture(capture).record_frames[0].offset
    data = bytearray(capture.read_bytes())
    data[offset + HEADER_BYTES + 9] ^= 1
    capture.write_bytes(data)
    ran = run(capture)
    assert ran.code == 3
    assert ran.err.startswith(f"DATA_LOSS: {capture}: frame ") and "the body is damaged" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert "valid" not in ran.out and "payloads     6" in ran.out


def test_a_capture_that_was_never_closed_exits_with_3_and_is_explained(run: Tool, tmp_path: Path) -> None:
    path = tmp_path / "b.opreplay"
    write_small(path, close=False).abandon()
    ran = run(f"{path}.partial")
    assert ran.code == 3
    assert "never closed, or is still being written" in ran.err and "its 4 records" in ran.err
    assert f"opreplay-check {path}.partial --recover OUT" in ran.err
    assert "incomplete" in ran.out.splitlines()[0] and "2 op" in ran.out
    ran = run(path)
    assert ran.code == 3 and ran.err.startswith("NOT_FOUND: ") and f"{path}.partial is there" in ran.err


def test_recover_writes_a_valid_capture_and_exits_with_0(run: Tool, tmp_path: Path) -> None:
    path, out = tmp_path / "b.opreplay", tmp_path / "out.opreplay"
    write_small(path, close=False).abandon()
    ran = run(f"{path}.partial", "--recover", out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0].startswith(f"{out}: capture of format 1.0") and "recovered" in ran.out
    assert ran.out.splitlines()[-1] == f"valid; recovered from {path}.partial"
    assert "left behind: the capture was never closed" in ran.out
    assert run(out).code == 0 and len(read_all(out)[1]) == 4
    again = run(f"{path}.partial", "--recover", out)
    assert again.code == 1 and again.err.startswith("FAILED_PRECONDITION: ") and "--force" in again.err
    assert run(f"{path}.partial", "--recover", out, "--force").code == 0


def test_recovering_what_is_no_capture_exits_with_3_and_leaves_nothing(run: Tool, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a capture")
    assert run(tmp_path / "x", "--recover", tmp_path / "out").code == 3
    assert run(tmp_path / "missing", "--recover", tmp_path / "out").code == 3
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_recovering_onto_itself_or_nowhere_fails_clearly(run: Tool, capture: Path) -> None:
    ran = run(capture, "--recover", capture, "--force")
    assert ran.code == 2 and ran.err.startswith("INVALID_ARGUMENT: ")
    ran = run(capture, "--recover", capture.parent / "missing" / "out")
    assert ran.code == 1 and "there is no directory" in ran.err


@pytest.mark.parametrize("arguments", [[], ["--recover"], ["--force"], ["a", "b"], ["--no-such-flag", "a"]])
def test_wrong_usage_exits_with_2(run: Tool, capture: Path, arguments: list[str]) -> None:
    ran = run(*(arguments + [str(capture)] if arguments == ["--force"] else arguments))
    assert ran.code == 2 and ran.out == ""


def test_help_and_version_and_the_playbook_exit_with_0(run: Tool) -> None:
    assert "--recover" in run("--help").out and run("--version").out.startswith("opreplay-check")
    assert run("--agents-md").code == 0


def test_what_a_capture_says_of_itself_cannot_steer_the_terminal(run: Tool, tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    CaptureWriter(path, CaptureInfo(SESSION.session_id, "\x1b[31mred\nvalid\n", "1")).close(1)
    ran = run(path)
    assert ran.code == 0 and "\x1b" not in ran.out and "\\x1b[31mred\\nvalid\\n" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "title"), [([], b"checking"), (["--add-digests"], b"adding digests")])
def test_a_progress_bar_is_shown_on_a_terminal_and_nowhere_else(
    tmp_path: Path, arguments: list[str], title: bytes
) -> None:
    capture, place = tmp_path / "a.opreplay", tmp_path / "file.bin"
    place.write_bytes(bytes(100))
    status = place.stat()
    writer = CaptureWriter(capture, SESSION)
    writer.file(ExternalFile(str(place), 100, FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)))
    writer.close(1)
    arguments = [*arguments, str(capture), *([str(tmp_path / "out"), "--force"] if arguments else [])]
    code = [sys.executable, "-c", "from opreplay_tools.check import main; main()", *arguments]
    master, slave = pty.openpty()
    try:
        terminal = {**os.environ, "TERM": "xterm"}
        ran = subprocess.run(code, stdout=subprocess.PIPE, stderr=slave, timeout=600, env=terminal)
        os.close(slave)
        shown = os.read(master, 100_000)
    finally:
        os.close(master)
    assert ran.returncode == 0 and b"\nvalid" in ran.stdout and title in shown
    assert subprocess.run(code, capture_output=True, timeout=600).stderr == b""


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_check_quietly(capture: Path) -> None:
    code = f"'{sys.executable}' -c 'from opreplay_tools.check import main; main()' '{capture}' | true"
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=600)
    assert ran.stderr == ""


@pytest.mark.slow
def test_fifty_truncations_exit_with_3_and_one_line(run: Tool, tmp_path: Path) -> None:
    path, cut = tmp_path / "a.opreplay", tmp_path / "cut.opreplay"
    write_small(path)
    data = path.read_bytes()
    for length in range(0, len(data), len(data) // 50):
        cut.write_bytes(data[:length])
        ran = run(cut)
        assert ran.code == 3 and len(ran.err.splitlines()) == 1 and ran.err.startswith("DATA_LOSS: ")


@pytest.mark.slow
def test_the_format_and_the_check_work_where_torch_cannot_be_imported(capture: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nimport replayfmt.format.writer\n"
        "from opreplay_tools.check import main\nsys.argv[1:] = [sys.argv[-1]]\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(capture)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
