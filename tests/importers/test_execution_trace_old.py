"""What older execution traces say in another way, operators that do no work, storages, archives of several ranks."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.common.report import ImportReport
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.importers.importing import import_trace
from replayfmt.importers.kineto.importer import import_kineto

from .observed import MM, RELU, Traced, Written, as_schema, observe
from .traces import MM as MM_INPUTS
from .traces import op, trace

ALLREDUCE = "c10d::allreduce_(Tensor[] tensors, Any group, Any op, Tensor? sparse, int timeout) -> (Tensor[], Any)"
RECORD_STREAM = "aten::record_stream(Tensor(a!) self, Stream s) -> ()"


def imported(path: Path, rewrite: Any = "none") -> tuple[ImportReport, list[Record]]:
    """The report, and what is no storage's."""
    out = path.with_suffix(".opreplay")
    report = import_execution_trace(path, out, ImportOptions(rewrite=rewrite), force=True)
    with open_capture(out) as reader:
        return report, [each for each in reader.records() if not each.kind.name.startswith("storage_")]


def reduced(version: str) -> tuple[Written, list[Any]]:
    """A trace with an all-reduce, described by what its inner function was given, as that version's has it."""
    made = Written()
    tensor = Traced(10, 11, [7])
    group: list[Any] = [93891384002768] if version == "1.0.1" else [["0", "default_pg"]]
    tail: list[Any] = [] if version == "1.0.1" else [0, 1, 8]
    outer = made.node("c10d::allreduce_", ALLREDUCE, [[tensor]], [[tensor]])
    inner = made.node(
        "record_param_comms", "", [[tensor], 151, *group, 2, "allreduce", [], [], *tail], [], parent=outer
    )
    made.node("nccl:all_reduce", "", [tensor], parent=inner)
    made.node("record_param_comms", "", [151, *group, 2, "wait", [], [], *tail])
    return made, tail


def saved(made: Written, path: Path, version: str) -> Path:
    made.save(path)
    nodes = made.nodes
    children = {node["id"]: node for node in nodes}
    # The observer writes what a function called before the function itself.
    order = sorted(nodes, key=lambda node: (-_depth(node, children), node["id"]))
    path.write_text(json.dumps(as_schema(json.loads(path.read_text()) | {"nodes": order}, version)))
    return path


def _depth(node: dict[str, Any], nodes: dict[int, dict[str, Any]]) -> int:
    above = nodes.get(node["ctrl_deps"])
    return 0 if above is None or above is node else 1 + _depth(above, nodes)


@pytest.mark.parametrize(
    ("version", "group", "ranks"),
    [("1.0.1", "93891384002768", None), ("1.0.3-chakra.0.0.4", "0", 8), ("1.1.0-chakra.0.0.4", "0", 8)],
)
def test_the_inner_function_describes_a_collective_of_older_schemas(
    version: str, group: str, ranks: int | None, tmp_path: Path
) -> None:
    made, _tail = reduced(version)
    _report, records = imported(saved(made, tmp_path / "t.json", version))
    (record,) = records
    assert record.argument("op") == "c10d::allreduce_" and record.annotation is not None
    told = record.annotation["collective"]
    assert (told["name"], told["dtype"], told["elements_in"], told["group"]) == ("allreduce", "float", 7, group)
    assert told["group_size"] == ranks and "allreduce of 7 float elements over" in str(record.argument("detail"))


def test_splits_tell_how_many_ranks_there_are(tmp_path: Path) -> None:
    made = Written()
    given = Traced(10, 11, [24])
    made.node("record_param_comms", "", [given, 148, 9, 2, "all_to_allv", [8, 8, 8], [8, 8, 8]], [])
    _report, records = imported(saved(made, tmp_path / "t.json", "1.0.1"))
    assert "all_to_allv of 24 float elements over 3 ranks, group '9'" in str(records[0].argument("detail"))


def test_a_description_is_not_taken_for_another_collective(tmp_path: Path) -> None:
    made, _tail = reduced("1.0.3")
    tensor = Traced(20, 21, [5])
    made.node("c10d::broadcast_", ALLREDUCE.replace("allreduce_", "broadcast_"), [[tensor]], [[tensor]])
    _report, records = imported(saved(made, tmp_path / "t.json", "1.0.3"))
    said = {str(each.argument("op")): str(each.argument("detail")) for each in records}
    assert said["c10d::broadcast_"] == "arguments: [float[5]]; the trace does not name its group"
    assert "does not name" not in said["c10d::allreduce_"] and len(said) == 2


def test_telling_the_allocator_about_a_stream_does_not_stop_a_replay(tmp_path: Path) -> None:
    made = Written()
    one, other = Traced(10, 11, [4]), Traced(12, 13, [4])
    made.node("aten::relu", RELU, [one], [other])
    made.node("aten::record_stream", RECORD_STREAM, [other, "<Stream>"], [])
    made.node("aten::relu", RELU, [other], [Traced(14, 15, [4])])
    report, records = imported(made.save(tmp_path / "t.json"))
    assert [each.kind for each in records] == [RecordKind.op, RecordKind.op] and report.calls()["incomplete"] == 0
    assert any("1 aten::record_stream" in note for note in report.notes)
    events = [
        op("aten::mm", 10, 5, MM_INPUTS),
        op("aten::record_stream", 20, 5, [MM_INPUTS[0], ("Stream", [], [], "")]),
    ]
    import_kineto(trace(tmp_path / "k.json", events), tmp_path / "k.opreplay")
    with replayfmt.open(tmp_path / "k.opreplay") as capture:
        assert [each.kernel.name for each in capture.ops] == ["aten::mm"]
        assert capture.reader.summary is not None and not capture.reader.summary.unsupported


def test_tensors_that_are_set_to_storages_are_on_their_memory(tmp_path: Path) -> None:
    whole = torch.arange(12.0)

    def program() -> None:
        made = torch.arange(12.0)
        view = torch.empty(0).set_(made.untyped_storage(), 2, (2, 3), (3, 1))  # type: ignore[call-overload]
        view.copy_(view + view)
        torch.empty(0).set_(whole.untyped_storage()).exp()  # type: ignore[call-overload]
        made.clone()

    report, _records = imported(observe(tmp_path / "t.json", program))
    assert report.calls()["incomplete"] == 0
    with replayfmt.open(tmp_path / "t.opreplay") as capture:
        last = max(number for number, each in capture.ops.by_ordinal.items() if each.kernel.name == "aten::clone")
        result = capture.ops.by_ordinal[last].replay()
        kinds = {
            node.kind.name
            for number, each in capture.ops.by_ordinal.items()
            if each.kernel.name == "aten::set_"
            for node in capture.reader.record(number).signature.args
            if node.name == "source"
        }
        with replayfmt.Plan(tmp_path / "t.opreplay") as plan:
            assert plan.execute().outcome == "ok"
            assert "the content of 1 storage was synthesized" in plan.synthesis.reason
    assert kinds == {"storage"}
    expected = torch.arange(12.0)
    expected[2:8] *= 2
    assert torch.equal(result, expected)


def archived(path: Path, files: dict[str, str]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("name", ["ranks.tar.gz", "ranks.zip"])
def test_the_ranks_of_an_archive_that_were_not_read_are_named(name: str, tmp_path: Path) -> None:
    made = Written()
    made.node("aten::mm", MM, [Traced(1, 2, [2, 3]), Traced(3, 4, [3, 2])], [Traced(5, 6, [2, 2])])
    text = made.save(tmp_path / "t.json").read_text()
    files = {"run/rank_2.json": text, "run/source.py": "x", "run/._rank_0.json": "x", "run/rank_0.json": text}
    report = import_trace(archived(tmp_path / name, files), tmp_path / "a.opreplay")
    assert (
        "of the archive, run/rank_2.json was read, its first JSON file; not read: run/rank_0.json; --rank=N or "
        "--rank=all imports the traces of other ranks" in report.notes
    )
    kineto = trace(tmp_path / "k.json", [op("aten::mm", 10, 5, MM_INPUTS)]).read_text()
    report = import_trace(
        archived(tmp_path / name, {f"{each}.json": kineto for each in range(40)}), tmp_path / "b.opreplay"
    )
    (note,) = (each for each in report.notes if "of the archive" in each)
    assert "0.json was read" in note and "16.json and 23 more; --rank=N" in note
    report = import_trace(archived(tmp_path / name, {"only.json": kineto, "a.py": ""}), tmp_path / "c.opreplay")
    assert "of the archive, only.json was read, its first JSON file" in report.notes
