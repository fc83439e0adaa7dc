"""Probes as TOML: those that are shipped, a user's own, and mistakes in one, each named by its key."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import CaptureNotFound, UsageError
from replayfmt.probes.definitions import find_probe, parse_probe, shipped_probes
from replayfmt.probes.recordings import BLOCK_SCHED, DMAT

from .test_report import ran

MINE = """
name = "mine"
about = "counts stores"
cost = "an addition"
[registers]
count = "b64"
[record]
level = "thread"
fields = [["count", "u64"]]
[[instruction]]
at = ["global_store"]
code = ["add.u64 {count}, {count}, 1;"]
[[instruction]]
at = ["end"]
code = []
save = ["count"]
"""


def test_the_shipped_probes_are_listed_with_what_they_save_and_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "list", "--format=json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == ["block_sched", "dmat", "gmem_bytes", "progress", "tensorop_count"]
    assert all(row["about"] and row["cost"] and row["positions"] and row["saves"] for row in rows)
    assert [row["record_bytes"] for row in rows] == [16, 16, 16, 8, 8]
    assert ran(monkeypatch, "list") == 0
    assert "block_sched: when each warp ran, and on which SM\n  cost " in capsys.readouterr().out


def test_the_records_of_shipped_probes_are_those_that_reports_read() -> None:
    layouts = {probe.name: probe.layout for probe in shipped_probes()}
    assert layouts["block_sched"] == BLOCK_SCHED and layouts["dmat"] == DMAT


def test_a_shipped_probe_is_in_a_file_of_its_name() -> None:
    folder = files("replayfmt.probes").joinpath("shipped")
    assert sorted(each.name for each in folder.iterdir()) == [f"{probe.name}.toml" for probe in shipped_probes()]


def test_a_probe_of_the_users_own_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    assert find_probe(tmp_path / "mine.toml").name == "mine"
    assert ran(monkeypatch, "list", tmp_path / "mine.toml") == 0
    assert "mine: counts stores\n" in capsys.readouterr().out
    with pytest.raises(
        UsageError, match="nothing: expected a probe, one of block_sched, dmat, .*, or the path of a .to"
    ):
        find_probe("nothing")
    with pytest.raises(CaptureNotFound, match=r"none\.toml: No such file"):
        find_probe("none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="expected TOML in UTF-8"):
        find_probe(tmp_path / "binary.toml")
    assert ran(monkeypatch, "list", "--force") == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', 'name = "My probe"', "name: expected a name of letters, digits and _, got 'My probe'"),
        ('name = "mine"', "name = 5", "name: expected a string, got '5'"),
        ('name = "mine"', "", "name: expected a string, it is missing"),
        ('count = "b64"', 'count = "f32"', "registers.count: expected a name and one of b32, b64, got 'f32'"),
        ('count = "b64"', 'bytes = "b64"', "registers.bytes: expected a name"),
        ('level = "thread"', 'level = "block"', "record.level: expected warp or thread, got 'block'"),
        ('level = "thread"', 'level = "thread"\neach = "day"', "record.each: expected launch or site, got 'day'"),
        ('level = "thread"', 'level = "warp"\neach = "site"', "record.each: expected launch where level is warp"),
        ('level = "thread"', 'size = 4\nlevel = "thread"', "record.size: expected one of level, each, fields"),
        ('["count", "u64"]', '["count", "f16"]', "record.fields[0]: expected a new name and u32 or u64"),
        (
            '["count", "u64"]',
            '["a", "u32"], ["b", "u64"]',
            "record.fields[1]: expected an offset that is a multiple of 8",
        ),
        ('["count", "u64"]', '["a", "u64"], ["b", "u32"]', "record.fields: expected fields whose size is a multiple"),
        ('"global_store"', '"everywhere"', "instruction[0].at: expected some of start, end"),
        ('"global_store"]', '"branch"]\nwhen = "after"', "instruction[0].when: expected before"),
        ("{count}, 1;", "{bytes}, 1;", None),
        ('at = ["global_store"]', 'at = ["matrix"]\nsave = ["count"]', "save: expected to be at the end alone"),
        ("{count}, 1;", "{nothing}, 1;", "instruction[0].code: expected in braces one of address, bytes, count, got"),
        ('"add.u64 {count}, {count}, 1;"', '"@p add.u64 {count}, {count}, 1;"', "no guard and no label"),
        ('"add.u64 {count}, {count}, 1;"', '"here: ret;"', "no guard and no label"),
        (
            'save = ["count"]',
            'save = ["count", "count"]',
            "instruction[1].save: expected 1 registers, one for each field",
        ),
        ('save = ["count"]', 'save = ["other"]', "instruction[1].save: expected a register of b64 for count"),
        ('save = ["count"]', "", "instruction: expected one with save, got 'none'"),
        ("[registers]", "[registers", "expected TOML: "),
        ("[registers]", f"[registers]\na = {'9' * 5000}", "expected TOML: "),
        ("[registers]", f"[registers]\na = {'[' * 5000}", "expected TOML: "),
    ],
)
def test_a_mistake_is_one_error_with_the_key(old: str, new: str, message: str | None) -> None:
    assert old in MINE
    text = MINE.replace(old, new)
    if message is None:
        parse_probe(text, "mine.toml")
        return
    with pytest.raises(UsageError) as raised:
        parse_probe(text, "mine.toml")
    assert str(raised.value).startswith("mine.toml: ") and message in str(raised.value)


def test_bytes_and_addresses_belong_to_instructions_of_memory() -> None:
    for place in ('"matrix"', '"global_store", "end"'):
        text = MINE.replace('"global_store"', place).replace("{count}, 1;", "{address}, 1;")
        with pytest.raises(UsageError, match="expected in braces one of count, got 'address'"):
            parse_probe(text, "mine.toml")


def test_every_field_is_in_the_record_of_the_layout() -> None:
    probe: Any = parse_probe(MINE, "mine.toml")
    assert probe.layout.dtype.names == ("count",) and probe.layout.single and probe.record_bytes == 8
