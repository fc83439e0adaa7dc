"""The numbers of an import's report are sums: nothing of a trace is in two of them, nothing in none."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.report import ImportReport
from replayfmt.importers.importing import import_trace, sniff

from .observed import ADD_, MM, RELU, Mlp, Traced, Written, observe
from .traces import ADD, NONE, SHARED, annotation, kernel, launch, op, trace
from .traces import MM as FACTORS

_CASES = SHARED.parent / "cases" / "traces"
_OTHERS = sorted(
    each for folder in (SHARED, _CASES) if folder.is_dir() for each in folder.rglob("*") if ".json" in each.suffixes
)


def _adds_up(report: ImportReport, capture: Path, *, unique: bool = False) -> None:
    """Check every number of a report against the others, and against the capture."""
    rows = list(report.rows())
    head, entries = rows[0], rows[1:]
    assert all(isinstance(count, int) and count >= 0 for count in head["counts"].values())
    for status, calls in head["calls"].items():
        assert calls == sum(row["calls"] for row in entries if row["status"] == status)
        assert head["unique"][status] == sum(row["status"] == status for row in entries)
    counts = head["counts"]
    total = sum(head["calls"].values())
    if head["format"] != "tracelens":
        parts = ("taken", "inside taken", "around taken", "no work", *(["not selected"] * ("not selected" in counts)))
        assert counts["operators"] == sum(counts[part] for part in parts)
        whole = counts["events" if head["format"] == "kineto" else "nodes"]
        assert whole == counts["operators"] + counts["wrappers"] + counts["annotations"]
        assert total == counts["taken"] + counts.get("without one", 0)
    with open_capture(capture) as reader:
        kept = Counter(each.kind for each in reader.records() if each.kind in (RecordKind.op, RecordKind.unsupported))
    if not unique and head["format"] != "tracelens":  # its calls have counts
        assert kept[RecordKind.unsupported] == head["calls"]["incomplete"]
        assert kept[RecordKind.op] == head["calls"]["exact"] + head["calls"]["inferred"]
    else:
        assert sum(kept.values()) >= sum(head["unique"].values())
    if head["device_time"] is not None:
        time = head["device_time"]
        assert time["total_ns"] == time["calls_ns"] + sum(time["rest_ns"].values())
        assert all(part > 0 for part in time["rest_ns"].values())
        of_calls = sum(row["device_ns"] or 0 for row in entries)
        left = sum(time["rest_ns"].get(reason, 0) for reason in ("lost", "untimed", "not selected"))
        assert time["total_ns"] == of_calls + left


@pytest.mark.sweep
@pytest.mark.skipif(not _OTHERS, reason="no other people's traces are beside the project")
@pytest.mark.parametrize("path", _OTHERS, ids=lambda path: path.name)
def test_the_numbers_of_every_other_trace_add_up(path: Path, tmp_path: Path) -> None:
    try:
        kind = sniff(path)
        found: list[dict[str, Any]] = [{}]
        if kind == "kineto":
            found = [
                {"level": level, "unique": unique} for level in ("auto", "leaf", "root") for unique in (False, True)
            ]
        elif kind == "execution-trace":
            found = [{}, {"level": "root"}]
        for options in found:
            out = tmp_path / "out.opreplay"
            report = import_trace(path, out, force=True, **options)
            _adds_up(report, out, unique=options.get("unique", False))
    except OpReplayError as error:
        assert str(error)  # a refusal has no numbers


@pytest.mark.parametrize("level", ["launching", "leaf", "root"])
@pytest.mark.parametrize("unique", [False, True])
def test_the_numbers_of_a_profiler_trace_with_all_kinds_of_work_add_up(
    level: Any, unique: bool, tmp_path: Path
) -> None:
    events = [
        annotation("step", 0, 2000),
        op("aten::linear", 10, 50, FACTORS),
        op("aten::mm", 12, 40, FACTORS),
        launch(1, 14),
        kernel(1, 100, 7),
        launch(2, 16),
        kernel(2, 110, None),  # type: ignore[arg-type]
        op("aten::mm", 70, 10, FACTORS),
        launch(3, 72),
        kernel(3, 130, 9),
        op("aten::view", 90, 5, [FACTORS[0], ("ScalarList", [], [], "[32]")]),
        op("nowhere::nothing", 100, 30, ADD),
        launch(4, 105),
        kernel(4, 150, 11),
        op("MmBackward0", 140, 30, [NONE]),
        launch(5, 150),
        kernel(5, 170, 13),
        op("c10d::send", 200, 100, [("TensorList", [[4]], [[1]], "")]),
        op("aten::add", 250, 20, ADD),
        launch(6, 255),
        kernel(6, 300, 15),
        launch(7, 400, name="cudaGraphLaunch"),
        kernel(7, 500, 17),
        kernel(7, 520, float("nan")),
        kernel(99, 600, 19),  # launched before the trace began
        kernel(0, 700, 21),
    ]
    path = trace(tmp_path / "trace.json", events)
    out = tmp_path / "out.opreplay"
    report = import_trace(path, out, level=level, unique=unique)
    _adds_up(report, out, unique=unique)
    assert report.device_time is not None
    assert report.device_time.total_ns == 112_000 and report.device_time.untimed == 2
    assert report.device_time.lost_ns == 19_000
    assert report.device_time.untimed_ns >= 24_000


@pytest.mark.parametrize("wanted", [{"steps": [1]}, {"scopes": ["part"]}, {"time": "0.5:1"}, {"time": "0.25:"}])
@pytest.mark.parametrize("unique", [False, True])
def test_a_part_of_a_trace_is_what_began_in_it_and_the_numbers_add_up(
    wanted: dict[str, Any], unique: bool, tmp_path: Path
) -> None:
    events = []
    for step in range(3):
        start = 500 * step
        events += [
            annotation(f"ProfilerStep#{step}", start, 490),
            annotation("part" if step == 1 else "rest", start + 5, 480),
            op("aten::mm", start + 10, 20, FACTORS),
            launch(10 * step + 1, start + 12),
            kernel(10 * step + 1, start + 2000, 7 + step),
            op("aten::add", start + 50, 20, ADD, thread=2),
            launch(10 * step + 2, start + 52, thread=2),
            kernel(10 * step + 2, start + 2100, 20 + step),
            launch(10 * step + 3, start + 90, name="cudaGraphLaunch"),
            kernel(10 * step + 3, start + 2200, 40 + step),
        ]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    report = import_trace(path, out, unique=unique, **wanted)
    _adds_up(report, out, unique=unique)
    calls, device_time = report.calls(), report.device_time
    assert device_time is not None and device_time.total_ns == 210_000
    if wanted != {"time": "0.25:"}:
        assert calls == {"exact": 2, "inferred": 0, "incomplete": 1} and report.counts["not selected"] == 4
        assert device_time.left_out_ns == 140_000
    with open_capture(out) as reader:
        assert reader.session.policies["traced-device-ns"] == 210_000


@pytest.mark.parametrize(
    "wanted", [{"steps": [9]}, {"scopes": ["none"]}, {"time": "5"}, {"time": "7:3"}, {"time": ":x"}]
)
def test_a_part_that_the_trace_does_not_have_is_refused(wanted: dict[str, Any], tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.json", [annotation("part", 0, 100), op("aten::mm", 10, 5, FACTORS)])
    with pytest.raises(UsageError, match="it has part|expected A:B in milliseconds"):
        import_trace(path, tmp_path / "out.opreplay", **wanted)


def test_the_numbers_of_an_execution_trace_add_up(tmp_path: Path) -> None:
    path = observe(tmp_path / "trace.json", Mlp().steps)
    for level in ("auto", "root"):
        report = import_trace(path, tmp_path / "out.opreplay", level=level, force=True)  # type: ignore[arg-type]
        _adds_up(report, tmp_path / "out.opreplay")


def test_the_numbers_of_an_execution_trace_with_what_cannot_be_called_add_up(tmp_path: Path) -> None:
    written = Written()
    a, b = Traced(10, 10, [4, 4]), Traced(11, 11, [4, 4])
    module = written.node("nn.Module: Linear")
    written.node("aten::mm", MM, [a, a], [b], parent=module)
    written.node("nowhere::op", "nowhere::op(Tensor self) -> Tensor", [b], [a])
    hidden = written.node("mystery", inputs=[a])
    inner = written.node("aten::add_", ADD_, [a, b, 1], [a], parent=hidden)
    written.node("aten::relu", RELU, [a], [b], parent=inner)
    written.node("mystery", inputs=[a])
    report = import_trace(written.save(tmp_path / "trace.json"), tmp_path / "out.opreplay")
    _adds_up(report, tmp_path / "out.opreplay")
    assert report.counts["inside taken"] == 1 and report.counts["taken"] == 4


def test_what_a_report_says_in_text_is_what_it_says_in_rows(tmp_path: Path) -> None:
    shutil.copy(trace(tmp_path / "a.json", [op("aten::mm", 1, 5, FACTORS)]), tmp_path / "trace.json")
    report = import_trace(tmp_path / "trace.json", tmp_path / "out.opreplay")
    lines = list(report.lines())
    for name, count in report.counts.items():
        assert any(line.split()[: len(name.split()) + 1] == [*name.split(), str(count)] for line in lines)
