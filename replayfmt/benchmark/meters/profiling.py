"""A torch.profiler trace of one replay, with the capture's scopes as annotations.

Families select what the trace contains. The profiler runs for exactly one replay: it starts once state has been
restored and stops with the last op, outside anything that is timed. A replay that fails is traced up to its failure.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from replayfmt.errors import OpReplayError, ReplayFailed, UsageError
from replayfmt.pytorch.accelerators import is_accelerator, synchronize
from replayfmt.replay.plan import Plan

from ..output import output_file
from ..same_capture import TRACE_SESSION

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
