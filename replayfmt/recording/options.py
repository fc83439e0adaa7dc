"""The options of a capture, checked once, and the limits that say which part of a program is recorded.

A capture and `opreplay-capture` take the same options. `steps`, `start_scope` and `stop_scope` are limits:
`ProgramProgress` follows the program's position in them. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from replayfmt.errors import UsageError
from replayfmt.format.model import OPAQUE_RESULTS
from replayfmt.format.redaction import WITHOUT_SOURCES
from replayfmt.format.validation import choice_of, flag_of, paths_of, shown, text_of, texts_of
from replayfmt.pytorch.operators import OpaqueResults, is_pytorchs

from .known_files import expand, look_at

_STEPS = re.compile(r"(\d{1,15})?:(\d{1,15})?", re.ASCII)
_NUMBERED = re.compile(r"(.+)#(\d{1,15})", re.ASCII | re.DOTALL)


class StepRange(NamedTuple):
    """The steps from `start` up to, not including, `stop`; None: to the end."""

    start: int
    stop: int | None


class ScopeAt(NamedTuple):
    """A scope's name, and which scope of that name is meant, counted from 0; None: the first suitable one."""

    name: str
    number: int | None


def parse_steps(text: str) -> StepRange:
    """Parse `A:B`; either may be missing. Raises UsageError."""
    found = _STEPS.fullmatch(text) if isinstance(text, str) else None
    if found is None or text == ":":
        raise UsageError(
            f"steps={shown(text)}: expected A:B, the steps from A up to, not including, B; either may be "
            "missing: 10:12, or 500:"
        )
    start, stop = int(found[1] or 0), None if found[2] is None else int(found[2])
    if stop is not None and stop <= start:
        raise UsageError(f"steps={text}: leaves nothing to record: the second number has to be the larger one")
    return StepRange(start, stop)


def parse_scope(text: str) -> ScopeAt:
    """Parse `NAME` or `NAME#N`. A name that itself ends in `#N` needs a number: `block#3#0`."""
    found = _NUMBERED.fullmatch(text)
    return ScopeAt(text, None) if found is None else ScopeAt(found[1], int(found[2]))


class ProgramProgress:
    """How far the program has come. `steps` counts completed steps."""

    def __init__(self, steps: StepRange | None, start: ScopeAt | None, stop: ScopeAt | None) -> None:
        self._steps, self._start, self._stop = steps, start, stop
        self._names = {scope.name for scope in (start, stop) if scope is not None}
        self._begun: Counter[str] = Counter()
        self.steps = 0

    def scope_begun(self, name: str) -> int:
        """A scope begins. Returns which one of its name it is, if that matters."""
        if name not in self._names:
            return -1
        self._begun[name] += 1
        return self._begun[name] - 1

    def is_start(self, name: str, number: int) -> bool:
        """Whether recording starts with this scope."""
        return self._start is not None and name == self._start.name and number >= (self._start.number or 0)

    def is_stop(self, name: str, number: int) -> bool:
        """Whether recording stops when this scope is left."""
        return self._stop is not None and name == self._stop.name and self._stop.number in (None, number)

    def waits(self) -> bool:
        """Whether the first step to record is still to come."""
        return self._steps is not None and self.steps < self._steps.start

    def step_ended(self) -> bool:
        """A step ended. Returns whether it was the last one to record."""
        self.steps += 1
        return self._steps is not None and self.steps == self._steps.stop

    def unmatched(self) -> str | None:
        """A message if the program did not reach the end of the last step."""
        if self._steps is None or self.steps >= (self._steps.stop or self._steps.start + 1):
            return None
        asked = f"{self._steps.start}:{'' if self._steps.stop is None else self._steps.stop}"
        ended = f"{self.steps} step{'' if self.steps == 1 else 's'} ended"
        return (
            f"--steps={asked}: {ended}; a step ends when the step() of an optimizer of PyTorch returns. For other "
            "loops there is --start-scope=NAME#N"
        )


Payload = Literal["full", "integers", "none"]
PAYLOADS = get_args(Payload)
FilePolicy = Literal["reference", "capture-ranges", "capture-all", "fail"]
FILE_POLICIES = get_args(FilePolicy)
FileValidation = Literal["identity", "digest"]
FILE_VALIDATIONS = get_args(FileValidation)
Digests = Literal["live", "ops", "none"]
DIGESTS = get_args(Digests)
CollectiveResults = Literal["full", "none"]
COLLECTIVE_RESULTS = get_args(CollectiveResults)
Compiled = Literal["kernels", "keep", "eager"]
COMPILED = get_args(Compiled)
Native = Literal["auto", "off"]
NATIVE = get_args(Native)
RecorderKind = Literal["auto", "native", "python"]
RECORDERS = get_args(RecorderKind)
Children = Literal["note", "record"]
CHILDREN = get_args(Children)

_LIMITS = ("start_op", "stop_op", "start_scope", "stop_scope")

# Records per frame: few enough that no part of writing one stalls the program for long, enough to keep the cost per op
# low.
CHUNK_RECORDS = 8192


class CaptureKeywords(TypedDict, total=False):
    """Fields of CaptureOptions, as keywords of `capture`."""

    payload: Payload
    files: Iterable[str | os.PathLike[str]]
    file_policy: FilePolicy | None
    file_validation: FileValidation | None
    redact: bool
    sources: bool
    digests: Digests
    audit: bool
    compiled: Compiled
    opaque_results: Iterable[str]
    inside: Iterable[str]
    whole: Iterable[str]
    reads_unwritten: Iterable[str]
    native: Native | None
    recorder: RecorderKind | None
    start_op: int | None
    stop_op: int | None
    start_scope: str | None
    stop_scope: str | None
    steps: str | None
    collective_results: CollectiveResults
    children: Children
    force: bool
    chunk_records: int


@dataclass(frozen=True)
class CaptureOptions:
    """The policies of one capture. Raises UsageError for values that do not exist or contradict each other.

    `payload`: `full` embeds the bytes of storages no captured op produced; `integers` embeds those of integer and
    boolean ones and records how to synthesize the others; `none` records metadata only, redacted. With the last two no
    value that depends on the content is recorded: no digests, no values of host reads, no scalar results of ops.

    `file_policy`: storages whose bytes are in a known file refer to it (`reference`), are embedded (`capture-ranges`),
    embed the whole file (`capture-all`), or end the capture (`fail`). A file is known if a storage is an untouched
    mapping of it, or if `files` names it: paths of files, of directories with checkpoints, or of an index of shards.
    None: `reference`; with `payload="integers"` and no file options, files are not looked for. `file_validation`: how a
    replay recognizes a file, by its `identity` (device, inode, length, modification time) or by a `digest` of all its
    content; None: `identity`.

    `redact`: leave out host name, user, command line, and the directories of files. `sources`: keep the source of
    kernels that are no operators; without it, intermediate code that names files and the paths in their metadata are
    left out, too. `digests`: what verification will compare. `audit`: hash every op's inputs before it runs, and import
    again what was written from outside. `compiled`: torch.compile'd regions run as they would, with what their
    generated code calls recorded (`kernels`) or each call an unsupported record (`keep`), or as their operators
    (`eager`). `opaque_results` names results that hold bytes no replay reproduces, as OPERATOR[:INDEX]: they
    are never compared. `inside` and `whole`: operators of other packages (`vllm::unified_attention`, or a pattern,
    `vllm::*`) to record as the operators inside them, or always as one op. Operators named by neither are observed if
    they are written in Python. `reads_unwritten`: names of scopes in which the program may read memory
    that it never wrote, as a warm-up does; its bytes are recorded as they are. `native`: `auto` counts the operators of
    threads that cannot be recorded, with a library that is built once; `off` does not count them; None: what the
    environment variable OPREPLAY_NATIVE says, or `auto`. `recorder`: `native` sees operators below autograd, through a
    library that is built once, and leaves the program as it is; `python` is a dispatch mode; `auto` is `native` if that
    library is available; None: what OPREPLAY_RECORDER says, or `auto`. `collective_results`: keep what collectives
    wrote (`full`), so that one rank replays alone, or not (`none`; with `payload="none"` always). `start_op`
    and `stop_op` count ops from 0; ops
    in [start_op, stop_op) are recorded. `start_scope` and `stop_scope` are scope names: recording starts when the first
    is entered for the first time, and stops for good when the second is next left; `NAME#N` means the scope of that
    name that begins as number N, counted from 0 and from the start of the capture. `steps`: `A:B` records the steps A
    up to, not including, B of a training loop, counted from 0; a step ends when the `step()` of a PyTorch optimizer
    returns. `children`: `note` says in the capture which child processes worked, `record` also captures what
    multiprocessing runs in them, each into a file beside: `NAME.PID.opreplay`. `force` overwrites an existing file.
    `chunk_records`: records per frame.
    """

    payload: Payload = "full"
    files: Iterable[str | os.PathLike[str]] = ()
    file_policy: FilePolicy | None = None
    file_validation: FileValidation | None = None
    redact: bool = False
    sources: bool = True
    digests: Digests = "live"
    audit: bool = False
    compiled: Compiled = "kernels"
    opaque_results: Iterable[str] = ()
    inside: Iterable[str] = ()
    whole: Iterable[str] = ()
    reads_unwritten: Iterable[str] = ()
    native: Native | None = None
    recorder: RecorderKind | None = None
    collective_results: CollectiveResults = "full"
    start_op: int | None = None
    stop_op: int | None = None
    start_scope: str | None = None
    stop_scope: str | None = None
    steps: str | None = None
    children: Children = "note"
    force: bool = False
    chunk_records: int = CHUNK_RECORDS

    def __post_init__(self) -> None:
        if self.native is None:
            object.__setattr__(self, "native", os.environ.get("OPREPLAY_NATIVE") or "auto")
        if self.recorder is None:
            object.__setattr__(self, "recorder", os.environ.get("OPREPLAY_RECORDER") or "auto")
        for name, allowed in (
            ("payload", PAYLOADS),
            ("file_policy", FILE_POLICIES),
            ("file_validation", FILE_VALIDATIONS),
            ("digests", DIGESTS),
            ("compiled", COMPILED),
            ("native", NATIVE),
            ("recorder", RECORDERS),
            ("children", CHILDREN),
            ("collective_results", COLLECTIVE_RESULTS),
        ):
            if getattr(self, name) is not None or not name.startswith("file"):
                choice_of(name, getattr(self, name), allowed)
        if self.recorder == "native" and self.native == "off":
            raise UsageError(
                "recorder='native' needs a library, and native='off' builds and loads none; drop one of them"
            )
        if self.payload != "full":
            if self.digests == "ops":
                raise UsageError(
                    f"payload={self.payload!r} leaves content out, so digests='ops' cannot be recorded; "
                    "use digests='none'"
                )
            object.__setattr__(self, "digests", "none")
        if self.payload == "none":
            object.__setattr__(self, "collective_results", "none")
        self._check_files()
        for name in ("redact", "sources", "audit", "force"):
            object.__setattr__(self, name, flag_of(name, getattr(self, name)))
        given = texts_of("opaque_results", self.opaque_results)
        object.__setattr__(self, "opaque_results", given)
        OpaqueResults(given)
        self._check_operators()
        scopes = texts_of("reads_unwritten", self.reads_unwritten)
        if "" in scopes:
            raise UsageError("reads_unwritten='' is not the name of a scope")
        object.__setattr__(self, "reads_unwritten", scopes)
        for name in ("start_op", "stop_op"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 1 << 64):
                raise UsageError(f"{name}={shown(value)} must be a count of ops, 0 or more")
        if self.start_op is not None and self.stop_op is not None and self.stop_op <= self.start_op:
            raise UsageError(f"stop_op={self.stop_op} leaves nothing to record after start_op={self.start_op}")
        self._check_limits()
        if type(self.chunk_records) is not int or not 1 <= self.chunk_records <= 1 << 20:
            raise UsageError(f"chunk_records={shown(self.chunk_records)} must be between 1 and {1 << 20}")

    @staticmethod
    def of(caller: str, options: Mapping[str, Any]) -> CaptureOptions:
        """Options from a caller's keyword arguments. Also raises UsageError for names that are not options."""
        unknown = sorted(set(options) - {each.name for each in fields(CaptureOptions)})
        if unknown:
            raise UsageError(f"{caller}: there is no option {unknown[0]!r}")
        return CaptureOptions(**options)

    def _check_limits(self) -> None:
        others = [name for name in _LIMITS if getattr(self, name) is not None]
        if self.steps is not None:
            parse_steps(self.steps)
            if others:
                raise UsageError(f"steps and {others[0]} both say what to record; give one of them")
        for name in ("start_scope", "stop_scope"):
            if getattr(self, name) is not None and text_of(name, getattr(self, name)) == "":
                raise UsageError(f"{name}='' is not the name of a scope")

    def _check_operators(self) -> None:
        for option in ("inside", "whole"):
            patterns = texts_of(option, getattr(self, option))
            for pattern in patterns:
                namespace, separator, name = pattern.partition("::")
                if not (namespace and separator and name):
                    raise UsageError(f"{option}={pattern!r}: expected an operator, NAMESPACE::NAME")
                if is_pytorchs(namespace):
                    raise UsageError(f"{option}={pattern!r}: PyTorch's own operators are recorded as they run")
            object.__setattr__(self, option, patterns)
        both = set(self.inside) & set(self.whole)
        if both:
            raise UsageError(f"inside and whole both name {', '.join(sorted(both))}")

    def _check_files(self) -> None:
        named = paths_of("files", self.files)
        asked = bool(named) or self.file_policy is not None or self.file_validation is not None
        if self.payload == "none":
            if asked:
                raise UsageError("payload='none' records no content, so file options have no effect; omit them")
            object.__setattr__(self, "redact", True)
        if self.payload == "full" or (self.payload == "integers" and asked):
            object.__setattr__(self, "file_policy", self.file_policy or "reference")
            object.__setattr__(self, "file_validation", self.file_validation or "identity")
        paths = expand(named)
        for path in paths:
            look_at(path)
        object.__setattr__(self, "files", paths)

    @property
    def known_files(self) -> tuple[str, ...]:
        """The real paths of the files that were named."""
        return tuple(os.fspath(path) for path in self.files)

    @property
    def limited(self) -> bool:
        """Whether only part of the program is recorded."""
        return any(getattr(self, name) is not None for name in (*_LIMITS, "steps"))

    def unlimited(self) -> CaptureOptions:
        """The same, for all of a program."""
        return replace(self, start_op=None, stop_op=None, start_scope=None, stop_scope=None, steps=None)

    def progress(self) -> ProgramProgress:
        """The progress of a program that has not begun."""
        start, stop = (None if text is None else parse_scope(text) for text in (self.start_scope, self.stop_scope))
        return ProgramProgress(None if self.steps is None else parse_steps(self.steps), start, stop)

    @property
    def starts_late(self) -> bool:
        """Whether the program runs for a while before anything is recorded."""
        late_step = self.steps is not None and parse_steps(self.steps).start > 0
        return late_step or self.start_op is not None or self.start_scope is not None

    def policies(self) -> dict[str, Any]:
        """The options to record in the session: those that determine what the capture holds."""
        stated: dict[str, Any] = {
            name.replace("_", "-"): getattr(self, name)
            for name in ("payload", "file_policy", "file_validation", "redact", "digests", "audit", "compiled")
        }
        stated |= {name: " ".join(getattr(self, name)) for name in ("inside", "whole") if getattr(self, name)}
        if not self.sources:
            stated |= WITHOUT_SOURCES
        for name in (*_LIMITS, "steps"):
            if getattr(self, name) is not None:
                stated[name] = getattr(self, name)
        if self.collective_results != "full":
            stated["collective-results"] = self.collective_results
        if self.reads_unwritten:
            stated["reads-unwritten"] = " ".join(self.reads_unwritten)
        if self.opaque_results:
            stated[OPAQUE_RESULTS] = OpaqueResults(self.opaque_results).text
        return stated
