"""Programs that strain the recorder, one after the other: what sanitizers look at.

    PYTHONPATH=tests python -m safety.straining [NAME ...]

Each runs with the native recorder, and fails where the program's results or its exit differ from those without a
capture, or where a capture that it completes does not verify. What races does not, they run again and again.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import replayfmt
from replayfmt.errors import CaptureFailed, NothingCaptured
from replayfmt.recording.options import CaptureOptions
from replayfmt.recording.recorder import Recorder

_LONGEST_S = 600


def chain(count: int = 50) -> torch.Tensor:
    """Operators of many kinds: new storages, views, writes, random draws, what the hot path leaves to Python."""
    x = torch.ones(4, 4)
    for number in range(count):
        y = (x @ x).relu_().add_(1)
        x = torch.cat([y[:2], x[2:]]).softmax(-1) + number
        x[0].mul_(0.5)
        if number % 10 == 0:
            torch.rand(2)
            int(x.sum())
    return x


def train(count: int = 10) -> torch.Tensor:
    """Backward passes, whose nodes run in autograd's way."""
    weight = torch.ones(4, 4, requires_grad=True)
    for _ in range(count):
        loss = torch.nn.functional.gelu(torch.ones(2, 4) @ weight).sum()
        loss.backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad  # type: ignore[operator]
            weight.grad = None
    return weight.detach()


def failing() -> str:
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it did not raise")


def in_threads(work: Callable[[], object], count: int = 4) -> None:
    """Run it in threads of both kinds, and wait for them."""
    problems: list[BaseException] = []
    done = threading.Semaphore(0)

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)
        finally:
            done.release()

    for number in range(count):
        if number % 2:
            _thread.start_new_thread(guarded, ())
        else:
            threading.Thread(target=guarded).start()
    for _ in range(count):
        assert done.acquire(timeout=_LONGEST_S)
    if problems:
        raise problems[0]


def verified(path: Path) -> None:
    with replayfmt.Plan(path) as plan:
        result = plan.execute(verify="bitwise")
    assert result.outcome == "ok", str(result.divergence)


# ------------------------------------------------------------------------------------------------------------ programs


def one_thread(path: Path) -> None:
    expected, message = chain(), failing()
    torch.manual_seed(0)
    with replayfmt.capture(path, recorder="native"):
        assert torch.equal(chain(), expected) and failing() == message
        train()
    verified(path)


def several_threads(path: Path) -> None:
    expected, trained = chain(), train()

    def work() -> None:
        assert torch.equal(chain(), expected) and torch.equal(train(), trained)

    with replayfmt.capture(path, recorder="native"):
        chain()
        in_threads(work)
        chain()


def captures_come_and_go(path: Path) -> None:
    """Beneath threads that run all the time, some of which end the captures that others began."""
    expected, stopping = chain(), threading.Event()

    def work() -> None:
        while not stopping.is_set():
            assert torch.equal(chain(5), chain(5)) and torch.equal(chain(), expected)

    def capture_again_and_again() -> None:
        try:
            for number in range(20):
                recorder = Recorder(path, CaptureOptions(force=True, recorder="native"))
                recorder.start()
                chain(number % 7)
                with contextlib.suppress(NothingCaptured):
                    recorder.close() if number % 2 else in_threads(recorder.close, 1)
        finally:
            stopping.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    capture_again_and_again()
    for thread in threads:
        thread.join(_LONGEST_S)
        assert not thread.is_alive()


def storages_die_elsewhere(path: Path) -> None:
    """What one thread makes, another one drops, while a third looks for garbage."""
    kept: list[torch.Tensor] = []
    stopping = threading.Event()

    def drop() -> None:
        while not stopping.is_set():
            kept.clear()
            gc.collect()

    with replayfmt.capture(path, recorder="native", digests="none"):
        threads = [threading.Thread(target=drop) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(150):
                x = torch.ones(8)
                kept.append(x * 2)
                kept.append((x + 1)[:3])
        finally:
            stopping.set()
            for thread in threads:
                thread.join(_LONGEST_S)


def signals(path: Path) -> None:
    """A handler that raises wherever it strikes."""

    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with replayfmt.capture(path, recorder="native"):
            chain(3)
            for number in range(20):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + number * 0.0001)
                    try:
                        while True:
                            chain(20)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Struck:
                    pass
            chain(3)
    finally:
        signal.signal(signal.SIGALRM, before)
    verified(path)


def forks(path: Path) -> None:
    """While threads record. The children use PyTorch, and capture themselves."""
    stopping = threading.Event()

    def work() -> None:
        while not stopping.is_set():
            chain(5)

    with replayfmt.capture(path, recorder="native", digests="none"):
        chain()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(8):
                child = os.fork()
                if child == 0:
                    _as_child(path.with_suffix(f".{number}"))
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stopping.set()
            thread.join(_LONGEST_S)


def _as_child(path: Path) -> None:
    """Ends the process."""
    signal.alarm(_LONGEST_S)
    code = 1
    try:
        chain(3)
        with replayfmt.capture(path, recorder="native"):
            chain(3)
        verified(path)
        code = 0
    finally:
        os._exit(code)


def conversions(path: Path) -> None:
    """Arguments of many types, subclasses, other layouts."""

    def program() -> list[torch.Tensor]:
        x = torch.eye(4)
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            torch.nn.functional.linear(x, x)
        return [
            x.to_sparse() @ x,
            torch.zeros(2, 3, dtype=torch.complex64).conj() + 1,
            torch.nn.functional.pad(x, (1, 1), value=2.0),
            x[torch.tensor([0, 2]), None],
            torch.empty(3, device="meta").new_zeros(2, device="cpu"),
            torch.nn.functional.dropout(x, 0.5),
            *torch.stack([x, x]).unbind(),
            *torch._foreach_add([x, x], 1.0),
            torch.func.vmap(torch.sin)(x),
        ]

    with replayfmt.capture(path, recorder="native"):
        for _ in range(5):
            kept = program()
    assert len(kept) == 11
    verified(path)


# Programs of their own, which end while something goes on. `sys.argv[1]` is where to write.
EXITS = {
    # One that runs operators then ends in an abort of PyTorch's own, without a capture, too.
    "a daemon thread waits": """
        threading.Thread(target=lambda: (work(50), time.sleep(600)), daemon=True).start()
        with replayfmt.capture(sys.argv[1], recorder="native"):
            work(20)
    """,
    "a capture that nobody closes": """
        recorder = replayfmt.Recorder(sys.argv[1], CaptureOptions(recorder="native"))
        recorder.start()
        work(20)
    """,
    "threads that are waited for after the main one": """
        recorder = replayfmt.Recorder(sys.argv[1], CaptureOptions(recorder="native"))
        recorder.start()
        threading.Thread(target=work, args=(200,)).start()
        work(20)
    """,
    "an exception": """
        with replayfmt.capture(sys.argv[1], recorder="native"):
            work(20)
            raise SystemExit(3)
    """,
}
_PREAMBLE = """
import sys, threading, time, torch, replayfmt
from replayfmt.recording.options import CaptureOptions
torch.set_num_threads(1)
def work(count=1 << 60):
    x = torch.ones(3)
    for _ in range(count):
        x = (x * 0.5).relu_() + 1
"""


def interpreter_exits(path: Path) -> None:
    for number, (name, program) in enumerate(EXITS.items()):
        text = _PREAMBLE + "\n".join(line[8:] for line in program.splitlines())
        done = subprocess.run([sys.executable, "-c", text, f"{path}.{number}"], timeout=_LONGEST_S)
        assert done.returncode == (3 if name == "an exception" else 0), f"{name}: exit code {done.returncode}"


PROGRAMS = (
    one_thread,
    several_threads,
    captures_come_and_go,
    storages_die_elsewhere,
    signals,
    forks,
    conversions,
    interpreter_exits,
)


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.enable()
    chosen = [program for program in PROGRAMS if program.__name__ in sys.argv[1:] or len(sys.argv) == 1]
    for program in chosen:
        print(program.__name__.replace("_", " "), flush=True)
        faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
        with tempfile.TemporaryDirectory() as directory:
            try:
                program(Path(directory, "strained.opreplay"))
            except CaptureFailed as error:
                raise SystemExit(f"{program.__name__}: {error}") from error


if __name__ == "__main__":
    main()
