"""opreplay-probe report: what it prints and writes, what it refuses, and that pictures are pictures."""

from __future__ import annotations

import json
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from opreplay_tools.probe import main

from replayfmt.probes.recordings import write_recording

from .synthetic import block_records, shape_of, waves


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    blocks = waves(4, 2, 5, elapsed=400, gap=17)
    write_recording(tmp_path / "1.500000.bin", shape_of(len(blocks)), [block_records(blocks)])
    return tmp_path / "1.500000.bin"


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["opreplay-probe", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def is_picture(folder: Path, kind: str) -> bool:
    """Whether both files are pictures of a size that can be read, with more than one colour."""
    svg = ElementTree.fromstring((folder / f"{kind}.svg").read_text())
    png = (folder / f"{kind}.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert svg.tag.endswith("svg") and png.startswith(b"\x89PNG") and png[-8:-4] == b"IEND"
    return width >= 900 and height >= 500 and len(png) > 10_000


@pytest.mark.slow
def test_a_report_is_printed_and_written_as_text_json_and_pictures(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "reports"
    assert ran(monkeypatch, "report", "schedule", recording, "-o", folder) == 0
    printed = capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == [
        f"schedule.{end}" for end in ("json", "png", "svg", "txt")
    ]
    assert printed.out == (folder / "schedule.txt").read_text()
    assert "  scheduling_cycles                544\n" in printed.out
    assert [line for line in printed.err.splitlines() if line.startswith("written: ")] != []
    assert json.loads((folder / "schedule.json").read_text())["kind"] == "schedule"
    assert is_picture(folder, "schedule")


@pytest.mark.slow
def test_the_same_recording_gives_the_same_bytes(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        assert ran(monkeypatch, "report", "schedule", recording, "-o", tmp_path / name) == 0
    for ending in ("json", "txt", "svg", "png"):
        assert len({(tmp_path / name / f"schedule.{ending}").read_bytes() for name in ("a", "b")}) == 1, ending


@pytest.mark.slow
def test_files_are_replaced_only_with_force_and_none_is_written_beside_one_that_stays(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "schedule.svg").write_text("mine")
    assert ran(monkeypatch, "report", "schedule", recording, "-o", folder) == 1
    assert capsys.readouterr().err.startswith(f"FAILED_PRECONDITION: {folder}/schedule.svg: exists already")
    assert [path.name for path in folder.iterdir()] == ["schedule.svg"]
    assert ran(monkeypatch, "report", "schedule", recording, "-o", folder, "--force") == 0
    assert is_picture(folder, "schedule")


def test_json_is_printed_and_pictures_left_out_on_request(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("report", "schedule", recording, "--format=json", "--no-picture", "-o", tmp_path / "reports")
    assert ran(monkeypatch, *arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["whole launch"]
    assert row["scheduling_cycles"] == 544
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["schedule.json", "schedule.txt"]


def test_without_matplotlib_a_picture_is_refused_with_the_extra_to_install(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ran(monkeypatch, "report", "schedule", recording, "-o", tmp_path / "reports") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'opreplay[probe]'" in error and "--no-picture" in error
    assert not (tmp_path / "reports").exists()
    assert ran(monkeypatch, "report", "schedule", recording) == 0


def test_a_folder_of_a_run_stands_for_its_only_recording(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "result").mkdir(parents=True)
    (tmp_path / "run" / "result" / recording.name).write_bytes(recording.read_bytes())
    assert ran(monkeypatch, "report", "schedule", tmp_path / "run") == 0
    (tmp_path / "run" / "result" / "2.000000.bin").write_bytes(recording.read_bytes())
    capsys.readouterr()
    assert ran(monkeypatch, "report", "schedule", tmp_path / "run") == 2
    assert "has 2 recordings in result/; name one: 1.500000.bin, 2.000000.bin" in capsys.readouterr().err


def test_a_section_is_chosen_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (block_records(waves(1, 1, 2, elapsed=10, gap=gap)) for gap in (3, 5))
    write_recording(tmp_path / "a.bin", shape_of(2), [one, other])
    for section, cost in ((0, 3), (1, 5)):
        assert ran(monkeypatch, "report", "schedule", tmp_path / "a.bin", f"--section={section}", "--format=json") == 0
        (row,) = json.loads(capsys.readouterr().out)["tables"]["whole launch"]
        assert row["scheduling_cycles"] == cost
    assert ran(monkeypatch, "report", "schedule", tmp_path / "a.bin", "--section=2") == 2
    assert "has 2 sections, from 0; there is no section 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report"], 2, "INVALID_ARGUMENT: report: expected a KIND, one of schedule"),
        (["report", "nonsense", "x"], 2, "INVALID_ARGUMENT: nonsense: expected a kind of report, one of schedule"),
        (["report", "schedule"], 2, "INVALID_ARGUMENT: report schedule: expected 1: a recording of block_sched"),
        (["report", "schedule", "=x"], 2, "INVALID_ARGUMENT: =x: expected PATH or LABEL=PATH"),
        (["report", "schedule", "none.bin"], 3, "NOT_FOUND: none.bin: no such file or directory; expected a file of a"),
        (["report", "schedule", "cut.bin"], 3, "DATA_LOSS: cut.bin: at byte 0: expected a result file with a header"),
        (["report", "schedule", "."], 3, "NOT_FOUND: .: has no event.log, kernel/ or result/"),
    ],
)
def test_a_mistake_is_one_line_and_a_code(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.bin").write_bytes(b"short")
    assert ran(monkeypatch, *arguments) == code
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_label_is_what_stands_before_the_equals_sign_unless_the_whole_is_a_path(tmp_path: Path) -> None:
    from replayfmt.probes.reporting import NamedFile

    (tmp_path / "a=b").write_text("")
    assert NamedFile.parse(f"{tmp_path}/a=b") == NamedFile(f"{tmp_path}/a=b")
    assert NamedFile.parse("fill=run/1.bin") == NamedFile("run/1.bin", "fill")
    assert NamedFile.parse("run/1.bin") == NamedFile("run/1.bin")
