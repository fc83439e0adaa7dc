"""Which kernels, run another way, move the end result: delta debugging over kernels, then over their calls.

Each trial is a replay in which some ops run the other way (`OtherWay`) and all others as the capture says; a judge says
whether its end result is off from that of a replay without any. A set is minimal if no part of it that was tried is off
alone. Where the rest without it is still off, further sets are searched, so that in the end without all of them the
result is not off.

Replays that begin like an earlier one go on from a state of that (`Checkpoints`). The answer is confirmed by whole
replays; if these say otherwise, some operator keeps a state of its own, and the search is made again with whole ones.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replayfmt.errors import OpReplayError, ReplayFailed, ReplayMismatch, UsageError
from replayfmt.format.codes import DType, RecordKind
from replayfmt.format.validation import counted, parse_json, printable, some_of
from replayfmt.pytorch.collectives import plays_ranks
from replayfmt.pytorch.tensors.digests import digest_tensor
from replayfmt.pytorch.tensors.memory import DTYPE_CODE
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import CallSite, KernelStandIn
from replayfmt.replay.planning.records import describe
from replayfmt.replay.run.checkpoints import Checkpoints
from replayfmt.replay.run.run_twice import Outcome
from replayfmt.replay.substitution.loading import load_function

from .distances import Tolerance, digest_distance, distance, parse_tolerance
from .isolated import OtherWay, first_line
from .results import line

_MOST_SETS = 8
_STATE_VERSION = 1

# What a replay computed: lists of numbers that the program read, by the ordinal of their op; tuples of (dtype, digest),
# by that of the digest record or of the op whose results they are of.
Values = dict[int, Any]


@dataclass(frozen=True)
class FoundSet:
    """A minimal set: with these calls alone the result is off. `off_by` says how far."""

    kernels: dict[str, tuple[int, ...]]
    off_by: str

    @property
    def ordinals(self) -> tuple[int, ...]:
        return tuple(sorted(ordinal for calls in self.kernels.values() for ordinal in calls))


@dataclass
class Bisected:
    """What a bisection found. `outcome`: `found`, `not off` (with every op run the other way the result is the same),
    or `unexplained` (without all the sets found it is still off). `run` is the share of the replays' records that were
    run: the others are those of earlier replays that began alike. Prints as what `opreplay-compare --bisect` prints."""

    path: str
    way: str
    judge: str
    replays: int
    sets: list[FoundSet] = field(default_factory=list)
    outcome: str = "not off"
    failed: dict[int, str] = field(default_factory=dict)  # ops that fail the other way, which ran as captured
    run: float = 1.0

    @property
    def ok(self) -> bool:
        return self.outcome == "not off"

    @property
    def text(self) -> str:
        lines = [line("a", self.path), line("other way", self.way), line("judge", self.judge)]
        part = f", of which {self.run:.0%} was run: the rest is as in earlier ones" if self.run < 1 else ""
        lines.append(line("replays", f"{self.replays:,}{part}"))
        for ordinal, why in list(self.failed.items())[:4]:
            lines.append(line("as captured", f"ordinal {ordinal}: fails the other way: {why}"))
        for number, each in enumerate(self.sets, 1):
            what = f"{counted(len(each.ordinals), 'call')} of {counted(len(each.kernels), 'kernel')}"
            lines.append(line(f"set {number}", f"{what}; with these alone the result is off: {each.off_by}"))
            for kernel, calls in each.kernels.items():
                shown = some_of(calls, 8)
                lines.append(line("", f"{kernel}: ordinal{'s' if len(calls) > 1 else ''} {shown}"))
        said = {
            "not off": "with every op run the other way the result is within the tolerance",
            "found": f"without {'it' if len(self.sets) == 1 else 'all of these sets'}, everything else run the other "
            f"way, the result is within the tolerance",
            "unexplained": f"without these sets the result is still off; the search ended after {_MOST_SETS}",
        }
        return "\n".join([*lines, line(self.outcome, said[self.outcome])])

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        head = {
            "kind": "bisected",
            **{name: getattr(self, name) for name in ("path", "way", "judge", "outcome", "replays", "run")},
            "failed": {str(ordinal): why for ordinal, why in self.failed.items()},
        }
        sets = (
            {"kind": "bisected_set", "kernels": {k: list(v) for k, v in each.kernels.items()}, "off_by": each.off_by}
            for each in self.sets
        )
        return head, *sets

    def __str__(self) -> str:
        return self.text


def bisect(
    path: str | PathLike[str],
    *,
    judge: str = "host_read",
    against: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    tolerance: str = "exact",
    state: str | PathLike[str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Bisected:
    """Find the kernels and calls that move the end result, as `opreplay-compare --bisect` does. `state` is a file that
    keeps what was tried, from which an interrupted bisection goes on. `options` are those of a Plan.

    Raises UsageError, ReplayFailed for a judge that raises or does not say the same each time, and what a replay
    raises.
    """
    with Plan(path, **options) as plan:
        way = OtherWay(plan, against, settings)
        return bisect_plan(plan, way, judge, parse_tolerance(tolerance), state, on_progress)


def bisect_plan(
    plan: Plan,
    way: OtherWay,
    judge: str,
    tolerance: Tolerance,
    state: str | PathLike[str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Bisected:
    """The same for a plan that is ready."""
    if tolerance.auto:
        raise UsageError("--tolerance=auto: derives tolerances of ops; a bisection needs one of its end result")
    trials = _Trials(plan, way, _judge_of(plan, judge, tolerance), state, on_progress)
    made = Bisected(plan.reader.path, way.text, trials.judge.text, 0)
    kernels = trials.kernels
    calls = sum(map(len, kernels.values()))
    most_calls = max(map(len, kernels.values()), default=1)
    expected = 6 + 2 * math.ceil(math.log2(max(len(kernels), 1)) + math.log2(max(most_calls, 1)))
    on_progress(
        f"{counted(len(kernels), 'kernel')} with {counted(calls, 'call')}: about {expected} replays if one call is the "
        f"cause, more if several are"
    )
    trials.prepare()
    made.sets, made.outcome = _search(trials)
    if not trials.confirm(made.sets):
        made.sets, made.outcome = _search(trials)
    made.replays, made.failed, made.run = trials.replays, trials.failed, trials.run / trials.records
    return made


def _search(trials: _Trials) -> tuple[list[FoundSet], str]:
    """All minimal sets, and the outcome."""
    kernels, sets = trials.kernels, list[FoundSet]()
    left = {ordinal for ordinals in kernels.values() for ordinal in ordinals}
    while trials.off(left):
        if len(sets) == _MOST_SETS:
            return sets, "unexplained"
        found = _minimal(sorted(kernels), partial(trials.off_by_kernels, left))
        chosen = set(_minimal(sorted(left & trials.of(found)), trials.off))
        by_kernel = {name: tuple(sorted(chosen & set(kernels[name]))) for name in found if chosen & set(kernels[name])}
        sets.append(FoundSet(by_kernel, trials.why(chosen)))
        left -= chosen
    return sets, "found" if sets else "not off"


def _minimal(items: list[Any], off: Callable[[set[Any]], bool]) -> list[Any]:
    """A part of `items`, of which all together are off, that is off and cannot be cut further (Zeller's ddmin)."""
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        rests = [[each for each in items if each not in set(chunk)] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((each for each in [*chunks, *rests] if off(set(each))), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(len(chunks) - 1, 2)
            items = smaller
        elif parts >= len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items


@dataclass(frozen=True)
class _Judge:
    """`stop`: what comes from that ordinal on does not matter. `off` is given what two replays computed, and says how
    they differ, "" if that is within the tolerance."""

    text: str
    stop: int
    off: Callable[[Values, Values], str]
    watched: int = -1  # the op whose results are judged


def _judge_of(plan: Plan, text: str, tolerance: Tolerance) -> _Judge:
    kind, _, number = text.lower().partition(":")
    if kind in ("digest", "host_read") and (number.isdecimal() or not number):
        ordinal = _observed_at(plan, kind, int(number) if number else None, text)
        what = describe(plan.reader, ordinal)[0]
        name = f"{kind} at ordinal {ordinal} ({what}), tolerance {tolerance.text}"
        watched = ordinal if kind == "digest" and plan.reader.record(ordinal).kind is RecordKind.op else -1
        return _Judge(name, ordinal + 1, lambda one, other: _far(tolerance, ordinal, one, other), watched)
    if ".py" not in text:
        raise UsageError(f"--judge={text}: expected digest, host_read, either with :ORDINAL, or SCRIPT.py:FUNCTION")
    function = load_function(text)

    def off(one: Values, other: Values) -> str:
        try:
            said = function(dict(one), dict(other))
        except Exception as error:
            raise ReplayFailed(
                f"--judge={text}: raised {type(error).__name__}: {printable(str(error), 300)}; it is given what two "
                "replays computed, by ordinal, and returns whether the second is off"
            ) from error
        return (said if isinstance(said, str) else f"{text} says so") if said else ""

    return _Judge(text, plan.reader.record_count, off)


def _observed_at(plan: Plan, kind: str, ordinal: int | None, text: str) -> int:
    """The ordinal of what is judged: by default of the last there is."""
    reader = plan.reader
    wanted = RecordKind.digest if kind == "digest" else RecordKind.host_read
    last = None
    for record in reader.records():
        scalar = (
            kind == "host_read"
            and record.kind is RecordKind.op
            and any(isinstance(value, bool | int | float | complex) for value in record.results)
        )
        result = kind == "digest" and record.kind is RecordKind.op and record.ordinal == ordinal
        if record.kind is wanted or scalar or result:
            last = record.ordinal
            if last == ordinal:
                return last
    if ordinal is None and last is not None:
        return last
    raise UsageError(
        f"--judge={text}: {reader.path} has no {kind.replace('_', ' ')}{'' if ordinal is None else ' there'}; "
        f"{'capture with --digests=live or ops' if kind == 'digest' else 'the program must read a value'}"
    )


def _far(tolerance: Tolerance, ordinal: int, one: Values, other: Values) -> str:
    a, b = one.get(ordinal), other.get(ordinal)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for (dtype, mine), (_dtype, its) in zip(a, b, strict=True):
            far = digest_distance(mine, its, dtype, tolerance.of("", dtype))
            if far.beyond:
                return str(far)
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        numbers = [
            np.array(each, np.complex128 if any(isinstance(x, complex) for x in each) else np.float64)
            for each in (a, b)
        ]
        found = distance(numbers[0], numbers[1], DType.float64, tolerance.of("", DType.float64))
        return f"{a[0]!r} against {b[0]!r}" if found.beyond else ""
    return "" if a == b else f"{a!r} against {b!r}"


class _Trials:
    """Replays with sets of ops that run the other way, each judged once and kept."""

    def __init__(
        self, plan: Plan, way: OtherWay, judge: _Judge, state: Any, on_progress: Callable[[str], None]
    ) -> None:
        self.plan, self.way, self.judge, self._say = plan, way, judge, on_progress
        self.failed: dict[int, str] = {}
        self.replays, self.records, self.run = 0, 0, 0  # replays, the records in them, and those that were run
        self._mixed = _Mixed(self)
        self._checkpoints = Checkpoints(self._mixed, plan.generators)
        self._noting = plan.noting(self._mixed)
        self._resumed = False
        self._reference = self._run(())
        self.kernels: dict[str, list[int]] = {}
        for ordinal in sorted(self._mixed.possible):
            self.kernels.setdefault(describe(plan.reader, ordinal)[0], []).append(ordinal)
        self._file = None if state is None else Path(state)
        about = [_STATE_VERSION, plan.reader.session.session_id, way.text, judge.text, torch.__version__]
        self._about = sha256(json.dumps(about).encode()).hexdigest()
        self._known: dict[str, str] = self._kept()

    def prepare(self) -> None:
        """Check that the judge says the same of two replays without any op run the other way. Raises ReplayFailed."""
        again = self._run(())
        for one, other in ((self._reference, self._reference), (self._reference, again)):
            why = self.judge.off(one, other)
            if why:
                raise ReplayFailed(
                    f"{self.plan.reader.path}: nothing can be bisected: of two replays that ran alike the judge "
                    f"({self.judge.text}) says that one is off: {why}; opreplay-run --repeat names an op that differs "
                    "from itself, if it is not the judge"
                )
        self._checkpoints.resumes = not plays_ranks()

    def confirm(self, sets: Sequence[FoundSet]) -> bool:
        """Whether whole replays show that each set alone is off, and everything else is not; if they do not, only whole
        ones are made from now on, and nothing is known."""
        if not self._resumed:
            return True
        self._checkpoints.resumes = False
        self._say("confirming what was found, by whole replays")
        alone = [frozenset(each.ordinals) for each in sets]
        rest = frozenset(ordinal for ordinals in self.kernels.values() for ordinal in ordinals).difference(*alone)
        tried = [each for each in (*alone, rest) if each]
        if all(bool(self._try(each)) == bool(self.why(each)) for each in tried):
            return True
        self._say("they say otherwise: some operator keeps a state of its own; searching again, by whole replays")
        self._known = {}
        return False

    def of(self, names: Collection[str]) -> set[int]:
        return {ordinal for name in names for ordinal in self.kernels[name]}

    def off_by_kernels(self, among: set[int], names: Collection[str]) -> bool:
        return self.off(among & self.of(names))

    def off(self, ordinals: Collection[int]) -> bool:
        """Whether the result is off when these ops run the other way."""
        return bool(self.why(ordinals))

    def why(self, ordinals: Collection[int]) -> str:
        """How the result is off when these ops run the other way, "" if it is not. Raises ReplayFailed if the judge
        does not say the same of the same values."""
        if not ordinals:
            return ""
        key = sha256(np.array(sorted(ordinals), np.int64).tobytes()).hexdigest()[:32]
        if key not in self._known:
            self._known[key] = self._try(ordinals)
            self._keep()
        return self._known[key]

    def _try(self, ordinals: Collection[int]) -> str:
        try:
            values = self._run(ordinals)
        except ReplayMismatch as error:
            why = str(error)
        else:
            why = self.judge.off(self._reference, values)
            if bool(self.judge.off(self._reference, values)) != bool(why):
                raise ReplayFailed(f"the judge ({self.judge.text}) does not say the same of the same values")
        self._say(f"{counted(len(ordinals), 'call')} the other way: {'off' if why else 'not off'}")
        return why

    def _run(self, chosen: Collection[int]) -> Values:
        """What a replay computes in which these ops run the other way."""
        mixed, checkpoints = self._mixed, self._checkpoints
        mixed.begin(chosen)
        self.replays += 1
        try:
            self.plan.watch(mixed, self.judge.stop, "none", stand_in=mixed, judge=self._noting, checkpoints=checkpoints)
        finally:
            self.records += self.judge.stop
            self.run += self.judge.stop - checkpoints.began
            self._resumed |= checkpoints.began > 0
        return mixed.values

    def _kept(self) -> dict[str, str]:
        """What an earlier bisection tried. Raises UsageError for a file that is not one of this bisection."""
        if self._file is None or not self._file.exists():
            return {}
        try:
            kept = parse_json(self._file.read_text(encoding="utf-8"))
            if kept["about"] == self._about and all(isinstance(each, str) for each in kept["off"].values()):
                self._resumed = bool(kept["off"])  # perhaps: nobody knows how these were replayed
                return dict(kept["off"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise UsageError(
            f"--state={self._file}: is not of this bisection (the same capture, other way, judge and PyTorch); remove "
            "it, or name another file"
        )

    def _keep(self) -> None:
        if self._file is None:
            return
        partial = self._file.with_name(f"{self._file.name}.partial")
        try:
            partial.write_text(json.dumps({"about": self._about, "off": self._known}), encoding="utf-8")
            os.replace(partial, self._file)
        except OSError as error:
            raise UsageError(f"--state={self._file}: cannot be written: {error.strerror}") from None


class _Mixed(KernelStandIn):
    """A stand-in that runs chosen ops the other way; and what the replay computed. `possible` are all that could."""

    reason = "some ops run another way"

    def __init__(self, trials: _Trials) -> None:
        self._trials = trials
        self._chosen: frozenset[int] = frozenset()
        self._sorted = np.zeros(0, np.int64)
        self._prefixes: dict[int, bytes] = {}
        self.possible: set[int] = set()
        self.values: Values = {}

    def begin(self, chosen: Collection[int]) -> None:
        """The next replay follows."""
        self._chosen, self._sorted = frozenset(chosen), np.array(sorted(chosen), np.int64)
        self._prefixes, self.values = {}, {}

    def prefix(self, ordinal: int) -> bytes:
        if ordinal not in self._prefixes:
            chosen = self._sorted[: np.searchsorted(self._sorted, ordinal)]
            self._prefixes[ordinal] = sha256(chosen.tobytes()).digest() if len(chosen) else b""
        return self._prefixes[ordinal]

    def noted(self) -> Values:
        return _copied(self.values)

    def note(self, noted: Values) -> None:
        self.values = _copied(noted)

    def call(self, site: CallSite) -> tuple[None, Callable[..., Any]] | None:
        if self._trials.way.why_not(site) is not None:
            return None
        self.possible.add(site.ordinal)
        return None, partial(self._either_way, site)

    def _either_way(self, site: CallSite, /, *args: Any, **kwargs: Any) -> Any:
        if site.ordinal in self._chosen:
            return self._other_way(site, *args, **kwargs)
        return site.original(*args, **kwargs)

    def _other_way(self, site: CallSite, /, *args: Any, **kwargs: Any) -> Any:
        """The op runs as captured, for its results' memory, which then gets what the other way computes."""
        way = self._trials.way
        states = way.states(site)
        copies = way.copies(site, args, kwargs)
        returned = site.original(*args, **kwargs)
        try:
            got = way.run(site, copies, states)
        except OpReplayError:
            raise
        except Exception as error:  # whatever an operator of another device raises
            self._trials.failed[site.ordinal] = f"{type(error).__name__}: {first_line(error)}"
            return returned
        for key, tensor in Outcome.of(site, returned, args, kwargs).values.items():
            other = got.values.get(key)
            if other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype):
                tensor.copy_(other)
        return returned

    def scalar(self, ordinal: int, value: Any) -> None:
        self.values.setdefault(ordinal, []).append(value)

    def digest(self, found_at: int, tensor: torch.Tensor, host_read: bool) -> None:
        self.values[found_at] = ((DTYPE_CODE[tensor.dtype], digest_tensor(tensor)),)

    def watches(self, ordinal: int) -> bool:
        return ordinal == self._trials.judge.watched

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        pass

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        found = [results[slot] for slot in sorted(results)]
        self.values[ordinal] = tuple((DTYPE_CODE[tensor.dtype], digest_tensor(tensor)) for tensor in found)


def _copied(values: Values) -> Values:
    return {ordinal: list(value) if isinstance(value, list) else value for ordinal, value in values.items()}
