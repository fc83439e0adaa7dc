"""The options of an import: how a trace becomes a capture, and which part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal

from replayfmt.errors import UsageError
from replayfmt.format.validation import check_function, check_kind, choice_of
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.traced_names import TracedNames

from .inductor_cache import InductorCache
from .trace_files import Progress

Level = Literal["auto", "leaf", "launching", "root"]
LEVELS: tuple[Level, ...] = ("auto", "leaf", "launching", "root")
Rewrite = Literal["none", "portable"]
_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)?:(\d{1,12}(?:\.\d{1,6})?)?\Z")


@dataclass(frozen=True)
class TraceRange:
    """`steps`: numbers of the profiler's steps; `scopes`: names of annotations; `time`: A:B in milliseconds since the
    trace's first event. What is in any of them is imported; everything, if all are empty."""

    steps: Sequence[int] = ()
    scopes: Sequence[str] = ()
    time: str = ""

    def __bool__(self) -> bool:
        return bool(self.steps or self.scopes or self.time)


def parse_time(text: str) -> tuple[int, int]:
    """Nanoseconds of `A:B`, in milliseconds; either may be left out. Raises UsageError."""
    found = _TIME.match(text)
    begin, end = (found[1] or "0", found[2] or "1e12") if found else ("1", "0")
    if float(begin) >= float(end):
        raise UsageError(f"--time={text}: expected A:B in milliseconds since the trace's beginning, such as 10:25.5")
    return round(float(begin) * 1e6), round(float(end) * 1e6)


@dataclass(frozen=True)
class ImportOptions:
    """Those of `import_trace`, besides the paths. `wanted` is which part of a profiler trace is imported, `inductor`
    has sources of Triton kernels that are not beside the trace; `together`: its collectives are to be replayed with
    those of the other ranks. Raises UsageError for values of another kind."""

    level: Level = "auto"
    unique: bool = False
    rewrite: Rewrite = "none"
    libraries: OpLibraries = field(default_factory=OpLibraries)
    names: TracedNames = field(default_factory=TracedNames)
    progress: Progress | None = None
    on_record: Callable[[int, int], None] | None = None
    graph_captures: Sequence[str | PathLike[str]] = ()
    wanted: TraceRange = TraceRange()
    inductor: InductorCache | None = None
    together: bool = False

    def __post_init__(self) -> None:
        choice_of("level", self.level, LEVELS)
        choice_of("rewrite", self.rewrite, ("none", "portable"))
        check_kind("libraries", self.libraries, OpLibraries)
        check_kind("names", self.names, TracedNames)
        check_function("progress", self.progress)
        check_function("on_record", self.on_record)
