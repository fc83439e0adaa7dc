"""What a profiler trace says of one piece of device work besides its name and grid."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ..common.json_stream import EXACT_US, JsonStream, LongFloat
from ..common.trace_files import Progress

Details = tuple[tuple[str, Any], ...]  # pairs of a member and its value, which two kernels can be compared by

NUMBERS = {
    "registers per thread": "registers_per_thread",
    "shared memory": "shared_memory_bytes",
    "bytes": "bytes",
    "blocks per SM": "blocks_per_sm",
    "warps per SM": "warps_per_sm",
    "est. achieved occupancy %": "occupancy_percent",
}
_WHOLE = frozenset({"registers_per_thread", "shared_memory_bytes", "bytes"})
_COLLECTIVE = {
    "Collective name": "name",
    "dtype": "dtype",
    "In msg nelems": "in_elements",
    "Out msg nelems": "out_elements",
    "Group size": "group_size",
    "Process Group Name": "group",
    "Process Group Description": "group_description",
    "Process Group Ranks": "group_ranks",
}
_LONGEST = 4096  # characters of one text


def details_of(arguments: Mapping[str, Any]) -> Details:
    """What an event's arguments say of its work, in a fixed order; what is no number or text is not there."""
    found: list[tuple[str, Any]] = []
    for theirs, ours in NUMBERS.items():
        value = arguments.get(theirs)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value) and 0 <= value < 1 << 62:
            found.append((ours, int(value) if ours in _WHOLE else float(value)))
    if "Collective name" in arguments:
        about = tuple(
            (ours, value if isinstance(value, int) else value[:_LONGEST])
            for theirs, ours in _COLLECTIVE.items()
            if isinstance(value := arguments.get(theirs), int | str) and not isinstance(value, bool)
        )
        found.append(("collective", about))
    return tuple(found)


# Categories by what they are. The first names are those of today, the capitalized ones of PyTorch before 1.12.
OPERATOR_CATEGORIES = frozenset({"cpu_op", "Operator", "operator"})
ANNOTATION_CATEGORIES = frozenset({"user_annotation"})
LAUNCH_CATEGORIES = frozenset(
    {
        "cuda_runtime",
        "cuda_driver",
        "hip_runtime",
        "hip_driver",
        "xpu_runtime",
        "xpu_driver",
        "privateuse1_runtime",
        "privateuse1_driver",
        "mtia_runtime",
        "hpu_op",
        "Runtime",
        "runtime",
    }
)
# Runtimes of other accelerators (Gaudi's, MLU's) are called alike.
_LAUNCHES = re.compile(r"[a-z]\w*_(runtime|driver)\Z")
_WORKS = re.compile(r"[a-z]\w*_(kernel|memcpy|memset)\Z")  # of other makers' devices
DEVICE_CATEGORIES = frozenset(
    {
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "Kernel",
        "Memcpy",
        "Memset",
        "concurrent_kernel",
        "mtia_ccp_events",
        "privateuse1_kernel",
    }
)
# Other events that profilers write, none of them calls: stacks, flows, counters, the device's view of annotations.
OTHER_CATEGORIES = frozenset(
    {
        "python_function",
        "gpu_user_annotation",
        "Trace",
        "overhead",
        "cuda_sync",
        "cpu_instant_event",
        "ac2g",
        "fwdbwd",
        "async",
        "async_cpu_to_gpu",
        "external_correlation",
        "cuda_profiler_range",
        "gpu_pm_counter",
        "collective_comm",
        "mtia_insight",
        "mtia_counters",
        "glow_runtime",
        "ProfilerStep",
        "Python",
        "PythonFunction",
    }
)
_READ_CATEGORIES = OPERATOR_CATEGORIES | ANNOTATION_CATEGORIES | LAUNCH_CATEGORIES | DEVICE_CATEGORIES
OPERATOR_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?\Z")
# What the runtime that launched work calls its devices; CUDA and HIP are both `cuda` to PyTorch.
_DEVICE_TYPES = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu", "mtia": "mtia", "hpu": "hpu"}
RECORDED_FIELDS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
_OLD_FIELDS = {
    "Input Dims": "Input dims",
    "Input type": "Input types",
    "Input Strides": "Input strides",
    "Concrete Inputs": "Concrete inputs",
}
# What collectives say besides their inputs.
COLLECTIVE_FIELDS = (
    "Collective name",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Rank",
    "In split size",
    "Out split size",
    "Src Rank",
    "Dst Rank",
)


# What launches of kernels that torch.compile generated say besides their inputs.
TRITON_FIELDS = ("kernel_backend", "kernel_file", "kernel_hash", "kernel_kwargs", "grid", "num_warps", "num_stages")
_KIND_FIELDS = frozenset((*RECORDED_FIELDS, *_OLD_FIELDS.values(), *COLLECTIVE_FIELDS, *TRITON_FIELDS))
_LINKS = frozenset({"correlation", "External id", "external id"})  # what differs from launch to launch
_MOST_UNKNOWN = 16  # categories that are named
_LATEST = 1 << 62
NO_TIME = -_LATEST
_DECIMAL = re.compile(r"(-?\d{1,19})(\.\d+)?\Z")
_NO_FIELDS = "without the fields that events have were left out"


def _q() -> array:
    return array("q")


@dataclass
class OpEvents:
    """Operator events and annotations. `kind` indexes `kinds`; `external` is -1 if there is none."""

    start: array = field(default_factory=_q)  # ns since the epoch of the trace
    duration: array = field(default_factory=_q)
    thread: array = field(default_factory=_q)
    external: array = field(default_factory=_q)
    kind: array = field(default_factory=_q)


@dataclass
class Launches:
    """Calls of a device's runtime. `name` indexes `names`, `work` what they launch in Events.launch_kinds, -1 where the
    trace does not say; ids are -1 where there are none."""

    start: array = field(default_factory=_q)
    thread: array = field(default_factory=_q)
    correlation: array = field(default_factory=_q)
    external: array = field(default_factory=_q)
    name: array = field(default_factory=_q)
    work: array = field(default_factory=_q)
    graph: array = field(default_factory=lambda: array("b"))
    names: dict[str, int] = field(default_factory=dict)


@dataclass
class DeviceWork:
    """Work on a device: kernels, copies, fills. `kind` indexes `work`; -1: no such id, or no duration; `start` may be
    NO_TIME."""

    start: array = field(default_factory=_q)
    duration: array = field(default_factory=_q)
    correlation: array = field(default_factory=_q)
    external: array = field(default_factory=_q)
    kind: array = field(default_factory=_q)


@dataclass(frozen=True)
class OpKind:
    """What all events of one operator with the same recorded arguments share. `recorded` is None if the trace has no
    arguments at all; its fields are lists, None if a field is missing."""

    name: str
    annotation: bool
    recorded: dict[str, list[Any] | None] | None
    collective: dict[str, Any] | None = None
    triton: dict[str, Any] | None = None


@dataclass(frozen=True)
class WorkKind:
    """What all launches of one kernel with the same grid share. `stream` and `device` are -1 if not recorded; `details`
    is what else the trace says of it."""

    name: str
    category: str
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    stream: int
    device: int
    details: Details = ()

    def row(self) -> dict[str, Any]:
        """As a JSON object for an annotation."""
        row: dict[str, Any] = {
            "name": self.name,
            "grid": list(self.grid) if self.grid else None,
            "block": list(self.block) if self.block else None,
        }
        return row | {"stream": self.stream if self.stream >= 0 else None}


class _DigitsLost(Exception):
    """A time is a number of more digits than a double holds."""


def read_events(
    path: str | PathLike[str], progress: Progress | None = None, member: str = ""
) -> tuple[TraceEvents, JsonStream]:
    """The events of a trace, and the stream that they were read from, for what is wrong with it. Raises the errors of
    TraceFile."""
    try:
        with JsonStream.open(path, progress, member=member) as stream:
            return TraceEvents().read(stream), stream
    except _DigitsLost:  # times since 1970: keeping the digits of each number takes longer
        with JsonStream.open(path, progress, member=member, exact=True) as stream:
            return TraceEvents().read(stream), stream


class TraceEvents:
    """Everything in a trace that the import needs. `problems` counts errors in events, `others` the events that are not
    calls, `unknown` those of which nothing is known, `runtimes` launches, all by category."""

    def __init__(self) -> None:
        self.ops, self.launches, self.work = OpEvents(), Launches(), DeviceWork()
        self.kinds: list[OpKind] = []
        self.work_kinds: list[WorkKind] = []
        self.launch_kinds: list[WorkKind] = []
        self.threads: list[tuple[str, str]] = []
        self.borrowed: dict[int, int] = {}  # threads that stand for others
        self.durations: dict[int, int] = {}  # of operator events there: the column has their order alone
        self.metadata: dict[str, Any] = {}
        self.memory_devices: set[int] = set()
        self.device_type = "cuda"
        self.problems: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.runtimes: Counter[str] = Counter()
        self._begun: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._kind_ids: dict[Any, int] = {}
        self._work_ids: dict[Any, int] = {}
        self._launch_ids: dict[Any, int] = {}
        self._thread_ids: dict[tuple[str, str], int] = {}
        self._readers: dict[Any, Callable[[dict[str, Any], str], None]] = {
            **dict.fromkeys(OTHER_CATEGORIES, self._other),
            **dict.fromkeys(DEVICE_CATEGORIES, self._work),
            **dict.fromkeys(LAUNCH_CATEGORIES, self._launch),
            **dict.fromkeys(ANNOTATION_CATEGORIES, self._annotation),
            **dict.fromkeys(OPERATOR_CATEGORIES, self._operator),
        }

    def read(self, stream: JsonStream) -> TraceEvents:
        """Read all events. An outer array is read as the events themselves, as Chrome's format allows."""
        for key, value in stream.entries({"traceEvents"}):
            if key in ("traceEvents", ""):
                self._event(value)
            else:
                self.metadata[key] = value
        for events in self._begun.values():
            self.problems["begin (ph B) and never end; they were left out"] += len(events)
        return self

    def device_ns(self) -> int:
        """The duration of all device work."""
        return sum(each for each in self.work.duration if each > 0)

    def problem_lines(self) -> Iterator[str]:
        """Errors in events, as sentences."""
        return (f"{count} events {what}" for what, count in self.problems.items() if count)

    def _event(self, event: Any) -> None:
        if not isinstance(event, dict):
            self.problems[_NO_FIELDS] += 1
            return
        arguments = event.get("args")
        if type(arguments) is not dict and arguments is not None:
            self.problems["have args that are no object; they were read without them"] += 1
            event = {**event, "args": None}
        try:
            phase, category = event.get("ph"), event.get("cat")
            if phase in ("B", "E"):
                event = self._paired(event)
                phase = "X" if event else ""
                category = (event or {}).get("cat")
            if phase == "X" and event is not None:
                if event.get("name") is None:
                    raise KeyError("name")
                self._readers.get(category, self._unlisted)(event, category)
            elif phase and category in _READ_CATEGORIES:
                self.problems[f"are of category {category} and phase {str(phase)[:40]!r}, which is not read"] += 1
            elif isinstance(phase, str) and phase:
                self.others[str(category or f"phase {phase}")] += 1
                if event is not None and event.get("name") == "[memory]":
                    self._memory(event.get("args"))
            elif phase is None:
                # Exporters end lists with an empty entry to simplify the last comma.
                self.problems[_NO_FIELDS] += bool(event)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            self.problems[_NO_FIELDS] += 1

    def _unlisted(self, event: dict[str, Any], category: Any) -> None:
        """An event of no category, or of one that is in no list."""
        if category is None:
            self.problems[
                "have no category; those named like operators are treated as operators, the others left out"
            ] += 1
            if OPERATOR_NAME.match(str(event["name"])):
                self._operator(event, "cpu_op")
        elif isinstance(category, str) and _LAUNCHES.match(category):
            self._launch(event, category)
        elif isinstance(category, str) and _WORKS.match(category):
            self._work(event, category)
        elif category != "":
            name = str(category)[:60]
            if name in self.unknown or len(self.unknown) < _MOST_UNKNOWN:
                self.unknown[name] += 1
            self.problems[f"are of category {name!r}, which is not known; they were left out"] += 1

    def _other(self, _event: dict[str, Any], category: str) -> None:
        self.others[category] += 1

    def _operator(self, event: dict[str, Any], category: str) -> None:
        duration = _duration(event)
        if duration >= 0:
            self._op(event, False, duration)
        else:
            self.problems[f"of category {category} have no duration, or an impossible one; they were left out"] += 1

    def _annotation(self, event: dict[str, Any], category: str) -> None:
        duration = _duration(event)
        self._op(event, True, max(0, duration))
        if duration < 0:
            self.problems[
                f"of category {category} have no duration, or an impossible one; they were taken as moments"
            ] += 1

    def _paired(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The span completed by an end event (ph E); None for a begin event."""
        begun = self._begun.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
        if event["ph"] == "B":
            nanoseconds(event["ts"])
            begun.append(event)
            return None
        if not begun:
            self.problems["end (ph E) and never begin; they were left out"] += 1
            return None
        first = begun.pop()
        arguments = {**(first.get("args") or {}), **(event.get("args") or {})}
        duration = (nanoseconds(event["ts"]) - nanoseconds(first["ts"])) / 1000
        return {**first, "ph": "X", "dur": f"{duration:.3f}", "args": arguments}

    def _op(self, event: dict[str, Any], annotation: bool, duration: int) -> None:
        arguments = event.get("args") or {}
        name = str(event["name"])
        start = nanoseconds(event["ts"])
        said = name, annotation, repr({each: value for each, value in arguments.items() if each in _KIND_FIELDS})
        number = self._kind_ids.get(said)
        if number is None:
            number = self._kind_ids[said] = self.kind_number(_op_kind(name, annotation, arguments))
        thread, external = self._thread(event), _external(arguments)
        ops = self.ops
        ops.start.append(start)
        ops.duration.append(duration)
        ops.thread.append(thread)
        ops.external.append(external)
        ops.kind.append(number)

    def kind_number(self, kind: OpKind) -> int:
        """The number for what similar events share; a new one if there were none so far."""
        key = (
            kind.name,
            kind.annotation,
            json.dumps(kind.recorded) if kind.recorded else "",
            json.dumps(kind.collective) if kind.collective else "",
            json.dumps(kind.triton) if kind.triton else "",
        )
        number = self._kind_ids.setdefault(key, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def borrow_thread(self, thread: int) -> int:
        """A new thread for what another one did elsewhere, which has an order here and no times."""
        self.borrowed[len(self.threads)] = thread
        self.threads.append(self.threads[thread])
        return len(self.threads) - 1

    def _launch(self, event: dict[str, Any], category: str) -> None:
        runtime, separator, _rest = category.partition("_")
        if separator:
            self.device_type = _DEVICE_TYPES.get(runtime, "privateuseone")  # what other packages' devices are
        self.runtimes[category] += 1
        arguments = event.get("args") or {}
        correlation, external = integer(arguments.get("correlation")), _external(arguments)
        if correlation < 0 and external < 0:
            return
        start, thread, name = nanoseconds(event["ts"]), self._thread(event), str(event["name"])
        launches = self.launches
        launches.start.append(start)
        launches.thread.append(thread)
        launches.correlation.append(correlation)
        launches.external.append(external)
        launches.name.append(launches.names.setdefault(name, len(launches.names)))
        launches.work.append(self._launched(arguments))
        launches.graph.append("graphlaunch" in name.lower())

    def _launched(self, arguments: dict[str, Any]) -> int:
        """The number for what a launch says it launches, as ROCm's do."""
        kernel = arguments.get("kernel")
        if not isinstance(kernel, str) or not kernel:
            return -1
        grid, block = arguments.get("grid"), arguments.get("block")
        said = kernel, repr((grid, block))
        number = self._launch_ids.get(said)
        if number is None:
            kind = WorkKind(kernel, "kernel", _triple(grid), _triple(block), -1, -1)
            number = self._launch_ids[said] = self._launch_ids.setdefault(kind, len(self.launch_kinds))
            if number == len(self.launch_kinds):
                self.launch_kinds.append(kind)
        return number

    def _work(self, event: dict[str, Any], category: str) -> None:
        arguments = event.get("args") or {}
        try:
            start = nanoseconds(event["ts"])
        except (KeyError, TypeError, ValueError, OverflowError):
            if max(integer(arguments.get("correlation")), _external(arguments)) <= 0:
                raise
            start = NO_TIME  # its launch says what it belongs to
            self.problems[f"of category {category} have no beginning, or an impossible one; it is not known"] += 1
        duration = _duration(event)
        if duration < 0:
            self.problems[f"of category {category} have no duration, or an impossible one; it is not known"] += 1
        name = str(event["name"])
        said = name, category, repr({each: value for each, value in arguments.items() if each not in _LINKS})
        number = self._work_ids.get(said)
        if number is None:
            kind = WorkKind(
                name,
                category.lower(),
                _triple(arguments.get("grid")),
                _triple(arguments.get("block")),
                integer(arguments.get("stream")),
                integer(arguments.get("device")),
                details_of(arguments),
            )
            number = self._work_ids[said] = self._work_ids.setdefault(kind, len(self.work_kinds))
            if number == len(self.work_kinds):
                self.work_kinds.append(kind)
        self.work.start.append(start)
        self.work.duration.append(duration)
        self.work.correlation.append(integer(arguments.get("correlation")))
        self.work.external.append(_external(arguments))
        self.work.kind.append(number)

    def _memory(self, arguments: Any) -> None:
        """Allocations name devices as PyTorch numbers them."""
        if isinstance(arguments, dict) and integer(arguments.get("Device Type")) not in (-1, 0):
            self.memory_devices.add(integer(arguments.get("Device Id")))

    def _thread(self, event: dict[str, Any]) -> int:
        key = (str(event.get("pid")), str(event.get("tid")))
        number = self._thread_ids.get(key)
        if number is None:
            number = self._thread_ids[key] = len(self.threads)  # none is borrowed while a trace is read
            self.threads.append(key)
        return number


def _op_kind(name: str, annotation: bool, arguments: Mapping[str, Any]) -> OpKind:
    given = {each: arguments.get(each, arguments.get(_OLD_FIELDS[each])) for each in RECORDED_FIELDS}
    recorded = given if any(value is not None for value in given.values()) else None
    about = {each: arguments[each] for each in COLLECTIVE_FIELDS if each in arguments}
    triton = (
        {each: arguments[each] for each in TRITON_FIELDS if each in arguments}
        if "kernel_backend" in arguments or "kernel_hash" in arguments
        else None
    )
    return OpKind(name, annotation, recorded, about or None, triton)


def nanoseconds(microseconds: Any) -> int:
    """A time in whole nanoseconds. Raises ValueError, OverflowError and TypeError for an invalid one."""
    if type(microseconds) is float:
        if -EXACT_US < microseconds < EXACT_US:
            return round(microseconds * 1000)
        if math.isfinite(microseconds):
            raise _DigitsLost
    if isinstance(microseconds, bool):
        raise TypeError("a time is a number")
    text = microseconds.text if isinstance(microseconds, LongFloat) else microseconds
    if isinstance(text, str):
        exact = _DECIMAL.match(text)  # since 1970 there are more nanoseconds than a double holds
        if exact:
            fraction = round(float(exact[2] or 0) * 1000)
            time = int(exact[1]) * 1000 + (-fraction if text.startswith("-") else fraction)
        else:
            time = round(float(text) * 1000)
    else:
        time = microseconds * 1000 if isinstance(microseconds, int) else round(microseconds * 1000)
    if not -_LATEST < time < _LATEST:
        raise ValueError(f"{microseconds} is not a time")
    return time


def _duration(event: dict[str, Any]) -> int:
    """The duration in nanoseconds; -1 if it is missing, negative, or not a time."""
    try:
        return max(-1, nanoseconds(event["dur"])) if event.get("dur") is not None else -1
    except (ValueError, OverflowError, TypeError):
        return -1


def integer(value: Any) -> int:
    """An id as a number, -1 if missing or invalid."""
    if type(value) is int:
        return value if 0 <= value < 1 << 62 else -1
    if isinstance(value, bool) or value is None:
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 1 << 62 else -1


def _external(arguments: dict[str, Any]) -> int:
    return integer(arguments.get("External id", arguments.get("external id")))


def _triple(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        numbers = tuple(integer(each) for each in value)
        return numbers if numbers and min(numbers) >= 0 else None
    return None
