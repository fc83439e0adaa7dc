"""Measured ops as rows of Google Benchmark's JSON and CSV, and as text.

Each distinct op is one row; `verdict`, `count`, `captured_us`, `estimated_us` (count times the median) and `share` are
counters of ours. An op without times has none of those keys, but `error_occurred` and its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayfmt.format.codes import OpStatus
from replayfmt.format.model import CompositeValue, TensorValue, Value
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.text import signature_of
from replayfmt.replay.plan import Plan

from ..reports.rows import Report, plan_context
from ..reports.units import duration
from .measuring import MeasuredOp, PerOpRun

_NOT_MEASURED = "not measured"


def make_op_report(run: PerOpRun, plan: Plan) -> Report:
    """The report of the measured ops of `plan`."""
    total = run.estimated_ns
    context = {
        **plan_context(plan),
        "min_time": str(run.options.min_time),
        "verified": run.verified,
        "call_overhead_ns": run.overhead_ns,
        "distinct_ops": run.chosen.total,
        "matched": run.chosen.matched,
        "selected": len(run.ops),
        "attempted": run.successful + run.failed,
        "successful": run.successful,
        "failed": run.failed,
        "refused": dict(run.refused),
        "unsupported": _unsupported(run),
        "captured_device_us": run.chosen.device_ns / 1e3 or None,
        "measured_captured_device_us": run.measured_device_ns / 1e3 if run.chosen.device_ns else None,
        "estimated_us": total / 1e3,
        "warnings": _warnings(run),
    }
    return Report(context, [_row(op, index, total) for index, op in enumerate(run.ops)])


def _unsupported(run: PerOpRun) -> dict[str, Any]:
    """What the capture holds that no replay does; its device time is None where the capture has no such times."""
    unsupported, device_ns = run.chosen.unsupported, run.chosen.device_ns
    return {"calls": unsupported.calls.total(), "reasons": dict(unsupported.calls),
            "captured_device_us": unsupported.device_ns / 1e3 if device_ns else None,
            "share_of_device_time": unsupported.device_ns / device_ns if device_ns else None}


def _warnings(run: PerOpRun) -> list[str]:
    few = [op for op in run.ops if op.times is not None and op.times.interval is None]
    short = [op for op in run.ops if op.times is not None and op.times.median < 5 * run.overhead_ns]
    warnings = []
    if run.chosen.unsupported.calls:
        warnings.append("the capture holds work that is unsupported and was not measured: the estimated total is not "
                        "the whole workload's")
    if few:
        warnings.append(f"{len(few)} ops have too few samples for a confidence interval: raise --benchmark-min-time")
    if short:
        warnings.append(f"{len(short)} ops are so short that the call around them, {duration(run.overhead_ns)}, is "
                        "more than a fifth of their time; it is not subtracted")
    return warnings


def _row(op: MeasuredOp, index: int, total_ns: float) -> dict[str, Any]:
    group, times = op.group, op.times
    captured = group.captured_ns
    row: dict[str, Any] = {
        "name": f"BM_op/{group.signature}",
        "family_index": index,
        "per_family_instance_index": 0,
        "run_name": f"BM_op/{group.signature}",
        "run_type": "iteration",
        "repetitions": 1,
        "repetition_index": 0,
        "threads": 1,
        "iterations": op.calls,
        "real_time": None if times is None else times.mean,
        "cpu_time": op.cpu_ns,
        "time_unit": "ns",
        "op": group.kernel.qualified_name,
        "ordinal": group.first_ordinal if op.ordinal is None else op.ordinal,
        "verdict": op.verdict,
        "count": group.count,
        "captured_us": None if captured is None else captured / 1e3,
        "captured_clock": group.captured_clock,
    }
    if captured is None:
        row["captured_us_reason"] = "the capture has no time for it"
    if op.host_ns is not None:
        row["host_time"] = op.host_ns
    if op.reason:
        row["reason"] = op.reason
    if times is None:
        # Absent, not null: Google's compare.py passes over rows without times, and fails on null.
        del row["real_time"], row["cpu_time"]
        return row | {"error_occurred": True, "error_message": f"{op.verdict}: {op.reason}", "warnings": []}
    estimated = op.estimated_ns
    assert estimated is not None
    row |= {
        "median_real_time": times.median,
        "median_real_time_low": None if times.interval is None else times.interval.low,
        "median_real_time_high": None if times.interval is None else times.interval.high,
        "min_real_time": times.minimum,
        "stddev_real_time": times.standard_deviation,
        "samples_taken": times.count,
        "estimated_us": estimated / 1e3,
        "share": estimated / total_ns if total_ns else None,
        "warnings": [],
    }
    for name, reason in (("median_real_time_low", "interval"), ("stddev_real_time", "standard_deviation")):
        if row[name] is None:
            row[f"{name}_reason"] = times.reasons[reason]
    return row


# --------------------------------------------------------------------------------------------------------------- text


def progress_line(op: MeasuredOp, place: int, of: int) -> str:
    """`[i/N]`, verdict, time a call, count, and the op: printed as soon as it is known."""
    time = _NOT_MEASURED if op.times is None else duration(op.times.median)
    reason = f"  {op.reason}" if op.reason else ""
    return printable(f"[{place}/{of}] {op.verdict:<10} {time:>12} x {op.group.count:<6} {op.group.signature}{reason}")


def table_lines(report: Report) -> Iterator[str]:
    """The ops by their part of the workload, the largest first, and the totals."""
    context = report.context
    measured = sorted((row for row in report.rows if "estimated_us" in row), key=lambda row: -row["estimated_us"])
    yield (f"{'estimated':>12} {'share':>7} {'count':>7} {'time/call':>12} {'captured':>12} {'verdict':<10}  op")
    for row in measured:
        captured = _NOT_MEASURED if row["captured_us"] is None else duration(row["captured_us"] * 1e3)
        share = "-" if row["share"] is None else f"{row['share']:.1%}"
        yield printable(f"{duration(row['estimated_us'] * 1e3):>12} {share:>7} {row['count']:>7} "
                        f"{duration(row['median_real_time']):>12} {captured:>12} {row['verdict']:<10}  "
                        f"{row['name'].removeprefix('BM_op/')}")
    yield ""
    refused = sum(context["refused"].values())
    yield (f"distinct ops: {context['distinct_ops']} in the file, {context['matched']} matched, "
           f"{context['selected']} selected")
    yield (f"attempted {context['attempted']} = {context['successful']} successful + {context['failed']} failed; "
           f"refused {refused}")
    for reason, count in sorted(context["refused"].items(), key=lambda pair: -pair[1]):
        yield printable(f"  {count} refused: {reason}")
    unsupported = context["unsupported"]
    if unsupported["calls"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in unsupported["reasons"].items())
        share = unsupported["share_of_device_time"]
        yield printable(f"unsupported in the capture, not measured: {unsupported['calls']} calls ({reasons}), "
                        + ("of unknown device time" if share is None else f"{share:.1%} of the captured device time"))
    if context["captured_device_us"] is not None:
        of = context["measured_captured_device_us"] / context["captured_device_us"]
        yield (f"captured device time: {duration(context['captured_device_us'] * 1e3)}, {of:.1%} of it in the ops "
               "measured")
    yield f"estimated total: {duration(context['estimated_us'] * 1e3)}, the sum of count x time per call"
    yield f"verified  {printable(context['verified'])}"


def describe(op: MeasuredOp, reader: CaptureReader) -> Iterator[str]:
    """Each argument's name, schema type and value, and each result's shape, dtype and device, as captured and as the op
    gave it here."""
    record = reader.record(op.group.first_ordinal if op.ordinal is None else op.ordinal)
    types = _schema_types(op.group.kernel.schema)
    shown = signature_of(record, reader, values=True).arguments
    for node, (_name, text) in zip(record.signature.args, shown, strict=True):
        yield printable(f"    {node.name}: {types.get(node.name, 'type not known')} = {text}")
    for index, value in enumerate(record.results):
        yield printable(f"    -> {index}: {_result(value, reader)}")
    if not record.results:
        unknown = (record.annotation or {}).get("results")      # an import that could not find out says why
        yield printable("    -> captured: " + ("it raised" if record.signature.status is OpStatus.raised else
                                               str(unknown) if unknown else "nothing"))
    for index, returned in enumerate(op.returned or ()):
        yield printable(f"    replayed {index}: {returned}")
    if op.returned is not None and not op.returned:
        yield "    replayed: nothing"


def _schema_types(schema: str) -> dict[str, str]:
    try:
        return {each.name: each.type.text for each in parse_operator_schema(schema).arguments}
    except ValueError:
        return {}


def _result(value: Value, reader: CaptureReader) -> str:
    if isinstance(value, TensorValue):
        meta = value.meta
        return f"{meta.dtype.name}[{','.join(map(str, meta.sizes))}] on {reader.devices[meta.device]}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_result(each, reader) for each in value) + "]"
    if isinstance(value, CompositeValue):
        return f"{value.form}({', '.join(_result(each, reader) for each in value.parts)})"
    return repr(value)
