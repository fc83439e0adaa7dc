"""A comparison of original and substituted kernels as a table, as Google Benchmark's JSON, and as CSV.

The JSON has two rows of type `iteration` for everything compared, `BM_original/...` and `BM_substituted/...`, so that
any tool that reads Google Benchmark's schema reads it, and `comparisons` with the ratios, intervals and verdicts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.format.printable import printable
from replayfmt.replay.plan import Plan

from ..gpu_state import gpu_lines
from ..measure import Measurement, Run, Sample
from ..reports.caveats import run_caveats
from ..reports.rows import csv_field, plan_context
from ..reports.units import duration, ran_on, verified
from ..statistics import CONFIDENCE
from .compare import Compared, CompareRun

_SIDES = ("original", "substituted")
# An interval whose ends are this far apart can hide differences that matter.
_WIDE = 1.2
_DECIDED = ("faster", "slower")
_CSV_FIELDS = (
    "name",
    "replacement",
    "calls",
    "rounds",
    "original_ns",
    "substituted_ns",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "reason",
)


@dataclass(frozen=True)
class CompareReport:
    """A comparison ready to be written. `comparisons` has a dict for each row, times in nanoseconds per replay."""

    context: dict[str, Any]
    comparisons: list[dict[str, Any]]
    compared: list[Compared]

    def json(self) -> str:
        """Google Benchmark's JSON document, with `comparisons` beside its rows."""
        rows = [
            row
            for index, comparison in enumerate(self.comparisons)
            for row in _benchmark_rows(comparison, index, self.compared[index])
        ]
        document = {"context": self.context, "benchmarks": rows, "comparisons": self.comparisons}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def csv(self) -> str:
        """A line for each row compared. Unknown values are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_CSV_FIELDS)
        for comparison in self.comparisons:
            writer.writerow([csv_field(comparison[name]) for name in _CSV_FIELDS])
        return text.getvalue()

    def lines(self) -> Iterator[str]:
        """The report as text for people."""
        context = self.context
        yield f"capture   {context['capture']} (session {context['capture_session']})"
        yield ran_on(context)
        yield verified(context["verified"])
        yield from (f"gpu       {text}" for text in gpu_lines(context["gpus"]))
        yield from (f"checked   {line.strip()}" for line in context["substitution_check"])
        yield ""
        yield from _table(self.comparisons)
        yield ""
        yield from (
            f"{each['name']}: not known: {each['reason']}"
            for each in self.comparisons
            if each["verdict"] == "not known"
        )
        yield (
            f"medians over {context['rounds']} rounds, each with one replay of either side; a ratio below 1 is "
            f"faster; the interval contains the median ratio with {CONFIDENCE:.0%} confidence"
        )


def make_compare_report(run: CompareRun, plan: Plan) -> CompareReport:
    """The report of a comparison of `plan`'s substitutions."""
    assert plan.substitution is not None and plan.substitution.report is not None
    whole = run.rows[0].comparison
    sample = Sample(whole.substituted, whole.substituted, None)
    as_run = Run(run.options, [], Measurement(run.whole, [sample]), run.before, run.after, run.cut_short, gpus=run.gpus)
    verified = "not verified: --verify=none" if run.before is None else run.before.verification.text
    context = {
        **plan_context(plan),
        "min_time": str(run.options.min_time),
        "warmup_iterations": run.options.warmup,
        "rounds": run.rounds,
        "confidence": CONFIDENCE,
        "gpus": run.gpus,
        "verified": verified,
        "warnings": [*run_caveats(as_run, plan.reader, plan.devices), *_too_wide(run.rows)],
    }
    return CompareReport(context, [_comparison(row) for row in run.rows], run.rows)


def _too_wide(rows: list[Compared]) -> list[str]:
    """Warnings about rounds that vary so much that only large differences could be detected."""
    found = []
    for row in rows:
        interval = row.comparison.interval
        if interval is not None and interval.high / interval.low > _WIDE and row.comparison.verdict not in _DECIDED:
            found.append(
                f"{row.name}: the ratio is only known to be between {_ratio(interval.low)} and "
                f"{_ratio(interval.high)}: smaller differences cannot be seen; measure more rounds, or stop "
                f"other programs"
            )
    return found


def _comparison(row: Compared) -> dict[str, Any]:
    found = row.comparison
    return {
        "name": row.name,
        "replacement": row.replacement or None,
        "calls": row.calls,
        "rounds": found.rounds,
        "original_ns": float(np.median(found.original)),
        "substituted_ns": float(np.median(found.substituted)),
        "ratio": found.ratio,
        "ratio_low": None if found.interval is None else found.interval.low,
        "ratio_high": None if found.interval is None else found.interval.high,
        "confidence": None if found.interval is None else found.interval.confidence,
        "verdict": found.verdict,
        "reason": found.reason or None,
    }


def _benchmark_rows(comparison: dict[str, Any], index: int, row: Compared) -> Iterator[dict[str, Any]]:
    sides = (row.comparison.original, row.comparison.substituted)
    for side, times, cpu in zip(_SIDES, sides, row.cpu, strict=True):
        name = f"BM_{side}/{comparison['name']}"
        yield {
            "name": name,
            "family_index": index,
            "per_family_instance_index": _SIDES.index(side),
            "run_name": name,
            "run_type": "iteration",
            "repetitions": 1,
            "repetition_index": 0,
            "threads": 1,
            "iterations": comparison["rounds"],
            "real_time": float(times.mean()),
            "cpu_time": float(cpu.mean()),
            "time_unit": "ns",
            "median_real_time": float(np.median(times)),
            "samples": {"real_time": times.tolist(), "cpu_time": cpu.tolist()},
        }


def _table(comparisons: list[dict[str, Any]]) -> Iterator[str]:
    heads = ("original", "substituted", "median ratio", "95% interval", "")
    cells = [
        [
            duration(each["original_ns"]),
            duration(each["substituted_ns"]),
            _ratio(each["ratio"]),
            "-" if each["ratio_low"] is None else f"{_ratio(each['ratio_low'])} to {_ratio(each['ratio_high'])}",
            each["verdict"],
        ]
        for each in comparisons
    ]
    widths = [max(len(row[column]) for row in (heads, *cells)) for column in range(4)]
    for name, row in zip(("", *(_named(each) for each in comparisons)), (list(heads), *cells), strict=True):
        if name:
            yield name
        aligned = [f"{cell:>{width}}" for cell, width in zip(row[:4], widths, strict=True)]
        yield "  ".join(["  " + aligned[0], *aligned[1:], row[4]]).rstrip()


def _named(comparison: dict[str, Any]) -> str:
    name = printable(comparison["name"])
    if comparison["calls"] is None:
        return name
    calls = comparison["calls"]
    return f"{name} by {printable(comparison['replacement'])}, {calls} call{'s' if calls != 1 else ''}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
