"""The picture of a schedule: blocks on each SM over time, the slots of one SM, and the distribution of the costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replayfmt.probes.evaluations.schedule import ScheduleResult

from .style import BLUE, LIGHT, ORANGE, SKY, VERMILION, empty, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 10.0, 8.5
_MOST_BARS = 1500


def draw_schedule(result: ScheduleResult, figure: Figure) -> None:
    """Draw a result."""
    grid = figure.add_gridspec(2, 2, height_ratios=(1.3, 1), width_ratios=(1.7, 1))
    _draw_sms(result, figure.add_subplot(grid[0, :]), figure)
    _draw_slots(result, figure.add_subplot(grid[1, 0]))
    _draw_costs(result, figure.add_subplot(grid[1, 1]))


def _draw_sms(result: ScheduleResult, axes: Axes, figure: Figure) -> None:
    most = max(1.0, float(np.ceil(result.occupied.max())))
    image = axes.imshow(
        result.occupied,
        aspect="auto",
        origin="lower",
        extent=(0, max(result.span_cycles, 1), -0.5, len(result.sms) - 0.5),
        cmap="cividis",
        vmin=0,
        vmax=most,
    )
    steps = np.unique(np.linspace(0, len(result.sms) - 1, min(len(result.sms), 12)).astype(int))
    axes.set_yticks(steps, [str(result.sms[step]) for step in steps])
    axes.set(title="Blocks on each SM", xlabel="cycles since the first start on the same SM", ylabel="SM")
    thousands(axes.xaxis)
    bar = figure.colorbar(image, ax=axes, pad=0.01, label="blocks at once (mean)")
    if most <= 8:
        bar.set_ticks(list(range(int(most) + 1)))


def _draw_slots(result: ScheduleResult, axes: Axes) -> None:
    here = result.costliest
    start, end = here.blocks.start[:_MOST_BARS], here.blocks.end[:_MOST_BARS]
    slot, cost = here.slot[:_MOST_BARS], here.cost[:_MOST_BARS]
    gaps = cost > 0
    turns = np.array([int((slot[:place] == slot[place]).sum()) for place in range(len(slot))])
    shades = np.where(turns % 2 == 0, BLUE, SKY)
    axes.barh(slot, end - start, left=start, height=0.8, color=shades, linewidth=0)
    axes.barh(slot[gaps], cost[gaps], left=(start - cost)[gaps], height=0.8, color=ORANGE, linewidth=0)
    rest = len(here.blocks.start) - len(start)
    title = f"Slots of SM {here.blocks.sm}, whose costs are the largest"
    axes.set(
        title=title + (f" (its first {_MOST_BARS:,} blocks)" if rest else ""),
        xlabel="cycles since the first start",
        ylabel="slot",
    )
    axes.set_yticks(np.unique(np.linspace(0, here.slots - 1, min(here.slots, 9)).astype(int)))
    thousands(axes.xaxis)
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=BLUE), Patch(color=SKY), Patch(color=ORANGE)],
        labels=["block", "the next block", "cost: the slot waits"],
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
    )


def _draw_costs(result: ScheduleResult, axes: Axes) -> None:
    costs = result.costs
    axes.set_title("Cost of a block")
    if not costs.count:
        empty(axes, "no slot ran\na second block")
        return
    axes.hist(costs.values, bins=min(40, max(5, len(costs.values))), weights=costs.counts, color=BLUE, edgecolor=LIGHT)
    axes.set_yscale("log")
    axes.set(xlabel="cycles from the end before it to its start", ylabel="blocks (logarithmic)")
    axes.set_ylim(bottom=0.7)
    for share, name, style in ((0.5, "median", "-"), (0.99, "99 %", "--")):
        value = costs.quantile(share)
        axes.axvline(value, color=VERMILION, linestyle=style, label=f"{name}: {value:,}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    axes.locator_params(axis="x", nbins=5, integer=True)
    thousands(axes.xaxis)
    thousands(axes.yaxis)
