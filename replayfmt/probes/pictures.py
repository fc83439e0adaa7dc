"""Pictures of evaluations: for each kind a function that draws a result into a figure of matplotlib.

`pictures_of` gives SVG and PNG of a figure; no window is opened. The colours are those of Okabe and Ito, which
colour-blind readers can tell apart; shades of one colour differ in lightness. matplotlib is imported when a picture is
drawn.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from replayfmt.errors import LibraryMissing
from replayfmt.format.validation import in_units

from .costs import PARTS, CountsResult, LatencyResult, MemoryResult, OverheadResult
from .dmat import OTHER, UNKNOWN, WINDOWS, DmatResult
from .schedule import ScheduleResult, WarpActivity, WarpsResult
from .tables import Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
CATEGORIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY)
GREY, LIGHT = "#666666", "#DDDDDD"
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "opreplay",  # the same picture has the same bytes
    "image.interpolation": "nearest",
    "text.parse_math": False,  # names of kernels may hold dollar signs
}


def pictures_of(
    draw: Callable[[Figure], None],
    width_inches: float,
    height_inches: float,
    *,
    creator: str = "opreplay-probe",
    advice: str = "pip install 'opreplay[probe]', or leave them out with --no-picture",
) -> dict[str, bytes]:
    """What `draw` draws, as files by ending: "svg" and "png". `creator` is named in the SVG, `advice` ends the error.
    Raises LibraryMissing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LibraryMissing(f"pictures need matplotlib, which cannot be imported ({error}): {advice}") from None
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():  # type: ignore[arg-type]
        # Names may be in a script that the font does not have: boxes stand for it.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font")
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        draw(figure)
        found = {}
        for ending, metadata in (("svg", {"Date": None, "Creator": creator}), ("png", {"Software": None})):
            target = BytesIO()
            figure.savefig(target, format=ending, metadata=metadata)
            found[ending] = target.getvalue()
    return found


def thousands(*axes: Any) -> None:
    """Numbers on axes as 12,000."""
    from matplotlib.ticker import StrMethodFormatter

    for axis in axes:
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def patches(colours: Iterable[str]) -> list[Any]:
    """Squares of these colours, for a legend."""
    from matplotlib.patches import Patch

    return [Patch(color=colour) for colour in colours]


def legend(figure: Figure, names: list[str], handles: Sequence[Any], columns: int = 4) -> None:
    """Below the picture."""
    figure.legend(handles=list(handles), labels=names, loc="outside lower center", ncols=columns)


def empty(axes: Axes, why: str) -> None:
    """In the place of what cannot be drawn: why."""
    axes.text(0.5, 0.5, f"not measured: {why}", ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def shortened(name: str, limit: int = 40) -> str:
    """A name that fits a label: its beginning and its end."""
    return name if len(name) <= limit else f"{name[: limit * 2 // 3]}…{name[-(limit // 3 - 1) :]}"


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
    legend(figure, [shortened(probe) for probe in probes], patches(colours[probe] for probe in probes))


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
    kinds = [("the program's peak", BLUE), ("most that probes needed in a launch", ORANGE)] if result.runs else []
    kinds += [("predicted", GREEN)] if result.predictions else []
    legend(figure, [name for name, _colour in kinds], patches(colour for _name, colour in kinds), 3)


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
    legend(figure, [*parts, "Nsight Compute"], [*patches(parts.values()), ncu_patch])


def _amount(count: int) -> str:
    """Bytes as people read them."""
    return in_units(count, ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")))


def _plain_powers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.xaxis.set_major_locator(LogLocator(2, numticks=9))
    axes.xaxis.set_minor_locator(LogLocator(2, numticks=100))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: _amount(round(value))))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda _value, _place: ""))
    axes.tick_params(axis="x", which="minor", length=2)


LEVELS = 5


def draw_dmat(result: DmatResult, figure: Figure) -> None:
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
    thousands(axes.xaxis, axes.yaxis)
    handles = patches(colours_of(result.owners))
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
    thousands(axes.xaxis, axes.yaxis)


def _draw_distances(result: DmatResult, axes: Axes) -> None:
    axes.set_title("Reuse distance")
    _draw_distribution(result.distances, axes, "no page was accessed\nat two clocks")
    axes.set(xlabel="other pages since the last access", ylabel="accesses")


def _draw_distribution(found: Distribution, axes: Axes, none: str) -> None:
    if not found.count:
        empty(axes, none)
        return
    values = found.values
    bins = np.unique(np.linspace(0, int(values[-1]) + 1, min(40, int(values[-1]) + 1) + 1))
    counts, _ = np.histogram(values, bins, weights=found.counts)
    axes.stairs(counts, bins, color=BLUE, fill=True, alpha=0.7)
    axes.locator_params(axis="x", nbins=5, integer=True)
    thousands(axes.xaxis, axes.yaxis)


def draw_counts(result: CountsResult, figure: Figure) -> None:
    """A distribution for each thing that threads counted."""
    every = figure.subplots(1, len(result.distributions), squeeze=False)[0]
    for axes, (title, found) in zip(every, result.distributions.items(), strict=True):
        axes.set_title(title)
        _draw_distribution(found, axes, "nothing was recorded")
        axes.set(xlabel=title if "cycles" in title else f"{title} of a thread", ylabel="how many")


_MOST_BARS = 1500


def draw_schedule(result: ScheduleResult, figure: Figure) -> None:
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
    axes.legend(
        handles=patches((BLUE, SKY, ORANGE)),
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
    thousands(axes.xaxis, axes.yaxis)


_POINTS = 400
_COLOURS = (BLUE, ORANGE)


def draw_warps(result: WarpsResult, figure: Figure) -> None:
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
        thousands(here.xaxis, here.yaxis)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    legend(figure, labels, handles, 2)


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
