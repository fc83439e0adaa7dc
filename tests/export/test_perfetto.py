"""The timeline: what Chrome's trace event format asks of a file, and what the capture says, nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from dump import captures
from in_process import Tools

import replayfmt
from replayfmt.export.perfetto import export_perfetto
from replayfmt.format.memory import memory_by_device
from replayfmt.format.reader import open_capture

Event = dict[str, Any]


def exported(tools: Tools, path: Path, *flags: object) -> list[Event]:
    out = path.with_suffix(".json")
    done = tools("export", "--format=perfetto", "--force", *flags, path, out)
    assert done.code == 0, done.err
    return checked(json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")))


def checked(document: dict[str, Any]) -> list[Event]:
    """The events, if the document is as the format's description wants it ("Trace Event Format", Google): each phase
    with the fields that it needs."""
    assert document["displayTimeUnit"] == "ns"
    ends: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    assert isinstance(document["traceEvents"], list) and isinstance(document["otherData"], dict)
    for event in document["traceEvents"]:
        assert event["ph"] in set("XBEbenisftCM") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert 0 <= event["pid"] < 1 << 31 and 0 <= event["tid"] < 1 << 31, "viewers keep 32 bits"
        assert event["ph"] == "E" or isinstance(event["name"], str)
        assert event["ph"] == "M" or (isinstance(event["ts"], int | float) and abs(event["ts"]) < 1 << 53)
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] in "bensft":
            assert isinstance(event["id"], int | str) and isinstance(event["cat"], str)
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            assert isinstance(event["args"]["name"], str)
            named.add((event["name"], event["pid"], event["tid"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "X" and event["pid"] < 1000:
            assert event["dur"] >= 0 and ("thread_name", event["pid"], event["tid"]) in named
            ends[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in "gpt"
    for event in document["traceEvents"]:
        assert ("process_name", event["pid"], 0) in named, "viewers show a process without a name by its number"
    for spans in ends.values():
        around: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start + 1e-6:
                around.pop()
            assert not around or end <= around[-1] + 1e-6, "viewers nest what is on one track"
            around.append(end)
    return document["traceEvents"]


def of(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.ones(64, 64)
    with replayfmt.capture(tmp_path / "a.opreplay"), replayfmt.scope("outer"):
        for _ in range(2):
            with replayfmt.scope("inner"):
                (weight @ weight).sum().item()
    return tmp_path / "a.opreplay"


def test_ops_scopes_and_memory_are_where_the_capture_has_them(path: Path, tools: Tools) -> None:
    events = exported(tools, path)
    slices = {event["args"]["ordinal"]: event for event in of(events, "X") if "ordinal" in event["args"]}
    with replayfmt.open(path) as capture:
        assert list(slices) == list(capture.ops.by_ordinal)
        for ordinal, op in capture.ops.by_ordinal.items():
            event = slices[ordinal]
            assert event["name"] == op.kernel.qualified_name and event["args"]["scope"] == op.scope
            assert round(event["ts"] * 1000) == op.record.start_ns and round(event["dur"] * 1000) == op.duration_ns
        (memory,) = memory_by_device(capture.reader)
    assert [event["name"] for event in of(events, "X") if not event["args"]] == ["inner", "inner", "outer"]
    counters = [event["args"]["bytes"] for event in of(events, "C")]
    assert max(counters) == memory.peak_bytes and counters[-1] == memory.end_bytes
    tracks = {event["args"]["name"] for event in of(events, "M")}
    assert tracks == {"captured: host", "captured: memory and power", "thread 0", "thread 0: scopes"}


@pytest.mark.parametrize("make", [captures.every_kind, captures.plain])
def test_any_capture_becomes_a_valid_timeline(make: Any, tmp_path: Path, tools: Tools) -> None:
    path = make(tmp_path / "a.opreplay")
    events = exported(tools, path)
    with replayfmt.open(path) as capture:
        untimed = [op.ordinal for op in capture.ops if op.duration_ns is None]
        found = {event["args"]["ordinal"] for event in events if "ordinal" in event.get("args", {})}
        assert set(capture.ops.by_ordinal) <= found
        assert [event["args"]["ordinal"] for event in of(events, "i") if event["cat"] == "op"] == untimed
        unsupported = [event for event in of(events, "i") if event["cat"] == "unsupported"]
        assert len(unsupported) == sum(capture.summary.unsupported.values())


def test_a_selection_has_its_ops_alone(path: Path, tools: Tools) -> None:
    events = exported(tools, path, "--kernel=aten::mm")
    assert {event["name"] for event in of(events, "X") if "ordinal" in event["args"]} == {"aten::mm.default"}


def test_a_replay_begins_with_the_captures_first_op_in_processes_of_its_own(path: Path, tools: Tools) -> None:
    trace = path.with_name("replay.json.gz")
    done = tools("run", "--device-profiling-mode=host-ops", f"--device-profiling-output={trace}", path)
    assert done.code == 0, done.err
    events = exported(tools, path, f"--replayed={trace}", f"--replayed={trace}")
    captured = [event for event in of(events, "X") if event["pid"] == 1 and "ordinal" in event["args"]]
    for first in (1000, 2000):
        replayed = [event for event in of(events, "X") if first <= event["pid"] < first + 1000]
        assert min(event["ts"] for event in replayed) == pytest.approx(captured[0]["ts"], abs=1e-3)
        assert sum(event["name"] == "aten::mm" for event in replayed) == 2
        assert {"outer", "outer/inner"} <= {event["name"] for event in replayed}


def test_isolated_calls_follow_each_other_in_a_process_that_says_so(path: Path, tools: Tools) -> None:
    results = path.with_name("per_op.json")
    done = tools("benchmark", "--per-op", "--benchmark-min-time=6x", f"--benchmark-out={results}", path)
    assert done.code == 0, done.err
    events = exported(tools, path, f"--benchmark={results}")
    (process,) = (event["pid"] for event in of(events, "M") if "not a run" in event["args"]["name"])
    slices = [event for event in of(events, "X") if event["pid"] == process]
    calls = [event for event in slices if "ordinal" in event["args"]]
    captured = [event for event in of(events, "X") if event["pid"] == 1 and "ordinal" in event["args"]]
    assert [(each["name"], each["args"]["ordinal"]) for each in calls] == [
        (each["name"], each["args"]["ordinal"]) for each in captured
    ]
    assert calls[0]["ts"] == captured[0]["ts"]
    for before, after in zip(calls, calls[1:], strict=False):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-3)
    measured = sum(row["estimated_us"] for row in json.loads(results.read_text())["benchmarks"])
    assert sum(each["dur"] for each in calls) == pytest.approx(measured, abs=1e-2)
    assert [each["name"] for each in slices if each not in calls] == ["outer", "outer/inner", "outer/inner"]
    some = of(exported(tools, path, f"--benchmark={results}", "--kernel=aten::mm"), "X")
    chosen = [event for event in some if event["pid"] == process and "ordinal" in event["args"]]
    assert [event["name"] for event in chosen] == ["aten::mm.default"] * 2


def test_a_trace_that_names_no_capture_is_shown_and_that_is_said(path: Path, tools: Tools) -> None:
    trace = path.with_name("trace.json")
    trace.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 5, "dur": 1}]}))
    done = tools("export", "--format=perfetto", f"--replayed={trace}", path, path.with_name("out"))
    assert done.code == 0 and "does not say of which capture it is" in done.out


def test_what_a_replays_trace_says_wrongly_is_left_out_and_counted(path: Path, tools: Tools) -> None:
    trace = path.with_name("odd.json")
    good = {"ph": "X", "name": "good", "pid": "a", "tid": "b", "ts": 5, "dur": 1}
    odd = [good | change for change in ({"ts": "x"}, {"ts": True}, {"name": 3}, {"ph": "?"}, {"dur": []})]
    odd += [good | {"ph": ["X"]}, good | {"ts": 10**400}, good | {"ts": 1e300}]
    odd.append({name: value for name, value in good.items() if name != "dur"})  # it would be shown as taking no time
    flow = good | {"ph": "s", "id": 7, "cat": "ac2g", "name": "flow"}
    odd += [{name: value for name, value in flow.items() if name != missing} for missing in ("id", "cat")]
    odd.append(good | {"ph": "C", "args": {"bytes": "many"}})
    fine = [good, flow, flow | {"ph": "f", "bp": "e"}, good | {"ph": "C", "name": "bytes", "args": {"bytes": 3}}]
    fine += [good | {"ph": "B", "name": "begun"}, {"ph": "E", "pid": "a", "tid": "b", "ts": 9}]
    text = json.dumps({"traceEvents": [*odd, good | {"ts": "@"}, good | {"args": {"x": float("nan")}}, *fine]})
    trace.write_text(text.replace('"@"', "9" * 400 + ".123456"))  # more digits than a double holds
    done = tools("export", "--format=perfetto", f"--replayed={trace}", path, path.with_name("out"))
    assert done.code == 0 and "left out  14 events of a replay" in done.out, done.out + done.err
    events = checked(json.loads(path.with_name("out").read_text(), parse_constant=pytest.fail))
    shown = [event for event in events if event["pid"] >= 1000 and event["ph"] != "M"]
    assert [event.get("name") for event in shown] == ["good", "flow", "flow", "bytes", "begun", None]
    assert shown[1]["id"] == shown[2]["id"]


def test_power_is_shown_where_it_was_sampled_during_the_capture_and_refused_elsewhere(path: Path, tools: Tools) -> None:
    with open_capture(path) as reader:
        began, ended = reader.session.created_unix_ns, reader.summary.ended_ns
    assert ended is not None
    log = path.with_name("power.csv")

    def write(offsets_ns: list[int]) -> None:
        rows = [f"{(began + offset) / 1e9:.9f},0,{100 + number}" for number, offset in enumerate(offsets_ns)]
        log.write_text("\n".join(["timestamp,gpu,power_w", *rows, ""]))

    write([-(10**9), ended // 2, ended + 10**9])
    (sample,) = (event for event in of(exported(tools, path, f"--power-log={log}"), "C") if "W" in event["args"])
    assert sample["args"] == {"W": 101.0} and sample["ts"] == pytest.approx(ended / 2000, abs=1)
    write([-(10**9)])
    done = tools("export", "--format=perfetto", f"--power-log={log}", path, path.with_name("out"))
    assert done.code == 2 and "no sample of GPU 0 during the capture" in done.err and done.err.count("\n") == 1


def test_wrong_requests_are_one_line_and_write_nothing(path: Path, tools: Tools) -> None:
    (empty := path.with_name("empty.json")).write_text('{"traceEvents":[]}')
    other = path.with_name("other.json")
    other.write_text('{"opreplay_capture_session":"x","traceEvents":[{"ph":"X","name":"a","ts":1,"dur":1}]}')
    before = sorted(path.parent.iterdir())
    for flags, said in (
        (["--format=csv", "--replayed=x"], "--replayed is for --format=perfetto"),
        (["--format=perfetto", "--table=ops"], "--table is for --format=csv and parquet"),
        (["--format=perfetto", f"--replayed={empty}"], "has no events with a time"),
        (["--format=perfetto", "--replayed=no/such.json"], "no/such.json"),
        (["--format=perfetto", f"--replayed={other}"], "another capture"),
        (["--format=perfetto", "--benchmark=no/such.json"], "no/such.json"),
        (["--format=perfetto", f"--benchmark={empty}"], "has no context"),
        (["--format=csv", "--benchmark=x"], "--benchmark is for --format=perfetto"),
        (["--format=perfetto", "--zone=UTC"], "--zone is for --power-log"),
        (["--format=perfetto", "--power-log=no/such.csv"], "no/such.csv"),
    ):
        done = tools("export", *flags, path, path.with_name("out"))
        assert done.code in (1, 2, 3) and said in done.err and done.err.count("\n") == 1, done.err
    assert sorted(path.parent.iterdir()) == before


def test_slices_that_overlap_in_one_thread_have_tracks_of_their_own(tmp_path: Path) -> None:
    builder = captures.Builder(tmp_path / "a.opreplay")
    kernel = builder.writer.kernel(captures.Kernel("test::op", "default", "test::op() -> ()"))
    call = captures.Signature(captures.RecordKind.op, (), (), kernel, captures.OpStatus.ok)
    for _ in range(3):
        builder.record(call)
        builder.starts[-1] = 1000 + 40 * len(builder.starts)  # each takes 100 ns and more
    builder.frame()
    builder.close()
    with open_capture(builder.path) as reader:
        export_perfetto(reader, tmp_path / "out")
    events = checked(json.loads((tmp_path / "out").read_text()))
    assert len({event["tid"] for event in of(events, "X")}) == 3
