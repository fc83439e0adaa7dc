"""Measured ops by kernel, signature and scope: sums, ranks that say how sure they are, and what was not measured."""

import csv
import io
import json
from types import SimpleNamespace

import pytest
import torch

import replayfmt
from replayfmt.benchmark.per_op.groups import OpGroup, SelectedOps, UnsupportedWork
from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.op_report import _warnings
from replayfmt.benchmark.per_op.results import NO_SCOPE, MeasuredOp, OpOptions, PerOpRun, make_rows
from replayfmt.benchmark.statistics import MinTime, summarize
from replayfmt.format.model import Kernel, Scope
from replayfmt.replay.plan import Plan

# Paths: 1 `execute`, 2 `execute/step`, 3 `init`.
READER = SimpleNamespace(
    scopes=(None, Scope(0, "execute"), Scope(1, "step"), Scope(0, "init")),
    scope_path=("", "execute", "execute/step", "init").__getitem__,
)


def op(kernel, times, by_scope, verdict="ok", reason="", sizes=""):
    group = OpGroup(f"aten::{kernel}({sizes})", Kernel(f"aten::{kernel}", "default", ""), 0, sum(by_scope.values()))
    group.by_scope.update(by_scope)
    return MeasuredOp(group, verdict, reason, calls=len(times), times=summarize(times) if times else None, cpu_ns=1.0)


def run_of(*ops):
    chosen = SelectedOps([each.group for each in ops], {}, len(ops), len(ops), True, UnsupportedWork(), 0)
    return PerOpRun(OpOptions(), chosen, list(ops), "not verified: made up", 10.0)


def steady(value):
    return [value] * 20


def test_a_kernel_is_the_sum_over_its_signatures_of_calls_times_the_median():
    rows = make_rows(
        run_of(
            op("mm", steady(100), {1: 2}, sizes="a"),
            op("add", steady(30), {1: 10}),
            op("mm", steady(50), {2: 4}, sizes="b"),
        ),
        "kernel",
        READER,
    )
    assert [(row.label, row.estimated_ns, row.calls) for row in rows] == [
        ("aten::mm.default", 400, 6),
        ("aten::add.default", 300, 10),
    ]
    assert [row.ranks for row in rows] == [(1, 1), (2, 2)]


def test_a_scope_has_the_calls_in_it_and_beside_them_those_of_inner_scopes():
    rows = make_rows(run_of(op("mm", steady(100), {1: 1, 2: 5, 0: 1}), op("add", steady(10), {3: 1})), "scope", READER)
    assert [(row.label, row.estimated_ns, row.inner_ns) for row in rows] == [
        ("execute/step", 500, 500),
        ("execute", 100, 600),
        (NO_SCOPE, 100, 100),
        ("init", 10, 10),
    ]
    assert sum(row.estimated_ns for row in rows) == 710, "each call counts once"


def test_rows_whose_intervals_overlap_share_their_ranks():
    noisy = [90.0, 95.0, 100.0, 105.0, 110.0] * 4
    rows = make_rows(
        run_of(op("a", noisy, {1: 1}), op("b", [each - 2 for each in noisy], {1: 1}), op("c", steady(20), {1: 1})),
        "kernel",
        READER,
    )
    assert [row.ranks for row in rows] == [(1, 2), (1, 2), (3, 3)]
    assert rows[0].width > 0.05 and rows[2].width == 0


def test_of_too_few_samples_no_rank_follows():
    rows = make_rows(run_of(op("a", [100.0], {1: 1}), op("b", steady(20), {1: 1})), "kernel", READER)
    assert [(row.bounds_ns, row.ranks) for row in rows] == [(None, (1, 2)), ((20, 20), (1, 2))]


def test_what_has_no_time_comes_last_counts_apart_and_is_never_zero():
    rows = make_rows(
        run_of(
            op("a", [], {1: 7}, "refused", "no library"),
            op("b", steady(20), {1: 1}, sizes="x"),
            op("b", [], {1: 2}, "failed", "RuntimeError: x", sizes="y"),
        ),
        "kernel",
        READER,
    )
    assert [(row.label, row.estimated_ns, row.verdict, dict(row.not_measured)) for row in rows] == [
        ("aten::b.default", 20, "failed", {"failed": 2}),
        ("aten::a.default", None, "refused", {"refused": 7}),
    ]
    assert rows[1].ranks is None


@pytest.fixture
def partly(tmp_path):
    """An op that no replay can do any more, in scope `execute`; one that works is in both scopes."""
    path = tmp_path / "partly.opreplay"
    with torch.library._scoped_library("op_rows_test", "DEF") as library:
        library.define("gone(Tensor x) -> Tensor")
        library.impl("gone", lambda x: x.clone(), "CPU")
        with replayfmt.capture(path):
            x = torch.ones(3)
            with replayfmt.scope("execute"):
                torch.ops.op_rows_test.gone(x)
                x.sin()
            with replayfmt.scope("deinit"):
                x.sin()
                x.cos()
    return path


@pytest.mark.parametrize("by", ["kernel", "signature", "scope"])
def test_the_sum_names_what_was_refused_and_the_exit_code_says_so(partly, tools, by):
    ran = tools("benchmark", "--per-op", f"--group-by={by}", "--benchmark-min-time=1x", partly)
    assert ran.code == 1
    (total,) = (line for line in ran.out.splitlines() if line.startswith("sum: "))
    assert total.endswith("; not measured and not included: 1 call (1 refused)")
    assert "WARNING: not measured: 1 call; " in ran.out
    assert "op_rows_test::gone" in ran.out
    assert "verdict" in ran.out.splitlines()[0].split()


def test_what_could_not_be_measured_is_listed_however_few_rows_are_asked_for(partly, tools):
    out = partly.with_suffix(".json")
    ran = tools("benchmark", "--per-op", "--top=1", "--benchmark-min-time=1x", f"--benchmark-out={out}", partly)
    assert ran.code == 1
    rows = ran.out[: ran.out.index("\n\n")].splitlines()[1:]
    assert len(rows) == 2 and "refused" in rows[1]
    assert "the 1 rows shown are " in ran.out and ", 2 more are not shown" in ran.out
    report = json.loads(out.read_text())
    assert [row["verdict"] for row in report["benchmarks"]] == ["ok", "ok", "ok", "refused"]
    assert report["context"]["complete"] is False
    assert report["context"]["not_measured_calls"] == {"refused": 1}


def test_top_hides_no_row_from_the_baseline_and_its_gate(partly, tools):
    """A row that is not printed can still be slower."""
    out, flags = partly.with_suffix(".json"), ("--per-op", "--benchmark-min-time=6x", "--scope=deinit")
    tools("benchmark", *flags, f"--benchmark-out={out}", partly)
    names = {row["name"] for row in json.loads(out.read_text())["benchmarks"]}
    ran = tools("benchmark", *flags, "--top=1", f"--baseline={out}", "--benchmark-format=json", partly)
    baseline = json.loads(ran.out)["baseline"]
    assert {row["name"] for row in baseline["rows"]} == {*names, "BM_op/total"} and len(names) == 2
    assert baseline["only_in_baseline"] == []


def test_a_scope_restricts_what_is_measured(partly, tools):
    arguments = ("--per-op", "--scope=deinit", "--benchmark-min-time=1x", "--benchmark-format=json")
    ran = tools("benchmark", *arguments, partly)
    assert ran.code == 0, "what is refused is elsewhere"
    report = json.loads(ran.out)
    counts = {row["op"]: row["count"] for row in report["benchmarks"]}
    assert counts == {"aten::sin.default": 1, "aten::cos.default": 1}
    assert report["context"]["complete"] is True and report["context"]["distinct_ops"] == 4
    ran = tools("benchmark", *arguments, "--scope=execute", partly)
    assert ran.code == 1
    assert {row.get("op"): row["count"] for row in json.loads(ran.out)["benchmarks"]}["aten::sin.default"] == 2


def test_a_range_of_ordinals_restricts_what_is_measured(partly, tools):
    flags = ("--per-op", "--benchmark-min-time=1x", "--benchmark-format=json")
    with replayfmt.open(partly) as capture:
        cos = next(op.ordinal for op in capture.ops if op.kernel.name == "aten::cos")
    ran = tools("benchmark", *flags, f"--ops={cos}:", partly)
    assert ran.code == 0
    assert [row["op"] for row in json.loads(ran.out)["benchmarks"]] == ["aten::cos.default"]
    sines = json.loads(tools("benchmark", *flags, f"--ops=:{cos}", "--kernel=aten::sin", partly).out)["benchmarks"]
    assert [(row["op"], row["count"]) for row in sines] == [("aten::sin.default", 2)]
    ran = tools("benchmark", *flags, f"--ops={cos + 1}:", partly)
    assert ran.code == 2 and f"no op in --ops={cos + 1}:" in ran.err
    assert tools("benchmark", "--ops=0:1", partly).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", ["kernel", "scope", "signature"])
def test_rows_are_sorted_alike_in_every_format_and_top_cuts_only_the_table(captured, tools, by):
    flags = ("--per-op", f"--group-by={by}", "--top=2", "--benchmark-min-time=1x")
    ran = tools("benchmark", *flags, "--benchmark-format=json", captured)
    assert ran.code == 0
    report = json.loads(ran.out)
    rows = report["benchmarks"]
    times = [row["estimated_us"] for row in rows]
    places = list(range(1, len(rows) + 1))
    assert len(rows) > 2 and times == sorted(times, reverse=True) and [row["rank"] for row in rows] == places
    assert all(row["name"].startswith(f"BM_op/{by}:") and row["real_time"] > 0 for row in rows)
    whole = report["context"]["estimated_us"]
    assert sum(times) == pytest.approx(whole)
    assert all(row["share"] == pytest.approx(row["estimated_us"] / whole) for row in rows)
    assert all(row["rank_low"] <= row["rank"] <= row["rank_high"] for row in rows)
    assert all(("inclusive_us" in row) == (by == "scope") for row in rows)
    ran = tools("benchmark", *flags, "--benchmark-format=csv", captured)
    assert ran.code == 0
    table = list(csv.DictReader(io.StringIO(ran.out)))
    assert [row["rank"] for row in table] == [str(place) for place in places]
    ran = tools("benchmark", *flags, captured)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines[1 : lines.index("")]) == 2 and "verdict" not in lines[0], "there is none but ok"
    assert "the 2 rows shown are " in ran.out and " more are not shown" in ran.out


@pytest.mark.slow
def test_the_calls_of_all_groups_together_are_those_of_the_capture(captured):
    with Plan(captured, keep_going=True) as plan:
        run = measure_ops(plan, OpOptions(MinTime(iterations=1), "none"), progress=lambda *_: None)
        for by in (None, "kernel", "signature", "scope"):
            assert sum(row.calls for row in make_rows(run, by, plan.reader)) == len(replayfmt.open(captured).ops)


@pytest.mark.parametrize(
    ("captured_ns", "device", "warned"), [(100, False, True), (1000, False, False), (100, True, False)]
)
def test_times_far_from_those_of_the_capture_are_a_warning(captured_ns, device, warned):
    """Threads that wait for a processor give steady times, and wrong ones."""
    measured = op("mm", steady(1000), {1: 2})
    measured.group.host_ns, measured.group.host_calls = 2 * captured_ns, 2
    if device:  # the host only launched it
        measured.host_ns = 10.0
    run = run_of(measured)
    said = [text for text in _warnings(run, make_rows(run, None, READER), 2000.0) if "times as long" in text]
    assert len(said) == warned and all(
        "the calls took 10 times as long as when they were captured" in text for text in said
    )


def test_a_warning_says_what_is_wrong_however_long_the_signature_is():
    run = run_of(op("long", [800.0, 900.0, 1000.0, 1100.0, 1200.0, 1300.0], {1: 1}, sizes="float32[2,4], " * 50))
    (wide,) = [text for text in _warnings(run, make_rows(run, None, READER), 1000.0) if "intervals are wider" in text]
    assert len(wide) < 240 and wide.startswith("intervals are wider than 10% for ") and "…" in wide
