"""The picture of warps: active ones over time with the tail, progress, throughput, and how long they took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayfmt.probes.evaluations.warps import WarpActivity, WarpsResult

from .style import BLUE, ORANGE, shortened, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 7.5
_POINTS = 400
_COLOURS = (BLUE, ORANGE)


def draw_warps(result: WarpsResult, figure: Figure) -> None:
    """Draw a result."""
    axes = figure.subplots(2, 2)
    for each, colour in zip(result.recordings, _COLOURS, strict=False):
        _draw(each, colour, axes)
    for place, (title, unit) in enumerate(
        [("Active warps (shaded: the tail)", "warps"), ("Progress", "finished, % of all warps"),
         ("Throughput", "warps finished in 1,000 cycles"), ("Elapsed cycles of a warp", "warps (logarithmic)")]
    ):  # fmt: skip
        here = axes.flat[place]
        here.set(title=title, ylabel=unit, xlabel="cycles of a warp" if place == 3 else "cycles since the first start")
        here.set_ylim(bottom=0 if place != 3 else 0.7)
        here.locator_params(axis="x", nbins=6)
        thousands(here.xaxis)
        thousands(here.yaxis)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


def _draw(each: WarpActivity, colour: str, axes: Any) -> None:
    name = shortened(each.name)
    edges = np.linspace(0, len(each.active), min(_POINTS, len(each.active)) + 1).astype(int)
    if len(edges) < 2:
        edges = np.array([0, 1])
    cycles = edges * each.tick_cycles
    sums = np.concatenate([[0], np.cumsum(each.active)])
    active = np.diff(sums[np.minimum(edges, len(sums) - 1)]) / np.diff(edges)
    finished = np.concatenate([[0], each.finished])[np.minimum(edges, len(each.finished))]
    axes.flat[0].stairs(active, cycles, color=colour, label=f"{name} ({each.warps:,} warps)", linewidth=1.5)
    if each.tail_start_cycles < each.span_cycles:
        axes.flat[0].axvspan(each.tail_start_cycles, each.span_cycles, color=colour, alpha=0.18, linewidth=0)
    axes.flat[1].plot(cycles, 100 * finished / max(1, each.warps), color=colour)
    _draw_throughput(axes.flat[2], cycles, finished, colour)
    low, high = int(each.elapsed.values[0]), int(each.elapsed.values[-1])
    bins = np.linspace(low, high + 1, min(60, max(10, high - low)) + 1)
    counts, _ = np.histogram(each.elapsed.values, bins, weights=each.elapsed.counts)
    axes.flat[3].set_yscale("log")
    axes.flat[3].stairs(np.maximum(counts, 0.1), bins, color=colour, fill=True, alpha=0.35, baseline=0.1)
    axes.flat[3].stairs(np.maximum(counts, 0.1), bins, color=colour, baseline=0.1)


def _draw_throughput(axes: Axes, cycles: Any, finished: Any, colour: str) -> None:
    """In at most 60 steps: single warps would be spikes."""
    chosen = np.unique(np.linspace(0, len(cycles) - 1, 61).astype(int))
    rate = 1000 * np.diff(finished[chosen]) / np.maximum(1, np.diff(cycles[chosen]))
    axes.stairs(rate, cycles[chosen], color=colour, linewidth=1.5)
