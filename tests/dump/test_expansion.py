"""Templates are filled with columns, alike in Python and in C++; the text in them never becomes code."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.dump.expansion import (
    EXACT,
    Column,
    Expander,
    Halves,
    InCpp,
    InPython,
    Numbers,
    Piece,
    Sheet,
    Slot,
    Words,
)
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_lines, text_lines
from replayfmt.errors import InvalidCapture
from replayfmt.format.reader import CaptureReader, open_capture

from .captures import HOSTILE

GOLDEN = Path(__file__).parents[1] / "golden"
INTS = np.array([10, 11, 12, EXACT + 1, -EXACT - 1, -1, 0])
COLUMNS: dict[str, Column] = {
    "ordinal": Numbers(np.array([12, -(2**63)])),
    "scope": Words(['"execute"', "é∀😀\ud800"], np.array([0, 1])),
    "unsigned": Numbers(np.array([2**64 - 1, 2**63], np.uint64), before="t=", null=2**64 - 1),
    "tensor": Words(["T0", "T1", "T2", "T3", "T4"]),
    "integer": Numbers(INTS, quoted=True, null=0),
    "hash": Halves(INTS),
    "float": Words(["0.5", '"NaN"'], np.array([0, 1, 0])),
}
SHEET = Sheet(2, COLUMNS, {"t": np.array([1, 0]), "i": np.array([2, 0]), "f": np.array([0, 2])})


@pytest.fixture(params=[InPython, InCpp])
def expander(request: pytest.FixtureRequest) -> Expander:
    return request.param()  # type: ignore[no-any-return]


def filled(expander: Expander, *pieces: Piece, sheet: Sheet = SHEET) -> list[str]:
    """A template's rows, each by itself."""
    template = expander.template([*pieces, "\0"], tuple(sheet.columns))
    whole = b"".join(map(bytes, expander.lines([template], np.zeros(sheet.rows, int), sheet, 1)))
    return whole.decode().split("\0")[:-1]


def test_a_hole_shows_its_column_at_the_rows_place(expander: Expander) -> None:
    assert filled(expander, "a", Slot("ordinal"), ",", Slot("scope"), Slot("tensor", 2), "b") == [
        'a12,"execute"T3b',
        f"a{-(2**63)},é∀😀\\ud800T2b",
    ]
    assert filled(expander, Slot("integer"), Slot("integer", 1), Slot("float")) == [f'12"{EXACT + 1}"0.5', "10110.5"]
    assert filled(expander, Slot("integer", 4)) == ["null", f'"{-EXACT - 1}"']
    assert filled(expander, Slot("tensor", 0, 3, "+"), "|", Slot("integer", 0, 2, ",")) == [
        f'T1+T2+T3|12,"{EXACT + 1}"',
        "T0+T1+T2|10,11",
    ]
    assert filled(expander, Slot("unsigned")) == ["t=null", f"t={2**63}"]
    assert filled(expander, Slot("hash", 2)) == [
        f"{2**64 - 1:016x}{2**64 - EXACT - 1:016x}",
        f"{EXACT + 1:016x}{12:016x}",
    ]


def test_a_template_without_text_or_without_holes_is_a_row_too(expander: Expander) -> None:
    assert filled(expander, "only text") == ["only text"] * 2
    assert filled(expander, "", "a", "", "b") == ["ab"] * 2
    assert filled(expander) == ["", ""]
    assert filled(expander, "a", sheet=Sheet(0, {})) == []


def test_rows_of_one_sheet_are_words_of_another(expander: Expander) -> None:
    templates = [
        expander.template(pieces, tuple(COLUMNS)) for pieces in (["x", Slot("ordinal")], [Slot("scope")], [""])
    ]
    words = expander.words(templates, np.array([1, 0]), SHEET)
    assert expander.longest(words) == len(f"x{-(2**63)}")
    sheet = Sheet(3, {"word": Words(words, np.array([1, 1, 0]))})
    assert filled(expander, Slot("word"), sheet=sheet) == [f"x{-(2**63)}", f"x{-(2**63)}", '"execute"']


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_a_template_is_never_code(text: str, expander: Expander) -> None:
    sheet = Sheet(1, {"ordinal": COLUMNS["ordinal"], "tensor": COLUMNS["tensor"]}, {"t": np.array([1])})
    pieces = (text, Slot("ordinal"), text, Slot("tensor", 0, 2, text), text)
    template = expander.template(pieces, ("ordinal", "tensor"))
    found = b"".join(map(bytes, expander.lines([template], np.zeros(1, int), sheet, 1)))
    assert found == f"{text}12{text}T1{text}T2{text}".encode("utf-8", "backslashreplace")


def test_a_template_of_any_length_works(expander: Expander) -> None:
    pieces = [piece for number in range(1280) for piece in (f" {number}:", Slot("integer", 1))]
    assert filled(expander, *pieces)[1] == "".join(f" {number}:11" for number in range(1280))
    long = "x" * 3_000_000
    assert filled(expander, Slot("ordinal"), long) == [f"12{long}", f"{-(2**63)}{long}"]


def test_a_hole_beyond_its_column_is_an_error_in_cpp() -> None:
    for slot in (Slot("tensor", 5), Slot("integer", 7), Slot("hash", 4), Slot("tensor", -1), Slot("float", 2, 2, ",")):
        with pytest.raises(IndexError):
            filled(InCpp(), slot)


def both(path: Path, write: Callable[..., Iterator[bytes]], selection: Selection) -> list[bytes]:
    found = []
    for expander in (InPython(), InCpp()):
        with open_capture(path) as reader:
            found.append(b"".join(map(bytes, write(reader, selection, expander=expander))))
    return found


@pytest.mark.slow
def test_captures_are_written_alike(every: Path, plain: Path) -> None:
    goldens = sorted(GOLDEN.glob("*.opreplay"))
    assert goldens
    for path in (every, plain, *goldens):
        for write in (jsonl_lines, text_lines):
            for selection in (Selection(), Selection(start=3, stop=20), Selection(kernel="*")):
                in_python, in_cpp = both(path, write, selection)
                assert in_python == in_cpp and in_python


def test_floats_are_written_alike(tmp_path: Path) -> None:
    values = [0.1, -0.0, 1e16, 1e-5, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf, 3.0]
    x = torch.zeros(2)
    with replayfmt.capture(tmp_path / "floats.opreplay"):
        for value in values:
            x.add(1, alpha=2).mul(value)
    in_python, in_cpp = both(tmp_path / "floats.opreplay", jsonl_lines, Selection())
    assert in_python == in_cpp
    assert all(f'"value":{value!r}'.encode() in in_cpp for value in values if math.isfinite(value))


@pytest.fixture(scope="module")
def long_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is worth loading the library."""
    path = tmp_path_factory.mktemp("long") / "long.opreplay"
    x = torch.zeros(2)
    with replayfmt.capture(path):
        for _ in range(45_000):
            x.add_(1)
    return path


def dumped(path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opreplay_tools.dump", *flags, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def in_python(reader: CaptureReader, write: Callable[..., Iterator[bytes]]) -> Iterator[str]:
    return (str(chunk, "utf-8") for chunk in write(reader, Selection(), expander=InPython()))


@pytest.mark.slow
def test_a_long_capture_is_dumped_alike_with_and_without_the_library(long_capture: Path, tmp_path: Path) -> None:
    InCpp()  # builds it, if nothing did
    for flags, write in ((("--format=jsonl",), jsonl_lines), ((), text_lines)):
        with open_capture(long_capture) as reader:
            expected = "".join(in_python(reader, write))
        shown = dumped(long_capture, *flags)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == expected
        # Neither a library nor a compiler.
        without = dumped(long_capture, *flags, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="", CXX="")
        assert without.returncode == 0 and without.stdout == expected
        assert len(without.stderr.splitlines()) == 1 and "no C++ compiler" in without.stderr


@pytest.mark.slow
def test_a_damaged_frame_of_a_long_capture_ends_the_dump_after_those_before(long_capture: Path, tmp_path: Path) -> None:
    with open_capture(long_capture) as reader:
        frames = list(reader.record_frames)
    damaged = tmp_path / "damaged.opreplay"
    content = bytearray(long_capture.read_bytes())
    middle = (frames[1].offset + frames[2].offset) // 2
    content[middle : middle + 8] = bytes(8 * [0x5A])
    damaged.write_bytes(content)
    before = ""
    with open_capture(damaged) as reader, pytest.raises(InvalidCapture) as raised:
        for chunk in in_python(reader, jsonl_lines):
            before += chunk
    shown = dumped(damaged, "--format=jsonl")
    assert shown.stdout == before and shown.returncode == 3
    assert str(raised.value) in shown.stderr
