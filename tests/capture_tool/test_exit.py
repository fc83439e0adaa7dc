"""What a program computes while the interpreter exits is recorded, too: nothing of the recorder ends before it."""

import pytest

from .running import Captured, capture, plain

# An engine whose destructor runs at exit does the same: vLLM's releases its matrices there.
REGISTERS_FIRST = """
import atexit
atexit.register(lambda: print(tensor.cos().sum().item()))
import torch
tensor = torch.ones(3).sin()
"""


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["native", "python"])
def test_atexit_functions_that_were_registered_before_torch_was_imported_are_recorded(tmp_path, recorder):
    (tmp_path / "program.py").write_text(REGISTERS_FIRST)
    done = capture(tmp_path, "-o", "a.opreplay", f"--recorder={recorder}", "program.py")
    assert (done.returncode, done.stdout) == (0, plain(tmp_path, "program.py").stdout)
    captured = Captured(tmp_path / "a.opreplay")
    assert captured.op_names[-4:] == [
        "aten::sin.default",
        "aten::cos.default",
        "aten::sum.default",
        "aten::_local_scalar_dense.default",
    ]
    assert not captured.summary.unsupported


ASKED_FOR = """
import atexit, sys, torch, replayfmt
requests = replayfmt.request_capture("a.opreplay", file="never")
atexit.register(lambda: tensor.cos())
requests.start()
tensor = torch.ones(3).sin()
"""


@pytest.mark.slow
def test_a_capture_that_was_asked_for_ends_after_the_program_s_atexit_functions(tmp_path):
    (tmp_path / "program.py").write_text(ASKED_FOR)
    done = plain(tmp_path, "program.py", OPREPLAY_RECORDER="native")
    assert done.returncode == 0, done.stderr
    assert Captured(tmp_path / "a.opreplay").op_names[-1] == "aten::cos.default"


CLOSED_LATE = """
import atexit
@atexit.register
def close():
    tensor.cos()
    recorder.close()
import torch, replayfmt
recorder = replayfmt.Recorder("a.opreplay")
recorder.start()
tensor = torch.ones(3).sin()
"""


@pytest.mark.slow
def test_one_that_is_closed_after_the_recorder_ended_says_what_it_lacks(tmp_path):
    (tmp_path / "program.py").write_text(CLOSED_LATE)
    done = plain(tmp_path, "program.py", OPREPLAY_RECORDER="native")
    assert done.returncode == 0, done.stderr
    captured = Captured(tmp_path / "a.opreplay")
    assert "aten::cos.default" not in captured.op_names
    assert captured.summary.unsupported["unseen_thread"] >= 1
    assert "the recorder ended with the interpreter" in str(captured.records)
