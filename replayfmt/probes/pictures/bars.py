"""The pictures that are bars: what probes cost (`overhead`), their memory, and the latency they expose."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from replayfmt.probes.evaluations.latency import PARTS, LatencyResult
from replayfmt.probes.evaluations.memory import MemoryResult
from replayfmt.probes.evaluations.overhead import OverheadResult

from .style import BLUE, CATEGORIES, GREEN, GREY, LIGHT, ORANGE, SKY, VERMILION, empty, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 6.0
MOST_BARS = 24


def draw_overhead(result: OverheadResult, figure: Figure) -> None:
    """Slowdown and registers of each kernel; of many, those that lost most."""
    kernels = sorted(result.kernels, key=lambda each: -statistics.fmean(each.slowdowns) if each.slowdowns else 0.0)[
        :MOST_BARS
    ]
    probes = list(dict.fromkeys(each.probe for each in kernels))
    colours = {probe: CATEGORIES[place % len(CATEGORIES)] for place, probe in enumerate(probes)}
    one, other = figure.subplots(1, 2, sharey=True, width_ratios=(1.3, 1))
    rows = np.arange(len(kernels))
    for row, each in enumerate(kernels):
        if not each.slowdowns:
            one.text(0.02, row, " not measured", va="center", color=GREY, fontsize=7)
            continue
        spread = statistics.stdev(each.slowdowns) if len(each.slowdowns) > 1 else None
        mean = statistics.fmean(each.slowdowns)
        one.barh(row, mean, color=colours[each.probe], xerr=spread, capsize=2, height=0.7)
        one.text(mean + (spread or 0), row, f"  {mean:.2f}×", va="center", fontsize=8)
    one.axvline(1, color=GREY, linestyle="--", linewidth=1)
    one.set_yticks(rows, [shortened(each.kernel, 30) for each in kernels])
    one.invert_yaxis()
    one.margins(x=0.18)
    left = len(result.kernels) - len(kernels)
    one.set(
        title="Slowdown" + (f" (the largest {MOST_BARS} of {len(result.kernels)})" if left else ""),
        xlabel="time with the probe / without (bar: standard deviation)",
    )
    for row, each in enumerate(kernels):
        before, after = (figures.registers if figures else None for figures in (each.before, each.after))
        if before is None or after is None:
            other.text(0.02, row, " not measured", va="center", color=GREY, fontsize=7)
            continue
        other.barh(row, min(before, after), color=LIGHT, height=0.7)
        other.barh(row, abs(after - before), left=min(before, after), color=colours[each.probe], height=0.7)
        other.text(max(before, after), row, f"  {after - before:+d}", va="center", fontsize=8)
    other.margins(x=0.15)
    other.set(title="Registers of a thread", xlabel="registers (grey: without the probe)")
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=colours[probe]) for probe in probes],
        labels=[shortened(probe) for probe in probes],
        loc="outside lower center",
        ncols=4,
    )


def draw_memory(result: MemoryResult, figure: Figure) -> None:
    """The program's peak and what probes needed, on a logarithmic axis."""
    axes = figure.subplots()
    bars: list[tuple[str, list[tuple[int | None, str]]]] = [
        (f"{each.model}/{each.test}".strip("/"), [(each.peak_bytes, BLUE), (each.probe_bytes, ORANGE)])
        for each in result.runs
    ] + [(each.name, [(each.nbytes, GREEN)]) for each in result.predictions]
    bars = bars[:MOST_BARS]
    height = 0.38
    known = [value for _name, each in bars for value, _colour in each if value]
    floor = min(known, default=1) / 4
    for row, (_name, each) in enumerate(bars):
        for place, (value, colour) in enumerate(each):
            at = row + (place - (len(each) - 1) / 2) * height
            axes.barh(at, value or 0, color=colour, height=height * 0.95)
            text = "  not measured" if value is None else f"  {_amount(value)}"
            axes.text(value or floor, at, text, va="center", fontsize=8, color=GREY if value is None else "black")
    axes.set_xscale("log")
    axes.set_xlim(floor, max(known, default=1) * 12)
    axes.set_yticks(range(len(bars)), [shortened(name, 34) for name, _each in bars])
    axes.invert_yaxis()
    axes.set(title="Memory of programs and of their probes", xlabel="bytes (logarithmic)")
    _plain_powers(axes)
    from matplotlib.patches import Patch

    kinds = [("the program's peak", BLUE), ("most that probes needed in a launch", ORANGE)] if result.runs else []
    kinds += [("predicted", GREEN)] if result.predictions else []
    figure.legend(
        handles=[Patch(color=colour) for _name, colour in kinds],
        labels=[name for name, _colour in kinds],
        loc="outside lower center",
        ncols=3,
    )


def draw_latency(result: LatencyResult, figure: Figure) -> None:
    """Prologue, kernel and epilogue stacked, beside Nsight Compute's."""
    axes = figure.subplots()
    probes = result.probes[:MOST_BARS]
    parts = dict(zip(PARTS, (SKY, BLUE, ORANGE), strict=True))
    tallest = max((value for each in probes for value in [each.parts_sum or 0, each.ratios["ncu"] or 0]), default=1)
    for place, each in enumerate(probes):
        below = 0.0
        for part, colour in parts.items():
            value = each.ratios[part] or 0.0
            axes.bar(place - 0.2, value, bottom=below, color=colour, width=0.36)
            below += value
        total = each.parts_sum
        axes.text(place - 0.2, below, f"{total:.2f}×" if total is not None else "not all\nmeasured", ha="center",
                  va="bottom", fontsize=8)  # fmt: skip
        ncu = each.ratios["ncu"]
        axes.bar(place + 0.2, ncu or 0, color=VERMILION, width=0.36, hatch="//", edgecolor="white", linewidth=0)
        text = f"{ncu:.2f}×" if ncu is not None else "not\nmeasured"
        colour = GREY if ncu is None else "black"  # above the dashed line where there is no bar
        axes.text(place + 0.2, 1.05 if ncu is None else ncu, text, ha="center", va="bottom", fontsize=8, color=colour)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
    if tallest <= 0:
        empty(axes, "the file has no time")
    axes.set_xticks(range(len(probes)), [shortened(each.probe, 18) for each in probes])
    axes.set(title="Exposed latency", ylabel="time / the original's (dashed: 1)")
    axes.margins(y=0.1)
    from matplotlib.patches import Patch

    ncu_patch = Patch(facecolor=VERMILION, hatch="//", edgecolor="white")
    figure.legend(
        handles=[*(Patch(color=colour) for colour in parts.values()), ncu_patch],
        labels=[*parts, "Nsight Compute"],
        loc="outside lower center",
        ncols=4,
    )


def _amount(count: int) -> str:
    """Bytes as people read them."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _plain_powers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.xaxis.set_major_locator(LogLocator(2, numticks=9))
    axes.xaxis.set_minor_locator(LogLocator(2, numticks=100))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: _amount(round(value))))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda _value, _place: ""))
    axes.tick_params(axis="x", which="minor", length=2)
