"""The sampler of power: a process of its own that writes a log while work runs.

`python -m replayfmt.benchmark.energy.sampler INTERVAL KINDS` reads the first of these kinds of sources that the machine
has (`sources`) each INTERVAL seconds and writes `timestamp,gpu,power_w` to stdout, and behind it the energy counter
where there is one; the first line at once and the last when its stdin ends, so that it never outlives the process that
it samples for. On stderr it says in a line what it samples, or why it does not. Imports no torch.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NoReturn

from replayfmt.errors import OpReplayError

from ..machine import KINDS, EnergySource, NoSource, SourceLost, open_source
from .power_log import COUNTER

HEADER = "timestamp,gpu,power_w"
_READY_S = 60.0
_END_S = 10.0
_SHOWN = 300
_NOT_SAID = "[N/A]"
_READY = "ready: "
# How often a counter's change is waited for, and how long, to know how often it changes.
_UPDATES = 6
_UPDATES_S = 1.0


class NoPowerSource(OpReplayError):
    """Nothing on this machine says what power it takes."""


class PowerSourceLost(OpReplayError):
    """What said what power this machine takes ended while work was measured. Not an op's failure."""


class Sampler:
    """A running sampler, writing to a file. `source` says what it reads, `counter_period_s` how often its energy
    counters change; None if it has none."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._unread = ""  # said behind the line that it is ready, and read with it
        self.source = ""
        self.counter_period_s: float | None = None

    def await_ready(self) -> None:
        """Wait until it has written a line: then its source works. Raises NoPowerSource."""
        said, until = "", time.monotonic() + _READY_S
        while (left := until - time.monotonic()) > 0 and (more := self._said(left)):
            said += more
            lines = said.splitlines(keepends=True)
            for place, line in enumerate(lines):  # what libraries say on stderr may stand before it
                if line.startswith(_READY) and line.endswith("\n"):
                    told = json.loads(line.removeprefix(_READY))
                    self.source, self.counter_period_s = told["source"], told["counter_period_s"]
                    self._unread = "".join(lines[place + 1 :])
                    return
        why = said.strip()[-_SHOWN:] or "the sampler of power does not answer"
        raise NoPowerSource(
            f"--energy: not measured: {why}; log the power in another way, and use --energy-windows with "
            "opreplay-energy"
        )

    def require_running(self) -> None:
        """Raises PowerSourceLost if the sampler has ended: what ran since is in no log."""
        code = self._process.poll()
        if code is not None:
            said = (self._unread + self._said(0.0)).strip().splitlines()
            how = f"signal {-code}" if code < 0 else said[-1] if said else f"exit code {code}"
            raise PowerSourceLost(f"the power sampler ended ({how}) while energy was measured; measure again")

    def _said(self, timeout_s: float) -> str:
        """What it has written to stderr since it was asked last."""
        assert self._process.stderr is not None
        ready, _, _ = select.select([self._process.stderr], [], [], timeout_s)
        return os.read(self._process.stderr.fileno(), 4096).decode(errors="replace") if ready else ""

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
def sampling(log: Path, interval_s: float, kinds: Sequence[str] = KINDS) -> Iterator[Sampler]:
    """Sample into `log` while the body runs, the first of `kinds` that there is. Raises NoPowerSource if there is none,
    PowerSourceLost if the sampler ends before the body does."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, repr(interval_s), ",".join(kinds)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    sampler = Sampler(process)
    try:
        sampler.await_ready()
        yield sampler
        sampler.require_running()
    finally:
        sampler.stop()
        assert process.stderr is not None
        process.stderr.close()


def main() -> None:
    """Sample until stdin ends. Ctrl-C is for the one that measures, which still reports what was sampled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interval, kinds = float(sys.argv[1]), sys.argv[2].split(",")
    try:
        source = open_source(kinds)
    except NoSource as error:
        _end(error)
    try:
        counts = source.has_counters()
        period = _update_period(source) if counts else None
        print(HEADER + (f",{COUNTER}" if counts else ""), flush=True)
        _write(source, counts)
        told = {"source": source.name, "counter_period_s": period}
        sys.stderr.write(f"{_READY}{json.dumps(told)}\n")
        sys.stderr.flush()
        due = time.monotonic()
        while True:
            due = max(due + interval, time.monotonic())
            ended, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
            _write(source, counts)  # also at the end: the last window needs a sample behind it
            if ended:
                return
    except Exception as error:  # whatever a driver raises: there is no source any more
        _end(error)


def _end(error: Exception) -> NoReturn:
    """Say why there is no source, or none any more, and leave."""
    text = str(error) if isinstance(error, NoSource | SourceLost) else f"{type(error).__name__}: {error}"
    sys.stderr.write(" ".join(text.split())[:_SHOWN])
    sys.exit(1)


def _update_period(source: EnergySource) -> float:
    """Seconds from one change of a counter to the next, of the device whose counter changes least often; that of the
    wait if it was in vain."""
    began = time.monotonic()
    changes: dict[str, list[float]] = {}
    last: dict[str, float | None] = {}
    while (now := time.monotonic()) - began < _UPDATES_S:
        for sample in source.read():
            if last.setdefault(sample.device, sample.joules) != sample.joules:
                changes.setdefault(sample.device, []).append(now)
                last[sample.device] = sample.joules
        if len(changes) == len(last) and all(len(times) >= _UPDATES for times in changes.values()):
            break
    periods = [
        median(after - before for before, after in zip(times, times[1:], strict=False))
        for times in changes.values()
        if len(times) > 1
    ]
    return max(periods) if len(periods) == len(last) else _UPDATES_S


def _write(source: EnergySource, counts: bool) -> None:
    before = time.time()
    found = source.read()
    when = (before + time.time()) / 2
    rows = []
    for sample in found:
        row = f"{when:.6f},{sample.device},{_NOT_SAID if sample.watts is None else f'{sample.watts:.3f}'}"
        rows.append(row + (f",{_NOT_SAID if sample.joules is None else f'{sample.joules:.6f}'}" if counts else ""))
    sys.stdout.write("".join(f"{row}\n" for row in rows))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
