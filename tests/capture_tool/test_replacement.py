"""A program that becomes another one, or closes descriptors that are not its own."""

import os

import pytest
import torch

import replayfmt
from replayfmt.format.reader import open_capture

from .running import Captured, capture

REPLACES = """
import os, sys
import torch
torch.ones(2) + 1
os.execlp(sys.executable, "python", "-c", "print('another program')")
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
def test_a_program_that_replaces_itself_ends_its_capture(tmp_path):
    (tmp_path / "program.py").write_text(REPLACES)
    done = capture(tmp_path, "-o", "x.opreplay", "program.py")
    assert (done.returncode, done.stdout) == (0, "another program\n")
    said = done.stderr.splitlines()
    assert "the program replaces itself (os.execv): the capture ends here" in said[0]
    assert "x.opreplay: 2 ops" in said[1] and len(said) == 2
    assert Captured(tmp_path / "x.opreplay").op_names == ["aten::ones.default", "aten::add.Tensor"]


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
