"""Pictures as plain values, before any library draws them. Figures are in base units (s, B, J): prefixes are the
drawing library's. What cannot be shown is a picture with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from .timeline import Timeline

# Those of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#C9B800",
)  # fmt: skip
CATEGORIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, YELLOW)
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
    """`coloured` are names of the timeline that have colours of their own, in the order of CATEGORIES."""

    name: str
    title: str
    timeline: Timeline
    coloured: list[int]


@dataclass(frozen=True)
class MissingPicture:
    """In the place of a picture: why there is none."""

    name: str
    title: str
    reason: str


Drawn = BarPicture | ScatterPicture | StepPicture | TimelinePicture
Picture = Drawn | MissingPicture
