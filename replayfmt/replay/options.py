"""What a replay runs on and what it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from replayfmt.format.validation import check_kind, choice_of, flag_of
from replayfmt.initializers import Initializer

from .codegen.streams import STREAMS_MODES, StreamsMode
from .planning.scan import WindowSize
from .resolution.graph_kernels import GRAPHS_MODES, GraphsMode
from .substitution.distance import Tolerance
from .substitution.table import SubstitutionChoice


@dataclass(frozen=True)
class ReplayOptions:
    """Raises UsageError for values of another kind.

    `file_remaps` are CAPTURED=REPLAY pairs of path prefixes, and say where external files are now. `initializers` fill
    what was not captured, before those that are registered and built in; `initializer_options` are for them
    (`moe-routing`: uniform, zipf or zipf:EXPONENT). `substitutions` puts other functions in place of kernels: texts as
    on the command line, Substitution objects, or a function that decides for each Call; `substitution_tolerance` is how
    far their results may be off. `allow_imports` names modules to import for the operators that they register (a
    capture causes no other), `allow_operators` operators that may run although they do more than compute on tensors.
    `allow_code` lets machine code and source in the capture run, with the rights of this process (SECURITY.md). With
    `keep_going` a plan is made of what can run, and has its findings. `opaque_results`, `streams` and `graphs` are
    those of the flags.
    """

    devices: Sequence[str] = ()
    allow_incomplete: bool = False
    keep_going: bool = False
    file_remaps: Sequence[str] = ()
    initializers: Sequence[Initializer] = ()
    initializer_options: Mapping[str, str] | None = None
    substitutions: SubstitutionChoice = ()
    substitution_tolerance: Tolerance = Tolerance()
    allow_imports: Iterable[str] = ()
    allow_operators: Iterable[str] = ()
    allow_code: bool = False
    opaque_results: Iterable[str] = ()
    streams: StreamsMode = "captured"
    graphs: GraphsMode = "captured"
    window: WindowSize = WindowSize()

    def __post_init__(self) -> None:
        choice_of("streams", self.streams, STREAMS_MODES)
        choice_of("graphs", self.graphs, GRAPHS_MODES)
        check_kind("window", self.window, WindowSize)
        check_kind("substitution_tolerance", self.substitution_tolerance, Tolerance)
        for name in ("allow_incomplete", "keep_going", "allow_code"):
            flag_of(name, getattr(self, name))


class MorePlanOptions(TypedDict, total=False):
    """Fields of ReplayOptions, as keywords of `Plan` after the first."""

    file_remaps: Sequence[str]
    initializers: Sequence[Initializer]
    initializer_options: Mapping[str, str] | None
    substitutions: SubstitutionChoice
    substitution_tolerance: Tolerance
    allow_imports: Iterable[str]
    allow_operators: Iterable[str]
    allow_code: bool
    opaque_results: Iterable[str]
    streams: StreamsMode
    graphs: GraphsMode
    window: WindowSize


class PlanOptions(MorePlanOptions, total=False):
    """Fields of ReplayOptions, as keywords of the functions that replay."""

    devices: Sequence[str]
    allow_incomplete: bool
