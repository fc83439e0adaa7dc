"""The sampler of power: a process of its own that writes a log while work runs.

`python -m replayfmt.benchmark.energy.sampler INTERVAL` reads the power of every GPU through zeus (NVML, AMD SMI) each
INTERVAL seconds and writes `timestamp,gpu,power_w` to stdout, the first line at once and the last when its stdin ends,
so that it never outlives the process that it samples for. Imports no torch.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replayfmt.errors import OpReplayError, ReplayFailed

HEADER = "timestamp,gpu,power_w"
_READY_S = 60.0
_END_S = 10.0
_SHOWN = 300


class NoPowerSource(OpReplayError):
    """Nothing on this machine says what power it takes."""


class Sampler:
    """A running sampler, writing to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def require_running(self) -> None:
        """Raises ReplayFailed if the sampler has ended: what ran since is in no log."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ReplayFailed(f"the power sampler ended ({how}) while energy was measured; measure again")

    def stop(self) -> None:
        """End it and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def sampling(log: Path, interval_s: float) -> Iterator[Sampler]:
    """Sample power into `log` while the body runs. Raises NoPowerSource if there is none, ReplayFailed if the sampler
    ends before the body does."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, repr(interval_s)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    sampler = Sampler(process, log)
    try:
        _await_first_line(process, log)
        yield sampler
        sampler.require_running()
    finally:
        sampler.stop()
        assert process.stderr is not None
        process.stderr.close()


def _await_first_line(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the sampler has written a line: then its source works."""
    assert process.stderr is not None
    ready, _, _ = select.select([process.stderr], [], [], _READY_S)
    said = os.read(process.stderr.fileno(), 4096).decode(errors="replace").strip() if ready else "it does not answer"
    if said != "ready":
        said += process.stderr.read().decode(errors="replace").strip() if process.poll() is not None else ""
        raise NoPowerSource(
            f"--energy: not measured: {said[:_SHOWN]}; log the power in another way, and use --energy-windows with "
            "opreplay-energy"
        )


def main() -> None:
    """Sample until stdin ends."""
    interval = float(sys.argv[1])
    try:
        read = _zeus_reader()
    except _NoSource as error:
        sys.stderr.write(" ".join(str(error).split()))
        sys.exit(1)
    print(HEADER, flush=True)
    _write(read)
    sys.stderr.write("ready")
    sys.stderr.flush()
    due = time.monotonic()
    while True:
        due = max(due + interval, time.monotonic())
        ended, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        _write(read)  # also at the end: the last window needs a sample behind it
        if ended:
            return


class _NoSource(Exception):
    """There is no source; the message says why."""


def _zeus_reader() -> Any:
    """A function that returns (GPU, watts) pairs. Raises _NoSource with the reason."""
    try:
        from zeus.device import get_gpus
    except ImportError as error:
        raise _NoSource(f"zeus is not installed ({error}): pip install 'opreplay[energy]'") from error
    try:
        gpus: Any = get_gpus()
    except Exception as error:  # zeus has an exception for each way in which a driver can be missing
        raise _NoSource(f"no GPU says what power it takes ({type(error).__name__}: {error})") from error
    if not len(gpus):
        raise _NoSource("zeus finds no GPU")
    functions = (gpus.get_instant_power_usage, gpus.get_average_power_usage)
    for function in functions:
        try:
            function(0)
        except Exception as error:  # boards have one, the other, or neither
            reason = f"{type(error).__name__}: {error}"
            continue
        return lambda: [(index, function(index) / 1e3) for index in range(len(gpus))]
    raise _NoSource(f"the GPU does not say what power it takes ({reason})")


def _write(read: Any) -> None:
    before = time.time()
    found = read()
    when = (before + time.time()) / 2
    sys.stdout.write("".join(f"{when:.6f},{gpu},{watts:.3f}\n" for gpu, watts in found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
