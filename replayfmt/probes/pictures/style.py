"""What all pictures share. The colours are those of Okabe and Ito, which colour-blind readers can tell apart; shades of
one colour differ in lightness."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

from replayfmt.errors import LibraryMissing

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


def thousands(axis: Any) -> None:
    """Numbers on an axis as 12,000."""
    from matplotlib.ticker import StrMethodFormatter

    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def empty(axes: Axes, why: str) -> None:
    """In the place of what cannot be drawn: why."""
    axes.text(0.5, 0.5, f"not measured: {why}", ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def shortened(name: str, limit: int = 40) -> str:
    """A name that fits a label: its beginning and its end."""
    return name if len(name) <= limit else f"{name[: limit * 2 // 3]}…{name[-(limit // 3 - 1) :]}"
