"""torch.profiler beside a replay: a trace of one replay, and the device kernels that its ops launch.

`profile_replay` traces exactly one replay, with the capture's scopes as annotations: it starts once state has been
restored and stops with the last op, outside anything that is timed. A replay that fails is traced up to its failure.

`compare_kernels` asks whether the ops of an imported capture launch the device kernels that the capture says they
launched: it runs each op once more under the profiler, after a call that lets libraries choose their kernels, and
compares names and grids.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from replayfmt.errors import OpReplayError, ReplayFailed, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.importers.common.json_stream import JsonStream
from replayfmt.importers.kineto.events import TraceEvents
from replayfmt.importers.kineto.tree import build
from replayfmt.pytorch.accelerators import is_accelerator, synchronize
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.records import describe
from replayfmt.replay.run.steps import IsolatedOp

from .result_files import TRACE_SESSION, output_file

MODE_FLAG = "--device-profiling-mode"
OUTPUT_FLAG = "--device-profiling-output"

FAMILIES = {
    "host-ops": "operators on the host",
    "device-kernels": "kernels, copies and runtime calls of accelerators",
    "memory": "allocations and releases",
    "shapes": "the operators' input shapes (with them the operators: host-ops)",
    "stacks": "Python functions",
}
# torch's profiler needs its CPU side for annotations too, and then records every operator.
_HOST_OPS = frozenset({"cpu_op", "fwdbwd"})


def parse_families(text: str) -> tuple[str, ...]:
    """The families that a comma-separated list names, in a fixed order. Raises UsageError for any other name."""
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name not in FAMILIES]
    if unknown:
        raise UsageError(
            f"{MODE_FLAG}={text}: {', '.join(map(repr, unknown))} is not a family; expected some of "
            f"{', '.join(FAMILIES)}, separated by commas"
        )
    return tuple(name for name in FAMILIES if name in asked)


def check_families(families: Sequence[str], devices: Sequence[torch.device]) -> None:
    """Raises UsageError for families that cannot be recorded here, on the devices that a plan uses."""
    if "device-kernels" not in families:
        return
    used = [device for device in devices if is_accelerator(device)]
    if not used:
        raise UsageError(
            f"{MODE_FLAG}: device-kernels is not available: the replay uses "
            f"{', '.join(map(str, devices)) or 'no device'} and no accelerator"
        )
    if not device_activities(used):
        kind = used[0].type
        raise UsageError(
            f"{MODE_FLAG}: device-kernels is not available: this torch's profiler has no support of {kind}"
        )


def device_activities(devices: Sequence[torch.device]) -> set[ProfilerActivity]:
    """What torch's profiler calls the work of some devices, where it can see it. It says that it supports every
    out-of-tree backend, and shows nothing of those that have no part in it, so of these none is taken."""
    names = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU"}
    found = {getattr(ProfilerActivity, names[each.type]) for each in devices if each.type in names}
    return found & supported_activities()


def profile_replay(plan: Plan, families: Sequence[str], output: str | PathLike[str], *, force: bool = False) -> None:
    """Replay once under the profiler and write its Chrome trace (gzip if the name ends in .gz) to `output`.

    Raises UsageError for unavailable families, OutputExists, and the replay's errors; after a failed replay the trace
    up to the failure is written before the error propagates.
    """
    check_families(families, plan.devices)
    with output_file(OUTPUT_FLAG, output, force) as file:
        session = _Session(families, plan.devices, plan.reader.session.session_id)
        annotations = _Annotations()
        try:
            plan.execute(verify="none", on_scope=annotations, timer=session)
        finally:
            annotations.close()
            session.stop()
            if session.profiler is not None:
                _export(session.profiler, file.partial, fspath(output), families)
                file.commit()


def _export(profiler: profile, partial: Path, output: str, families: Sequence[str]) -> None:
    """Write the trace to `partial`. Raises OpReplayError if it is not written completely."""
    left_by_torch = partial.with_name(f"{partial.name}.tmp")  # torch leaves this file if it fails to write
    try:
        profiler.export_chrome_trace(fspath(partial))
        if not _is_whole(partial):
            raise OpReplayError(f"{OUTPUT_FLAG}={output}: torch could not write the whole trace; is the disk full?")
        if not {"host-ops", "shapes"} & set(families):
            _drop_events(fspath(partial), _HOST_OPS)
    except OSError as error:
        raise OpReplayError(f"{OUTPUT_FLAG}={output}: cannot be written: {error.strerror}") from error
    finally:
        left_by_torch.unlink(missing_ok=True)


def _is_whole(trace: Path) -> bool:
    """Whether a trace ends as JSON does. torch reports a failure to write it only on stderr."""
    end = b""
    with _opened(fspath(trace), "rb") as file:
        while part := file.read(1 << 20):
            end = (end + part)[-64:]
    return end.rstrip().endswith(b"}")


def _opened(path: str, mode: str) -> Any:
    return gzip.open(path, mode) if path.endswith(".gz") else open(path, mode)


class _Session:
    """A replay's `timer` that runs the profiler. Content imported during the replay is in the trace."""

    def __init__(self, families: Sequence[str], devices: Sequence[torch.device], capture_session: str) -> None:
        self._families = frozenset(families)
        self._capture_session = capture_session
        self._devices = device_activities(devices) if "device-kernels" in self._families else set()
        self.profiler: profile | None = None
        self._running = False

    def start(self) -> None:
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *self._devices],
            record_shapes="shapes" in self._families,
            profile_memory="memory" in self._families,
            with_stack="stacks" in self._families,
        )
        self.profiler.start()
        self.profiler.add_metadata(TRACE_SESSION, self._capture_session)
        self._running = True

    def pause(self) -> None:
        """A profiler cannot pause."""

    def resume(self) -> None:
        """See `pause`."""

    def stop(self) -> None:
        """Stop once the devices have finished: their work would otherwise be missing from the trace."""
        if self._running and self.profiler is not None:
            self._running = False
            if self._devices:
                synchronize()
            self.profiler.stop()


class _Annotations:
    """A replay's `on_scope` that marks its scopes in the trace. Scopes of several threads may end in any order."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Any]] = []

    def __call__(self, event: str, _name: str, path: str, ordinal: int) -> None:
        if event == "begin":
            annotation = record_function(path)
            annotation.__enter__()
            self._open.append((path, annotation))
            return
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == path:
                self._open.pop(index)[1].__exit__(None, None, None)
                return
        raise ReplayFailed(f"ordinal {ordinal}: scope {path!r} ended before it began while being replayed")

    def close(self) -> None:
        """End the annotations that a failed replay left open."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)


def _drop_events(path: str, categories: frozenset[str]) -> None:
    """Rewrite a trace without the events of some categories."""
    with _opened(path, "rb") as file:
        trace = json.load(file)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") not in categories]
    with _opened(path, "wb") as file:
        for part in json.JSONEncoder().iterencode(trace):
            file.write(part.encode())


FLAG = "--compare-kernels"
_MARK = "opreplay op "
KernelVerdictName = Literal["MATCH", "DIFFERENT", "UNKNOWN"]
# Runs its body under a profiler and writes a trace to a path.
Tracing = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Launched:
    """A device kernel, copy or fill. `grid` and `block` are None if they are unknown, and for copies."""

    name: str
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = f" grid {list(self.grid)}" if self.grid else ""
        return self.name + shape + (f" block {list(self.block)}" if self.block else "")


@dataclass(frozen=True)
class KernelVerdict:
    """One op: MATCH, DIFFERENT, or UNKNOWN with the reason."""

    ordinal: int
    op: str
    verdict: KernelVerdictName
    captured: tuple[Launched, ...] = ()
    replayed: tuple[Launched, ...] = ()
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """As a JSON object."""
        row: dict[str, Any] = {
            "kind": "device_kernels",
            "ordinal": self.ordinal,
            "op": self.op,
            "verdict": self.verdict,
            "captured": [vars(each) for each in self.captured],
        }
        return row | (
            {"reason": self.reason}
            if self.verdict == "UNKNOWN"
            else {"replayed": [vars(each) for each in self.replayed]}
        )

    def __str__(self) -> str:
        text = f"{self.verdict:<9} ordinal {self.ordinal} ({self.op})"
        if self.verdict == "DIFFERENT":
            captured, replayed = Counter(self.captured), Counter(self.replayed)
            text += f": captured {_listed(captured - replayed)}; replayed {_listed(replayed - captured)}"
        return f"{text}: {self.reason}" if self.reason else text


def captured_kernels(annotation: Mapping[str, Any] | None) -> tuple[Launched, ...] | None:
    """The device kernels that a record's annotation says its op launched, None if it does not mention any."""
    rows = (annotation or {}).get("device_kernels")
    if not isinstance(rows, list) or (annotation or {}).get("device_kernels_left_out"):
        return None
    return tuple(
        Launched(str(row.get("name")), _triple(row.get("grid")), _triple(row.get("block")))
        for row in rows
        if isinstance(row, dict)
    )


def judge(captured: Iterable[Launched], replayed: Iterable[Launched]) -> KernelVerdictName:
    """MATCH if the same kernels ran, each as often and with the same grid, in any order."""
    return "MATCH" if Counter(captured) == Counter(replayed) else "DIFFERENT"


def check_device(plan: Plan) -> None:
    """Raises UsageError if a plan uses no device whose kernels can be compared."""
    if not device_activities(plan.devices):
        raise UsageError(
            f"{FLAG}: the replay uses {', '.join(map(str, plan.devices)) or 'no device'}, and no accelerator "
            "whose kernels torch's profiler shows; expected one, such as --device=cuda:0"
        )


def kernels_of(plan: Plan) -> dict[int, tuple[Launched, ...]]:
    """The device kernels that the capture names, by the ordinal of their op. Raises UsageError if it names none."""
    records = plan.reader.records() if plan.reader.summary.annotated else ()
    found = {each.ordinal: captured_kernels(each.annotation) for each in records if each.kind is RecordKind.op}
    captured = {ordinal: kernels for ordinal, kernels in found.items() if kernels is not None}
    if not captured:
        raise UsageError(
            f"{FLAG}: {plan.reader.path} has no device kernels for its ops; imported profiler "
            "traces with device work do"
        )
    return captured


def compare_kernels(
    plan: Plan, captured: Mapping[int, tuple[Launched, ...]], tracing: Tracing | None = None
) -> list[KernelVerdict]:
    """A verdict for each op that `kernels_of` returns, in capture order. The plan must be made with keep_going."""
    tracing = tracing or traced
    failed: dict[int, str] = {}

    def run(op: IsolatedOp) -> None:
        if op.ordinal not in captured:
            return
        try:
            op.call()  # libraries choose, compile and allocate at the first call
            op.restore()
            synchronize()  # so that the profiler sees launched work end
            with record_function(f"{_MARK}{op.ordinal}"):
                op.call()
            synchronize()
        except Exception as error:  # any operator may fail in any way
            failed[op.ordinal] = f"it failed: {type(error).__name__}: {error}".partition("\n")[0]

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernels.json")
        with tracing(path):
            verdicts = plan.examine(run)
        launched = replayed_kernels(path)
    reasons = {each.ordinal: each.reason or each.verdict for each in verdicts if each.verdict in ("refused", "skipped")}
    return [
        _verdict(plan, ordinal, kernels, launched, failed.get(ordinal) or reasons.get(ordinal, ""))
        for ordinal, kernels in sorted(captured.items())
    ]


def _verdict(
    plan: Plan, ordinal: int, captured: tuple[Launched, ...], launched: Mapping[int, list[Launched]], reason: str
) -> KernelVerdict:
    name = describe(plan.reader, ordinal)[0]
    if reason:
        return KernelVerdict(ordinal, name, "UNKNOWN", captured, reason=reason)
    replayed = tuple(launched.get(ordinal, ()))
    return KernelVerdict(ordinal, name, judge(captured, replayed), captured, replayed)


def replayed_kernels(path: str | os.PathLike[str]) -> dict[int, list[Launched]]:
    """The device work in a trace by the ordinal that its op was marked with."""
    with JsonStream.open(path) as stream:
        events = TraceEvents().read(stream)
    marks = np.asarray([events.kinds[kind].name.startswith(_MARK) for kind in events.ops.kind], bool)
    tree = build(events, marks)
    found: dict[int, list[Launched]] = defaultdict(list)
    order = sorted(range(len(events.work.start)), key=events.work.start.__getitem__)
    for index in order:
        launch = int(tree.work_launch[index])
        mark = int(tree.launch_scope[launch]) if launch >= 0 else -1
        if mark >= 0:
            kind = events.work_kinds[events.work.kind[index]]
            ordinal = int(events.kinds[events.ops.kind[mark]].name.removeprefix(_MARK))
            found[ordinal].append(Launched(kind.name, kind.grid, kind.block))
    return found


@contextmanager
def traced(path: str) -> Iterator[None]:
    """Run under torch's profiler, with device work, and write its trace."""
    with profile(activities=supported_activities()) as profiler:
        yield
    Path(path).unlink(missing_ok=True)
    profiler.export_chrome_trace(path)


def _triple(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(each, int) for each in value) else None


def _listed(kernels: Counter[Launched]) -> str:
    return ", ".join(f"{kernel}{f' x {count}' if count > 1 else ''}" for kernel, count in kernels.items()) or "nothing"
