"""--baseline, --fail-above and --noise-floor: a benchmark against an earlier one, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import say

if TYPE_CHECKING:
    from replayfmt.benchmark.comparison.baseline import BaselineComparison, Document
    from replayfmt.benchmark.reports.rows import Report


def baseline_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags, as parameters baseline, fail_above and noise_floor."""
    for option in (
        click.option(
            "--noise-floor",
            is_flag=True,
            help="Measure everything twice, as if it were two versions, and print for each row how large a difference "
            "may be that means nothing. --benchmark-out keeps that for --baseline.",
        ),
        click.option(
            "--fail-above",
            metavar="PERCENT",
            help="With --baseline: exit with 1 if a row is slower than there by more than that, or cannot be judged, "
            "and name these rows. If there are any, everything is measured once more, and they have to fail again.",
        ),
        click.option(
            "--baseline",
            metavar="FILE",
            help="Compare each row with that of the same name in FILE, which --benchmark-out wrote: faster, slower, or "
            "no measurable difference.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class BaselineFlags:
    """The values of the flags. `document` is the baseline's content."""

    path: str | None
    document: Document | None
    fail_above: float | None
    noise_floor: bool

    @staticmethod
    def of(baseline: str | None, fail_above: str | None, noise_floor: bool) -> BaselineFlags:
        """Read the baseline. Raises UsageError if it is none, and for --fail-above without it."""
        from replayfmt.benchmark.comparison.baseline import read_baseline
        from replayfmt.benchmark.precision import parse_share

        if fail_above is not None and baseline is None:
            raise UsageError(f"--fail-above={fail_above} needs --baseline=FILE: there is nothing to compare with")
        above = None if fail_above is None else parse_share("--fail-above", fail_above)
        return BaselineFlags(baseline, None if baseline is None else read_baseline(baseline), above, noise_floor)

    def apply(self, measure: Callable[[], Report]) -> tuple[Report, list[str], bool]:
        """Measure, once or twice, and compare; a row has to fail both times. Returns the report, the lines to print
        below it, and whether it passes.

        Raises UsageError if the baseline has no row of this measurement.
        """
        from replayfmt.benchmark.comparison.baseline import compare_with_baseline, confirmed

        report = measure()
        again = measure() if self.noise_floor else None
        if self.path is None or self.document is None:
            return report, [] if again is None else self._floor(report, again), True
        comparison = alone = compare_with_baseline(self.path, self.document, report.document())
        above = self.fail_above
        failures = [] if above is None else comparison.failures(above)
        second: BaselineComparison | None = None
        lines: list[str] = []
        if failures and again is None:
            again = measure()
        if again is not None:
            floor = self._floor(report, again)
            lines += floor if self.noise_floor else []
            comparison = compare_with_baseline(self.path, self.document, report.document())
        lines += comparison.lines()
        passed: list[str] = []
        if failures and above is not None and again is not None:
            second = compare_with_baseline(self.path, self.document, again.document())
            found = confirmed(alone, comparison, second, above)
            failures, passed = found.failures, found.passed
            lines.append(f"measured again, since a row failed: {len(failures)} failed both times")
        report.sections["baseline"] = comparison.as_json()
        if above is not None:
            hidden = comparison.hidden(above, second)
            gate = {"fail_above": above, "failures": failures, "passed_again": passed, "hidden": hidden}
            report.sections["baseline"] |= gate
            lines += [f"WARNING: {each}" for each in hidden]
        lines += [f"passed the second time: {each}" for each in passed]
        return report, [*lines, *(f"FAILED: {failure}" for failure in failures)], not failures

    @staticmethod
    def _floor(report: Report, again: Report) -> list[str]:
        """Give the rows of a report their noise floors, from a second measurement; returns the lines that say so."""
        from replayfmt.benchmark.comparison.baseline import noise_floor

        found = noise_floor(report.document(), again.document())
        shares = found.shares()
        for row in report.rows:
            if row["name"] in shares:
                row["noise_floor"] = shares[row["name"]]
        report.sections["noise_floor"] = found.comparison.as_json()
        return list(found.lines())


def show_below(lines: list[str], form: str) -> None:
    """Print them: below the table on stdout, beside a document for programs on stderr."""
    for line in lines:
        say(line, err=form != "console")
