"""opreplay-report --run: what a replay verified, as opreplay-run printed it, or one error and no page."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.reader import open_capture
from replayfmt.report.contents import ReportInputs, VerificationNote, make_contents
from replayfmt.report.measurements import read_run

from .conftest import Measured, tool


@pytest.fixture(scope="module")
def printed(measured: Measured) -> dict[str, Any]:
    """The first row of a replay that was verified."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert tool("run", "--format=jsonl", measured.capture) == 0
    row: dict[str, Any] = json.loads(out.getvalue().splitlines()[0])
    return row


def note_of(measured: Measured, row: dict[str, Any], tmp_path: Path) -> VerificationNote:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(row) + "\nmore\n")
    with open_capture(measured.capture) as reader:
        (note,) = make_contents(reader, ReportInputs(runs=[read_run(path, reader)])).verification
    assert note.source == f"--run={path}"
    return note


def test_a_verified_replay_is_verified(measured: Measured, printed: dict[str, Any], tmp_path: Path) -> None:
    note = note_of(measured, printed, tmp_path)
    digests = printed["verification"]["digests"]
    assert note.verified and digests > 0
    assert note.text.startswith(f"bitwise, on cpu; compared: {digests} digests")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"outcome": "mismatched", "divergence": {"ordinal": 5, "op": "aten::mm.default"}},
         "differs from the capture, first at ordinal 5 (aten::mm.default)"),
        ({"outcome": "incomplete", "verdicts": {"ok": 3, "skipped": 2}}, "is incomplete: 3 ok, 2 skipped"),
        ({"verification": {"mode": "none", "reasons": ["--verify=none"]}}, "not verified: --verify=none"),
        ({"outcome": "of another version"}, "is of another version"),
        ({"verification": {"mode": "bitwise", "digests": 0, "host_reads": 0, "scalars": 0, "structures": 0}},
         "compared: nothing"),
    ],
)  # fmt: skip
def test_another_outcome_is_not_verified(
    measured: Measured, printed: dict[str, Any], tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    note = note_of(measured, printed | changes, tmp_path)
    assert not note.verified and text in note.text


def test_what_was_not_replayed_is_said(measured: Measured, printed: dict[str, Any], tmp_path: Path) -> None:
    note = note_of(measured, printed | {"unsupported": 3, "left_out": ["a marker"]}, tmp_path)
    assert "3 records of work that cannot be replayed; 1 records left out" in note.text


def test_nondeterministic_operators_are_said(measured: Measured, printed: dict[str, Any], tmp_path: Path) -> None:
    note = note_of(measured, printed | {"nondeterministic": ["ordinal 3 (a::b)"]}, tmp_path)
    assert note.verified and note.text.endswith("; nondeterministic: ordinal 3 (a::b)")


@pytest.mark.parametrize("what", ["missing", "empty", "other", "rejected", "session", "damaged"])
def test_a_file_that_is_no_such_output_is_one_error_and_no_page(
    measured: Measured, printed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "x.html"
    rows: dict[str, object] = {
        "empty": "", "other": [1], "rejected": {"kind": "finding"}, "session": printed | {"capture_session": "x"},
        "damaged": printed | {"verification": 3},
    }  # fmt: skip
    if what in rows:
        path.write_text(json.dumps(rows[what]) if what != "empty" else "")
    capsys.readouterr()
    assert tool("report", f"--run={path}", "-o", out, measured.capture) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"INVALID_ARGUMENT: --run={path}") and not out.exists()
    assert "another capture" in line if what == "session" else "another capture" not in line


def test_the_page_says_verified(measured: Measured, printed: dict[str, Any], tmp_path: Path) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "x.html"
    path.write_text(json.dumps(printed) + "\n")
    assert tool("report", f"--run={path}", "-o", out, measured.capture) == 0
    assert '<p class="verification yes"><strong>verified</strong>' in out.read_text()
