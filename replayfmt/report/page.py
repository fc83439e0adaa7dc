"""The page: contents in a template, with the libraries that draw and sort packed into it.

Pictures become the JSON that plotly.js draws, without colours of text and background: the page has two themes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from importlib.util import find_spec
from math import log10
from pathlib import Path
from typing import Any

import numpy as np

from replayfmt.errors import LibraryMissing, optional_library

from .contents import ReportContents
from .pictures import (
    CATEGORIES,
    OTHERS,
    Axis,
    BarPicture,
    Drawn,
    MissingPicture,
    ScatterPicture,
    StepPicture,
    TimelinePicture,
    colour_of,
)

_LABEL = 34
_DASHES = ("solid", "dash", "dot", "dashdot")


def plotly_figure(picture: Drawn) -> dict[str, Any]:
    """`data` and `layout` for Plotly.newPlot. A timeline has its bars instead, for the page to choose from."""
    if isinstance(picture, BarPicture):
        return _bars(picture)
    if isinstance(picture, ScatterPicture):
        return _scatter(picture)
    if isinstance(picture, StepPicture):
        return _steps(picture)
    return _timeline(picture)


def _axis(axis: Axis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.title}, "automargin": True, "nticks": 6}
    if axis.logarithmic:
        title = {"text": f"{axis.title} ({axis.unit})"}
        return found | {"title": title, "type": "log", "dtick": "D2", "tickformat": "~s"}
    if axis.unit == "%":
        return found | {"tickformat": "+.0%"}
    return found | {"tickformat": "~s", "ticksuffix": axis.unit}


def _bars(picture: BarPicture) -> dict[str, Any]:
    places = list(range(len(picture.labels)))
    data = []
    hover = "%{x:+.2%}" if picture.axis.unit == "%" else f"%{{x:.4s}}{picture.axis.unit}"
    for place, series in enumerate(picture.series):
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": series.name,
            "y": places,
            "x": series.values,
            "customdata": picture.links,
            "hovertext": [_shown(label, 120) for label in picture.labels],
            "hovertemplate": f"%{{hovertext}}<br>{hover}<extra>{series.name}</extra>",
            "marker": {"color": colour_of(place)},
        }
        if any(value is not None for value in series.low):
            ends = list(zip(series.values, series.low, series.high, strict=True))
            trace["error_x"] = {
                "type": "data",
                "symmetric": False,
                "array": [_distance(high, value) for value, _low, high in ends],
                "arrayminus": [_distance(value, low) for value, low, _high in ends],
                "thickness": 1,
                "width": 3,
            }
        data.append(trace)
    rows = len(picture.labels) * max(1, len(picture.series) * 0.7)
    layout = {
        "xaxis": _axis(picture.axis),
        "yaxis": {
            "tickvals": places,
            "ticktext": [_shown(label, _LABEL) for label in picture.labels],
            "autorange": "reversed",
            "automargin": True,
        },
        "height": round(90 + 24 * rows),
        "bargap": 0.25,
        "showlegend": len(picture.series) > 1,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"t": 40 if len(picture.series) > 1 else 10},
    }
    return {"data": data, "layout": layout}


def _scatter(picture: ScatterPicture) -> dict[str, Any]:
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": _shown(points.name, _LABEL),
            "x": points.x,
            "y": points.y,
            "customdata": points.links,
            "hovertext": [_shown(label, 160) for label in points.labels],
            "hovertemplate": f"%{{hovertext}}<br>%{{x:.4s}}{picture.x.unit}, %{{y:.4s}}{picture.y.unit}<extra></extra>",
            "marker": {"color": colour_of(place), "size": 9, "opacity": 0.8},
        }
        for place, points in enumerate(picture.points)
    ]
    data += [
        {
            "type": "scatter",
            "mode": "lines",
            "name": _shown(line.name, 60),
            "x": line.x,
            "y": line.y,
            "hoverinfo": "name",
            "line": {"color": OTHERS, "width": 2},
        }
        for line in picture.lines
    ]
    layout = _plane(picture.x, picture.y)
    for name, axis in (("x", picture.x), ("y", picture.y)):
        values = [value for each in (*picture.points, *picture.lines) for value in getattr(each, name)]
        if axis.logarithmic and values:
            layout[f"{name}axis"] |= {"range": [log10(min(values) / 2), log10(max(values) * 2)]}
    return {"data": data, "layout": layout}


def _steps(picture: StepPicture) -> dict[str, Any]:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": _shown(line.name, 60),
            "x": line.x,
            "y": line.y,
            "hovertemplate": f"%{{x:,}}: %{{y:.4s}}{picture.y.unit}",
            "line": {
                "shape": "hv",
                "color": colour_of(place),
                "width": 1.5,
                "dash": _DASHES[place // len(CATEGORIES) % len(_DASHES)],
            },
            "fill": "tozeroy" if len(picture.lines) == 1 else "none",
        }
        for place, line in enumerate(picture.lines)
    ]
    layout = _plane(picture.x, picture.y)
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["shapes"] = [
        {
            "type": "rect", "layer": "below", "yref": "paper", "x0": region.first, "x1": region.last, "y0": 0, "y1": 1,
            "fillcolor": OTHERS, "opacity": 0.2 if place % 2 else 0.1, "line": {"width": 0},
        }
        for place, region in enumerate(picture.regions)
    ]  # fmt: skip
    layout["annotations"] = [
        {
            "text": _shown(region.name, _LABEL), "x": (region.first + region.last) / 2, "yref": "paper", "y": 1,
            "yanchor": "bottom", "showarrow": False,
        }
        for region in picture.regions
    ]  # fmt: skip
    if picture.regions:
        layout["legend"] |= {"y": 1.08}  # above their names
    return {"data": data, "layout": layout}


def _plane(x: Axis, y: Axis) -> dict[str, Any]:
    return {
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        "height": 440,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "showlegend": True,
    }


def _timeline(picture: TimelinePicture) -> dict[str, Any]:
    """Starts and ordinals are differences from the bar before: they take a fraction of the space."""
    timeline = picture.timeline
    found: dict[str, Any] = {
        "lanes": [_shown(lane, _LABEL) for lane in timeline.lanes],
        "names": timeline.names,
        "coloured": dict(zip(map(str, picture.coloured), CATEGORIES, strict=False)),
        "others": OTHERS,
        "linked": picture.linked,
        "pauses": [[each.start, each.end, each.taken_ns] for each in timeline.pauses],
    }
    for name, bars in (("bars", timeline.bars), ("scopes", timeline.scopes)):
        found[name] = {
            "lane": bars.lane.tolist(),
            "start": np.diff(bars.start, prepend=0).tolist(),
            "span": (bars.end - bars.start).tolist(),
            "busy": None if bool((bars.count == 1).all()) else bars.busy.tolist(),
            "count": None if bool((bars.count == 1).all()) else bars.count.tolist(),
            "name": bars.name.tolist(),
            "site": bars.site.tolist(),
            "ordinal": np.diff(bars.ordinal, prepend=0).tolist(),
        }
    return {"timeline": found}


def _distance(larger: float | None, smaller: float | None) -> float:
    return 0.0 if larger is None or smaller is None else max(0.0, larger - smaller)


def _shown(text: str, limit: int) -> str:
    """Text for plotly, which reads some tags of HTML in it, and a limit: the beginning and the end of long names."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]}…{text[-(limit // 3 - 1) :]}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_ADVICE = "pip install 'opreplay[report]'"
_EXPORTS = re.compile(r"export\s*\{([^{}]*)\}\s*;?")


def make_page(contents: ReportContents, version: str) -> str:
    """The page as text. Raises LibraryMissing, with the extra that has it."""
    environment = _environment()
    here = files(__package__)
    start, page = (here.joinpath(name).read_text(encoding="utf-8") for name in ("start.js", "page.js"))
    scripts = {"plotly": _read("plotly", "package_data/plotly.min.js"), "datatables": _datatables(), "page": page}
    pictures = [each for section in contents.sections for each in section.pictures]
    figures = {each.name: plotly_figure(each) for each in pictures if not isinstance(each, MissingPicture)}
    hashes = " ".join(f"'{_hash(script)}'" for script in (start, *scripts.values()))
    text: str = environment.get_template("page.html").render(
        contents=contents,
        version=version,
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        style=_read("itables", "html/dt_bundle.css") + here.joinpath("page.css").read_text(encoding="utf-8"),
        start=start,
        packed={name: _packed(script) for name, script in scripts.items()},
        figures=_packed(json.dumps(figures, separators=(",", ":"), allow_nan=False)),
        is_missing=lambda picture: isinstance(picture, MissingPicture),
    )
    return text


def _environment() -> Any:
    jinja2 = optional_library("jinja2", "a report", _ADVICE)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return jinja2.Environment(
        loader=jinja2.DictLoader({"page.html": template}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _datatables() -> str:
    """The module of itables as a script of its own, which leaves what it exports in `DataTables`."""
    module = _read("itables", "html/dt_bundle.js")
    found = list(_EXPORTS.finditer(module))
    if len(found) != 1:
        raise LibraryMissing(
            f"itables carries DataTables in an unknown form ({len(found)} lists of exports): pip install "
            "'itables>=2.9,<3'"
        )
    names = [each.split(" as ") for each in found[0][1].split(",")]
    exported = ", ".join(f"{json.dumps(public.strip())}: {local.strip()}" for local, public in names)
    before, after = module[: found[0].start()], module[found[0].end() :]
    return f"(() => {{\n{before}\nwindow.DataTables = {{{exported}}};\n{after}\n}})();"


def _read(package: str, path: str) -> str:
    """A file of an installed package, which need not be imported for it."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place, path)
        if file.is_file():
            return file.read_text(encoding="utf-8")
    raise LibraryMissing(f"a report needs {package}, which is not installed: {_ADVICE}")


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
