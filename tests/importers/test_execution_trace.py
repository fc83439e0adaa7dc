"""Execution traces that PyTorch's own observer makes here: imported, compared with the recorder, and replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import InvalidCapture, UnsupportedVersion
from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.execution_trace import allocations as execution_trace_content
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.replay.plan import Plan

from .observed import Mlp, as_schema, observe


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mlp]:
    """The trace of three training steps, and the model afterwards."""
    program = Mlp()
    return observe(tmp_path_factory.mktemp("observed") / "mlp.json", program.steps), program


@pytest.fixture(scope="module")
def imported(mlp: tuple[Path, Mlp]) -> Iterator[CaptureReader]:
    out = mlp[0].with_name("mlp.opreplay")
    import_execution_trace(mlp[0], out)
    with open_capture(out) as reader:
        yield reader


def ops(reader: CaptureReader) -> list[Record]:
    return [record for record in reader.records() if record.kind is RecordKind.op]


def names(reader: CaptureReader) -> list[str]:
    return [reader.kernels[record.signature.kernel].qualified_name for record in ops(reader)]


@pytest.mark.slow
def test_the_import_has_exactly_the_ops_that_the_recorder_records(tmp_path: Path, imported: CaptureReader) -> None:
    program = Mlp()
    with replayfmt.capture(tmp_path / "recorded.opreplay"):
        program.steps()
    with open_capture(tmp_path / "recorded.opreplay") as recorded:
        assert _calls(imported) == _calls(recorded)


def _calls(reader: CaptureReader) -> list[tuple[str, list[Any]]]:
    """Every op with the sizes it returned; PyTorch detaches more often where a dispatch mode is active."""
    return [
        (name, [value.meta.sizes for value in record.results if isinstance(value, TensorValue)])
        for name, record in zip(names(reader), ops(reader), strict=True)
        if name != "aten::detach.default"
    ]


def test_only_what_was_there_before_the_trace_is_without_content(imported: CaptureReader) -> None:
    absent = [
        number
        for number in range(1, imported.storage_count + 1)
        if imported.storage(number).origin is StorageOrigin.absent
    ]
    # Four parameters, inputs, labels.
    assert sorted(imported.storage(number).bytes for number in absent) == sorted(
        [6 * 8 * 4, 8 * 4, 8 * 3 * 4, 3 * 4, 5 * 6 * 4, 5 * 8]
    )


def test_marks_become_scopes(imported: CaptureReader) -> None:
    assert {scope.name for scope in imported.scopes[1:]} >= {"step 0", "step 1", "step 2"}
    inside = [imported.scope_path(record.scope) for record in ops(imported)]
    assert inside[0].startswith("step 0")
    assert "step 2/Optimizer.step#SGD.step" in inside


def test_a_replay_has_every_result_as_it_was_traced(imported: CaptureReader) -> None:
    with Plan(imported) as plan:
        result = plan.execute(verify="auto")
    assert result.outcome == "ok"
    assert result.ops == len(ops(imported))


@pytest.mark.slow
def test_values_flow_through_the_replayed_graph(
    mlp: tuple[Path, Mlp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the program's inputs, the replay of three training steps computes the program's last loss."""
    fresh = Mlp()
    contents = {
        tuple(tensor.shape): tensor.detach().contiguous().numpy().tobytes()
        for tensor in [*fresh.model.parameters(), fresh.inputs, fresh.labels]
    }

    def find(
        _self: Any, _node: int, _number: int, placed: Any, *_more: Any
    ) -> execution_trace_content.FoundContent | None:
        data = contents.get(placed.tensor.sizes)
        return None if data is None else execution_trace_content.FoundContent(StorageOrigin.payload, data, "")

    monkeypatch.setattr(execution_trace_content.TracedContent, "find", find)
    import_execution_trace(mlp[0], tmp_path / "known.opreplay")
    capture = replayfmt.open(tmp_path / "known.opreplay")
    losses = [number for number, op in capture.ops.by_ordinal.items() if op.kernel.name == "aten::nll_loss_forward"]
    assert len(losses) == 3
    loss, _weight = capture.ops.by_ordinal[losses[-1]].replay()
    torch.testing.assert_close(loss, mlp[1].losses[-1])
    assert mlp[1].losses[-1] < mlp[1].losses[0]
    capture.close()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0.1", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4"])
def test_older_schemas_give_the_same_graph_with_strides_that_are_said_to_be_inferred(
    version: str, mlp: tuple[Path, Mlp], imported: CaptureReader, tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(as_schema(json.loads(mlp[0].read_text()), version)))
    report = import_execution_trace(path, tmp_path / "old.opreplay")
    assert report.calls()["inferred"] > 0 and report.calls()["incomplete"] == 0
    assert any("has no strides" in note for note in report.notes)
    with open_capture(tmp_path / "old.opreplay") as old:
        assert names(old) == names(imported)
        for then, now in zip(ops(old), ops(imported), strict=True):
            assert _geometry(then) == _geometry(now)
        assert "inferred" in {(record.annotation or {}).get("import") for record in ops(old)}


def _geometry(record: Record) -> list[Any]:
    values = (*record.args, *record.results)
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [
        (value.storage, value.offset, value.meta.sizes, value.meta.strides)
        for value in flat
        if isinstance(value, TensorValue)
    ]


def test_views_are_on_the_storage_they_were_on(imported: CaptureReader) -> None:
    transposes = [record for record in ops(imported) if imported.kernels[record.signature.kernel].name == "aten::t"]
    assert transposes
    for record in transposes:
        given, result = record.args[0], record.results[0]
        assert isinstance(given, TensorValue) and isinstance(result, TensorValue)
        assert given.storage == result.storage
        assert result.meta.strides == given.meta.strides[::-1]


def test_the_root_level_takes_the_outermost_operators(mlp: tuple[Path, Mlp], tmp_path: Path) -> None:
    import_execution_trace(mlp[0], tmp_path / "root.opreplay", ImportOptions(level="root"))
    with open_capture(tmp_path / "root.opreplay") as reader:
        assert "aten::linear.default" in names(reader)
        assert "aten::addmm.default" not in names(reader)


def test_a_level_that_the_trace_cannot_tell_is_said_to_be_another(mlp: tuple[Path, Mlp], tmp_path: Path) -> None:
    report = import_execution_trace(mlp[0], tmp_path / "l.opreplay", ImportOptions(level="launching"))
    assert any("the deepest operators are taken" in note for note in report.notes)


@pytest.mark.slow
def test_a_trace_that_was_cut_off_gives_what_is_there_and_says_where_it_ends(
    mlp: tuple[Path, Mlp], tmp_path: Path
) -> None:
    text = mlp[0].read_text()
    path = tmp_path / "cut.json"
    path.write_text(text[: len(text) // 2])
    report = import_execution_trace(path, tmp_path / "cut.opreplay")
    assert any("ends" in problem for problem in report.problems)
    with open_capture(tmp_path / "cut.opreplay") as reader, Plan(reader) as plan:
        assert plan.execute().outcome == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"nodes": []}',
        '{"schema": "1.1.1", "nodes": []}',
        '{"schema": 3, "nodes": [{}]}',
        '{"schema": "1.1.1", "nodes": [{"id": 1}]}',
    ],
)
def test_what_is_no_execution_trace_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InvalidCapture) as caught:
        import_execution_trace(path, tmp_path / "out.opreplay")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out.opreplay").exists()


@pytest.mark.parametrize("version", ["0.9.0", "1.0.0", "1.2.0", "2.0.0-chakra.1.0.0"])
def test_an_unknown_schema_version_is_refused_by_name(version: str, tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({"schema": version, "nodes": []}))
    with pytest.raises(UnsupportedVersion, match=version.replace(".", r"\.")):
        import_execution_trace(path, tmp_path / "out.opreplay")


def test_progress_counts_to_the_end_once(mlp: tuple[Path, Mlp], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = ImportOptions(progress=lambda done, length: seen.append((done, length)))
    import_execution_trace(mlp[0], tmp_path / "p.opreplay", options)
    assert seen == sorted(seen)
    assert seen[-1] == (mlp[0].stat().st_size,) * 2


def test_autograds_wrappers_are_noted_on_the_ops_inside_them(imported: CaptureReader) -> None:
    around = {
        name: (record.annotation or {}).get("within", [])
        for name, record in zip(names(imported), ops(imported), strict=True)
    }
    assert around["aten::mm.default"][-1] == "AddmmBackward0"
    assert around["aten::mm.default"][0].startswith("autograd::engine::evaluate_function")
    assert around["aten::addmm.default"] == []


def test_a_trace_without_times_has_none(imported: CaptureReader) -> None:
    assert {record.duration_ns for record in imported.records()} == {None}
