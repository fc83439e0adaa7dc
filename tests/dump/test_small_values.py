"""Values of small integer tensors in a dump: those that the op had, and none that the capture does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

import replayfmt
from replayfmt.dump.record_rows import SmallValues
from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.record_frames import distinct
from replayfmt.pytorch.tensors.memory import storage_bytes
from replayfmt.replay.plan import Plan

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "rows.schema.json").read_text())


def program() -> None:
    """Tables, lengths and masks: read, viewed, overwritten, written from outside, resized, made anew."""
    weights, table = torch.randn(12, 4), torch.arange(12, dtype=torch.int32).view(3, 4)
    for step in range(6):
        rows = weights[TABLE[step % 3].long()]
        LENGTHS.add_(1)
        torch.where(MASK, weights[LENGTHS], rows[:2])
        (TABLE.t()[1:3] + step).sum()
        if step == 2:
            OUTSIDE[1] = 9
        SHARED * 2
        table.mul_(2)
        if step == 4:
            TABLE.zero_()
    HUGE + 1
    torch.cat([WIDE, WIDE])
    LENGTHS.resize_(3)
    LENGTHS + 1


TABLE = torch.arange(12, dtype=torch.int32).view(3, 4)
LENGTHS = torch.tensor([3, 5])
MASK = torch.tensor([[True], [False]])
OUTSIDE = np.arange(3, dtype=np.int16)
SHARED = torch.from_numpy(OUTSIDE)
HUGE = torch.tensor([2**62, -(2**60), 7])
WIDE = torch.arange(65, dtype=torch.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured in many small frames."""
    made = tmp_path_factory.mktemp("values") / "values.opreplay"
    with replayfmt.capture(made, chunk_records=7):
        program()
    return made


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    selection = Selection(**{name: options.pop(name) for name in ("start", "stop", "kernel") if name in options})
    with open_capture(path) as reader:
        text = "".join(jsonl_chunks(reader, selection, **options))
    return [row for row in map(json.loads, text.splitlines()) if row["kind"] == "op"]


def tensors(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors that an op takes, those in lists included."""
    found = []
    for each in row["args"]:
        found += (
            [each]
            if each["type"] == "tensor"
            else [item for item in each.get("value") or () if isinstance(item, dict)]
            if each["type"] == "list"
            else []
        )
    return found


class Program:
    """Watches a replay: what each op's small integer tensors held, by ordinal and tensor id."""

    def __init__(self, shown: list[dict[str, Any]]) -> None:
        self._rows = {row["ordinal"]: row for row in shown}
        self.held: dict[tuple[int, int], Any] = {}

    def watches(self, ordinal: int) -> bool:
        return ordinal in self._rows

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        for each in tensors(self._rows[ordinal]):
            dtype = np.dtype("?" if each["dtype"] == "bool" else each["dtype"].replace("bfloat", "float"))
            strides = [stride * dtype.itemsize for stride in each["strides"]]
            if dtype.kind in "iub" and 0 < np.prod(each["sizes"], dtype=int) <= 64:
                content = np.frombuffer(storage_bytes(storages[each["storage"]]), np.uint8)
                array = np.ndarray(each["sizes"], dtype, content, each["offset"] * dtype.itemsize, strides)
                self.held[ordinal, each["tensor"]] = array.tolist()

    def after(self, ordinal: int, results: Any, args: Any) -> None:
        pass


def exact(value: Any) -> Any:
    if isinstance(value, list):
        return [exact(each) for each in value]
    return int(value) if isinstance(value, str) else value


@pytest.mark.slow
def test_every_value_shown_is_the_one_that_the_op_had(path: Path) -> None:
    shown = rows(path)
    watched = Program(shown)
    with Plan(path) as plan:
        plan.watch(watched, plan.reader.record_count, "none")
    values = {
        (row["ordinal"], each["tensor"]): each["value"] for row in shown for each in tensors(row) if "value" in each
    }
    assert len(values) > 30
    for key, value in values.items():
        assert exact(value) == watched.held[key], key
    # What ops gave is not shown, and what they overwrote no more: the rest of the small tensors, and nothing else.
    hidden = watched.held.keys() - values.keys()
    assert hidden and len(hidden) < len(watched.held) / 2


def test_what_is_shown_of_a_program(path: Path) -> None:
    shown = rows(path)

    def of(op: str, name: str) -> list[Any]:
        return [
            exact(each["value"]) if "value" in each else None
            for row in shown
            if row["op"] == op
            for each in row["args"]
            if each["name"] == name
        ]

    assert of("aten::where", "condition") == [[[True], [False]]] * 6
    assert of("aten::add_", "self") == [[3, 5], None, None, None, None, None], "overwritten from then on"
    assert of("aten::zero_", "self") == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    assert of("aten::mul", "self") == [[0, 1, 2]] * 2 + [[0, 9, 2]] * 4, "written from outside, and imported again"
    assert [2**62, -(2**60), 7] in of("aten::add", "self")
    assert [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]] in of("aten::slice", "self"), "by sizes, whatever strides"


def test_how_many_elements_are_shown_can_be_said(path: Path) -> None:
    def lengths(**options: Any) -> set[int]:
        return {
            int(np.size(each["value"])) for row in rows(path, **options) for each in tensors(row) if "value" in each
        }

    assert max(lengths()) == 12 and lengths(values=0) == set() and max(lengths(values=3)) == 3
    assert 65 in lengths(values=65)
    with open_capture(path) as reader:
        assert "]=[" not in "".join(text_chunks(reader, Selection(), values=0))
        text = "".join(text_chunks(reader, Selection(), values=65))
    assert "condition=%" in text and "bool[2,1]=[[True], [False]]" in text
    assert "u8[65]=[0, 1, 2, 3, 4, 5, 6, 7, … 57 more]" in text


@pytest.mark.slow
def test_a_selection_shows_what_the_whole_dump_shows(path: Path) -> None:
    whole = {row["ordinal"]: row for row in rows(path)}
    for start in range(0, max(whole), 5):
        part = rows(path, start=start, stop=start + 9)
        assert all(row == whole[row["ordinal"]] for row in part)
    assert all(row == whole[row["ordinal"]] for row in rows(path, kernel="aten::*a*"))


@pytest.mark.slow
def test_rows_with_values_are_valid(path: Path) -> None:
    with open_capture(path) as reader:
        for line in "".join(jsonl_chunks(reader, Selection())).splitlines():
            Draft202012Validator(SCHEMA).validate(json.loads(line))


def test_nothing_is_decoded_where_nobody_asks_or_there_is_nothing_to_show(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_arguments: Any) -> Any:
        raise AssertionError("a payload was read")

    bare = tmp_path / "bare.opreplay"
    with replayfmt.capture(bare, payload="none"):
        torch.arange(3) + TABLE[0, :3]
    monkeypatch.setattr(CaptureReader, "payload", unexpected)
    assert rows(path, values=0) and rows(bare)
    with open_capture(bare) as reader:
        assert not SmallValues(reader, 64, str).shows
    with pytest.raises(AssertionError, match="a payload was read"):
        rows(path)


def test_a_storage_that_is_only_passed_on_keeps_its_values(tmp_path: Path) -> None:
    positions = torch.tensor([4, 2, 7])
    with replayfmt.capture(tmp_path / "passed.opreplay"):
        positions + 1
        other = torch.empty(0, dtype=torch.int64).set_(positions.untyped_storage(), 1, (2,), (1,))
        positions - 1
        other.add_(1)
        positions * 3
    dumped = [row for row in rows(tmp_path / "passed.opreplay") if tensors(row)]
    shown = {row["op"]: tensors(row)[0].get("value") for row in dumped}
    assert shown["aten::mul"] is None, "after a write"
    assert shown["aten::sub"] == [4, 2, 7]
    assert shown["aten::add_"] == [2, 7]


def test_a_dump_starts_without_the_parts_of_numpy_that_it_does_not_need(path: Path) -> None:
    code = (
        "import sys; from replayfmt.format.reader import open_capture; from replayfmt.dump.selection import Selection; "
        "from replayfmt.dump.stream import jsonl_chunks; "
        f"print(len(''.join(jsonl_chunks(open_capture({str(path)!r}), Selection()))), 'numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    length, masked = done.stdout.split()
    assert int(length) > 1000 and masked == "False", done.stderr


def test_distinct_values_are_what_numpy_says() -> None:
    for values in ([], [3], [2, 2, 2], [5, 1, 5, 0, 1]):
        for dtype in ("u4", "i8"):
            column = np.array(values, dtype)
            assert distinct(column).tolist() == np.unique(column).tolist() and distinct(column).dtype == column.dtype
