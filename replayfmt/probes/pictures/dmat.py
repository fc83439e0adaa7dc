"""The picture of memory accesses: a map of pages over time in the colours of tensors, the working set, reuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replayfmt.probes.evaluations.dmat import OTHER, UNKNOWN, WINDOWS, DmatResult

from .style import BLUE, CATEGORIES, GREY, empty, shortened, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 8.5
LEVELS = 5


def draw_dmat(result: DmatResult, figure: Figure) -> None:
    """Draw a result."""
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1), width_ratios=(1.7, 1))
    _draw_map(result, figure.add_subplot(grid[0, :]))
    _draw_working_set(result, figure.add_subplot(grid[1, 0]))
    _draw_distances(result, figure.add_subplot(grid[1, 1]))


def colours_of(owners: tuple[str, ...]) -> list[str]:
    """One for each; the grey of what no tensor owns is no tensor's."""
    found, free = [], iter(CATEGORIES)
    for owner in owners:
        found.append(GREY if owner == UNKNOWN else "#000000" if owner == OTHER else next(free))
    return found


def shades(density: Any) -> Any:
    """The depth of each cell from 0 (no access) to LEVELS, by the quantiles of the cells of its owner that have any."""
    depth = np.zeros(density.shape, np.int64)
    for layer, counts in enumerate(density):
        if (counts > 0).any():
            limits = np.quantile(counts[counts > 0], np.linspace(0, 1, LEVELS + 1)[1:-1])
            depth[layer] = np.where(counts > 0, 1 + np.searchsorted(limits, counts, side="left"), 0)
    return depth


def _draw_map(result: DmatResult, axes: Axes) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    depth = shades(result.density)
    most = result.density.argmax(axis=0)  # of several owners in one cell, the one with most accesses
    strength = np.take_along_axis(depth, most[None], 0)[0] / LEVELS
    base = np.array([to_rgb(each) for each in colours_of(result.owners)])[most]
    strength = np.where(strength > 0, 0.2 + 0.8 * strength, 0)[..., None]
    image = 1 - strength * (1 - base)
    axes.imshow(image, aspect="auto", origin="lower", extent=(0, result.span_cycles, 0, result.pages))
    axes.set(
        title="Density of memory accesses (darker: more, by fifths of the cells of each tensor)",
        xlabel="cycles since the first access",
        ylabel="touched pages, by address",
    )
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    handles = [Patch(color=colour) for colour in colours_of(result.owners)]
    axes.legend(
        handles, [shortened(name) for name in result.owners], ncols=min(4, len(handles)), loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
    )  # fmt: skip


def _draw_working_set(result: DmatResult, axes: Axes) -> None:
    axes.stairs(result.working_set, np.linspace(0, result.span_cycles, WINDOWS + 1), color=BLUE, fill=True, alpha=0.7)
    axes.set(
        title=f"Working set (in windows of {result.span_cycles / WINDOWS:,.0f} cycles)",
        xlabel="cycles since the first access",
        ylabel="pages",
    )
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", nbins=6)
    thousands(axes.xaxis)
    thousands(axes.yaxis)


def _draw_distances(result: DmatResult, axes: Axes) -> None:
    axes.set_title("Reuse distance")
    if not result.distances.count:
        empty(axes, "no page was accessed\nat two clocks")
        return
    values = result.distances.values
    bins = np.unique(np.linspace(0, int(values[-1]) + 1, min(40, int(values[-1]) + 1) + 1))
    counts, _ = np.histogram(values, bins, weights=result.distances.counts)
    axes.stairs(counts, bins, color=BLUE, fill=True, alpha=0.7)
    axes.set(xlabel="other pages since the last access", ylabel="accesses")
    axes.locator_params(axis="x", nbins=5, integer=True)
    thousands(axes.xaxis)
    thousands(axes.yaxis)
