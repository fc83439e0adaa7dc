"""Measured ops as text: a table for people, and each op as it is measured, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from replayfmt.format.codes import OpStatus
from replayfmt.format.model import CompositeValue, TensorValue, Value
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.text import signature_of

from ..gpu_state import gpu_lines
from ..meters.meter import Quantity
from ..peaks import peak_line
from ..reports.rows import Report
from ..reports.units import call_count, duration, figure, ran_on, rate, share_text, verified
from .results import MeasuredOp
from .rows import GroupBy

_NOT_MEASURED = "not measured"
_MOST_LISTED = 20
# With --roofline; the columns are empty without it.
_WORK_HEADS = ("FLOP/s", "B/s", "of roof", "bound", "class")
_HEADS = ("rank", "estimated", "share", "interval", "with inner", "calls", "time/call", "captured", "verdict")


def progress_line(op: MeasuredOp, place: int, of: int) -> str:
    """`[i/N]`, verdict, time per call, count, and the op: printed as soon as it is known."""
    time = _NOT_MEASURED if op.times is None else duration(op.times.median)
    reason = f"  {op.why}" if op.why else ""
    return printable(f"[{place}/{of}] {op.status:<12} {time:>12} x {op.group.count:<6} {op.group.signature}{reason}")


def table_lines(report: Report) -> Iterator[str]:
    """The rows by their share of the workload, the largest first, then those without times, the sum, and the totals."""
    context = report.context
    group_by = context["group_by"]
    measured = [row for row in report.rows if "estimated_us" in row]
    others = [row for row in report.rows if "estimated_us" not in row]
    yield from _aligned(
        [
            (*_HEADS, *_WORK_HEADS, *(quantity.title for quantity in report.further), group_by or "op"),
            *(_cells(row, context, report.further) for row in measured),
            *(_unmeasured(row, group_by, report.further) for row in others[:_MOST_LISTED]),
        ]
    )
    if len(others) > _MOST_LISTED:
        yield f"and {len(others) - _MOST_LISTED} more that were not measured (--benchmark-format=json lists them)"
    yield ""
    yield printable(_sum(context, len(measured)))
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


def _cells(row: dict[str, Any], context: dict[str, Any], further: Sequence[Quantity]) -> tuple[str, ...]:
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
        *(figure(row[quantity.name]) for quantity in further),
        f"{_label(row, group_by)}{reason}",
    )


def _unmeasured(row: dict[str, Any], group_by: GroupBy | None, further: Sequence[Quantity]) -> tuple[str, ...]:
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
        *("-" for _ in further),
        f"{_label(row, group_by)}: {row['reason']}",
    )


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of the table, without the columns that are empty in all rows; the last column is not padded."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns[:-1]]
    for cells in zip(*columns, strict=True):
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        yield printable("  ".join([*aligned, cells[-1]]))


def _label(row: dict[str, Any], group_by: GroupBy | None) -> str:
    return str(row["name"]).removeprefix("BM_op/" if group_by is None else f"BM_op/{group_by}:")


def _sum(context: dict[str, Any], rows: int) -> str:
    """The total, the part of it that is not shown, and what it does not include."""
    if context["estimated_us"] is None:
        left_out = dict(context["not_measured_calls"])
        return f"sum: not measured: no call has a time ({_counted(left_out) or 'none was selected'})"
    total = duration(context["estimated_us"] * 1e3)
    text = f"sum: {total} in {call_count(context['calls'])}; each row is its calls times the median time of a call"
    if context["rows_not_shown"]:
        share = context["estimated_us_not_shown"] / context["estimated_us"] if context["estimated_us"] else 0.0
        text += f"; the {rows} rows shown are {1 - share:.1%} of it, {context['rows_not_shown']} more are not shown"
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
