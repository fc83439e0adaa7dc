"""Measured ops as rows of Google Benchmark's JSON and CSV, and as a table for people.

There is a row for each distinct op, or each kernel, signature or scope, the most expensive first; `verdict`, `count`,
`captured_us`, `estimated_us` (count times the median), `share` and `rank` are our own counters. A row without times has
`error_occurred` and the reason in `error_message`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from textwrap import wrap
from typing import Any

import torch

from replayfmt.format.codes import OpStatus
from replayfmt.format.model import TRACED_DEVICE_NS, CaptureInfo, CompositeValue, TensorValue, Value
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import signature_of
from replayfmt.format.validation import aligned, counted, printable
from replayfmt.replay.plan import Plan

from ..machine import gpu_caveats, gpu_lines
from ..run_report import (
    Report,
    crowded,
    iteration_fields,
    plan_context,
    statistics_fields,
    time_limits,
    unmeasurable_fields,
)
from ..statistics import call_count, duration, ran_on, rate, share_text, verified
from .results import WIDE, GroupBy, MeasuredOp, OpRow, PerOpRun, make_rows
from .roofline import Peaks, PeaksOf, above_the_roof, peak_caveats, peak_line, row_work

# Captured times include recording, so a replay is rarely slower at all.
_MUCH_SLOWER = 5
# Rows below this share of the total are not worth a warning.
_SMALL = 0.01
# A signature may be longer than a sentence; the rows have all of it.
_LONGEST_LABEL = 100
# Reasons in a warning; the rows have all of them.
_REASONS = 3


def make_op_report(
    run: PerOpRun, plan: Plan, *, group_by: GroupBy | None = None, top: int | None = None, peaks: PeaksOf | None = None
) -> OpReport:
    """The report of the measured ops of `plan`, grouped by `group_by`; the table shows only the `top` first rows that
    have times. With `peaks`, each row of one op is placed on the roofline of its device.
    """
    total = run.estimated_ns
    rows = make_rows(run, group_by, plan.reader)
    measured = [row for row in rows if row.members]
    context = {
        **plan_context(plan),
        **time_limits(run.options.min_time, run.options.precision),
        "inputs": run.inputs,
        "cuda_graph": run.options.cuda_graph,
        "meters": run.meters,
        "gpus": run.gpus,
        "others_share": run.others_share,
        "verified": run.verified,
        "call_overhead_ns": run.overhead_ns,
        "event_pair_ns": run.event_pair_ns or None,
        "distinct_ops": run.chosen.total,
        "matched": run.chosen.matched,
        "selected": len(run.ops),
        "attempted": run.successful + run.failed,
        "successful": run.successful,
        "failed": run.failed,
        "refused": dict(run.refused),
        "not_measured_calls": dict(run.not_measured),
        "unsupported": _unsupported(run),
        "captured_device_us": run.chosen.device_ns / 1e3 or None,
        "measured_captured_device_us": run.measured_device_ns / 1e3 if run.chosen.device_ns else None,
        "traced_device_us": _traced_device_us(plan.reader.session),
        "estimated_us": None if total is None else total / 1e3,
        "calls": sum(row.calls for row in measured),
        "group_by": group_by,
        "top": top,
        "complete": run.complete,
    }
    crowd = crowded(context["torch_num_threads"], run.others_share)
    context["warnings"] = [*_warnings(run, measured, total or 0.0), *crowd, *gpu_caveats(run.gpus)]
    of_device: dict[torch.device, Peaks] = {}

    def peaks_of(device: torch.device) -> Peaks:
        if peaks is not None and device not in of_device:
            precision = str(plan.reader.session.settings.get("float32_matmul_precision", "highest"))
            of_device[device] = peaks(device, context["torch_num_threads"], precision)
        return of_device[device]

    placed = None if peaks is None else peaks_of
    reported = [
        _row(row, index, total or 0.0, group_by) | row_work(row, group_by is None, placed)
        for index, row in enumerate(rows)
    ]
    if peaks is not None:
        context["roofline"] = True
        context["peaks"] = [row for each in of_device.values() for row in each.rows()]
        context["warnings"] += [*above_the_roof(reported), *peak_caveats(context["peaks"])]
    return OpReport(context, reported)


def _traced_device_us(session: CaptureInfo) -> float | None:
    """The device time of the whole trace that a capture was imported from, in microseconds."""
    known = session.policies.get(TRACED_DEVICE_NS)
    return known / 1e3 if isinstance(known, int) and not isinstance(known, bool) and known > 0 else None


def _unsupported(run: PerOpRun) -> dict[str, Any]:
    """Captured work that no replay does; its device time is None if the capture has no such times."""
    unsupported, device_ns = run.chosen.unsupported, run.chosen.device_ns
    return {
        "calls": unsupported.calls.total(),
        "reasons": dict(unsupported.calls),
        "captured_device_us": unsupported.device_ns / 1e3 if device_ns else None,
        "share_of_device_time": unsupported.device_ns / device_ns if device_ns else None,
    }


def _warnings(run: PerOpRun, measured: list[OpRow], total_ns: float) -> list[str]:
    few = [op for op in run.ops if op.times is not None and op.times.interval is None]
    short = [
        op for op in run.ops if op.times is not None and op.host_ns is None and op.times.median < 5 * run.overhead_ns
    ]
    large = [row for row in measured if (row.estimated_ns or 0.0) >= _SMALL * total_ns]
    dependent = [
        op
        for op in run.ops
        if op.times is not None and op.times.interval and op.times.interval.independent < op.times.count
    ]
    wide = [row for row in large if row.width is not None and row.width > WIDE]
    unranked = [row for row in large if row.ranks is not None and row.ranks[0] != row.ranks[1]]
    warnings = []
    if run.chosen.unsupported.calls:
        warnings.append(
            "the capture holds unsupported work, which was not measured: the estimated total does not cover the "
            "whole workload"
        )
    if run.not_measured:
        warnings.append(
            f"not measured: {call_count(run.not_measured.total())}; the estimated total does not include them, "
            f"and they have no rank"
        )
    slower = _times_slower(run)
    if slower is not None and slower > _MUCH_SLOWER:
        warnings.append(
            f"the calls took {slower:.0f} times as long as when they were captured: threads may be waiting for a "
            "processor (try --threads=1, or OMP_WAIT_POLICY=passive), or this is another machine"
        )
    outside = [op for op in run.ops if op.no_graph]
    if outside:
        reasons = Counter(op.no_graph for op in outside)
        warnings.append(
            f"{counted(len(outside), 'op')} could not be put into a graph, so measured call by call: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_REASONS))
        )
    exposed = [op for op in run.ops if op.exposed]
    if exposed:
        warnings.append(
            f"the device waited for the host while {counted(len(exposed), 'op')} ran, so their times hold more than "
            f"its work: {printable(exposed[0].group.signature, _LONGEST_LABEL)}"
            + (f" and {len(exposed) - 1} more" if len(exposed) > 1 else "")
        )
    if few:
        warnings.append(
            f"too few samples for a confidence interval of {counted(len(few), 'op')}: raise --benchmark-min-time"
        )
    if dependent:
        warnings.append(
            f"successive times of {counted(len(dependent), 'op')} depend on each other (heat, other programs, modes "
            "that last): their intervals are wider for it, and another run may still differ by more"
        )
    if wide:
        warnings.append(
            f"intervals are wider than {WIDE:.0%} for {_count(wide)}; raise --benchmark-min-time, or stop other "
            "programs"
        )
    if unranked:
        warnings.append(
            f"the order is uncertain: intervals overlap, so {_count(unranked)} may have another "
            "rank; raise --benchmark-min-time, or stop other programs"
        )
    if short:
        warnings.append(
            f"the call around an op, {duration(run.overhead_ns)}, is more than a fifth of the time of "
            f"{counted(len(short), 'op')}; it is not subtracted"
        )
    return warnings


def _times_slower(run: PerOpRun) -> float | None:
    """The ratio of the measured times to the captured times of the calls, on the host's clock; None if the capture has
    none."""
    pairs = [
        (op.times.median * op.group.host_calls, op.group.host_ns)
        for op in run.ops
        if op.times is not None and op.host_ns is None and op.group.captured_clock == "host"
    ]
    captured = sum(then for _now, then in pairs)
    return sum(now for now, _then in pairs) / captured if captured else None


def _count(rows: list[OpRow]) -> str:
    return printable(rows[0].label, _LONGEST_LABEL) + (
        f" and {counted(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
    )


def _row(row: OpRow, index: int, total_ns: float, group_by: GroupBy | None) -> dict[str, Any]:
    name = f"BM_op/{row.label}" if group_by is None else f"BM_op/{group_by}:{row.label}"
    calls, estimated, captured = row.calls, row.estimated_ns, row.captured_ns
    found: dict[str, Any] = {
        **iteration_fields(name, index),
        "iterations": sum(op.calls for op, _calls in row.members),
        "time_unit": "ns",
        "verdict": row.verdict,
        "count": calls + row.not_measured.total(),
        "ops": len(row.members) + len(row.unmeasured),
        **_of_one(row, group_by),
    }
    if row.unmeasured:
        found["not_measured"] = row.not_measured.total()
        found["reason"] = _reason(row)
    if estimated is None:
        # Google's compare.py passes over rows without times, and fails on null.
        return found | {"error_occurred": True, "error_message": f"{row.verdict}: {_reason(row)}", "warnings": []}
    assert row.ranks is not None
    bounds = row.bounds_ns
    found |= {
        "real_time": _mean(row, lambda op: None if op.times is None else op.times.mean),
        "cpu_time": _mean(row, lambda op: op.cpu_ns),
        "captured_us": None if captured is None else captured / 1e3,
        "captured_clock": None if captured is None else row.members[0][0].group.captured_clock,
        "estimated_us": estimated / 1e3,
        "estimated_us_low": None if bounds is None else bounds[0] / 1e3,
        "estimated_us_high": None if bounds is None else bounds[1] / 1e3,
        "estimated_us_shortest": None if row.shortest_ns is None else row.shortest_ns / 1e3,
        "share": estimated / total_ns if total_ns else None,
        "rank": index + 1,
        "rank_low": row.ranks[0],
        "rank_high": row.ranks[1],
        "warnings": [],
    }
    if bounds is None:
        found["estimated_us_low_reason"] = "too few samples for an interval"
    if captured is None:
        found["captured_us_reason"] = "the capture has no time for exactly these calls"
    if row.inner_ns is not None:
        found["inclusive_us"] = row.inner_ns / 1e3
    host = _mean(row, lambda op: op.host_ns)
    if host is not None:
        found["host_time"] = host
    exposed = dict.fromkeys(op.exposed for op, _calls in row.members if op.exposed)
    if exposed:
        found["device_waited"] = "; ".join(exposed)
    if all(op.on_device is False for op, _calls in row.members):
        found["launches"] = False
    return found | _graphed(row)


def measured_row(op: MeasuredOp) -> dict[str, Any]:
    """The row of an op that was just measured: without its rank and its share, which depend on those that follow."""
    row = OpRow(op.group.signature, ranks=(0, 0))
    (row.unmeasured if op.times is None else row.members).append((op, op.group.count))
    found = _row(row, 0, 0.0, None)
    later = ("family_index", "rank", "rank_low", "rank_high", "share")
    return {key: value for key, value in found.items() if key not in later}


def _graphed(row: OpRow) -> dict[str, Any]:
    """With --cuda-graph: how many of the calls were measured in graphs, why others were not, and the time of a call
    that is issued by itself."""
    inside = [op for op, _calls in row.members if op.graph_calls is not None]
    reasons = list(dict.fromkeys(op.no_graph for op, _calls in row.members if op.no_graph))
    if not inside and not reasons:
        return {}
    found: dict[str, Any] = {"graphs": len(inside), "no_graph": reasons or None}
    if len(inside) == len(row.members):
        found["eager_time"] = _mean(row, lambda op: op.eager_ns)
    return found


def _mean(row: OpRow, of: Callable[[MeasuredOp], float | None]) -> float | None:
    """The mean over a row's calls, None if unknown for all of them."""
    total = 0.0
    for op, calls in row.members:
        value = of(op)
        if value is None:
            return None
        total += value * calls
    return total / row.calls


def _of_one(row: OpRow, group_by: GroupBy | None) -> dict[str, Any]:
    if group_by is not None:
        return {}
    ((op, _calls),) = row.members or row.unmeasured
    found: dict[str, Any] = {
        "op": op.group.kernel.qualified_name,
        "ordinal": op.group.first_ordinal if op.ordinal is None else op.ordinal,
    }
    if op.measured_on:
        found["measured_on"] = op.measured_on
    if op.why:
        found["reason"] = op.why
    times = op.times
    if op.unmeasurable:
        found |= unmeasurable_fields(op.unmeasurable) | {"samples": {"real_time": op.samples}}
    if times is None:
        return found
    return found | statistics_fields(times) | {"samples_taken": times.count, "samples": {"real_time": op.samples}}


def _reason(row: OpRow) -> str:
    """Why the ops without times have none: the first one's reason, and the number of others."""
    reasons = list(dict.fromkeys(op.why for op, _calls in row.unmeasured))
    return reasons[0] + (f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else "")


_NOT_MEASURED = "not measured"
_MOST_LISTED = 20
# With --roofline; the columns are empty without it.
_WORK_HEADS = ("FLOP/s", "B/s", "of roof", "bound", "class")
_HEADS = ("rank", "estimated", "share", "interval", "with inner", "calls", "time/call", "captured", "verdict")


def progress_lines(op: MeasuredOp, place: int, of: int, columns: int) -> list[str]:
    """`[i/N]`, verdict, time per call, count, and the op, cut to so many columns: printed as soon as it is known. Below
    it, why an op was not measured."""
    time = _NOT_MEASURED if op.times is None else duration(op.times.median)
    line = printable(f"[{place}/{of}] {op.status:<12} {time:>12} x {op.group.count:<6} {op.group.signature}")
    if len(line) > columns:
        line = f"{line[: columns - 1]}…"
    return [line, *wrap(printable(op.why), columns, initial_indent="  ", subsequent_indent="  ")]


class OpReport(Report):
    def lines(self) -> Iterator[str]:
        """The rows by their share of the workload, the largest first (at most the context's `top`), then those without
        times, the sum, and the totals."""
        context = self.context
        group_by = context["group_by"]
        measured = [row for row in self.rows if "estimated_us" in row]
        shown = measured[: context["top"]]
        others = [row for row in self.rows if "estimated_us" not in row]
        yield from _aligned(
            [
                (*_HEADS, *_WORK_HEADS, group_by or "op"),
                *(_cells(row, context) for row in shown),
                *(_unmeasured(row, group_by) for row in others[:_MOST_LISTED]),
            ]
        )
        if len(others) > _MOST_LISTED:
            yield f"and {len(others) - _MOST_LISTED} more that were not measured (--benchmark-format=json lists them)"
        yield ""
        yield printable(_sum(context, shown, len(measured) - len(shown)))
        yield (
            f"distinct ops: {context['distinct_ops']} in the file, {context['matched']} matched, "
            f"{context['selected']} selected"
        )
        yield (
            f"attempted {context['attempted']} = {context['successful']} successful + {context['failed']} failed; "
            f"refused {sum(context['refused'].values())}"
        )
        for reason, count in sorted(context["refused"].items(), key=lambda pair: -pair[1]):
            yield printable(f"  {count} refused: {reason}")
        unsupported = context["unsupported"]
        if unsupported["calls"]:
            share = unsupported["share_of_device_time"]
            yield printable(
                f"unsupported in the capture, not measured: {call_count(unsupported['calls'])} "
                f"({_counted(unsupported['reasons'])}), "
                + ("of unknown device time" if share is None else f"{share:.1%} of the captured device time")
            )
        if context["captured_device_us"] is not None:
            of = context["measured_captured_device_us"] / context["captured_device_us"]
            told = f"{of:.1%} of it in the ops measured"
            traced = context["traced_device_us"]
            if traced is not None:
                share = context["measured_captured_device_us"] / traced
                told += f", {share:.1%} of the {duration(traced * 1e3)} of the whole trace"
            yield f"captured device time: {duration(context['captured_device_us'] * 1e3)}, {told}"
        yield printable(ran_on(context))
        yield printable(f"inputs    {context['inputs']}")
        yield from (printable(f"gpu       {text}") for text in gpu_lines(context["gpus"]))
        yield from (printable(f"peak      {peak_line(row)}") for row in context.get("peaks", ()))
        yield verified(printable(context["verified"]))


def _work_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Achieved rates, and where the call lies under its roof."""
    return (
        rate(row.get("flops_per_second")),
        rate(row.get("bytes_per_second")),
        share_text(row["share_of_roof"]) if "share_of_roof" in row else "-",
        row.get("bound", "-"),
        row.get("kernel_class", "-"),
    )


def _cells(row: dict[str, Any], context: dict[str, Any]) -> tuple[str, ...]:
    group_by: GroupBy | None = context["group_by"]
    ranks = sorted({row["rank_low"], row["rank_high"]})
    estimated, low, high = row["estimated_us"], row["estimated_us_low"], row["estimated_us_high"]
    left_out = row.get("not_measured", 0)
    measured = row["count"] - left_out
    reason = f" (and {call_count(left_out)} not measured: {row['reason']})" if left_out else ""
    return (
        "-".join(map(str, ranks)),
        duration(estimated * 1e3),
        "-" if row["share"] is None else share_text(row["share"]),
        "-" if low is None or not estimated else f"+-{(high - low) / estimated / 2:.1%}",
        duration(row["inclusive_us"] * 1e3) if "inclusive_us" in row else "",
        str(measured),
        duration(estimated * 1e3 / measured),
        "-" if row["captured_us"] is None else duration(row["captured_us"] * 1e3),
        "" if row["verdict"] == "ok" else row["verdict"],
        *(_work_cells(row) if context.get("roofline") else ("",) * len(_WORK_HEADS)),
        f"{_label(row, group_by)}{reason}",
    )


def _unmeasured(row: dict[str, Any], group_by: GroupBy | None) -> tuple[str, ...]:
    return (
        "-",
        _NOT_MEASURED,
        "-",
        "-",
        "",
        str(row["count"]),
        "-",
        "-",
        row["verdict"],
        *("" for _ in _WORK_HEADS),
        f"{_label(row, group_by)}: {row['reason']}",
    )


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of the table, without the columns that are empty in all rows; the last column is not padded."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return aligned(zip(*columns, strict=True))


def _label(row: dict[str, Any], group_by: GroupBy | None) -> str:
    return str(row["name"]).removeprefix("BM_op/" if group_by is None else f"BM_op/{group_by}:")


def _sum(context: dict[str, Any], shown: list[dict[str, Any]], more: int) -> str:
    """The total, the part of it that is not shown, and what it does not include."""
    if context["estimated_us"] is None:
        left_out = dict(context["not_measured_calls"])
        return f"sum: not measured: no call has a time ({_counted(left_out) or 'none was selected'})"
    total = duration(context["estimated_us"] * 1e3)
    text = f"sum: {total} in {call_count(context['calls'])}; each row is its calls times the median time of a call"
    if more:
        share = sum(row["estimated_us"] for row in shown) / (context["estimated_us"] or 1.0)
        text += f"; the {len(shown)} rows shown are {share:.1%} of it, {more} more are not shown"
    left_out = dict(context["not_measured_calls"])
    if context["unsupported"]["calls"]:
        left_out["unsupported"] = context["unsupported"]["calls"]
    if not left_out:
        return f"{text}; all calls are included"
    return f"{text}; not measured and not included: {call_count(sum(left_out.values()))} ({_counted(left_out)})"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def describe(op: MeasuredOp, reader: CaptureReader) -> Iterator[str]:
    """Each argument's name, schema type and value, and each result's shape, dtype and device, as captured and as
    returned here."""
    record = reader.record(op.group.first_ordinal if op.ordinal is None else op.ordinal)
    types = _schema_types(op.group.kernel.schema)
    shown = signature_of(record, reader, values=True).arguments
    for node, (_name, text) in zip(record.signature.args, shown, strict=True):
        yield printable(f"    {node.name}: {types.get(node.name, 'type not known')} = {text}")
    for index, value in enumerate(record.results):
        yield printable(f"    -> {index}: {_result(value, reader)}")
    if not record.results:
        unknown = (record.annotation or {}).get("results")  # an import that could not find out says why
        yield printable(
            "    -> captured: "
            + ("it raised" if record.signature.status is OpStatus.raised else str(unknown) if unknown else "nothing")
        )
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
