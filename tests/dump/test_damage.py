"""The dump of captures that were cut short or changed: what can be shown, or one error of the library's own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.errors import CaptureNotFound, InvalidCapture
from replayfmt.format.reader import open_capture

from . import captures


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return captures.plain(tmp_path_factory.mktemp("damage") / "small.opreplay", ops=12, frame=4).read_bytes()


def rows(path: Path) -> list[dict[str, object]] | None:
    """The rows of a dump; None where it is refused. Any other exception is a fault."""
    try:
        with open_capture(path) as reader:
            "".join(text_chunks(reader, Selection()))
            return [json.loads(line) for chunk in jsonl_chunks(reader, Selection()) for line in chunk.splitlines()]
    except (InvalidCapture, CaptureNotFound):
        return None


@pytest.mark.sweep
def test_a_capture_cut_anywhere_is_refused_or_shown_as_incomplete(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.opreplay"
    shown = 0
    for length in range(0, len(small), 5):
        path.write_bytes(small[:length])
        found = rows(path)
        if found is not None:
            shown += 1
            assert found[0]["complete"] is False and found[0]["incomplete_reason"]
            ordinals = [row["ordinal"] for row in found if "ordinal" in row]
            assert ordinals == list(range(len(ordinals)))
    assert shown > len(small) // 20


@pytest.mark.sweep
def test_a_changed_bit_is_refused_or_changes_no_record(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "flipped.opreplay"
    path.write_bytes(small)
    whole = [row for row in rows(path) or [] if "ordinal" in row]
    choose = random.Random(5)
    for _ in range(600):
        data = bytearray(small)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(data)
        found = rows(path)
        if found is not None:
            assert [row for row in found if "ordinal" in row] == whole[: sum("ordinal" in row for row in found)]
