"""The sections on what was measured: capture against replay, a baseline, energy."""

from __future__ import annotations

from replayfmt.benchmark.comparison.baseline import BaselineComparison
from replayfmt.format.printable import counted, printable

from .documents import Fields
from .kernel_sections import MOST_ROWS, KernelFigures, Section
from .pictures import Axis, BarPicture, BarSeries, MissingPicture, Picture
from .tables import ReportTable, TableColumn, TableRow, count_cell, figure_cell, si, text_cell

_WHOLE = "the whole capture"
_SHOWN_BARS = 30


def captured_and_replayed(figures: KernelFigures) -> Section:
    """What regions took during capture, what their replay takes, and what their isolated calls add up to."""
    command = figures.command("benchmark --benchmark-out=whole.json")
    missing = f"no benchmark of whole replays was given. Measure them with {command}, then add --benchmark=whole.json"
    isolated = _isolated_seconds(figures)
    about = [
        "Captured times include the recorder's own work, and the program's between ops. A replay runs the same ops "
        "without the program. Isolated calls, each in a loop of its own, find their inputs in the caches, or not: "
        "their sum need not be the time of the replay."
    ]
    wholes = figures.measured.wholes
    if not wholes:
        return Section("replay", "Captured and replayed", about, [MissingPicture("replay", "Times", missing)])
    names = [each.name or _WHOLE for each in wholes]

    def seconds(nanoseconds: float | None) -> float | None:
        return None if nanoseconds is None else nanoseconds / 1e9

    series = [
        BarSeries("captured", [seconds(each.captured_ns) for each in wholes]),
        BarSeries(
            "replayed, median",
            [seconds(each.median_ns) for each in wholes],
            [seconds(each.low_ns) for each in wholes],
            [seconds(each.high_ns) for each in wholes],
        ),
        BarSeries("isolated calls, summed", [None if each.name else isolated for each in wholes]),
    ]
    series = [each for each in series if any(value is not None for value in each.values)]
    rows = [
        TableRow(
            (
                text_cell(name),
                figure_cell(seconds(each.captured_ns), "s", each.reasons.get("captured", "")),
                figure_cell(seconds(each.median_ns), "s", each.reasons.get("median", "")),
                figure_cell(seconds(each.low_ns), "s", "the benchmark has no interval"),
                figure_cell(seconds(each.high_ns), "s", "the benchmark has no interval"),
                figure_cell(
                    each.median_ns / each.captured_ns if each.median_ns and each.captured_ns else None,
                    "×",
                    "one of the two times is not known",
                ),
            )
        )
        for name, each in zip(names, wholes, strict=True)
    ]
    columns = ("region", "captured", "replayed, median", "at least", "at most", "replayed / captured")
    table = ReportTable("regions", "Regions", _columns(columns), rows, None)
    notes = [] if isolated is not None else [f"Sum of isolated calls: not measured: {_no_sum(figures)}."]
    picture = BarPicture("replay", "Times", Axis("", "s"), names, series)
    return Section("replay", "Captured and replayed", about, [picture], [table], notes)


def _isolated_seconds(figures: KernelFigures) -> float | None:
    """The sum over all calls of the capture; None if one of them was not measured."""
    found = [figures.calls_by_kernel.get(each.kernel) for each in figures.kernels]
    totals = [None if each is None else each.total_ns for each in found]
    known = [total for total in totals if total is not None]
    return sum(known) / 1e9 if known and len(known) == len(totals) else None


def _no_sum(figures: KernelFigures) -> str:
    """Why the sum of isolated calls is not known."""
    if not figures.measured.any_calls:
        return figures.no_calls
    found = [figures.calls_by_kernel.get(each.kernel) for each in figures.kernels]
    without = sum(each is None or each.total_ns is None for each in found)
    return f"not all calls of {counted(without, 'kernel')} have an isolated time"


def baseline_section(comparison: BaselineComparison) -> Section:
    """Each row against that of the same name in an earlier file."""
    rows = [
        TableRow(
            (
                text_cell(row.name),
                figure_cell(None if row.before.value is None else row.before.value / 1e9, "s", row.before.reason),
                figure_cell(None if row.after.value is None else row.after.value / 1e9, "s", row.after.reason),
                figure_cell(row.ratio, "×", row.reason),
                figure_cell(row.ratio_low, "×", row.reason),
                figure_cell(row.ratio_high, "×", row.reason),
                text_cell(row.verdict, row.reason),
            )
        )
        for row in comparison.rows[:MOST_ROWS]
    ]
    table = ReportTable(
        "baseline-rows",
        "Rows",
        _columns(("row", "before", "now", "ratio", "at least", "at most", "verdict"), texts=(0, 6)),
        rows,
        3,
    )
    notes = [f"Another {printable(each)}." for each in comparison.differences]
    for title, names in (
        ("Only in the baseline", comparison.only_before),
        ("Not in the baseline", comparison.only_after),
    ):
        if names:
            more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
            notes.append(f"{title}: {'; '.join(printable(name, 200) for name in names[:10])}{more}.")
    if len(comparison.rows) > MOST_ROWS:
        notes.append(f"{len(comparison.rows) - MOST_ROWS:,} more rows are left out of the page.")
    decided = [row for row in comparison.rows if row.ratio and row.ratio_low and row.ratio_high]
    furthest = sorted(decided, key=lambda row: -max(row.ratio or 1.0, 1 / (row.ratio or 1.0)))[:_SHOWN_BARS]
    picture: Picture
    if not furthest:
        picture = MissingPicture("baseline", "Change", "no row has an interval in both files")
    else:
        bars = BarSeries(
            "",
            [(row.ratio or 1.0) - 1 for row in furthest],
            [(row.ratio_low or 1.0) - 1 for row in furthest],
            [(row.ratio_high or 1.0) - 1 for row in furthest],
        )
        title = (
            "Change" if len(furthest) == len(decided) else f"Change, the {len(furthest)} largest of {len(decided):,}"
        )
        labels = [row.name.removeprefix("BM_op/") for row in furthest]
        picture = BarPicture("baseline", title, Axis("slower is to the right", "%"), labels, [bars])
    about = [
        f"{comparison.summary().capitalize()}. Baseline: {printable(comparison.path)}. A ratio above 1 is slower now; "
        "where its interval contains 1, there is no measurable difference."
    ]
    return Section("baseline", "Compared with the baseline", about, [picture], [table], notes)


def energy_section(energy: Fields | None, figures: KernelFigures) -> Section:
    """Joules of the whole and of isolated kernels, and whether they add up."""
    title = "Energy"
    if energy is None:
        return Section("energy", title, [], [MissingPicture("energy", title, figures.no_energy)])
    parts = [(name, energy.fields(name)) for name in ("idle", "whole_model", "program") if energy.has(name)]
    parts += [(each.text("name"), each) for each in energy.rows("scopes")]
    rows = [
        TableRow(
            (
                text_cell(name.replace("_", " ")),
                count_cell(part.count("runs")),
                figure_cell(part.number("joules_per_run"), "J", _reason(part)),
                figure_cell(part.number("joules"), "J", _reason(part)),
                figure_cell(part.amount("error_joules"), "J", _reason(part)),
                figure_cell(part.amount("mean_watts"), "W", _reason(part)),
                figure_cell(part.amount("seconds"), "s", _reason(part)),
                count_cell(part.count("samples")),
            )
        )
        for name, part in parts
    ]
    columns = ("what", "runs", "a run", "joules", "± at most", "mean power", "seconds", "samples")
    isolated, comparison = energy.fields("isolated_kernels"), energy.fields("comparison")
    whole, predicted = comparison.number("whole_joules_per_run"), comparison.number("predicted_joules_per_run")
    rest = isolated.number("estimated_joules_of_the_rest")
    values = {"whole model": whole, "isolated kernels, predicted": predicted, "the rest, estimated": rest}
    known = {name: value for name, value in values.items() if value is not None}
    picture: Picture = (
        BarPicture("energy", "A run", Axis("", "J"), list(known), [BarSeries("", list(known.values()))])
        if known
        else MissingPicture("energy", "A run", _reason(comparison))
    )
    ratio = comparison.number("ratio")
    verdict = (
        f"Isolated kernels predict {si(ratio, '×')} the energy of the whole"
        if ratio is not None
        else f"Isolated kernels against the whole: not measured: {_reason(comparison)}"
    )
    about = [
        f"{verdict}; {isolated.count('measured'):,} of {isolated.count('distinct'):,} distinct kernels were measured, "
        f"{isolated.count('unmeasurable'):,} are unmeasurable, {isolated.count('not_run'):,} were not run. Idle power "
        "is in every figure."
    ]
    notes = [f"Warning: {printable(each)}." for each in energy.texts("warnings")]
    log = energy.fields("power_log")
    notes.append(f"Power log: {printable(log.text('path'))}; {printable(energy.text('method'))}.")
    return Section(
        "energy", title, about, [picture], [ReportTable("energy-parts", "Parts", _columns(columns), rows)], notes
    )


def _reason(fields: Fields) -> str:
    return fields.text("reason") if fields.has("reason") else "the report does not say"


def _columns(titles: tuple[str, ...], texts: tuple[int, ...] = (0,)) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(title, figures=place not in texts) for place, title in enumerate(titles))
