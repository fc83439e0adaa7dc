"""--ops, --scope, --kernel: which records are shown, and which frames are read for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayfmt.dump.listings import signature_lines, signature_text_lines
from replayfmt.dump.selection import Selection, parse_range
from replayfmt.dump.stream import jsonl_chunks, text_chunks
from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader, open_capture


def ordinals(path: Path, **asked: Any) -> list[int]:
    with open_capture(path) as reader:
        found = [json.loads(line) for chunk in jsonl_chunks(reader, Selection(**asked)) for line in chunk.splitlines()]
    assert [row["kind"] for row in found[:2]] == ["file", "summary"]
    assert all("ordinal" in row for row in found[2:])
    return [row["ordinal"] for row in found[2:]]


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [("10:20", 10, 20), (":20", 0, 20), ("10:", 10, None), (":", 0, None), ("3:3", 3, 3), ("007:8", 7, 8)],
)
def test_a_range_is_half_open_and_either_end_may_be_missing(text: str, start: int, stop: int | None) -> None:
    assert parse_range(text) == (start, stop)


@pytest.mark.parametrize(
    "text", ["", "5", "a:b", "-1:3", "1:-3", "1:2:3", "5:2", "1.5:2", " 1:2", "१:२", "1:" + "9" * 99]
)
def test_anything_else_is_no_range(text: str) -> None:
    with pytest.raises(UsageError, match="--ops"):
        parse_range(text)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 3, [0, 1, 2]),
        (8, 12, [8, 9, 10, 11]),
        (20, 30, list(range(20, 30))),
        (99, None, [99, 100, 101]),
        (99, 10**17, [99, 100, 101]),
    ],
)
def test_ops_takes_these_ordinals_across_frames(plain: Path, start: int, stop: int | None, expected: list[int]) -> None:
    assert ordinals(plain, start=start, stop=stop) == expected


def test_only_the_frames_that_hold_the_range_are_read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    original = CaptureReader.frame

    def frame(reader: CaptureReader, index: int) -> Any:
        touched.append(index)
        return original(reader, index)

    monkeypatch.setattr(CaptureReader, "frame", frame)
    assert ordinals(plain, start=38, stop=41) == [38, 39, 40]
    assert touched == [3, 4]
    touched.clear()
    with open_capture(plain) as reader:
        text = "".join(text_chunks(reader, Selection(start=50, stop=51)))
        "".join(jsonl_chunks(reader, Selection(), summary_only=True))
    assert touched == [5] and "\n    50  " in text


def test_scope_takes_what_is_in_scopes_of_that_name_or_path_and_below(every: Path) -> None:
    with open_capture(every) as reader:
        paths = {record.ordinal: reader.scope_path(record.scope) for record in reader.records()}
    inside = [ordinal for ordinal, path in paths.items() if path.startswith("execute/step 3")]
    assert 0 < len(inside) < len([path for path in paths.values() if path]) < len(paths)
    assert ordinals(every, scope="step 3") == ordinals(every, scope="execute/step 3") == inside
    assert ordinals(every, scope="execute") == [ordinal for ordinal, path in paths.items() if path]
    deepest = ordinals(every, scope="execute/step 3/k0")
    assert deepest == [ordinal for ordinal, path in paths.items() if path.endswith("/k0")]


@pytest.mark.parametrize("name", ["exec", "step", "step 3/execute", ""])
def test_a_scope_that_is_not_there_is_refused_with_those_that_are(every: Path, name: str) -> None:
    with open_capture(every) as reader, pytest.raises(UsageError, match="it has .*'execute'"):
        next(jsonl_chunks(reader, Selection(scope=name)))


@pytest.mark.parametrize("pattern", ["aten::mul", "aten::mul.Tensor", "aten::m*", "*mul.T?nsor", "aten::[m]ul"])
def test_kernel_takes_ops_by_operator_with_or_without_overload(plain: Path, pattern: str) -> None:
    assert ordinals(plain, kernel=pattern) == list(range(2, 102, 2))[:50]


def test_kernel_takes_nothing_but_ops(every: Path, plain: Path) -> None:
    with open_capture(every) as reader:
        ops = [record.ordinal for record in reader.records() if record.kind == RecordKind.op]
    assert ordinals(every, kernel="*") == ops


def test_what_is_asked_for_together_must_hold_together(every: Path, plain: Path) -> None:
    assert ordinals(plain, start=11, stop=31, kernel="aten::mul", scope="execute") == list(range(12, 31, 2))


def test_several_names_take_what_any_of_them_takes(every: Path, plain: Path) -> None:
    both = sorted([*ordinals(plain, kernel="aten::add"), *ordinals(plain, kernel="aten::mul")])
    assert ordinals(plain, kernel=("aten::mul", "aten::add.Tensor", "aten::m*")) == both
    one, other = ordinals(every, scope="k0"), ordinals(every, scope="</script>")
    assert one and other and ordinals(every, scope=("k0", "</script>")) == sorted({*one, *other})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"start": 5, "stop": 5}, "^--ops=5:5: selects no record of "),
        ({"start": 0, "stop": 0}, "^--ops=:0: selects no record of "),
        ({"start": 500}, "^--ops=500:: .* has 102 records, with ordinals from 0 to 101$"),
        ({"kernel": "aten::mul.out"}, "^--kernel=aten::mul.out: .* has no op of that name; opreplay-dump --signatures"),
        ({"kernel": ("aten::mul", "ATEN::ADD")}, "^--kernel=ATEN::ADD: .* has no op of that name"),
        ({"scope": ("execute", "nowhere")}, "^--scope=nowhere: .* has no scope of that name"),
        ({"stop": 2, "kernel": "aten::mul"}, "^--ops=:2 --kernel=aten::mul: selects no record of "),
    ],
)
def test_what_takes_nothing_is_refused_before_anything_is_shown(plain: Path, asked: dict[str, Any], said: str) -> None:
    with open_capture(plain) as reader:
        for make in (jsonl_chunks, text_chunks):
            with pytest.raises(UsageError, match=said):
                next(make(reader, Selection(**asked)))
        if "scope" not in asked:
            for listing in (signature_lines, signature_text_lines):
                with pytest.raises(UsageError, match="selects|--kernel|--ops"):
                    next(listing(reader, Selection(**asked)))
