"""A capture, a plan and clocks that are made up, so that what is measured is known exactly.

A script is a list of steps: ("begin", path), ("end", path), ("op", real nanoseconds, CPU nanoseconds),
or ("import", nanoseconds): content that enters while the timer pauses.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from replayfmt.benchmark.meters import Clock
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import CaptureInfo, Scope

KINDS = {"op": 1, "begin": 2, "end": 3, "import": 4}  # signature ids
SIGNATURES = (
    None,
    SimpleNamespace(kind=RecordKind.op),
    SimpleNamespace(kind=RecordKind.scope_begin),
    SimpleNamespace(kind=RecordKind.scope_end),
    SimpleNamespace(kind=RecordKind.storage_import),
)

EXECUTE = [("begin", "execute"), ("op", 100, 50), ("op", 20, 10), ("end", "execute")]


class Time:
    """Two clocks that move only when told to."""

    def __init__(self) -> None:
        self.real = self.cpu = 0

    def clock(self) -> Clock:
        return Clock(real=lambda: self.real, cpu=lambda: self.cpu)


class FakeReader:
    """As much of a CaptureReader as the benchmark reads, made from a script; `frames`: records in each."""

    def __init__(self, script: list[tuple], frames: Iterable[int] = (), times: bool = True) -> None:
        self.path, self.complete, self.incomplete_reason = "fake.opreplay", True, ""
        self.session = CaptureInfo("1234", "test", "0", torch_version=torch.__version__)
        self.devices = (None,)
        self.signatures = SIGNATURES
        self.signature_kinds = np.array([0 if each is None else each.kind for each in SIGNATURES], np.uint8)
        paths = list(dict.fromkeys(step[1] for step in script if step[0] in ("begin", "end")))
        for path in list(paths):  # parents that are never entered themselves have ids as well
            while "/" in path:
                path = path.rpartition("/")[0]
                if path not in paths:
                    paths.append(path)
        paths.sort(key=lambda path: path.count("/"))
        self._ids = {"": 0} | {path: number + 1 for number, path in enumerate(paths)}
        self.scopes = (None, *(Scope(self._ids[path.rpartition("/")[0]], path.rpartition("/")[2]) for path in paths))
        self.record_count = len(script)
        self.summary = SimpleNamespace(records={RecordKind.op: sum(step[0] == "op" for step in script)})
        self._frames = []
        ordinal = now = 0
        for count in (*frames, len(script) - sum(frames)):
            steps = script[ordinal : ordinal + count]
            starts = []
            for step in steps:
                starts.append(now)
                now += step[1] * 10 if step[0] == "op" and times else 0  # capture is ten times as slow
            self._frames.append(
                SimpleNamespace(
                    first_ordinal=ordinal,
                    count=len(steps),
                    duration_ns=None,
                    signature=np.array([KINDS[step[0]] for step in steps], dtype=np.uint32),
                    scope=np.array([self._ids.get(step[1], 0) for step in steps], dtype=np.uint32),
                    start_ns=np.array(starts, dtype=np.int64),
                )
            )
            ordinal += count
        self.record_frames = self._frames

    def frame(self, index: int) -> Any:
        return self._frames[index]

    def scope_path(self, scope: int) -> str:
        return next(path for path, number in self._ids.items() if number == scope)


class FakePlan:
    """Plays a script: every replay after the first takes `slower` nanoseconds more for each op than the one before."""

    def __init__(self, script: list[tuple], time: Time, slower: int = 0, restore: int = 0) -> None:
        self.script, self.time, self.slower, self.restore = script, time, slower, restore
        self.reader = FakeReader(script)
        self.devices = [torch.device("cpu")]
        self.context = SimpleNamespace(streams=None)
        self.calls: list[str] = []  # how each execute was asked to verify
        self.timed = 0
        self.mismatch_at: int | None = None  # this call of execute does not match

    def execute(self, *, verify: str = "none", on_scope: Any = None, timer: Any = None) -> Any:
        self.calls.append(verify)
        self.time.real += self.restore
        if timer is not None:
            timer.start()
        for ordinal, step in enumerate(self.script):
            if step[0] == "op":
                self.time.real += step[1] + self.slower * self.timed
                self.time.cpu += step[2]
            elif step[0] == "import":
                if timer is not None:
                    timer.pause()
                self.time.real += step[1]
                if timer is not None:
                    timer.resume()
            elif on_scope is not None:
                on_scope(step[0], step[1].rpartition("/")[2], step[1], ordinal)
        if timer is not None:
            timer.stop()
            self.timed += 1
        self.time.real += self.restore
        failed = self.mismatch_at is not None and len(self.calls) == self.mismatch_at
        return SimpleNamespace(
            outcome="mismatched" if failed else "ok",
            verification=f"{verify}, all of it",
            divergence="op 3 (aten::mm), result 0" if failed else None,
        )
