"""A finished benchmark as rows, and the rows as Google Benchmark's JSON and CSV.

The JSON has Google Benchmark's schema, version 1, and can be read by its `compare.py` and everything else that reads
that schema: one row of type `iteration` for each repetition, then the aggregates over them if there are two or more.
Its `real_time` and `cpu_time` are means over the iterations; the unit is always ns, so any two files can be compared.
Our own data are additional fields of a row ("counters") and of the context. An unknown value is null, and a field of
the same name with `_reason` says why.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replayfmt.format.printable import printable
from replayfmt.pytorch import accelerators
from replayfmt.pytorch.environment import describe_device
from replayfmt.replay.plan import Plan
from replayfmt.version import own_version

from ..measure import Measurement, Run, Sample
from ..meters.meter import NotMeasured, Quantity
from ..statistics import TimeStatistics, summarize, why_unmeasurable
from .caveats import measurement_caveats, run_caveats
from .machine import machine_context

SCHEMA_VERSION = 1
_CSV_FIELDS = ("name", "iterations", "real_time", "cpu_time", "time_unit")
_CSV_FIELDS_NOT_OURS = ("bytes_per_second", "items_per_second", "label", "error_occurred", "error_message")
# The counters that are aggregated over repetitions. Those that say how an aggregate was made are not.
_AGGREGATED = ("host_time", "eager_time", "median_real_time", "min_real_time", "max_real_time", "ops_per_second")
# What an unmeasurable row does not say: no single number stands for its times.
_SINGLE_FIGURES = frozenset({"real_time", "cpu_time", "ops_per_second", "median_real_time"})
# Fields that are not single figures are left out of the CSV.
_NOT_COUNTERS = frozenset({"samples", "warnings", "kernel_classes", "graph", "no_graph", *_CSV_FIELDS_NOT_OURS})
_SCHEMA_FIELDS = frozenset(
    {
        "name",
        "family_index",
        "per_family_instance_index",
        "run_name",
        "run_type",
        "repetitions",
        "repetition_index",
        "threads",
        "aggregate_name",
        "aggregate_unit",
        "iterations",
        "real_time",
        "cpu_time",
        "time_unit",
    }
)


def csv_field(value: Any) -> Any:
    """The text of a CSV field: empty if unknown; names stay on one line."""
    return "" if value is None else printable(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Report:
    """A benchmark's context and rows, ready to be written in any format."""

    context: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    further: tuple[Quantity, ...] = ()  # the quantities measured besides times
    sections: dict[str, Any] = field(default_factory=dict)  # what else the document says, by its key there

    def document(self) -> dict[str, Any]:
        """Google Benchmark's JSON document, with our own sections beside its rows."""
        return {"context": self.context, "benchmarks": self.rows, **self.sections}

    def json(self) -> str:
        """The document as text."""
        return json.dumps(self.document(), indent=2, allow_nan=False) + "\n"

    def warnings(self) -> list[str]:
        """Reasons for doubt: the context's warnings, then those of each region once, with its name."""
        regions = [row for row in self.rows if row.get("repetition_index") == 0]
        return self.context["warnings"] + [f"{row['run_name']}: {text}" for row in regions for text in row["warnings"]]

    def csv(self) -> str:
        """Google Benchmark's columns, then one for each counter. Fields that a row does not have are empty."""
        counters = sorted(
            {
                name
                for row in self.rows
                for name, value in row.items()
                if name not in _SCHEMA_FIELDS | _NOT_COUNTERS and not isinstance(value, str)
            }
        )
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*_CSV_FIELDS, *_CSV_FIELDS_NOT_OURS, *counters])
        for row in self.rows:
            # Ratios have no time unit, as in Google Benchmark's `_cv` rows.
            shown = row | {"time_unit": ""} if row.get("aggregate_unit") == "percentage" else row
            names = (*_CSV_FIELDS, *_CSV_FIELDS_NOT_OURS, *counters)
            writer.writerow([csv_field(shown.get(name)) for name in names])
        return text.getvalue()


def make_report(run: Run, plan: Plan) -> Report:
    """The report of a run of `plan`."""
    rows = []
    further = tuple(run.whole.samples[0].further)
    for index, measurement in enumerate(run.measurements):
        warnings = measurement_caveats(measurement, run.options.precision)
        family = [
            _iteration_row(run, measurement, index, repetition, warnings)
            for repetition in range(len(measurement.reported))
        ]
        rows += family
        if len(family) > 1 and not any("unmeasurable" in row for row in family):
            rows += _aggregate_rows(family, further)
    return Report(_context(run, plan), rows, further)


def plan_context(plan: Plan) -> dict[str, Any]:
    """Machine, versions, capture and devices, as in every report on a plan."""
    reader = plan.reader
    threads = reader.session.settings.get("num_threads", torch.get_num_threads())  # a replay runs with the capture's
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
        "min_time": str(run.options.min_time),
        "precision": None if run.options.precision is None else run.options.precision.share,
        "max_time": None if run.options.precision is None else f"{run.options.precision.cap_s:g}s",
        "warmup_iterations": run.options.warmup,
        "inputs": run.inputs,
        **({"cuda_graph": True} if run.options.cuda_graph else {}),
        "meters": run.meters,
        "gpus": run.gpus,
        "verified": _verified(run),
        "warnings": run_caveats(run, plan.reader, plan.devices),
    }


def _verified(run: Run) -> str:
    if run.before is None:
        return "not verified: --verify=none"
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


def _iteration_row(
    run: Run, measurement: Measurement, family: int, repetition: int, warnings: list[str]
) -> dict[str, Any]:
    """One repetition of one region. An unmeasurable one has its samples and its interval, and no single figure."""
    region, sample = measurement.region, measurement.reported[repetition]
    statistics = sample.statistics()
    row: dict[str, Any] = {
        "name": region.row,
        "family_index": family,
        "per_family_instance_index": 0,
        "run_name": region.row,
        "run_type": "iteration",
        "repetitions": len(measurement.reported),
        "repetition_index": repetition,
        "threads": 1,
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
    row |= further_fields(
        {
            quantity: readings if isinstance(readings, NotMeasured) else float(readings.mean())
            for quantity, readings in sample.further.items()
        }
    )
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


def further_fields(means: Mapping[Quantity, float | NotMeasured]) -> dict[str, Any]:
    """A row's fields for the meters other than clocks: each with its unit, or why there is none."""
    fields: dict[str, Any] = {}
    for quantity, mean in means.items():
        missing = isinstance(mean, NotMeasured)
        fields[quantity.name] = None if missing else mean
        fields[f"{quantity.name}_unit"] = quantity.unit
        if isinstance(mean, NotMeasured):
            fields[f"{quantity.name}_reason"] = mean.reason
    return fields


def _samples(sample: Sample) -> dict[str, list[float]]:
    """Each iteration's times and further readings, in order."""
    columns: dict[str, Any] = {"real_time": sample.real, "cpu_time": sample.cpu, "host_time": sample.host}
    columns |= {quantity.name: readings for quantity, readings in sample.further.items()}
    return {name: column.tolist() for name, column in columns.items() if isinstance(column, np.ndarray)}


def _aggregate_rows(family: list[dict[str, Any]], further: Sequence[Quantity]) -> list[dict[str, Any]]:
    """Mean, median, standard deviation and coefficient of variation over the repetitions of one region."""
    first = family[0]
    figures = ["real_time", "cpu_time"]
    counters = (*_AGGREGATED, *(quantity.name for quantity in further))
    figures += [name for name in counters if all(row.get(name) is not None for row in family)]
    over = {name: summarize([row[name] for row in family]) for name in figures}
    rows = []
    for name in ("mean", "median", "stddev", "cv"):
        values: dict[str, Any] = {}
        for figure, statistics in over.items():
            values[figure] = {
                "mean": statistics.mean,
                "median": statistics.median,
                "stddev": statistics.standard_deviation,
                "cv": statistics.variation,
            }[name]
        rows.append(
            {
                "name": f"{first['run_name']}_{name}",
                "family_index": first["family_index"],
                "per_family_instance_index": 0,
                "run_name": first["run_name"],
                "run_type": "aggregate",
                "repetitions": len(family),
                "threads": 1,
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
