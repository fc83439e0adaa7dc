"""A finished benchmark as rows: Google Benchmark's JSON and CSV, the table on the console, and caveats.

The JSON has Google Benchmark's schema, version 1, and can be read by its `compare.py` and everything else that reads
it: one row of type `iteration` for each repetition, then the aggregates over them if there are two or more. Its
`real_time` and `cpu_time` are means over the iterations; the unit is always ns. Our own data are additional fields of a
row ("counters") and of the context. An unknown value is null, and a field of the same name with `_reason` says why.

A caveat is a reason to doubt the figures, one sentence, printed beside them as torch.utils.benchmark does. Those of a
measurement come from its own times, those of a run from the machine and from what the capture says about its origin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import aligned, counted, csv_text, printable
from replayfmt.pytorch import accelerators
from replayfmt.pytorch.accelerators import HOST, NOTHING, is_accelerator
from replayfmt.pytorch.collectives import LEFT_OUT, are_left_out
from replayfmt.pytorch.environment import cpu_capability, describe_device, replay_threads
from replayfmt.replay.plan import Plan
from replayfmt.version import own_version

from .machine import BUSY, frequency_scaling, gpu_caveats, gpu_lines, machine_context, others_had
from .measure import PATIENCE, Measurement, Run, Sample
from .statistics import (
    SMALLEST_FOR_INTERVAL,
    MinTime,
    Precision,
    TimeStatistics,
    duration,
    ran_on,
    rate,
    summarize,
    verified,
    why_unmeasurable,
)

# Standard deviation over mean. torch.utils.benchmark warns at the same shares, of the interquartile range.
NOISY = 0.10
VERY_NOISY = 0.25


def measurement_caveats(measurement: Measurement, precision: Precision | None = None) -> list[str]:
    """Reasons in one region's own times to doubt them, among them that they miss the `precision` asked for."""
    found = []
    if measurement.in_graph is not None and measurement.in_graph.reason:
        found.append(f"measured op by op, because it could not be put into a graph: {measurement.in_graph.reason}")
    half_width = measurement.reported[0].statistics().half_width
    if precision is not None and half_width is not None and half_width > precision.share:
        found.append(
            f"the median is known to +-{half_width:.2g} of itself, not to the {precision.share:.2g} asked for, after "
            f"{precision.cap_s:g} s: raise --benchmark-max-time, or stop other programs"
        )
    for index, sample in enumerate(measurement.reported):
        interval = sample.statistics().interval
        if interval is not None and interval.independent < len(sample.real):
            found.append(
                f"repetition {index + 1}: successive times depend on each other (heat, other programs, modes that "
                f"last): {len(sample.real):,} of them tell as much as {interval.independent:.0f} independent ones "
                "would; the interval allows for it"
            )
    iterations = len(measurement.reported[0].real)
    if iterations < SMALLEST_FOR_INTERVAL:
        found.append(
            f"only {iterations} iteration{'s' if iterations > 1 else ''}: too few to tell how far the median "
            f"can be trusted; give --benchmark-min-time={SMALLEST_FOR_INTERVAL}x or more"
        )
    for index, sample in enumerate(measurement.reported):
        variation = sample.statistics().variation
        if variation is not None and variation > NOISY:
            cause = (
                "suggests strong interference from other work"
                if variation > VERY_NOISY
                else "could be other work on the machine"
            )
            found.append(
                f"repetition {index + 1}: iterations vary by {variation:.0%} (standard deviation over mean), "
                f"which {cause}"
            )
    if len(measurement.reported) > 1:
        variation = summarize([float(sample.real.mean()) for sample in measurement.reported]).variation
        if variation is not None and variation > NOISY:
            found.append(f"repetitions vary by {variation:.0%}: conditions on the machine changed")
    return found


def run_caveats(run: Run, reader: CaptureReader, devices: list[torch.device], root: Path = Path("/")) -> list[str]:
    """Reasons in the machine and the capture to doubt all figures of a run. `root` is where proc and sys are."""
    found = []
    if run.before is None or run.before.verification.mode == "none":
        why = _not_asked_for() if run.before is None else "; ".join(run.before.verification.reasons)
        found.append(f"nothing was verified ({why}): the timed work may differ from the captured work")
    if run.interrupted:
        done = len(run.whole.samples)
        found.append(f"interrupted after {done} of {run.options.repetitions} repetitions")
    if run.cut_short is not None:
        found.append(
            f"stopped after {run.cut_short:.3g} s, {PATIENCE} times what --benchmark-min-time asks for, with "
            "fewer timed seconds than that: restoring state between replays, which is not timed, takes long"
        )
    if frequency_scaling(root):
        found.append("CPU frequency scaling is on, which makes real times noisy: set the performance governor")
    if torch.version.debug:
        found.append("this torch is a debug build: its times mean little")
    found += crowded(replay_threads(reader.session.settings.get("num_threads"))[0], run.others_share)
    if not reader.complete:
        found.append(f"the capture is incomplete: {reader.incomplete_reason}")
    return [*found, *gpu_caveats(run.gpus), *_differences(reader, devices)]


def crowded(threads: int, others_share: float | None) -> list[str]:
    """That more wants to run here than there are processors: the replay's own threads, or other programs, during the
    measurement (`Run.others_share`) or, if that is unknown, in the last minute."""
    load, processors = os.getloadavg()[0], os.cpu_count()
    found = []
    if processors and threads > processors:
        found.append(
            f"{threads} threads share {processors} processors here: oversubscription makes times long and unsteady; "
            f"give --threads={processors}"
        )
    waits = f": an op on {threads} threads waits for the slowest; --threads=1 is steadier" if threads > 1 else ""
    if others_share is not None and others_share > BUSY:
        found.append(f"the machine was busy: {others_had(others_share)}{waits}")
    elif others_share is None and processors and load > processors:
        found.append(f"the machine was busy: load average {load:.1f} with {processors} processors{waits}")
    return found


def _differences(reader: CaptureReader, devices: list[torch.device]) -> list[str]:
    """How this machine and setup differ from the capture's: its own times cannot be compared with these."""
    session = reader.session
    here = describe_device(torch.device("cpu"))
    pairs: list[tuple[str, Any, Any]] = [
        ("torch", session.torch_version, torch.__version__),
        ("processor", session.cpu, here.name or None),
        ("CPU capability", session.cpu_capability, cpu_capability()),
    ]
    captured = [device for device in reader.devices[1:] if device is not None]
    names = [device.name or str(device) for device in captured if device.kind not in (HOST, NOTHING)]
    names_here = [describe_device(device).name or str(device) for device in devices if is_accelerator(device)]
    if names or names_here:
        pairs.append(("accelerator", ", ".join(names) or "none", ", ".join(names_here) or "none"))
    return [
        f"captured with another {what} ({then}, here {now}): its captured times cannot be compared with these"
        for what, then, now in pairs
        if then is not None and now is not None and then != now
    ]


SCHEMA_VERSION = 1
_CSV_FIELDS = ("name", "iterations", "real_time", "cpu_time", "time_unit")
_CSV_FIELDS_NOT_OURS = ("bytes_per_second", "items_per_second", "label", "error_occurred", "error_message")
# The counters that are aggregated over repetitions. Those that say how an aggregate was made are not.
_AGGREGATED = ("host_time", "eager_time", "median_real_time", "min_real_time", "max_real_time", "ops_per_second")
# Of the aggregates the fields of TimeStatistics.
_AGGREGATES = {"mean": "mean", "median": "median", "stddev": "standard_deviation", "cv": "variation"}
# What an unmeasurable row does not say: no single number stands for its times.
_SINGLE_FIGURES = frozenset({"real_time", "cpu_time", "ops_per_second", "median_real_time"})
# Fields that are not single figures are left out of the CSV.
_NOT_COUNTERS = frozenset({"samples", "warnings", "kernel_classes", "graph", "no_graph", *_CSV_FIELDS_NOT_OURS})


def csv_field(value: Any) -> Any:
    """The text of a CSV field: empty if unknown; names stay on one line."""
    return "" if value is None else printable(value) if isinstance(value, str) else value


def _as_code(name: str) -> str:
    """A name in a cell of a Markdown table: nothing in it is markup."""
    return "`" + printable(name).replace("`", "'").replace("|", "\\|") + "`"


@dataclass(frozen=True)
class Report:
    """A benchmark's context and rows, ready to be written in any format. As text it is what the tool prints."""

    context: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)  # what else the document says, by its key there

    def document(self) -> dict[str, Any]:
        """Google Benchmark's JSON document, with our own sections beside its rows."""
        return {"context": self.context, "benchmarks": self.rows, **self.sections}

    def json(self) -> str:
        return json.dumps(self.document(), indent=2, allow_nan=False) + "\n"

    def warnings(self) -> list[str]:
        """Reasons for doubt: the context's warnings, then those of each region once, with its name."""
        regions = [row for row in self.rows if row.get("repetition_index") == 0]
        found = [f"{row['run_name']}: {text}" for row in regions for text in row.get("warnings", ())]
        return [*self.context["warnings"], *found]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"WARNING: {printable(text)}" for text in self.warnings())])

    def head(self) -> Iterator[str]:
        """What was measured, and how."""
        context = self.context
        yield printable(f"capture   {context['capture']} (session {context['capture_session']})")
        yield printable(ran_on(context))
        yield printable(verified(context["verified"]))
        yield from (printable(f"inputs    {context['inputs']}") for _ in range("inputs" in context))
        yield from (printable(f"gpu       {text}") for text in gpu_lines(context.get("gpus", ())))
        yield from (printable(f"checked   {text.strip()}") for text in context.get("substitution_check", ()))
        yield ""

    def lines(self) -> Iterator[str]:
        """For people, without the warnings."""
        yield from self.head()
        yield from _table(self.rows)
        yield ""
        for row in self.rows:
            if row.get("repetition_index") == 0:
                yield printable(_captured(row))
            if row.get("graph"):
                yield printable(
                    f"{row['name']}: launched as one graph; op by op it takes {duration(row['eager_time'])} (compared: "
                    f"{row['graph_compared']})"
                )
            if row.get("median_real_time_low") is not None:
                low, high = duration(row["median_real_time_low"]), duration(row["median_real_time_high"])
                half = "" if row["median_half_width"] is None else f" (+-{row['median_half_width']:.1%})"
                whose = "the median of another run" if "processes" in row else "the median"
                yield printable(f"{row['name']}: {whose} is between {low} and {high} with 95% confidence{half}")
            if row.get("iqr_real_time") is not None:
                yield printable(_spread(row))

    def text(self, form: str) -> str:
        """In a format for programs (json, jsonl, csv), or for a pull request (markdown)."""
        return {"json": self.json, "jsonl": self.json_lines, "csv": self.csv, "markdown": self.markdown}[form]()

    def markdown(self) -> str:
        """A table of the rows' medians; with a baseline also the ones before, the ratios and the verdicts. With --top
        only of the first ones, of those that were not measured, and of those that are slower."""
        paired = {row["name"]: row for row in self.sections.get("baseline", {}).get("rows", [])}
        head = ("what", "median", "at least", "at most", *(("before", "ratio", "verdict") if paired else ()))
        lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        left = self.context.get("top") or len(self.rows)
        for row in self.rows:
            if row.get("run_type") == "aggregate" or row.get("repetition_index", 0):
                continue
            found = paired.get(row["name"])
            if row.get("median_real_time") is not None:
                left -= 1
                if left < 0 and (found is None or found["verdict"] != "slower"):
                    continue
            times = (row.get(f"median_real_time{end}") for end in ("", "_low", "_high"))
            cells = [_as_code(row["name"]), *(duration(each) for each in times)]
            if paired:
                ratio = None if found is None else found["ratio"]
                cells.append("-" if found is None else duration(found["before"]["value"]))
                cells.append("-" if ratio is None else f"{ratio:.3f}")
                cells.append("not in the baseline" if found is None else found["verdict"])
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def json_lines(self) -> str:
        """A line for each row, then one with the context and the other sections."""
        rest = {key: value for key, value in self.document().items() if key != "benchmarks"}
        lines = [*({"kind": "row", **row} for row in self.rows), {"kind": "context", **rest}]
        return "".join(f"{json.dumps(each)}\n" for each in lines)

    def csv(self) -> str:
        """Google Benchmark's columns, then one for each counter. Fields that a row does not have are empty."""
        schema = {*iteration_fields("", 0), *_CSV_FIELDS, "aggregate_name", "aggregate_unit"}
        not_counters = schema | _NOT_COUNTERS
        counters = sorted(
            {
                name
                for row in self.rows
                for name, value in row.items()
                if name not in not_counters and not isinstance(value, str)
            }
        )
        names = (*_CSV_FIELDS, *_CSV_FIELDS_NOT_OURS, *counters)
        rows = []
        for row in self.rows:
            # Ratios have no time unit, as in Google Benchmark's `_cv` rows.
            shown = row | {"time_unit": ""} if row.get("aggregate_unit") == "percentage" else row
            rows.append([csv_field(shown.get(name)) for name in names])
        return csv_text(names, rows)


def make_report(run: Run, plan: Plan) -> Report:
    rows = []
    for index, measurement in enumerate(run.measurements):
        warnings = measurement_caveats(measurement, run.options.precision)
        family = [
            _iteration_row(run, measurement, index, repetition, warnings)
            for repetition in range(len(measurement.reported))
        ]
        rows += family
        if len(family) > 1 and not any("unmeasurable" in row for row in family):
            rows += _aggregate_rows(family)
    return Report(_context(run, plan), rows)


def plan_context(plan: Plan) -> dict[str, Any]:
    """Machine, versions, capture and devices, as in every report on a plan."""
    reader = plan.reader
    threads, why_threads = replay_threads(reader.session.settings.get("num_threads"))
    return {
        **machine_context(),
        "library_version": own_version(),
        "library_build_type": "debug" if torch.version.debug else "release",
        "json_schema_version": SCHEMA_VERSION,
        "capture": reader.path,
        "capture_session": reader.session.session_id,
        "capture_torch_version": reader.session.torch_version,
        "torch_version": torch.__version__,
        "torch_num_threads": threads,
        "threads_reason": why_threads or None,
        "processor": describe_device(torch.device("cpu")).name or None,
        "devices": [_device_name(device) for device in plan.devices],
        **_substitution(plan),
    }


def _substitution(plan: Plan) -> dict[str, Any]:
    """The findings of the check of substituted kernels; empty if there are none."""
    substitution = getattr(plan, "substitution", None)
    report = None if substitution is None else substitution.report
    return {} if report is None else {"substitution_check": report.as_text()}


def _context(run: Run, plan: Plan) -> dict[str, Any]:
    return {
        **plan_context(plan),
        **time_limits(run.options.min_time, run.options.precision),
        "warmup_iterations": run.options.warmup,
        "inputs": run.inputs,
        **({"cuda_graph": True} if run.options.cuda_graph else {}),
        "meters": run.meters,
        "gpus": run.gpus,
        "others_share": run.others_share,
        "verified": _verified(run),
        "warnings": run_caveats(run, plan.reader, plan.devices),
    }


def time_limits(min_time: MinTime, precision: Precision | None) -> dict[str, Any]:
    """A context's fields on how long was measured, as it was asked for."""
    return {
        "min_time": str(min_time),
        "precision": None if precision is None else precision.share,
        "max_time": None if precision is None else f"{precision.cap_s:g}s",
    }


def _not_asked_for() -> str:
    return f"--verify=none; {LEFT_OUT}" if are_left_out() else "--verify=none"


def _verified(run: Run) -> str:
    if run.before is None:
        return f"not verified: {_not_asked_for()}"
    when = "" if run.before.verification.mode == "none" else "before and after timing, "
    return f"{when}{run.before.verification.text}"


def _device_name(device: torch.device) -> str:
    name = accelerators.name_of(device) if accelerators.is_accelerator(device) else ""
    return f"{device} {name}".rstrip()


def statistics_fields(statistics: TimeStatistics) -> dict[str, Any]:
    """A row's fields for the median and its certainty, the spread and the outliers of its times; what the sample is too
    small for is None, with the reason."""
    interval, quartiles, outliers = statistics.interval, statistics.quartiles, statistics.outliers
    found: dict[str, Any] = {
        "median_real_time": statistics.median,
        "median_real_time_low": None if interval is None else interval.low,
        "median_real_time_high": None if interval is None else interval.high,
        "median_confidence": None if interval is None else interval.confidence,
        "median_half_width": statistics.half_width,
        "independent_samples": None if interval is None else interval.independent,
        "stddev_real_time": statistics.standard_deviation,
        "first_quartile_real_time": None if quartiles is None else quartiles[0],
        "third_quartile_real_time": None if quartiles is None else quartiles[1],
        "iqr_real_time": None if quartiles is None else quartiles[1] - quartiles[0],
        "outliers_low": None if outliers is None else outliers.low,
        "outliers_high": None if outliers is None else outliers.high,
        "min_real_time": statistics.minimum,
        "max_real_time": statistics.maximum,
    }
    why = {"median_confidence": "interval", "stddev_real_time": "standard_deviation", "iqr_real_time": "quartiles"}
    reasons = {f"{name}_reason": statistics.reasons[reason] for name, reason in why.items() if found[name] is None}
    return found | reasons


def unmeasurable_fields(reason: str) -> dict[str, Any]:
    """The fields of a row that has times, but no measurement. Google's compare.py passes over such rows."""
    return {"unmeasurable": reason, "error_occurred": True, "error_message": f"unmeasurable: {reason}"}


def iteration_fields(
    name: str, family: int, instance: int = 0, repetitions: int = 1, repetition: int = 0
) -> dict[str, Any]:
    """The fields with which Google Benchmark's rows of iterations begin."""
    return {
        "name": name,
        "family_index": family,
        "per_family_instance_index": instance,
        "run_name": name,
        "run_type": "iteration",
        "repetitions": repetitions,
        "repetition_index": repetition,
        "threads": 1,
    }


def _iteration_row(
    run: Run, measurement: Measurement, family: int, repetition: int, warnings: list[str]
) -> dict[str, Any]:
    """One repetition of one region. An unmeasurable one has its samples and its interval, and no single figure."""
    region, sample = measurement.region, measurement.reported[repetition]
    statistics = sample.statistics()
    row: dict[str, Any] = {
        **iteration_fields(region.row, family, 0, len(measurement.reported), repetition),
        "iterations": statistics.count,
        "real_time": statistics.mean,
        "cpu_time": float(sample.cpu.mean()),
        "time_unit": "ns",
        "ops": region.ops,
        "ops_per_second": region.ops / statistics.mean * 1e9 if statistics.mean > 0 else None,  # unmeasurable
        "passes": region.passes,
        **statistics_fields(statistics),
        "captured_time": region.captured_ns,
    }
    if region.captured_ns is None:
        row["captured_time_reason"] = region.captured_reason
    issued = measurement.samples[repetition]
    if issued.host is not None:
        row["host_time"] = float(issued.host.mean())
    row |= _graph_fields(measurement, issued)
    unmeasurable = why_unmeasurable(statistics, run.step_ns, noise=run.options.precision is not None)
    if not region.ops:
        unmeasurable = "no op is in it: its times are those of reading the clock"
    if unmeasurable:
        # Times of nothing, or that the clock did not see, have no interval and no spread either.
        nothing = not region.ops or statistics.median <= 0
        left_out = _SINGLE_FIGURES | (statistics_fields(statistics).keys() if nothing else set())
        row = {name: value for name, value in row.items() if name not in left_out}
        row |= unmeasurable_fields(unmeasurable)
        warnings = [*warnings, f"unmeasurable: {unmeasurable}"]
    row["samples"] = _samples(sample)
    row["warnings"] = warnings
    return row


def _graph_fields(measurement: Measurement, issued: Sample) -> dict[str, Any]:
    """A row's fields for the graph that was asked for: `host_time` is then still that of issuing ops one by one."""
    in_graph = measurement.in_graph
    if in_graph is None:
        return {}
    if not in_graph.samples:
        return {"graph": False, "no_graph": in_graph.reason}
    return {
        "graph": True,
        "no_graph": None,
        "graph_compared": in_graph.compared,
        "eager_time": issued.statistics().median,
    }


def _samples(sample: Sample) -> dict[str, list[float]]:
    """Each iteration's times, in order."""
    columns: dict[str, Any] = {"real_time": sample.real, "cpu_time": sample.cpu, "host_time": sample.host}
    return {name: column.tolist() for name, column in columns.items() if isinstance(column, np.ndarray)}


def _aggregate_rows(family: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, median, standard deviation and coefficient of variation over the repetitions of one region."""
    first = family[0]
    figures = ["real_time", "cpu_time"]
    figures += [name for name in _AGGREGATED if all(row.get(name) is not None for row in family)]
    over = {name: summarize([row[name] for row in family]) for name in figures}
    rows = []
    for name in _AGGREGATES:
        values: dict[str, Any] = {}
        for figure, statistics in over.items():
            values[figure] = getattr(statistics, _AGGREGATES[name])
        fields = iteration_fields(f"{first['run_name']}_{name}", first["family_index"], 0, len(family))
        del fields["repetition_index"]
        rows.append(
            fields
            | {
                "run_name": first["run_name"],
                "run_type": "aggregate",
                "aggregate_name": name,
                "aggregate_unit": "percentage" if name == "cv" else "time",
                "iterations": len(family),
                "real_time": values.pop("real_time"),
                "cpu_time": values.pop("cpu_time"),
                "time_unit": "ns",
                **values,
            }
        )
    return rows


def _captured(row: dict[str, Any]) -> str:
    if row["captured_time"] is None:
        return f"{row['run_name']}: time under capture not measured: {row['captured_time_reason']}"
    passes = f" in {row['passes']} passes" if row["passes"] > 1 else ""
    return (
        f"{row['run_name']}: took {duration(row['captured_time'])}{passes} during capture, including the "
        f"recorder's own work"
    )


def _spread(row: dict[str, Any]) -> str:
    """The middle half of the iterations, or of the medians of processes, and how many are far from it."""
    outliers = row["outliers_low"] + row["outliers_high"]
    told = (
        f"{counted(outliers, 'outlier')} ({row['outliers_low']} low, {row['outliers_high']} high), counted in every "
        "figure"
        if outliers
        else "no outliers"
    )
    quartiles = f"{duration(row['first_quartile_real_time'])} to {duration(row['third_quartile_real_time'])}"
    what = "processes" if "processes" in row else "iterations"
    return f"{row['name']}: half of the {what} took {quartiles} (IQR {duration(row['iqr_real_time'])}); {told}"


# Of the table: the heading of each column, and the field of a row that it shows.
_COLUMNS = {
    "Real mean": "real_time",
    "CPU time": "cpu_time",
    "Host time": "host_time",
    "Iterations": "iterations",
    "Median": "median_real_time",
    "Std. dev.": "stddev_real_time",
    "Minimum": "min_real_time",
    "Ops/s": "ops_per_second",
}


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    host = any("host_time" in row for row in rows)
    columns = {head: name for head, name in _COLUMNS.items() if host or name != "host_time"}
    names = ["Benchmark", *(printable(row["name"]) for row in rows)]
    cells = [[*columns, ""], *([*(_cell(row, name) for name in columns.values()), ""] for row in rows)]
    for name, line in zip(names, aligned(cells), strict=True):
        yield f"{name:<{max(map(len, names))}}  {line}".rstrip()


def _cell(row: dict[str, Any], name: str) -> str:
    """An aggregate has no figures over iterations, and `_cv` is a ratio for every figure in its row."""
    if name not in row:
        return ""
    if name == "iterations":
        return str(row[name])
    if row.get("aggregate_unit") == "percentage":
        return "-" if row[name] is None else f"{row[name]:.2%}"
    return rate(row[name]) if name == "ops_per_second" else duration(row[name])
