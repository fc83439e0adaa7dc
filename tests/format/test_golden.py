"""Captures of released format versions stay readable, whatever becomes of the code that wrote them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from opreplay_tools import dump

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.external_files import OpenedFile, validate
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture

GOLDEN = Path(__file__).parents[1] / "golden"
CAPTURES = sorted(GOLDEN.glob("*.opreplay"))


def test_there_are_golden_captures() -> None:
    names = {path.name for path in CAPTURES}
    assert names >= {f"{name}-1.0.opreplay" for name in ("everything", "recovered", "reference", "step")}


def test_the_file_of_a_golden_capture_is_known_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    with open_capture(GOLDEN / "reference-1.0.opreplay") as reader:
        (file,) = reader.files[1:]
        assert validate(file, file.path, False) is None
        with OpenedFile(file.path) as opened:
            for place in reader.file_ranges[1:]:
                assert len(opened.map(place.offset, place.bytes)) == place.bytes


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_golden_capture_is_valid_and_complete(path: Path) -> None:
    check_capture(path)
    with open_capture(path) as reader:
        assert reader.complete and reader.warnings == []
        assert f"-{reader.version[0]}.{reader.version[1]}" in path.stem
        assert len(list(reader.records())) == reader.record_count
        for info in reader.payloads:
            assert len(reader.payload(info.id)) == info.raw_bytes


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_golden_capture_dumps_at_least_what_it_did(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setattr(sys, "argv", ["opreplay-dump", "--format=jsonl", path.name])
    with pytest.raises(SystemExit) as leaving:
        dump.main()
    assert not leaving.value.code
    now = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    then = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert len(now) == len(then)
    for new, old in zip(now, then, strict=True):
        _assert_has(new, old)


def _assert_has(new: object, old: object) -> None:
    """`new` has everything of `old`; objects may have got more keys."""
    if isinstance(old, dict):
        assert isinstance(new, dict) and old.keys() <= new.keys()
        for key, value in old.items():
            _assert_has(new[key], value)
    elif isinstance(old, list):
        assert isinstance(new, list) and len(new) == len(old)
        for some, other in zip(new, old, strict=True):
            _assert_has(some, other)
    else:
        assert new == old and type(new) is type(old)


def test_the_golden_capture_has_every_kind_of_record_and_value() -> None:
    with open_capture(GOLDEN / "everything-1.0.opreplay") as reader:
        assert {record.kind for record in reader.records()} == set(RecordKind) - {RecordKind.none}
        assert {node.kind for signature in reader.signatures[1:] for node in signature.nodes} == set(ValueKind)


def test_a_recovered_capture_stays_of_its_version(tmp_path: Path) -> None:
    cut, out = tmp_path / "cut.opreplay", tmp_path / "out.opreplay"
    cut.write_bytes((GOLDEN / "everything-1.0.opreplay").read_bytes()[:-64])
    recover_capture(cut, out)
    with open_capture(out) as reader:
        assert reader.version == (1, 0)
        for position in range(len(reader.contents.frames)):
            assert reader.read_frame(position)[0].minor == 0


@pytest.mark.parametrize("name", ["everything-1.0", "recovered-1.0"])
def test_kernels_of_a_golden_capture_have_their_attachments(name: str) -> None:
    with open_capture(GOLDEN / f"{name}.opreplay") as reader:
        attachments = [reader.attachments[number] for number in reader.kernels[4].attachments]
        assert [(each.role, each.name) for each in attachments] == [
            ("source", "twice.py"),
            ("cubin", ""),
            ("from_the_future", "später.bin"),
        ]
        assert bytes(reader.payload(attachments[0].payload)) == b"def twice(x):\n    ...\n"
        assert reader.kernels[5].attachments == (1,)
