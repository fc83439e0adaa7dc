"""Ops, signatures and kernels as CSV, Parquet and data frames: the same rows everywhere, nulls for what is unknown."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump import captures
from in_process import Tools

import replayfmt
from replayfmt.errors import CaptureFailed, InvalidCapture, UsageError
from replayfmt.export.tables import NULLABLE, TABLE_COLUMNS, TableName, export_table, table_rows
from replayfmt.format.output import Output
from replayfmt.format.reader import open_capture


@pytest.fixture(params=["every_kind", "plain"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return getattr(captures, request.param)(tmp_path / "a.opreplay")


def rows(path: Path, table: TableName, ordinals: np.ndarray | None = None) -> list[dict[str, Any]]:
    with open_capture(path) as reader:
        return [
            dict(zip(piece, values, strict=True))
            for piece in table_rows(reader, table, ordinals)
            for values in zip(*piece.values(), strict=True)
        ]


def test_ops_are_what_the_capture_says_of_them(path: Path) -> None:
    with replayfmt.open(path) as capture:
        found = rows(path, "ops")
        assert [row["ordinal"] for row in found] == list(capture.ops.by_ordinal)
        for row, op in zip(found, capture.ops, strict=True):
            assert (row["op"], row["overload"], row["scope"]) == (op.kernel.name, op.kernel.overload, op.scope)
            assert (row["duration_ns"], row["device_duration_ns"]) == (op.duration_ns, op.device_duration_ns)
            assert row["calls"] == op.record.calls


@pytest.mark.parametrize("table", ["signatures", "kernels"])
def test_groups_add_up_the_calls_and_the_known_times_of_their_ops(path: Path, table: TableName) -> None:
    key = "signature" if table == "signatures" else "kernel"
    ops, found = rows(path, "ops"), rows(path, table)
    assert [row[key] for row in found] == list(dict.fromkeys(row[key] for row in ops))
    for row in found:
        own = [each for each in ops if each[key] == row[key]]
        assert row["calls"] == sum(each["calls"] for each in own) and row["first_ordinal"] == own[0]["ordinal"]
        for name, timed in (("duration_ns", "timed_calls"), ("device_duration_ns", "device_timed_calls")):
            known = [(each[name], each["calls"]) for each in own if each[name] is not None]
            assert row[timed] == sum(calls for _time, calls in known)
            assert row[f"total_{name}"] == (sum(time * calls for time, calls in known) if known else None)
    if table == "kernels":
        assert [row["signatures"] for row in found] == [
            len({each["signature"] for each in ops if each["kernel"] == row["kernel"]}) for row in found
        ]


@pytest.mark.parametrize("table", ["ops", "signatures", "kernels"])
def test_csv_parquet_and_data_frames_hold_the_same_rows_whatever_is_in_names(
    path: Path, table: TableName, tmp_path: Path, tools: Tools
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("pandas")
    expected = rows(path, table)
    for form in ("csv", "parquet"):
        done = tools("export", f"--format={form}", f"--table={table}", path, tmp_path / form)
        assert (done.code, done.out) == (0, f"{tmp_path / form}: {len(expected)} rows of {table}\n")
    with open(tmp_path / "csv", encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    assert tuple(head) == TABLE_COLUMNS[table]
    assert lines == [["" if value is None else str(value) for value in row.values()] for row in expected]
    stored = parquet.read_table(tmp_path / "parquet")
    assert stored.to_pylist() == expected
    assert {each.name for each in stored.schema if each.nullable} == NULLABLE & set(TABLE_COLUMNS[table])
    with replayfmt.open(path) as capture:
        frame = capture.to_pandas(table)
    if frame.index.name:
        frame = frame.reset_index()
    found = [
        {name: None if value is None or value != value else value for name, value in row.items()}
        for row in (frame.astype(object).where(frame.notna(), None).to_dict("records"))
    ]
    assert found == expected


def test_names_with_quotes_and_line_breaks_are_quoted(tmp_path: Path) -> None:
    path = captures.every_kind(tmp_path / "a.opreplay")
    scopes = {row["scope"] for row in rows(path, "ops")}
    assert any("\n" in name for name in scopes) and any('"' in name for name in scopes), "the capture is hostile"


def test_a_selection_limits_every_table_to_its_ops(tmp_path: Path, tools: Tools) -> None:
    path = captures.plain(tmp_path / "a.opreplay")
    assert tools("export", "--format=csv", "--kernel=aten::mul*", "--ops=0:20", path, tmp_path / "ops.csv").code == 0
    lines = (tmp_path / "ops.csv").read_text().splitlines()
    assert len(lines) == 1 + 9 and all(",aten::mul,Tensor," in line for line in lines[1:])
    done = tools("export", "--format=csv", "--table=kernels", "--ops=0:20", path, tmp_path / "kernels.csv")
    assert done.code == 0 and [
        line.split(",")[-7] for line in (tmp_path / "kernels.csv").read_text().splitlines()[1:]
    ] == ["10", "9"]


def test_a_count_that_no_number_holds_is_one_error(tmp_path: Path) -> None:
    builder = captures.Builder(tmp_path / "a.opreplay")
    w = builder.writer
    kernel = w.kernel(captures.Kernel("test::op", "default", "test::op() -> ()"))
    call = captures.Signature(captures.RecordKind.op, (), (), kernel, captures.OpStatus.ok)
    for count in (1 << 60, 1 << 60):
        builder.record(call, annotation=w.annotation({"count": count}))
    builder.frame()
    builder.close()
    with open_capture(builder.path) as reader, pytest.raises(InvalidCapture, match="more than 64 bits"):
        list(table_rows(reader, "kernels"))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_what_cannot_be_written_completely_leaves_no_file(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    path = captures.plain(tmp_path / "a.opreplay")
    write, calls = Output.write, []

    def failing(self: Output, parts: Any) -> None:
        calls.append(parts)
        if len(calls) > 2 and self.path.endswith("out"):
            raise self.fail("could not be written: the disk is full")
        write(self, parts)

    monkeypatch.setattr(Output, "write", failing)
    with open_capture(path) as reader, pytest.raises(CaptureFailed, match="disk is full"):
        export_table(reader, tmp_path / "out", "ops", form)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.opreplay"]


def test_wrong_requests_are_one_line_and_write_nothing(tmp_path: Path, tools: Tools) -> None:
    path = captures.plain(tmp_path / "a.opreplay")
    taken = tmp_path / "taken.csv"
    taken.write_text("mine")
    for flags, out, code, said in (
        (["--format=csv", "--unique"], "x", 2, "--unique is for --format=replay-zip"),
        (["--table=ops"], "x", 2, "--table is for --format=csv and parquet"),
        (["--format=csv", "--kernel=aten::nothing"], "x", 2, "has no op of that name"),
        (["--format=csv"], "taken.csv", 1, "exists already"),
        (["--format=csv", "--force"], "a.opreplay", 2, "is the capture that is exported"),
        (["--format=csv"], "no/such/x", 1, "there is no directory"),
    ):
        done = tools("export", *flags, path, tmp_path / out)
        assert done.code == code and said in done.err and done.err.count("\n") == 1, done.err
    assert taken.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.opreplay", "taken.csv"]
    assert tools("export", "--format=csv", "--force", path, taken).code == 0
    with replayfmt.open(path) as capture, pytest.raises(UsageError, match="expected 'ops', 'signatures', 'kernels'"):
        capture.to_pandas("nonsense")  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_pyarrow_parquet_is_one_error_and_csv_is_written(tmp_path: Path) -> None:
    path = captures.plain(tmp_path / "a.opreplay")
    code = f"""
import sys
sys.modules["pyarrow"] = None
sys.modules["torch"] = None
from replayfmt.errors import OpReplayError
from replayfmt.export.tables import export_table
from replayfmt.format.reader import open_capture
reader = open_capture({str(path)!r})
print(export_table(reader, {str(tmp_path / "a.csv")!r}, "ops", "csv"))
try:
    export_table(reader, {str(tmp_path / "a.parquet")!r}, "ops", "parquet")
except OpReplayError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [
        "100",
        "--format=parquet needs pyarrow, which is not installed: pip install 'opreplay[tables]'; --format=csv works "
        "without it",
    ], done.stderr
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize("name", ['=HYPERLINK("http://a.invalid","b")', "+1", "-2+3", "@SUM(A1)", "=cmd|' /C calc'!A0"])
def test_names_that_a_spreadsheet_takes_for_formulas_are_what_the_capture_says(tmp_path: Path, name: str) -> None:
    """SECURITY.md says so: a changed name would be another scope's."""
    with replayfmt.capture(tmp_path / "a.opreplay"), replayfmt.scope(name):
        torch.ones(2)
    with open_capture(tmp_path / "a.opreplay") as reader:
        export_table(reader, tmp_path / "a.csv", "ops", "csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["scope"] == name and row["op"] == "aten::ones"


@pytest.mark.parametrize("kind", ["execution-trace", "tracelens"])
def test_when_an_op_began_is_null_where_the_imported_trace_does_not_say(
    kind: str, tmp_path: Path, tools: Tools
) -> None:
    b = captures.Builder(tmp_path / "a.opreplay", replace(captures.SESSION, policies={"import": kind}))
    kernel = b.writer.kernel(captures.Kernel("a::b", "default", "a::b() -> ()"))
    b.record(captures.Signature(captures.RecordKind.op, (), (), kernel, captures.OpStatus.ok))
    b.starts[-1] = 0
    b.frame()
    path = b.close()
    assert [row["start_ns"] for row in rows(path, "ops")] == [None]
    done = tools("dump", "--format=jsonl", path)
    (dumped,) = (row for row in map(json.loads, done.out.splitlines()) if row["kind"] == "op")
    assert dumped["start_ns"] is None
    done = tools("export", "--format=perfetto", path, tmp_path / "timeline.json")
    assert "left out  1 ops: the trace that was imported does not say when they began" in done.out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}, "nothing is put at the beginning"
