"""TraceLens EventReplay IR: lists written by hand, the zip artifact, and what its own traces look like."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, MemoryFormat, RecordKind
from replayfmt.format.model import DeviceValue, Record, TensorValue
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.report import ImportReport
from replayfmt.importers.tracelens import import_tracelens
from replayfmt.replay.plan import Plan


def tensor(shape: list[int], dtype: str = "float", strides: list[int] | None = None, init: str = "normal") -> Any:
    step, steps = 1, []
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return {"shape": shape, "dtype": dtype, "strides": steps[::-1] if strides is None else strides, "init": init}


def entry(name: str, *positional: tuple[str, str, Any], count: int = 1, **keywords: tuple[str, Any]) -> dict[str, Any]:
    return {
        "op_name": name,
        "count": count,
        "replay_ir": {
            "list_pos_args": [{"arg_name": arg, "arg_type": kind, "value": value} for arg, kind, value in positional],
            "list_kwargs": [
                {"arg_name": arg, "arg_type": kind, "value": value} for arg, (kind, value) in keywords.items()
            ],
        },
    }


MM = entry("aten::mm", ("self", "Tensor", tensor([2, 3])), ("mat2", "Tensor", tensor([3, 4], strides=[1, 3])), count=5)


def imported(path: Path) -> tuple[ImportReport, list[Record], list[str]]:
    out = path.with_suffix(".opreplay")
    report = import_tracelens(path, out, force=True)
    with open_capture(out) as reader:
        records = [each for each in reader.records() if each.kind in (RecordKind.op, RecordKind.unsupported)]
        names = [
            reader.kernels[each.signature.kernel].qualified_name
            if each.kind is RecordKind.op
            else str(each.argument("reason"))
            for each in records
        ]
        return report, records, names


def saved(tmp_path: Path, *entries: Any) -> Path:
    path = tmp_path / "event_replay_ir.json"
    path.write_text(json.dumps(list(entries)))
    return path


def test_a_call_has_its_shapes_strides_and_count(tmp_path: Path) -> None:
    report, (record,), names = imported(saved(tmp_path, MM))
    assert names == ["aten::mm.default"]
    assert record.annotation == {"import": "exact", "count": 5}
    assert [(value.meta.sizes, value.meta.strides) for value in record.args if isinstance(value, TensorValue)] == [
        ((2, 3), (3, 1)),
        ((3, 4), (1, 3)),
    ]
    assert report.calls() == {"exact": 5, "inferred": 0, "incomplete": 0}
    assert any("cuda:0" in note for note in report.notes)


def test_the_overload_is_found_by_the_arguments(tmp_path: Path) -> None:
    add = entry(
        "aten::add",
        ("self", "Tensor", tensor([4], "long int")),
        ("other", "Tensor", tensor([4], "long int")),
        alpha=("Scalar", 2),
    )
    mean = entry(
        "aten::mean",
        ("self", "Tensor", tensor([4, 5])),
        ("dim", "int[1]?", [1]),
        ("keepdim", "bool", True),
        dtype=("ScalarType?", None),
    )
    _report, records, names = imported(saved(tmp_path, add, mean))
    assert names == ["aten::add.Tensor", "aten::mean.dim"]
    assert records[0].argument("alpha") == 2


def test_enumerations_stored_as_numbers_are_read(tmp_path: Path) -> None:
    copy = entry(
        "aten::_to_copy",
        ("self", "Tensor", tensor([1, 2, 4, 5])),
        dtype=("ScalarType?", 15),
        device=("Device?", "cuda:1"),
        memory_format=("MemoryFormat?", 2),
    )
    _report, (record,), _names = imported(saved(tmp_path, copy))
    assert record.argument("dtype") is DType.bfloat16
    assert record.argument("memory_format") is MemoryFormat.channels_last
    assert isinstance(record.argument("device"), DeviceValue)


def test_lists_of_tensors_and_undefined_ones_are_read(tmp_path: Path) -> None:
    cat = entry("aten::cat", ("tensors", "Tensor[]", [tensor([1, 2]), tensor([3, 2])]), ("dim", "int", 0))
    index = entry(
        "aten::index",
        ("self", "Tensor", tensor([4, 5])),
        ("indices", "Tensor?[]", [None, tensor([3], "long int", init="zeros")]),
    )
    _report, records, names = imported(saved(tmp_path, cat, index))
    assert names == ["aten::cat.default", "aten::index.Tensor"]
    assert [value.meta.sizes for value in records[0].args[0]] == [(1, 2), (3, 2)]  # type: ignore[union-attr]
    assert records[1].args[1][0] is None  # type: ignore[index]


def test_calls_that_cannot_be_made_are_unsupported_records_with_the_reason(tmp_path: Path) -> None:
    unknown = entry("nowhere::op", ("x", "Tensor", tensor([4])))
    shapeless = entry("aten::relu", ("self", "Tensor", {"dtype": "float"}))
    typeless = entry("aten::relu", ("self", "Tensor", tensor([4], "Mystery")))
    report, records, names = imported(saved(tmp_path, unknown, shapeless, typeless, MM))
    assert names == ["no_schema", "import_incomplete", "import_incomplete", "aten::mm.default"]
    assert report.calls()["incomplete"] == 3
    assert "nowhere" in str(records[0].argument("detail"))


def test_the_zip_artifact_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "replay_code.zip", "w") as archive:
        archive.writestr("replay_code/utils.py", "")
        archive.writestr("replay_code/event_replay_ir.json", json.dumps([MM]))
    _report, _records, names = imported(tmp_path / "replay_code.zip")
    assert names == ["aten::mm.default"]


def test_what_can_be_read_of_a_broken_file_is_imported_and_the_rest_is_told(tmp_path: Path) -> None:
    text = json.dumps([MM, MM, MM])
    path = tmp_path / "cut_ir.json"
    path.write_text(text[: len(text) - len(json.dumps(MM)) // 2])
    report, _records, names = imported(path)
    assert names == ["aten::mm.default"] * 2
    assert report.problems


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"op_name": "aten::mm"}]', "nothing"])
def test_what_is_no_ir_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x_ir.json"
    path.write_text(text)
    with pytest.raises(InvalidCapture, match="x_ir.json"):
        import_tracelens(path, tmp_path / "out.opreplay")
    assert not (tmp_path / "out.opreplay").exists()


def test_an_import_replays_elsewhere(tmp_path: Path) -> None:
    path = saved(tmp_path, MM, entry("aten::relu", ("self", "Tensor", tensor([4, 5], "c10::BFloat16"))))
    imported(path)
    with Plan(path.with_suffix(".opreplay"), devices=["cpu"]) as plan:
        result = plan.execute()
    assert (result.outcome, result.ops) == ("ok", 2)


def test_what_a_replay_of_an_import_returns_is_there_from_python_when_it_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, MM, entry("aten::relu", ("self", "Tensor", tensor([4, 5]))))
    imported(path)
    capture = path.with_suffix(".opreplay")
    before = capture.read_bytes()
    replayed = replayfmt.run(capture, results=True, devices=["cpu"])
    assert replayed.results is not None and len(replayed.results) == 2
    first, second = replayed.results
    assert second in replayed.results and first + 10**6 not in replayed.results
    assert (replayed.results[second] >= 0).all() and replayed.results[second].shape == (4, 5)
    assert torch.equal(replayed.results[first], replayed.results[first])
    with pytest.raises(KeyError):
        replayed.results[second + 10**6]
    assert replayfmt.run(capture, devices=["cpu"]).results is None
    assert capture.read_bytes() == before
