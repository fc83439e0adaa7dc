"""The pictures of a report as files, SVG and PNG, which matplotlib draws.

The folder is refused early if it cannot be written; then all of its files are written, or none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replayfmt.benchmark.result_files import OutputFile, output_file, refuse_existing
from replayfmt.errors import CaptureFailed, UsageError
from replayfmt.format.validation import printable
from replayfmt.probes.pictures import GREY, LIGHT, legend, patches, pictures_of, shortened

from .contents import ReportContents
from .pictures import (
    CATEGORIES,
    NOT_MEASURED,
    OTHERS,
    Axis,
    BarPicture,
    Drawn,
    MissingPicture,
    ScatterPicture,
    StepPicture,
    TimelinePicture,
    colour_of,
    si,
)
from .timelines import Bars, merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH_INCHES = 10.0
_MOST_LABELS = 40
_BARS_OF_A_LANE = 500  # about three pixels of a PNG for each
_MOST_PATHS = 4000  # beyond, bars are pixels in the SVG, too
_NAMED_POINTS = 12
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Plot:
    """A picture to draw, `title` so that it says on its own what it is."""

    title: str
    capture: str
    picture: Drawn


def plots_of(contents: ReportContents) -> tuple[list[Plot], list[MissingPicture]]:
    """What there is to draw, and what there is not, in the order of the page."""
    plots, missing = [], []
    for section in contents.sections:
        for picture in section.pictures:
            if isinstance(picture, MissingPicture):
                missing.append(picture)
                continue
            title = section.title
            if picture.title != title:
                title += f": {picture.title[:1].lower()}{picture.title[1:]}"
            plots.append(Plot(title, contents.title, picture))
    return plots, missing


def draw_plots(plots: list[Plot]) -> dict[str, bytes]:
    """The files by name: the picture's with `.svg` and `.png`. Raises LibraryMissing."""
    found = {}
    for each in plots:
        draw, height = _drawing(each.picture)
        made = pictures_of(
            partial(_draw, each, draw),
            _WIDTH_INCHES,
            height,
            creator="opreplay-report",
            advice="pip install 'opreplay[report]', or leave out --plots",
        )
        found.update({f"{each.picture.name}.{ending}": content for ending, content in made.items()})
    return found


def _drawing(picture: Drawn) -> tuple[Callable[[Axes, Figure], None], float]:
    """What draws a picture, and its height in inches."""
    if isinstance(picture, BarPicture):
        rows = min(len(picture.labels), _MOST_LABELS) * max(1.0, len(picture.series) * 0.7)
        return partial(_bars, picture), 1.3 + 0.3 * rows
    if isinstance(picture, ScatterPicture):
        return partial(_scatter, picture), 6.0
    if isinstance(picture, StepPicture):
        return partial(_steps, picture), 4.5
    return partial(_timeline, picture), 1.8 + 0.4 * len(picture.timeline.lanes)


def _draw(plot: Plot, draw: Callable[[Axes, Figure], None], figure: Figure) -> None:
    axes = figure.subplots()
    draw(axes, figure)
    axes.set_title(plot.title + axes.get_title(loc="left"), loc="left")
    axes.set_title(_label(plot.capture, 36), loc="right", color=GREY, fontsize=8)


def _bars(picture: BarPicture, axes: Axes, figure: Figure) -> None:
    labels = picture.labels[:_MOST_LABELS]
    rows = np.arange(len(labels))
    height = 0.8 / max(1, len(picture.series))
    for place, series in enumerate(picture.series):
        at = rows + (place - (len(picture.series) - 1) / 2) * height
        low, high = (list(ends) or [None] * len(series.values) for ends in (series.low, series.high))
        for row, value in enumerate(series.values[: len(labels)]):
            if value is None:
                axes.text(0, at[row], f"  {NOT_MEASURED}", va="center", color=GREY, fontsize=7)
                continue
            axes.barh(at[row], value, color=colour_of(place), height=height * 0.92)
            least, most = low[row], high[row]
            end = value
            if least is not None and most is not None:
                ends = [[max(0.0, value - least)], [max(0.0, most - value)]]
                axes.errorbar(value, at[row], xerr=ends, color="black", capsize=2, elinewidth=1)
                end = max(value, most) if value >= 0 else min(value, least)
            text = f"{value:+.1%}" if picture.axis.unit == "%" else _amount(value, picture.axis)
            side = {"ha": "left", "text": f"  {text}"} if value >= 0 else {"ha": "right", "text": f"{text}  "}
            axes.annotate(side["text"], (end, at[row]), ha=side["ha"], va="center", fontsize=8)
    axes.set_yticks(rows, [_label(label, 44) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.margins(x=0.12)
    _format(axes, "x", picture.axis)
    if min((value or 0.0 for each in picture.series for value in each.values), default=0.0) < 0:
        axes.axvline(0, color=GREY, linewidth=1)
    if len(picture.labels) > len(labels):
        axes.set_title(f" (the first {len(labels)} of {len(picture.labels):,})", loc="left")
    if len(picture.series) > 1:
        names = [each.name for each in picture.series]
        _legend(figure, names, patches(map(colour_of, range(len(names)))))


def _scatter(picture: ScatterPicture, axes: Axes, figure: Figure) -> None:
    for place, points in enumerate(picture.points):
        axes.scatter(points.x, points.y, color=colour_of(place), s=36, alpha=0.8, linewidth=0, zorder=3)
    for line in picture.lines:
        axes.plot(line.x, line.y, color=OTHERS, linewidth=2, zorder=2)
        end = (line.x[-1], line.y[-1])
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": GREY}
        axes.annotate(_label(line.name, 60), end, (0, 4), **style)
    axes.set(xscale="log", yscale="log")
    for name, axis in (("x", picture.x), ("y", picture.y)):
        values = [value for each in chain(picture.points, picture.lines) for value in getattr(each, name)]
        if values:
            getattr(axes, f"set_{name}lim")(min(values) / 2, max(values) * 2)
        _format(axes, name, axis)
    highest: dict[str, tuple[float, float]] = {}
    for points in picture.points:
        for x, y, label in zip(points.x, points.y, points.labels, strict=True):
            kernel = label.partition("(")[0]
            if y > highest.get(kernel, (0.0, 0.0))[1]:
                highest[kernel] = (x, y)
    for kernel, place_of in sorted(highest.items(), key=lambda each: -each[1][1])[:_NAMED_POINTS]:
        axes.annotate(_label(kernel, 30), place_of, (5, 4), textcoords="offset points", fontsize=7)
    names = [points.name or "operator" for points in picture.points]
    _legend(figure, names, patches(map(colour_of, range(len(names)))))


def _steps(picture: StepPicture, axes: Axes, figure: Figure) -> None:
    for place, line in enumerate(picture.lines):
        dash = _DASHES[place // len(CATEGORIES) % len(_DASHES)]
        width = 1.5 if len(line.x) < 1000 else 0.8
        axes.step(line.x, line.y, where="post", color=colour_of(place), linestyle=dash, linewidth=width)
        if len(picture.lines) == 1:
            axes.fill_between(line.x, line.y, step="post", color=colour_of(place), alpha=0.25, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    if picture.regions:
        axes.margins(y=0.12)  # room for the names
    for place, region in enumerate(picture.regions):
        axes.axvspan(region.first, region.last, color=LIGHT, alpha=0.5 if place % 2 else 0.25, linewidth=0, zorder=0)
        middle = ((region.first + region.last) / 2, 1)
        style: dict[str, Any] = {
            "xycoords": axes.get_xaxis_transform(),
            "textcoords": "offset points",
            "ha": "center",
            "va": "top",
        }
        axes.annotate(region.name, middle, (0, -4), color=GREY, fontsize=8, **style)
    _format(axes, "x", picture.x)
    _format(axes, "y", picture.y)
    _legend(figure, [each.name for each in picture.lines], axes.lines)


def _timeline(picture: TimelinePicture, axes: Axes, figure: Figure) -> None:
    timeline = picture.timeline
    lanes = len(timeline.lanes)
    whole = max((int(bars.end.max()) for bars in (timeline.bars, timeline.scopes) if len(bars)), default=1) or 1
    scopes, ops = (merged(bars, _BARS_OF_A_LANE * lanes) for bars in (timeline.scopes, timeline.bars))
    colours = {name: colour_of(place) for place, name in enumerate(picture.coloured)}
    _bars_of_time(axes, scopes, whole, [LIGHT] * len(scopes), edgecolor="white")
    _bars_of_time(axes, ops, whole, [colours.get(name, OTHERS) for name in ops.name.tolist()], linewidth=0)
    room = whole / (_WIDTH_INCHES * 0.8) * 0.07  # of a character
    for lane, start, end, name, count in zip(
        scopes.lane.tolist(), scopes.start.tolist(), scopes.end.tolist(), scopes.name.tolist(), scopes.count.tolist(),
        strict=True,
    ):  # fmt: skip
        text = timeline.names[name].rpartition("/")[2] if count == 1 else f"{count} scopes"
        if len(text) * room < end - start:
            axes.text((start + end) / 2e9, lane, text, ha="center", va="center", fontsize=7)
    for pause in timeline.pauses:
        axes.axvspan(pause.start / 1e9, pause.end / 1e9, color=LIGHT, zorder=0)
    axes.set_yticks(range(lanes), [_label(lane, 34) for lane in timeline.lanes])
    axes.set_ylim(lanes - 0.5, -0.5)
    axes.set_xlim(0, whole / 1e9)
    devices = any(not lane.startswith("thread ") for lane in timeline.lanes)
    more = {
        "timeline": "; on devices a bar begins when the host issued the op" if devices else "",
        "timeline-isolated": " if each call followed the one before",
    }.get(picture.name, "")
    if timeline.pauses:
        more += "; times without an op are narrower, in grey"
    _format(axes, "x", Axis(f"since the first op or scope{more}", "s"))
    if len(ops) < len(timeline.bars):
        axes.set_title(" (neighbours share a bar, coloured as the longest of them)", loc="left")
    shown = {timeline.names[name]: colour for name, colour in colours.items()}
    if set(ops.name.tolist()) - set(picture.coloured):
        shown["other kernels"] = OTHERS
    _legend(figure, list(shown), patches(shown.values()))


def _bars_of_time(axes: Axes, bars: Bars, whole: int, colours: list[str], **style: Any) -> None:
    """Each at least as wide as a pixel."""
    from matplotlib.collections import PolyCollection

    if not len(bars):
        return
    start, top = bars.start / 1e9, bars.lane - 0.4
    end, bottom = start + np.maximum(bars.end - bars.start, whole / 1200) / 1e9, bars.lane + 0.4
    corners = np.stack([start, top, start, bottom, end, bottom, end, top], axis=1).reshape(-1, 4, 2)
    axes.add_collection(PolyCollection(list(corners), facecolors=colours, rasterized=len(bars) > _MOST_PATHS, **style))


def _format(axes: Axes, name: str, axis: Axis) -> None:
    """The axis's title, and ticks as `si` says figures."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    ticks = getattr(axes, f"{name}axis")
    if axis.logarithmic:
        ticks.set_major_locator(LogLocator(10, numticks=12))
        ticks.set_minor_formatter(NullFormatter())
        ticks.grid(True, color=LIGHT, linewidth=0.6)
    else:
        ticks.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=not axis.unit))
    form = {"%": "{:+.0%}", "×": "{:g} ×"}.get(axis.unit)
    shown = form.format if form else lambda value: _amount(value, axis)
    ticks.set_major_formatter(FuncFormatter(lambda value, _place: shown(value)))
    getattr(axes, f"set_{name}label")(axis.title + (" (logarithmic)" if axis.logarithmic else ""))


def _amount(value: float, axis: Axis) -> str:
    return si(value, axis.unit) if axis.unit else f"{value:,.0f}"


def _legend(figure: Figure, names: list[str], handles: Sequence[Any]) -> None:
    labels = [_label(name) for name in names]
    labels = [f" {label}" if label.startswith("_") else label for label in labels]  # which matplotlib would leave out
    if labels:
        legend(figure, labels, handles, min(4, len(labels)))


def _label(text: str, limit: int = 34) -> str:
    return shortened(printable(text), limit)


_FLAG = "--plots"


@dataclass(frozen=True)
class PlotFolder:
    """Files that are complete, but for their names; and what there is no picture of."""

    files: dict[Path, OutputFile]
    missing: list[MissingPicture]

    def commit(self) -> list[Path]:
        """Give the files their names, which are returned."""
        for file in self.files.values():
            file.commit()
        return list(self.files)


@contextmanager
def plot_folder(folder: str, contents: ReportContents, others: Sequence[str], force: bool) -> Iterator[PlotFolder]:
    """Draw every picture into a folder, which is created. `others` are files that a picture may not replace. What is
    not committed is removed on leaving.

    Raises UsageError for one of `others`, OutputExists for an existing file without `force`, CaptureFailed if the files
    cannot be created, LibraryMissing.
    """
    if not folder:
        raise UsageError(f"{_FLAG}: is empty; name a folder to write to")
    place = Path(folder)
    plots, missing = plots_of(contents)
    paths = [place / f"{each.picture.name}.{ending}" for each in plots for ending in ("svg", "png")]
    taken = {os.path.realpath(other): other for other in others}
    for path in paths:
        if (other := taken.get(os.path.realpath(path))) is not None:
            raise UsageError(f"{_FLAG}={folder}: a picture would replace {other}; name another folder")
        if os.path.lexists(path):
            refuse_existing(_FLAG, path, force)
    drawn = draw_plots(plots)
    with ExitStack() as opened:
        opened.enter_context(_created(place))
        files = {path: opened.enter_context(output_file(_FLAG, path, force)) for path in paths}
        for path, file in files.items():
            file.fill(drawn[path.name])
        yield PlotFolder(files, missing)


@contextmanager
def _created(place: Path) -> Iterator[None]:
    """The folder and those that it is in are made; those of them that are empty in the end are removed again."""
    made: list[Path] = []
    try:
        try:
            for each in (*reversed(place.parents), place):
                if not each.is_dir():
                    each.mkdir()
                    made.append(each)
        except OSError as error:
            raise CaptureFailed(f"{_FLAG}={place}: cannot be created: {error.strerror}") from None
        yield
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()
