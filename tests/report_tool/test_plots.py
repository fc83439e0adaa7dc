"""opreplay-report --plots: each picture of the page as files, with what the page shows, or one error and no file."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from replayfmt.format.reader import open_capture
from replayfmt.report.contents import ReportInputs, make_contents
from replayfmt.report.measurements import read_benchmark, read_energy
from replayfmt.report.pictures import Axis, BarPicture, BarSeries, Line, Points, ScatterPicture, StepPicture
from replayfmt.report.plots import Plot, _draw, _drawing, plots_of
from replayfmt.report.timelines import ReplayedTrace

from .conftest import Measured, tool

PICTURES = {
    "top-captured", "top-replayed", "top-calls", "top-bytes", "top-energy", "replay", "roofline", "memory", "timeline",
    "timeline-replayed", "timeline-isolated", "energy",
}  # fmt: skip


def texts_of(plot: Plot) -> list[str]:
    """What a figure says, without making a file of it."""
    figure = Figure(figsize=(10, 6))
    draw, height = _drawing(plot.picture)
    assert 1 < height < 60
    _draw(plot, draw, figure)
    (axes,) = figure.axes
    texts = [*axes.texts, *axes.get_yticklabels(), *(text for legend in figure.legends for text in legend.get_texts())]
    return [axes.get_title(loc="left"), *(text.get_text().strip() for text in texts)]


@pytest.fixture(scope="module")
def plots(measured: Measured) -> dict[str, Plot]:
    with open_capture(measured.capture) as reader:
        benchmarks = [(str(path), read_benchmark(path, reader)) for path in (measured.whole, measured.per_op)]
        found, missing = plots_of(
            make_contents(
                reader,
                ReportInputs(
                    benchmarks,
                    None,
                    read_energy(measured.energy, reader),
                    replayed=ReplayedTrace(str(measured.trace), reader),
                ),
            )
        )
    assert not missing
    return {each.picture.name: each for each in found}


@pytest.mark.slow
def test_each_picture_of_the_page_is_an_svg_and_a_png_and_what_has_none_is_said(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "pictures"
    capsys.readouterr()
    assert tool("report", f"--plots={folder}", "-o", tmp_path / "x.html", measured.capture) == 0
    told = capsys.readouterr().err.splitlines()
    drawn = {"top-captured", "top-calls", "memory", "timeline"}
    assert {each.name for each in folder.iterdir()} == {
        f"{name}.{ending}" for name in drawn for ending in ("svg", "png")
    }
    assert {line for line in told if line.startswith("written: ")} == {f"written: {each}" for each in folder.iterdir()}
    missing = {line.split()[2].rstrip(":") for line in told if line.startswith("no picture ")}
    assert missing == PICTURES - drawn and len(told) == 8 + len(missing)
    for name in drawn:
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
        pixels = np.asarray(imread(folder / f"{name}.png"))
        assert pixels.shape[1] == 1500 and pixels[..., :3].std() > 0.05, "it is not blank"


@pytest.mark.slow
def test_pictures_are_replaced_only_with_force_and_none_replaces_what_the_report_is_made_of(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory.png").write_text("precious")
    out = tmp_path / "x.html"
    assert tool("report", f"--plots={tmp_path}", "-o", out, measured.capture) == 1
    assert "--force" in capsys.readouterr().err and [each.name for each in tmp_path.iterdir()] == ["memory.png"]
    svg = tmp_path / "timeline.svg"
    assert tool("report", "--force", f"--plots={tmp_path}", "-o", svg, measured.capture) == 2
    assert f"would replace {svg}" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["memory.png"]
    assert tool("report", "--force", f"--plots={tmp_path}", "-o", out, measured.capture) == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG") and out.exists()


def test_without_matplotlib_there_is_one_error_and_no_file(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert tool("report", f"--plots={tmp_path / 'new'}", "-o", tmp_path / "x.html", measured.capture) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "matplotlib" in line and "opreplay[report]" in line and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_leaves_nothing(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    folder = tmp_path / "a" / ("b" * 300)
    assert tool("report", f"--plots={folder}", "-o", tmp_path / "x.html", measured.capture) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--plots" in line and not list(tmp_path.iterdir())


def test_figures_say_what_the_page_says(plots: dict[str, Plot]) -> None:
    assert set(plots) == PICTURES
    bars = plots["top-captured"].picture
    assert isinstance(bars, BarPicture)
    texts = texts_of(plots["top-captured"])
    assert texts[0].startswith("Most expensive kernels: time during capture") and set(bars.labels) <= set(texts)
    assert {"captured", "replayed, median", "isolated calls, summed"} <= set(texts_of(plots["replay"]))
    assert {"aten::mm.default", "roof: 1 TFLOP/s, 100 GB/s"} <= set(texts_of(plots["roofline"]))
    assert {"step", "thread 0, host", "aten::mm.default"} <= set(texts_of(plots["timeline"]))
    for name in ("timeline-replayed", "timeline-isolated"):
        assert {"step", "thread 0, scopes", "thread 0, host", "aten::mm.default"} <= set(texts_of(plots[name]))
    assert "100 J" in texts_of(plots["energy"])
    memory = texts_of(plots["memory"])
    assert memory.count("step") == 3 and "cpu" in memory


def test_what_was_not_measured_has_no_bar_of_nothing() -> None:
    picture = BarPicture("x", "X", Axis("all", "s"), ["a", "b"], [BarSeries("", [1.5e-3, None])])
    texts = texts_of(Plot("X", "c", picture))
    assert "1.5 ms" in texts and "not measured" in texts and "0 s" not in texts


def test_changes_have_their_sign_and_their_interval() -> None:
    series = BarSeries("", [-0.25, 0.5], [-0.3, 0.4], [-0.2, 0.6])
    texts = [
        text.strip() for text in texts_of(Plot("X", "c", BarPicture("x", "X", Axis("", "%"), ["a", "b"], [series])))
    ]
    assert "-25.0%" in texts and "+50.0%" in texts


def test_more_lines_and_groups_than_there_are_colours_are_all_drawn() -> None:
    names = [f"cuda:{place}" for place in range(9)]
    lines = StepPicture("x", "X", Axis("record"), Axis("alive", "B"), [Line(name, [0, 1], [1, 2]) for name in names])
    assert set(names) <= set(texts_of(Plot("X", "c", lines)))
    groups = [Points(name, [1.0], [2.0], [f"{name}()"], [""]) for name in ["_hidden", *names]]
    scatter = ScatterPicture("x", "X", Axis("x", "FLOP/B", True), Axis("y", "FLOP/s", True), groups, [])
    assert {"_hidden", *names} <= set(texts_of(Plot("X", "c", scatter)))


def test_names_are_text_on_one_line_whatever_is_in_them(hostile: Path) -> None:
    picture = BarPicture("x", "X", Axis("calls"), ["$\\frac{$\n\x1b[31m"], [BarSeries("", [3.0])])
    assert "$\\frac{$\\n\\x1b[31m" in texts_of(Plot("X", "c", picture))
    with open_capture(hostile) as reader:
        drawn, _missing = plots_of(make_contents(reader, ReportInputs()))
    assert all(text.isprintable() for plot in drawn for text in texts_of(plot))
