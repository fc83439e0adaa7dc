"""The console's table of a benchmark: what was run, a row for each region and repetition, and its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replayfmt.format.printable import counted, printable

from ..gpu_state import gpu_lines
from ..meters.meter import Quantity
from .rows import Report
from .units import duration, figure, ran_on, rate, verified

# If the output is not a terminal, lines are not wrapped: they are for other programs and for files.
_UNLIMITED = 10_000


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report to stdout, or to `console`."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNLIMITED
    with console.capture() as printed:  # rich would otherwise set the exit code for a closed pipe
        _print(report, console)
    console.file.write(printed.get())
    console.file.flush()


def _print(report: Report, console: Console) -> None:
    context = report.context
    _line(console, f"capture   {context['capture']} (session {context['capture_session']})")
    _line(console, ran_on(context))
    _line(console, verified(context["verified"]))
    _line(console, f"inputs    {context['inputs']}")
    for text in gpu_lines(context.get("gpus", ())):
        _line(console, f"gpu       {text}")
    for text in context.get("substitution_check", ()):
        _line(console, f"checked   {text.strip()}")
    console.print()
    console.print(_table(report))
    console.print()
    for row in report.rows:
        if row.get("repetition_index") == 0:
            _line(console, _captured(row))
        if row.get("graph"):
            _line(console, _graph(row))
        if row.get("median_real_time_low") is not None:
            low, high = duration(row["median_real_time_low"]), duration(row["median_real_time_high"])
            half = "" if row["median_half_width"] is None else f" (+-{row['median_half_width']:.1%})"
            _line(console, f"{row['name']}: the median is between {low} and {high} with 95% confidence{half}")
        if row.get("iqr_real_time") is not None:
            _line(console, _spread(row))
    for quantity in report.further:
        reasons = {reason for row in report.rows if (reason := row.get(f"{quantity.name}_reason"))}
        for reason in sorted(reasons):
            _line(console, f"{quantity.name}: not measured: {reason}")
    for warning in report.warnings():
        _line(console, f"WARNING: {warning}", "yellow")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style), soft_wrap=True)


def _captured(row: dict[str, Any]) -> str:
    if row["captured_time"] is None:
        return f"{row['run_name']}: time under capture not measured: {row['captured_time_reason']}"
    passes = f" in {row['passes']} passes" if row["passes"] > 1 else ""
    return (
        f"{row['run_name']}: took {duration(row['captured_time'])}{passes} during capture, including the "
        f"recorder's own work"
    )


def _graph(row: dict[str, Any]) -> str:
    """What a launch of a graph stands for, and what it saves."""
    return (
        f"{row['name']}: launched as one graph; op by op it takes {duration(row['eager_time'])} (compared: "
        f"{row['graph_compared']})"
    )


def _spread(row: dict[str, Any]) -> str:
    """The middle half of the iterations, and how many are far from it."""
    outliers = row["outliers_low"] + row["outliers_high"]
    told = (
        f"{counted(outliers, 'outlier')} ({row['outliers_low']} low, {row['outliers_high']} high), counted in every "
        "figure"
        if outliers
        else "no outliers"
    )
    quartiles = f"{duration(row['first_quartile_real_time'])} to {duration(row['third_quartile_real_time'])}"
    return f"{row['name']}: half of the iterations took {quartiles} (IQR {duration(row['iqr_real_time'])}); {told}"


def _table(report: Report) -> Table:
    rows = report.rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    host = any("host_time" in row for row in rows)
    table.add_column("Benchmark", no_wrap=True)
    names = [
        "Real mean",
        "CPU time",
        *(["Host time"] if host else []),
        "Iterations",
        "Median",
        "Std. dev.",
        "Minimum",
        "Ops/s",
        *(quantity.title for quantity in report.further),
    ]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row, host, report.further)))
    return table


def _cells(row: dict[str, Any], host: bool, further: Sequence[Quantity]) -> list[str]:
    """One row. An aggregate has no figures over iterations, and `_cv` is a ratio for every figure in its row."""
    share = row.get("aggregate_unit") == "percentage"

    def shown(name: str) -> str:
        if name not in row:
            return ""
        if share:
            return "-" if row[name] is None else f"{row[name]:.2%}"
        return rate(row[name]) if name == "ops_per_second" else duration(row[name])

    def counted(name: str) -> str:
        return shown(name) if share or name not in row else figure(row[name])

    return [
        printable(row["name"]),
        shown("real_time"),
        shown("cpu_time"),
        *([shown("host_time")] if host else []),
        str(row["iterations"]),
        shown("median_real_time"),
        shown("stddev_real_time"),
        shown("min_real_time"),
        shown("ops_per_second"),
        *(counted(quantity.name) for quantity in further),
    ]
