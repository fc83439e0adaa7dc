"""Signals: SIGTERM closes the capture and leaves with 143, an interrupt is an exception, SIGKILL leaves a .partial."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .running import CAPTURE, CHECK, Captured, capture, environment, started

HEAD = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
x = torch.rand(600, 600)

def ready():  # not by print: a signal that comes then would find stdout in use
    os.write(1, b"ready\\n")

"""

PROGRAMS = {
    # Nearly all time is spent in operators, so nearly every signal comes while one is being recorded.
    "in operators": "x @ x\nready()\nwhile True:\n    x = x @ x / 1000\n",
    "in a backward pass": """
w = torch.rand(300, 300, requires_grad=True)
w @ w
ready()
while True:
    y = w
    for _ in range(20):
        y = torch.tanh(y @ w)
    y.sum().backward()
    w.grad = None
""",
    "in short operators": "y = torch.ones(2)\nready()\nwhile True:\n    y = y + 1\n",
    "waiting for a thread": """
def work():
    global x
    x = x @ x / 1000
    ready()
    while True:
        x = x @ x / 1000
thread = threading.Thread(target=work, daemon=False)
thread.start()
thread.join()
""",
    "at the end": """
x @ x
def last():
    threading.main_thread().join()
    ready()
    time.sleep(600)
threading.Thread(target=last).start()
""",
}


def await_sleep(pid):
    """Wait until a process's main thread sleeps, and stays asleep. Python does not notice a signal that comes just
    before it begins to wait for a lock, with a capture or without."""
    asleep = 0
    while asleep < 10:
        states = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("State:")]
        asleep = asleep + 1 if "S (sleeping)" in states[0] else 0
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("where", PROGRAMS)
def test_sigterm_closes_the_capture_and_exits_with_143(tmp_path, where):
    (tmp_path / "endless.py").write_text(HEAD + PROGRAMS[where] + "\n")
    process = started(tmp_path, "-o", "t.opreplay", "endless.py")
    if where in ("waiting for a thread", "at the end"):
        await_sleep(process.pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 143, errors
    assert errors.startswith("opreplay-capture: t.opreplay: ") and len(errors.splitlines()) == 1
    captured = Captured(tmp_path / "t.opreplay")
    assert captured.complete
    assert captured.op_names
    assert captured.scopes() == ["+execute", "-execute"]
    assert not (tmp_path / "t.opreplay.partial").exists()
    assert subprocess.run([CHECK, tmp_path / "t.opreplay"], env=environment(), capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_capture_from_python_is_closed_too_and_the_signal_is_as_it_was_afterwards(tmp_path):
    (tmp_path / "library.py").write_text(
        HEAD
        + """
import replayfmt
with replayfmt.capture("first.opreplay"):
    x + 1
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
with replayfmt.capture("second.opreplay"):
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    x @ x
    ready()
    while True:
        x = x @ x / 1000
"""
    )
    process = subprocess.Popen(
        [sys.executable, "library.py"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert [process.stdout.readline() for _ in range(2)] == ["-15\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (143, "")
    assert all(Captured(tmp_path / f"{name}.opreplay").complete for name in ("first", "second"))


@pytest.mark.slow
def test_the_programs_own_sigterm_handler_is_respected(tmp_path):
    (tmp_path / "own.py").write_text(
        HEAD
        + """
x + 1
def handler(number, frame):
    print("mine", number, callable(previous), flush=True)
    sys.exit(5)
previous = signal.signal(signal.SIGTERM, handler)
ready()
while True:
    time.sleep(0.05)
"""
    )
    process = started(tmp_path, "-o", "own.opreplay", "own.py")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (5, "mine 15 True\n")
    assert Captured(tmp_path / "own.opreplay").complete


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_goes_on(tmp_path):
    (tmp_path / "ignoring.py").write_text(
        HEAD
        + """
x + 1
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
    )
    done = capture(tmp_path, "-o", "i.opreplay", "ignoring.py")
    assert (done.returncode, done.stdout) == (0, "still here\n")


@pytest.mark.slow
def test_an_interrupt_is_a_keyboard_interrupt_and_130(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        HEAD
        + """
try:
    x @ x
    ready()
    while True:
        x = x @ x / 1000
finally:
    print("cleaned up", flush=True)
"""
    )
    process = started(tmp_path, "-o", "i.opreplay", "interrupted.py")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=600)
    assert (process.returncode, output) == (130, "cleaned up\n"), errors
    assert errors.startswith("Traceback (most recent call last):\n") and "\nKeyboardInterrupt\n" in errors
    assert Captured(tmp_path / "i.opreplay").complete


@pytest.mark.slow
def test_a_killed_capture_leaves_a_partial_file_that_check_explains_and_recovers(tmp_path):
    (tmp_path / "killed.py").write_text(
        HEAD
        + """
from replayfmt.format.reader import open_capture
for _ in range(50):
    x = x @ x / 1000
def written():
    return sum(record.kind.name == "op" for record in open_capture("k.opreplay.partial").records())
while written() < 101:  # what is buffered gets into the file by itself
    time.sleep(0.05)
ready()
time.sleep(600)
"""
    )
    process = started(tmp_path, "-o", "k.opreplay", "killed.py")
    process.kill()
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path).count("k.opreplay") == 0
    partial = tmp_path / "k.opreplay.partial"
    explained = subprocess.run([CHECK, partial], env=environment(), capture_output=True, text=True)
    assert explained.returncode == 3
    assert "never closed" in explained.stdout + explained.stderr
    recovered = subprocess.run(
        [CHECK, partial, "--recover", tmp_path / "r.opreplay"], env=environment(), capture_output=True, text=True
    )
    assert recovered.returncode == 0, recovered.stderr
    assert Captured(tmp_path / "r.opreplay").op_names.count("aten::mm.default") == 50


@pytest.mark.slow
def test_sigterm_ends_a_program_that_is_in_a_call_that_does_not_end(tmp_path):
    """As without a capture."""
    (tmp_path / "stuck.py").write_text(
        HEAD
        + """
import ctypes
x @ x
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(lock)
ready()
libc.pthread_mutex_lock(lock)
"""
    )
    process = started(tmp_path, "-o", "s.opreplay", "stuck.py")
    await_sleep(process.pid)
    time.sleep(0.5)  # the recorder's thread looks now and then
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    found = Captured(tmp_path / "s.opreplay")
    assert found.complete and "aten::mm.default" in found.op_names


@pytest.mark.slow
def test_a_partial_file_of_a_killed_capture_is_not_overwritten_without_force(tmp_path):
    (tmp_path / "p.opreplay.partial").write_text("what is left")
    (tmp_path / "short.py").write_text("import torch\ntorch.ones(1)\n")
    refused = capture(tmp_path, "-o", "p.opreplay", "short.py")
    assert refused.returncode == 1 and "p.opreplay.partial: exists already" in refused.stderr
    assert (tmp_path / "p.opreplay.partial").read_text() == "what is left"
    assert capture(tmp_path, "-o", "p.opreplay", "--force", "short.py").returncode == 0
    assert not (tmp_path / "p.opreplay.partial").exists()


@pytest.mark.slow
def test_sigterm_while_the_recorder_is_built_ends_the_compiler_and_the_process(tmp_path):
    (tmp_path / "program.py").write_text("import torch")
    (tmp_path / "cache").mkdir()
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        f"#!{sys.executable}\nimport os, time\n"
        f"open({str(tmp_path / 'pid.tmp')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'pid.tmp')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(600)\n"
    )
    compiler.chmod(0o755)
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "cache"), "CXX": str(compiler)}
    with subprocess.Popen(
        [CAPTURE, "-o", "x.opreplay", "program.py"],
        cwd=tmp_path,
        env=environment(**places),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM came while part of the recorder was built" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not list(tmp_path.glob("x.opreplay*"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "nothing half built is left"
