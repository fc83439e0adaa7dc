"""Captures of a running process: started and ended by a signal, by a file, or by the program, as often as wanted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import CaptureFailed, NothingCaptured, UsageError

# Answers each line on stdin with the number that it computed. Its work is done by a thread that was there before.
SERVER = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import torch
import replayfmt

weight = torch.arange(4.0)
pool = ThreadPoolExecutor(1)

def work(number):
    with replayfmt.scope("request"):
        return (weight * number).sum().item()

pool.submit(work, 0).result()
replayfmt.request_capture("{number}.opreplay", digests="ops", %s)
print("ready", flush=True)
for line in filter(str.strip, iter(sys.stdin.readline, "")):
    print(pool.submit(work, int(line)).result(), flush=True)
"""


class Server:
    """The server in a process. Nothing is waited for but lines that it prints."""

    def __init__(self, folder: Path, how: str) -> None:
        (folder / "server.py").write_text(textwrap.dedent(SERVER % how))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "server.py"],
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()

    def ask(self, number: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        assert float(self.process.stdout.readline()) == 6.0 * number

    def signal(self, number: int) -> None:
        """Python looks for signals before it reads; one that comes in between is seen once there was something to
        read."""
        assert self.process.stdin is not None
        self.process.send_signal(number)
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def says(self, text: str) -> None:
        """Wait for a line on stderr, where others may write, too."""
        assert self.process.stderr is not None
        passed: list[str] = []
        for line in self.process.stderr:
            if line == f"opreplay: {text}\n":
                return
            passed.append(line)
        raise AssertionError(f"the server never said {text!r}, but {passed}")

    def requests(self, name: str) -> list[float]:
        """What was asked while a capture was made, which replays."""
        path = self.folder / name
        assert replayfmt.run(path, verify="bitwise").outcome == "ok"
        with replayfmt.open(path) as capture:
            assert set(capture.scopes) == {"request"}
            return [op.inputs()["other"] for op in capture.ops if op.kernel.name == "aten::mul"]

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(600)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(tmp_path, request.param)
    yield server
    server.process.kill()
    with server.process:
        pass  # waits, and closes the pipes


@pytest.mark.slow
@pytest.mark.parametrize("server", ["signal=signal.SIGUSR1"], indirect=True)
def test_a_signal_starts_a_capture_and_another_one_ends_it(server: Server) -> None:
    server.ask(1)
    for number, asked in enumerate(([2, 3], [5])):
        server.signal(signal.SIGUSR1)
        server.says(f"capture to {number}.opreplay begins")
        for each in asked:
            server.ask(each)
        server.signal(signal.SIGUSR1)
        server.says(f"capture to {number}.opreplay is complete")
        server.ask(4)
        assert server.requests(f"{number}.opreplay") == asked
    server.signal(signal.SIGUSR1)
    server.says("capture to 2.opreplay begins")
    server.signal(signal.SIGUSR1)
    server.says(
        "2.opreplay: no op was captured; this process ran no PyTorch operator; the empty file was removed".replace(
            "2.opreplay", str(server.folder / "2.opreplay"), 1
        )
    )
    server.signal(signal.SIGUSR1)
    server.says("capture to 3.opreplay begins")
    server.ask(7)
    assert server.close() == 0
    server.says("capture to 3.opreplay is complete")
    assert server.requests("3.opreplay") == [7]
    assert not list(server.folder.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("server", ["file='please'"], indirect=True)
def test_a_capture_runs_while_the_file_is_there_and_sigterm_completes_it(server: Server) -> None:
    server.ask(1)
    (server.folder / "please").touch()
    server.says("capture to 0.opreplay begins")
    server.ask(2)
    (server.folder / "please").unlink()
    server.says("capture to 0.opreplay is complete")
    server.ask(3)
    assert server.requests("0.opreplay") == [2]
    (server.folder / "please").touch()
    server.says("capture to 1.opreplay begins")
    server.ask(4)
    server.signal(signal.SIGTERM)
    server.says("capture to 1.opreplay is complete")
    assert server.process.wait(600) == 128 + signal.SIGTERM
    assert server.requests("1.opreplay") == [4]


class Events:
    """Lines that were said, one after the other."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[str] = SimpleQueue()
        self.say = self._lines.put

    def next(self) -> str:
        return self._lines.get(timeout=600)


@pytest.mark.slow
def test_the_program_itself_may_start_and_end_captures(tmp_path: Path) -> None:
    events = Events()
    requests = replayfmt.request_capture(tmp_path / "{number}.{pid}.opreplay", on_event=events.say)
    try:
        assert requests.path is None
        with pytest.raises(CaptureFailed, match="no capture is running"):
            requests.stop()
        first = requests.start()
        assert first == str(tmp_path / f"0.{os.getpid()}.opreplay") == requests.path
        with pytest.raises(CaptureFailed, match="still running"):
            requests.start()
        torch.ones(2).add(1)
        assert requests.stop() == first
        assert replayfmt.run(first).outcome == "ok"
        requests.start()
        with pytest.raises(NothingCaptured):
            requests.stop()
        requests.start()
        torch.ones(1)
    finally:
        requests.close()
    assert events.next() == f"opreplay: capture to {tmp_path}/2.{os.getpid()}.opreplay is complete"
    with pytest.raises(CaptureFailed, match="closed"):
        requests.start()


def test_what_cannot_be_captured_is_said_and_the_program_goes_on(tmp_path: Path) -> None:
    events, please, out = Events(), tmp_path / "please", tmp_path / "one.opreplay"
    out.write_text("what was there before")
    requests = replayfmt.request_capture(out, file=please, on_event=events.say)
    try:
        please.touch()
        assert events.next().startswith(f"opreplay: FAILED_PRECONDITION: {out}: exists already")
        assert torch.ones(2).sum().item() == 2 and out.read_text() == "what was there before"
    finally:
        requests.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"payload": "some"}, "payload='some'"),
        ({"nothing": 1}, "nothing"),
        ({"signal": signal.SIGKILL}, "cannot be handled"),
    ],
)
def test_wrong_options_are_refused_at_once(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replayfmt.request_capture(tmp_path / "x.opreplay", **options)


def test_a_signal_is_for_the_main_thread_and_its_handler_is_put_back(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            replayfmt.request_capture(tmp_path / "x.opreplay", signal=signal.SIGUSR1)
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    before = signal.getsignal(signal.SIGUSR1)
    requests = replayfmt.request_capture(tmp_path / "x.opreplay", signal=signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) != before
    requests.close()
    requests.close()
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.slow
def test_nothing_of_ours_runs_once_the_requests_are_closed(tmp_path: Path) -> None:
    """A thread that the interpreter's end finds in C++ code aborts the process."""
    events, please = Events(), tmp_path / "please"
    requests = replayfmt.request_capture(tmp_path / "x.opreplay", file=please, on_event=events.say)
    please.touch()
    assert events.next().endswith("begins")
    torch.ones(2).add(1)
    requests.close()
    assert not requests._thread._over.locked()


@pytest.mark.slow
def test_the_function_that_is_told_may_close_the_requests(tmp_path: Path) -> None:
    events, please = Events(), tmp_path / "please"

    def close(event: str) -> None:
        if event.endswith("begins"):
            torch.ones(2).add(1)
            requests.close()
        events.say(event)

    requests = replayfmt.request_capture(tmp_path / "x.opreplay", file=please, on_event=close)
    please.touch()
    assert events.next().endswith("x.opreplay is complete")
    assert events.next().endswith("begins")


def test_the_example_of_the_document_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/running-processes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    made: list[Any] = []
    request = replayfmt.request_capture
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replayfmt, "request_capture", lambda *args, **options: made.append(request(*args, **options)))
    exec(example, {})
    (requests,) = made
    try:
        requests.start()
        torch.ones(2).add(1)
        assert requests.stop() == "server.0.opreplay"
        assert replayfmt.run("server.0.opreplay").outcome == "ok"
    finally:
        requests.close()


BUSY = """
import faulthandler, os, signal, sys, threading
from queue import SimpleQueue
import torch
import replayfmt

faulthandler.dump_traceback_later(500, exit=True)
torch.set_num_threads(1)
ended = threading.Event()

def work(seed):
    weight = torch.full((16, 16), 0.01 * (seed + 1))
    x, total = torch.ones(4, 16), torch.zeros(16)
    while not ended.is_set():
        y = (x @ weight).relu()
        total.add_(y.sum(0))
        x = torch.tanh(y + x)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
events = SimpleQueue()

def say(event):
    events.put(event)
    raise SystemExit("what the program's function raises is its own matter")

requests = replayfmt.request_capture("{number}.opreplay", on_event=say, signal=signal.SIGUSR1)
for number in range(int(sys.argv[2])):
    os.kill(os.getpid(), signal.SIGUSR1)
    print(events.get(), flush=True)
    ended.wait(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(events.get(), flush=True)
ended.set()
for thread in threads:
    thread.join()
requests.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["native", "python"])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.sweep), 8])
def test_a_busy_server_is_captured_from_one_moment_on_in_all_its_threads(
    tmp_path: Path, workers: int, recorder: str
) -> None:
    captures = 4
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(workers), str(captures)],
        cwd=tmp_path,
        env={**os.environ, "OPREPLAY_RECORDER": recorder},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = r"opreplay: capture to \d.opreplay is complete( \(without \d+ ops? that ran when it began\))?"
    assert len(lines) == 2 * captures and all(re.fullmatch(told, line) for line in lines[1::2]), lines
    assert done.stderr.count("on_event raised SystemExit") == 2 * captures
    for number in range(captures):
        with replayfmt.open(tmp_path / f"{number}.opreplay") as capture:
            assert not capture.summary.unsupported
        assert replayfmt.run(tmp_path / f"{number}.opreplay", verify="bitwise").outcome == "ok"
