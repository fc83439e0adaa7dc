"""A program that becomes another one, closes descriptors that are not its own, or starts without standard streams."""

import os
import subprocess
import sys

import pytest
import torch

import replayfmt
from replayfmt.format.reader import open_capture

from .running import CAPTURE, CHECK, Captured, capture, environment

REPLACES = """
import os, sys
import torch
torch.ones(2) + 1
os.execlp(sys.executable, "python", "-c", "print('another program')")
"""
ENDS_AT_ONCE = """
import os, sys
import torch
torch.ones(2) + 1
if os.fork() == 0:
    os._exit(0)
os.wait()
os.write(1, b"that is all\\n")
os._exit(7)
"""
REPLACES_AT_ONCE = """
import os, sys
os.execv(sys.executable, ["python", "-c", "print('another program')"])
"""
CLOSES = """
import os
import torch
x = torch.ones(2) + 1
os.closerange(3, 256)
mine = open("mine.txt", "w")
for _ in range(100):
    x = x + 1
mine.write("mine alone")
print(x.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "ends", "told"),
    [
        (REPLACES, (0, "another program\n"), ["the program replaces itself (os.execv): the capture ends here"]),
        (ENDS_AT_ONCE, (7, "that is all\n"), []),
    ],
)
def test_a_program_that_replaces_itself_or_ends_at_once_ends_its_capture(tmp_path, program, ends, told):
    (tmp_path / "program.py").write_text(program)
    done = capture(tmp_path, "-o", "x.opreplay", "program.py")
    assert (done.returncode, done.stdout) == ends
    said = done.stderr.splitlines()
    assert all(sentence in line for sentence, line in zip([*told, "x.opreplay: 2 ops"], said, strict=False))
    assert Captured(tmp_path / "x.opreplay").op_names == ["aten::ones.default", "aten::add.Tensor"]


@pytest.mark.slow
def test_what_an_earlier_program_left_is_not_taken_for_a_capture_of_this_one(tmp_path):
    (tmp_path / "program.py").write_text(REPLACES_AT_ONCE)
    with replayfmt.capture(tmp_path / "x.opreplay"):
        torch.ones(2)
    done = capture(tmp_path, "--force", "-o", "x.opreplay", "program.py")
    assert done.stdout == "another program\n"
    assert "never imported torch" in done.stderr and "the earlier x.opreplay was removed" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.slow
def test_a_program_that_closes_all_descriptors_keeps_its_files_and_ends_the_capture(tmp_path):
    (tmp_path / "program.py").write_text(CLOSES)
    done = capture(tmp_path, "-o", "x.opreplay", "program.py")
    assert (done.returncode, done.stdout) == (1, "[102.0, 102.0]\n")
    assert "its descriptor was closed by the program" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine alone"
    assert not (tmp_path / "x.opreplay").exists()


WITHOUT_STREAMS = """
import os, sys
import torch
x = torch.ones(2) + 1
def attempt(step, *arguments):
    try:
        print(step(*arguments))
    except OSError as error:
        print(error)
if "write" in sys.argv:
    attempt(os.write, 2, b"stray")
if "close" in sys.argv:
    attempt(os.close, 2)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    print("log:", log)
    attempt(os.write, log, b"mine alone")
if "daemon" in sys.argv:
    null = os.open(os.devnull, os.O_RDWR)
    print("null:", min(null, 3), [os.dup2(null, number) for number in (0, 2)])
if "child" in sys.argv:
    sys.stdout.flush()
    print(os.system("echo out; echo err >&2"))
if "exec" in sys.argv:
    print("replaced", flush=True)
    os.execlp("echo", "echo", "another program")
for _ in range(100):
    x = x + 1
print(x.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "redirection"),
    [("write", "2>&-"), ("child", "0<&- 2>&-"), ("daemon", "0<&-"), ("close", "2>err.txt"), ("exec", "2>&-")],
)
def test_a_program_without_standard_streams_is_captured_and_finds_its_descriptors_as_they_are(
    tmp_path, mode, redirection
):
    (tmp_path / "program.py").write_text(WITHOUT_STREAMS)
    said, logs = [], []
    for command in (sys.executable, f"{CAPTURE} -o x.opreplay"):
        line = f"{command} program.py {mode} {redirection}"
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, timeout=120
        )
        assert done.returncode == 0
        said.append(done.stdout)
        logs.append((tmp_path / "log.txt").read_text() if mode == "close" else "")
    assert said[0] == said[1]
    assert logs[0] == logs[1]
    assert subprocess.run([CHECK, "x.opreplay"], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    assert Captured(tmp_path / "x.opreplay").op_names.count("aten::add.Tensor") == (1 if mode == "exec" else 101)


@pytest.mark.parametrize("name", ["execv", "execve", "execl", "execvp", "execvpe"])
def test_from_python_a_capture_is_completed_before_the_process_is_replaced(tmp_path, monkeypatch, capsys, name):
    class Replaced(Exception):
        pass

    def replaced(*_):
        assert open_capture(tmp_path / "x.opreplay").complete
        raise Replaced

    for function in ("execv", "execve"):
        monkeypatch.setattr(os, function, replaced)
    arguments = ("/bin/true", "true") if name == "execl" else ("/bin/true", ["true"])
    with pytest.raises(Replaced), replayfmt.capture(tmp_path / "x.opreplay"):
        torch.ones(2)
        getattr(os, name)(*arguments, *([{}] if name.endswith("e") else []))
    assert "the program replaces itself (os." in capsys.readouterr().err
    assert os.execv is replaced
