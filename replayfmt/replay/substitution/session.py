"""The substitutions of one plan: resolved against its capture, checked in a separate pass, reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from replayfmt.errors import ReplayMismatch, SubstitutionRejected
from replayfmt.format.printable import counted
from replayfmt.format.reader import CaptureReader

from ..planning.devices import DeviceMap
from ..planning.kernels import ResolvedKernel
from ..planning.scan import Scan
from ..results import ReplayResult
from .call_sites import KernelStandIn
from .checked import Check, SignatureCheck, distances
from .distance import Tolerance
from .replace import Replace
from .table import LoadedRequests, Substitutions


@dataclass(frozen=True)
class SubstitutionReport:
    """The findings of the checked pass, one entry for each signature and replacement, in order of first call."""

    checks: tuple[SignatureCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, in full sentences."""
        return tuple(sentence for check in self.checks for sentence in check.sentences())

    def with_(self, later: SubstitutionReport) -> SubstitutionReport:
        """This report combined with the larger distances that a later pass over the same calls found."""
        found = {(each.signature, each.replacement): each.distance for each in later.checks}
        return SubstitutionReport(
            tuple(
                replace(each, distance=each.distance.or_(found[each.signature, each.replacement]))
                for each in self.checks
            )
        )

    def as_text(self) -> list[str]:
        """A line for each signature, for people."""
        calls = sum(check.calls for check in self.checks)
        lines = [
            f"substituted: {counted(calls, 'call')} of {counted(len(self.checks), 'signature')}, "
            + ("each checked against the original kernel" if self.ok else "NOT equivalent to the original kernels")
        ]
        for check in self.checks:
            state = "" if check.ok else "wrong: "
            lines.append(
                f"  {check.signature} by {check.replacement}: {state}{counted(check.calls, 'call')}, "
                f"values {distances(check.distance)}"
            )
            lines += [f"    {fault}" for fault in check.faults]
        return lines

    def as_rows(self) -> list[dict[str, Any]]:
        """A row for each signature, for programs."""
        return [
            {
                "kind": "substitution",
                "signature": check.signature,
                "kernel": check.kernel,
                "replacement": check.replacement,
                "ok": check.ok,
                "calls": check.calls,
                "first": check.first,
                "elements": check.distance.elements,
                "different": check.distance.different,
                "not_finite": check.distance.not_finite,
                "beyond": check.distance.beyond,
                "first_beyond": check.beyond,
                "worst": _worst_row(check),
                "largest_absolute": check.distance.largest_absolute,
                "largest_relative": check.distance.largest_relative,
                # A string: for 64-bit floats it may take more bits than a JSON number holds exactly.
                "largest_ulp": None if check.distance.largest_ulp is None else str(check.distance.largest_ulp),
                "tolerances": list(check.tolerances),
                "faults": list(check.faults),
                "fault_count": check.fault_count,
            }
            for check in self.checks
        ]


def _worst_row(check: SignatureCheck) -> dict[str, Any] | None:
    """The element farthest off; its values are texts, because JSON cannot express every number."""
    if check.worst is None:
        return None
    ordinal, where, _close = check.worst_place
    return {
        "ordinal": ordinal,
        "where": where,
        "index": None if check.worst.index is None else list(check.worst.index),
        "expected": str(check.worst.expected),
        "got": str(check.worst.got),
    }


class Planned(Protocol):
    """What a session needs from its plan."""

    reader: CaptureReader
    device_map: DeviceMap

    @property
    def kernels(self) -> Sequence[ResolvedKernel | str | None]: ...

    @property
    def calls_inside_graphs(self) -> Mapping[str, Sequence[str]]: ...

    @property
    def generators(self) -> Sequence[torch.Generator | None]: ...

    def scan(self, *, checks: bool) -> Scan: ...

    def describe(self, ordinal: int) -> tuple[str, str]: ...

    def run_with(
        self, stand_in: KernelStandIn | None, on_progress: Callable[[int], None] | None = None
    ) -> ReplayResult: ...


class SubstitutionSession:
    """A plan's substitutions. `replace` replaces kernels in every run; `report` is None before the checked pass."""

    def __init__(self, plan: Planned, loaded: LoadedRequests, tolerance: Tolerance) -> None:
        """Raises UsageError if what was requested does not fit the capture."""
        kernels = {number: kernel for number, kernel in enumerate(plan.kernels) if isinstance(kernel, ResolvedKernel)}
        self.table = Substitutions(
            plan.reader,
            loaded,
            kernels,
            plan.scan(checks=False).signature_calls.tolist(),
            plan.device_map.target,
            plan.calls_inside_graphs,
        )
        self.replace = Replace(plan.reader, self.table, plan.describe)
        self.report: SubstitutionReport | None = None
        self._plan, self._tolerance = plan, tolerance

    @property
    def notes(self) -> tuple[str, ...]:
        """What was asked for and is not done: kernels inside of graphs are those that were captured."""
        return self.table.left_inside_graphs()

    def check(self, on_progress: Callable[[int], None] | None = None, *, again: bool = False) -> SubstitutionReport:
        """Run both kernels of every substituted call: once in the life of a plan, and once more with `again`.

        Raises SubstitutionRejected if a replacement is wrong, ReplayFailed if one raises, ReplayMismatch if
        the original kernels do not even give the captured scalars.
        """
        if self.report is None:
            self.report = self._run(on_progress)
        elif again and self.report.ok:
            found = self._run(on_progress)
            self.report = self.report.with_(found) if found.ok else found
        else:
            again = False
        if not self.report.ok:
            wrong = sum(not check.ok for check in self.report.checks)
            raise SubstitutionRejected(
                f"{self._plan.reader.path}: the replacements of {counted(wrong, 'signature')} "
                + (
                    "no longer do what the original kernels do, though they did at first"
                    if again
                    else "do not do what the original kernels do; nothing was timed"
                ),
                self.report,
            )
        return self.report

    def _run(self, on_progress: Callable[[int], None] | None) -> SubstitutionReport:
        plan = self._plan
        check = Check(plan.reader, self.table, plan.generators, plan.describe, self._tolerance)
        result = plan.run_with(check, on_progress)
        report = SubstitutionReport(tuple(sorted(check.checks.values(), key=lambda each: each.first)))
        if result.divergence is not None and report.ok:
            raise ReplayMismatch(
                f"{plan.reader.path}: no replacement could be judged, because the original kernels "
                f"differ from the capture themselves: {result.divergence}"
            )
        return report
