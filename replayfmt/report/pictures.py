"""Pictures and tables as plain values, before any library draws or sorts them.

Figures are in base units (s, B, J); prefixes are the drawing library's. What cannot be shown is a picture with the
reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from replayfmt.benchmark.statistics import share_text
from replayfmt.format.validation import printable
from replayfmt.probes.pictures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

from .timelines import Timeline

CATEGORIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, "#C9B800")
OTHERS = "#8C8C8C"


def colour_of(place: int) -> str:
    """That of the series, line or group of points in this place. After seven they come again."""
    return CATEGORIES[place % len(CATEGORIES)]


@dataclass(frozen=True)
class Axis:
    """`unit` may be "" (a number) or "%" (a share)."""

    title: str
    unit: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class BarSeries:
    """A value for each label, with the ends of its interval where they are known; None: not measured."""

    name: str
    values: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class BarPicture:
    """Horizontal bars, the first label on top. `links` are names of rows."""

    name: str
    title: str
    axis: Axis
    labels: list[str]
    series: list[BarSeries]
    links: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    name: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Points:
    """A group of points of one colour. `labels` say what each is, `links` are names of rows."""

    name: str
    x: list[float]
    y: list[float]
    labels: list[str]
    links: list[str]


@dataclass(frozen=True)
class ScatterPicture:
    name: str
    title: str
    x: Axis
    y: Axis
    points: list[Points]
    lines: list[Line]


@dataclass(frozen=True)
class Region:
    """A named part of the x axis."""

    name: str
    first: float
    last: float


@dataclass(frozen=True)
class StepPicture:
    """Each line keeps its value until the next one. `regions` do not overlap, and come in order."""

    name: str
    title: str
    x: Axis
    y: Axis
    lines: list[Line]
    regions: list[Region] = field(default_factory=list)


@dataclass(frozen=True)
class TimelinePicture:
    """`coloured` are names of the timeline that have colours of their own, in the order of CATEGORIES. Lines link the
    bars of one site whose names are in `linked`: then a site is a collective, and its bars are on several ranks."""

    name: str
    title: str
    timeline: Timeline
    coloured: list[int]
    linked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class MissingPicture:
    """In the place of a picture: why there is none."""

    name: str
    title: str
    reason: str


Drawn = BarPicture | ScatterPicture | StepPicture | TimelinePicture
Picture = Drawn | MissingPicture


LONGEST_TEXT = 400
_PREFIXES = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class TableCell:
    """`sort` is a number, or None for a text; "" sorts below every number. `about` is more text for whoever asks;
    `link` the name of a row elsewhere in the page, `find` what to filter the table of that row by."""

    text: str
    sort: float | str | None = None
    about: str = ""
    link: str = ""
    find: str = ""


@dataclass(frozen=True)
class TableColumn:
    """`figures`: it holds numbers, to the right."""

    title: str
    about: str = ""
    figures: bool = False


class TableRow:
    """`name` is the row's own in the page, for links; "" if nothing leads to it."""

    def __init__(self, *cells: TableCell, name: str = "") -> None:
        self.cells, self.name = cells, name


@dataclass(frozen=True)
class ReportTable:
    """Rows are in the order in which they are first shown, by `sorted_by` (a column, largest first). `notes` stand
    below it."""

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: list[TableRow]
    sorted_by: int | None = None
    notes: list[str] = field(default_factory=list)


def table_columns(titles: Sequence[str], texts: Sequence[int] = (0,)) -> tuple[TableColumn, ...]:
    """Columns of figures, but for those in the places `texts`."""
    return tuple(TableColumn(title, figures=place not in texts) for place, title in enumerate(titles))


def text_cell(text: str, about: str = "", link: str = "", find: str = "") -> TableCell:
    """Text from anywhere, on one line."""
    return TableCell(printable(text, LONGEST_TEXT), None, printable(about), link, printable(find))


def count_cell(number: int) -> TableCell:
    return TableCell(f"{number:,}", number)


def figure_cell(value: float | None, unit: str, reason: str, about: str = "") -> TableCell:
    """A figure in a base unit (s, B, J, FLOP/s, %); `not measured` with the reason if there is none."""
    if value is None or not math.isfinite(value):
        return TableCell(NOT_MEASURED, "", printable(reason or "no reason is known"))
    return TableCell(si(value, unit), value, printable(about))


def seconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def time_cell(nanoseconds: float | None, reason: str, about: str = "") -> TableCell:
    """A time; `not measured` with the reason if it is None."""
    return figure_cell(seconds(nanoseconds), "s", reason, about)


def si(value: float, unit: str) -> str:
    """Four digits with a fitting prefix: 1.234 ms. A share as 12.3%."""
    if unit == "%":
        return share_text(value)
    if unit == "×":
        return f"{value:.3f} ×"
    if not value:
        return f"0 {unit}"
    scale, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0] * 0.99995), _PREFIXES[-1])
    if prefix and scale < 1 and unit == "B":
        scale, prefix = 1.0, ""
    return f"{value / scale:.4g} {prefix}{unit}".rstrip()
