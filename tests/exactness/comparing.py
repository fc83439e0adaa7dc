"""The cases of one entry in one mode, run without a capture and under one, and all that differs.

Each case runs twice without a capture first: one that is not equal to itself is left out. Then the others run under
captures, twice each, because what a recorder sees again it may record in another way. What differs is tried under a
dispatch mode that does nothing: a difference that it makes, too, is the mode's, any other one is the recorder's. Each
case has a scope of its own in the capture, which has to hold an op or an unsupported record for what ran in it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt
from replayfmt.errors import NothingCaptured, OpReplayError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording.options import CaptureOptions

from .entries import Entry
from .modes import Case, run, settled
from .outcomes import Facts, differences

_CAPTURE_CASES = 16  # in one file
_ROUNDS = 2
_TRIES = 24  # of a case that differed: some kernels give other last bits from call to call, most calls the same ones
RECORDERS = ("python", "native", "auto")


@dataclass
class Report:
    """What a comparison found. `differences`: what of the cases' results differed, by whom (`mode` or `recorder`) and
    how often, with the first case's facts. `unseen`: cases of which the capture holds nothing. `failed`: captures that
    failed, replays that differ."""

    entry: str
    mode: str
    recorder: str
    cases: int = 0
    compared: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        return dict(vars(self))


class Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Counts the operators that come to a dispatch mode, of composites their parts: some come whole and run none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # not `decompose`, which prefers decompositions written in Python that may run something else
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Comparison:
    """One entry in one mode. `samples`: at most so many cases, spread over all; 0: all."""

    def __init__(
        self, entry: Entry, mode: str, folder: Path, *, recorder: str = "python", samples: int = 0, replays: int = 1
    ) -> None:
        """`folder` is for captures. `replays`: how many of the captures are replayed; -1: all."""
        self._entry = entry
        self._mode = mode
        self._path = folder / "exactness.opreplay"
        # Where there is no choice yet, it is the one in Python.
        choice = any(option.name == "recorder" for option in fields(CaptureOptions))
        self._options = {"recorder": recorder} if choice or recorder != "python" else {}
        self._samples = samples
        self._replays = replays
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._under_nothing: dict[int, set[tuple[str, str, str]]] = {}  # of cases that differ, what a mode changes
        self._wavering: set[int] = set()  # cases that turned out not to be equal to themselves
        self.report = Report(entry.name, mode, recorder)

    def run(self) -> Report:
        """Compare. Exceptions of the samples' making pass: they are no case's."""
        report, began = self.report, time.perf_counter()
        reason = self._entry.why_not(self._mode)
        if reason is not None:
            report.left_out[reason] += 1
            return report
        with settled():
            expected = self._facts_without(self._cases())
            again = self._facts_without(self._cases())
            report.cases = len(expected)
            whole = [index for index in expected if not differences(expected[index], again[index])]
            if len(whole) < len(expected):
                report.left_out["not equal to itself"] += len(expected) - len(whole)
            rounds = [self._cases() for _ in range(_ROUNDS)]
            for first in range(0, len(whole), _CAPTURE_CASES):
                chosen = whole[first : first + _CAPTURE_CASES]
                self._capture(chosen, rounds, expected)
        report.compared = len(whole) - len(self._wavering)
        if self._wavering:
            report.left_out["equal to itself only sometimes"] += len(self._wavering)
        report.differences = list(self._found.values())
        report.seconds = round(time.perf_counter() - began, 2)
        return report

    def _cases(self) -> dict[int, Case]:
        """The chosen cases, made anew."""
        made = list(self._entry.cases(self._mode))
        step = max(1, -(-len(made) // self._samples)) if self._samples else 1
        return dict(list(enumerate(made))[::step])

    def _facts_without(self, cases: dict[int, Case]) -> dict[int, Facts]:
        return {index: run(case, self._mode).facts() for index, case in cases.items()}

    # --------------------------------------------------------------------------------------------------------- captured

    def _capture(self, chosen: list[int], rounds: list[dict[int, Case]], expected: dict[int, Facts]) -> None:
        report = self.report
        ran = []
        try:
            with replayfmt.capture(self._path, force=True, **self._options):
                for turn, cases in enumerate(rounds):
                    for index in chosen:
                        with replayfmt.scope(f"{index}.{turn}"):
                            ran.append((index, turn, run(cases[index], self._mode)))
            recorded = self._recorded()
        except NothingCaptured:
            recorded = Counter()
        except OpReplayError as error:
            report.failed.append(f"capture of {expected[chosen[0]] and rounds[0][chosen[0]].label} and others: {error}")
            return
        for index, turn, left in ran:
            self._compare(left.case.label, index, expected[index], left.facts())
            if not recorded[f"{index}.{turn}"]:
                self._ask_what_ran(index, left.case.label)
        if recorded and self._replays:
            self._replays -= 1
            self._replay(rounds[0][chosen[0]].label, {index: expected[index] for index in chosen})

    def _recorded(self) -> Counter[str]:
        """How many ops and unsupported records the capture holds, by the scope they are in."""
        found: Counter[str] = Counter()
        with open_capture(self._path) as reader:
            used = (reader.session.policies or {}).get("recorder", "python")
            if self.report.recorder not in ("auto", used):
                self.report.failed.append(f"recorder: {used} recorded instead of {self.report.recorder}")
            for record in reader.records():
                if record.kind in (RecordKind.op, RecordKind.unsupported):
                    found[reader.scope_path(record.scope).partition("/")[0]] += 1
                if record.kind is RecordKind.unsupported:
                    self.report.unsupported[str(record.argument("reason"))] += 1
        return found

    def _ask_what_ran(self, index: int, label: str) -> None:
        """The capture holds nothing of a case: something must have run."""
        case = self._cases()[index]
        with Counting() as counting:
            run(case, self._mode)
        if counting.seen:
            self.report.unseen.append(f"{label}: {', '.join(sorted(counting.seen))}")

    def _replay(self, label: str, expected: dict[int, Facts]) -> None:
        replays = self.report.replays
        try:
            with replayfmt.Plan(self._path) as plan:
                result = plan.execute(verify="bitwise")
        except OpReplayError as error:
            reason = str(error).replace(f"{self._path}: ", "").splitlines()[0]
            replays[f"refused: {reason[:100]}"] += 1
            return
        if result.outcome == "ok":
            replays["verified"] += 1
        elif any(self._wavers(index, facts, _TRIES) for index, facts in expected.items()):
            replays["not judged: a case is equal to itself only sometimes"] += 1
        else:
            replays["differs"] += 1
            self.report.failed.append(f"replay of the capture that begins with {label}: {result.divergence}")

    # -------------------------------------------------------------------------------------------------------- judgement

    def _compare(self, label: str, index: int, expected: Facts, under: Facts) -> None:
        differing = differences(expected, under)
        if not differing:
            return
        if index not in self._under_nothing:
            under_nothing = differences(expected, self._alone(index, Nothing))
            self._under_nothing[index] = {(each.place, each.kind, each.under) for each in under_nothing}
        under_nothing = self._under_nothing[index]
        by_mode = all((each.place, each.kind, each.under) in under_nothing for each in differing)
        if index not in self._wavering and self._wavers(index, expected, 1 if by_mode else _TRIES):
            self._wavering.add(index)
        if index in self._wavering:
            return
        for each in differing:
            cause = "mode" if (each.place, each.kind, each.under) in under_nothing else "recorder"
            place = each.place.partition("[")[0].partition(":")[0]
            place += ".grad" if each.place.endswith(".grad") else ""
            first = {"case": label, **asdict(each)}
            found = self._found.setdefault(
                (place, each.kind, cause),
                {"place": place, "kind": each.kind, "cause": cause, "count": 0, "first": first},
            )
            found["count"] += 1

    def _wavers(self, index: int, expected: Facts, tries: int) -> bool:
        """Whether a case differs from itself in one of some further runs, with its memory elsewhere each time."""
        elsewhere = []
        for size in range(tries):
            elsewhere.append(torch.empty(37 * size))
            if differences(expected, self._alone(index)):
                return True
        return False

    def _alone(self, index: int, around: Callable[[], Any] = nullcontext) -> Facts:
        case = self._cases()[index]
        with around():
            ran = run(case, self._mode)
        return ran.facts()


def is_whole(report: Report) -> bool:
    """Whether nothing was found that is the recorder's."""
    mine = [each for each in report.differences if each["cause"] == "recorder"]
    return not (mine or report.unseen or report.failed)


def cpu_capability() -> str:
    return torch.backends.cpu.get_cpu_capability()
