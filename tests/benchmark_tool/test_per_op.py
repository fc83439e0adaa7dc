"""--per-op: every op on its own, its verdict, its part of the workload, and totals that add up."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import count

import pytest
import torch

import replayfmt
from replayfmt.benchmark.meters import Clock
from replayfmt.benchmark.per_op.groups import select_ops
from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.statistics import MinTime
from replayfmt.format.codes import DType
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import Moment
from replayfmt.importers.common.synthesis import ImportedSession, imported_session, plain_tensor
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.records import describe

FEW = MinTime(iterations=3)


def quiet(_what, _done, _of):
    """No progress bar."""


def measured(path, **options):
    with Plan(path, keep_going=True) as plan:
        return measure_ops(plan, OpOptions(min_time=FEW, **options), progress=quiet)


@pytest.fixture
def dropout(tmp_path):
    """Ops of every kind that has to be put back: in place, random, views, one that raises."""
    path = tmp_path / "kinds.opreplay"
    torch.manual_seed(0)
    with replayfmt.capture(path, digests="ops"):
        x = torch.ones(64)
        for _ in range(3):
            x.mul_(1.5)
        y = torch.nn.functional.dropout(x, 0.5)
        x.unsqueeze_(0)
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        torch.cumsum(y, 0)
    return path


@pytest.mark.slow
def test_each_distinct_op_is_one_row_with_its_count(captured):
    run = measured(captured)
    by_name = {op.group.kernel.qualified_name: op for op in run.ops}
    assert by_name["aten::tanh.default"].group.count == 3
    assert by_name["aten::tanh.default"].calls >= 3
    assert {op.verdict for op in run.ops} == {"ok"}
    assert run.successful == len(run.ops) == run.chosen.total == run.chosen.matched
    assert sum(op.group.count for op in run.ops) == len(replayfmt.open(captured).ops)


class _Rank:
    """One of two ranks; what the other one says is `heard`."""

    world, turns = 2, 1

    def __init__(self, rank, heard=()):
        self.rank, self._heard = rank, heard

    def gather(self, _what, said):
        self.said = json.loads(json.dumps(said))
        return [said, *self._heard]


@pytest.mark.slow
def test_an_op_that_differs_on_the_rank_that_measures_it_has_that_verdict_and_reason(captured, monkeypatch):
    with Plan(captured, keep_going=True) as plan:
        first = select_ops(plan.reader, progress=quiet).groups[1].first_ordinal

        def execute(**options):
            result = Plan.execute(plan, **options)
            for each in result.verdicts:
                if each.ordinal == first:
                    object.__setattr__(each, "verdict", "mismatched")
                    object.__setattr__(each, "reason", "one bit")
            return result

        other = _Rank(1)
        with monkeypatch.context() as patched:
            patched.setattr(plan, "execute", execute)
            measure_ops(plan, OpOptions(min_time=FEW), progress=quiet, ranks=other)
        run = measure_ops(plan, OpOptions(min_time=FEW), progress=quiet, ranks=_Rank(0, [other.said]))
    apart = [op for op in run.ops if op.verdict != "ok"]
    assert [(op.group.first_ordinal, op.verdict, op.reason) for op in apart] == [(first, "mismatched", "one bit")]
    assert all(op.times is not None and op.work is not None for op in run.ops if op not in apart)
    assert {op.measured_on for op in run.ops} == {"rank 0, cpu", "rank 1, cpu"} and not run.complete


@pytest.mark.parametrize(
    ("asked", "tick_ns", "calls"),
    [
        (MinTime(iterations=3), 10_000_000, 6),  # as many samples as an interval needs
        (MinTime(iterations=3), 500_000, 10),  # 5 ms
        (MinTime(iterations=3), 400_000_000, 3),  # what takes a second anyway is left at what was asked for
        (MinTime(iterations=40), 500_000, 40),
        (MinTime(seconds=1e-9), 500_000, 11),
        (MinTime(seconds=0.05), 500_000, 100),
    ],
)
def test_short_ops_are_timed_for_more_than_was_asked_for_so_that_they_can_be_ranked(captured, asked, tick_ns, calls):
    ticks = count(0, tick_ns)
    clock = Clock(real=lambda: next(ticks), cpu=lambda: 0)
    with Plan(captured, keep_going=True) as plan:
        options = OpOptions(min_time=asked, verify="none", pattern="aten::tanh")
        run = measure_ops(plan, options, clock=clock, progress=quiet)
    assert [(op.calls, op.times.count) for op in run.ops] == [(calls, calls)]


@pytest.mark.slow
def test_every_op_can_be_measured_by_itself(captured):
    run = measured(captured, every=True)
    assert len(run.ops) == len(replayfmt.open(captured).ops)
    assert {op.group.count for op in run.ops} == {1}


@pytest.mark.slow
def test_what_an_op_writes_is_put_back_so_that_the_replay_goes_on_as_captured(dropout):
    run = measured(dropout)
    assert {op.group.kernel.qualified_name: op.verdict for op in run.ops}["aten::mul_.Tensor"] == "ok"
    assert {op.verdict for op in run.ops} == {"ok"}, [(op.group.signature, op.reason) for op in run.ops]
    with Plan(dropout, keep_going=True) as plan:
        calls = []

        def thrice(op):
            calls.append(op.ordinal)
            for _ in range(3):
                op.restore()
                op.calls(1)

        before = plan.execute(verify="bitwise", keep_going=True)
        plan.examine(thrice)
        after = plan.execute(verify="bitwise", keep_going=True)
    assert len(calls) == before.ops
    assert before.outcome == after.outcome == "ok"


def test_an_op_that_writes_finds_the_same_input_at_each_call(dropout):
    seen = []
    with Plan(dropout, keep_going=True) as plan:

        def twice(op):
            if op.writes and not describe(plan.reader, op.ordinal)[0].startswith("aten::bernoulli_"):
                results = []
                for _ in range(2):
                    op.restore()
                    op.call()
                    results.append([value.clone() for value in op._arguments if isinstance(value, torch.Tensor)])
                seen.append(results)

        plan.examine(twice)
    assert len(seen) >= 4
    for first, second in seen:
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.slow
def test_times_are_the_median_of_samples_and_the_estimate_is_count_times_it(captured):
    ticks = iter(range(0, 10**9, 1000))
    clock = Clock(real=lambda: next(ticks), cpu=lambda: 0)
    with Plan(captured, keep_going=True) as plan:
        run = measure_ops(
            plan, OpOptions(min_time=FEW, verify="none", pattern="aten::tanh"), clock=clock, progress=quiet
        )
    (op,) = run.ops
    assert op.times.median == 1000 / (op.calls / op.times.count)
    assert op.estimated_ns == op.group.count * op.times.median
    assert run.estimated_ns == op.estimated_ns


def test_a_filter_and_a_limit_choose_and_the_totals_say_so(captured, tools):
    ran = tools(
        "benchmark",
        "--per-op",
        "--kernel=aten::*m*",
        "--op-limit=2",
        "--benchmark-min-time=2x",
        "--benchmark-format=json",
        captured,
    )
    assert ran.code == 0
    report = json.loads(ran.out)
    context = report["context"]
    assert len(report["benchmarks"]) == context["selected"] == 2
    assert context["distinct_ops"] > context["matched"] > 2
    assert context["attempted"] == context["successful"] + context["failed"] == 2
    for row in report["benchmarks"]:
        assert row["verdict"] == "ok"
        assert row["estimated_us"] == pytest.approx(row["count"] * row["median_real_time"] / 1e3)
        assert row["captured_us"] > 0 and row["captured_clock"] == "host"
    assert sum(row["share"] for row in report["benchmarks"]) == pytest.approx(1)
    assert "[1/2]" not in ran.err


def test_the_console_has_each_op_once_by_share_then_totals(captured, tools):
    ran = tools("benchmark", "--per-op", "--verbose", "--kernel=aten::mm*", "--benchmark-min-time=2x", captured)
    assert ran.code == 0
    noted = ran.err.splitlines()
    assert noted[0].startswith("[1/2] ok") and "aten::mm.default(float32[8,48], float32[48,48])" in noted[0]
    assert "    self: Tensor = float32[8,48]" in noted
    assert "    -> 0: float32[8,48] on cpu" in noted
    lines = ran.out.splitlines()
    # A warning that says how sure the order is names it again, on a machine that is busy.
    ops = [line for line in lines if line.endswith(" aten::mm.default(float32[8,48], float32[48,48])")]
    assert lines[0].split()[0] == "rank" and len(ops) == 1 and not ops[0].startswith("WARNING")
    assert any(line.startswith("attempted ") and " successful + 0 failed; refused 0" in line for line in lines)
    assert lines[-1].startswith("verified") or lines[-1].startswith("WARNING")


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A capture with a custom op that has stopped working since, and ops after it: one needs it, one does not."""
    path = tmp_path / "broken.opreplay"
    works = [True]
    with torch.library._scoped_library("per_op_test", "DEF") as library:
        library.define("fragile(Tensor x) -> Tensor")

        def fragile(x):
            if not works:
                raise RuntimeError("no luck\nat all")
            return x * 2

        library.impl("fragile", fragile, "CPU")
        with replayfmt.capture(path):
            x = torch.ones(3) + 1
            torch.ops.per_op_test.fragile(x).exp()
            x.sin()
        works.clear()
        yield path


def test_an_op_that_fails_is_named_counted_and_ends_with_code_1(broken, tools):
    ran = tools("benchmark", "--per-op", "--verify=none", "--benchmark-min-time=2x", "--benchmark-format=json", broken)
    assert ran.code == 1
    report = json.loads(ran.out)
    verdicts = {row["op"]: row["verdict"] for row in report["benchmarks"]}
    assert verdicts["per_op_test::fragile.default"] == "failed"
    assert verdicts["aten::exp.default"] == "skipped"
    assert verdicts["aten::sin.default"] == "ok"
    row = next(row for row in report["benchmarks"] if row["verdict"] == "failed")
    assert row["error_occurred"] and row["error_message"] == "failed: RuntimeError: no luck"
    for row in report["benchmarks"]:  # Google's compare.py takes rows with these keys for numbers, and only those
        measured = row["verdict"] == "ok"
        assert ("real_time" in row) == ("cpu_time" in row) == measured
        assert not measured or row["real_time"] > 0 and row["cpu_time"] >= 0
    context = report["context"]
    assert context["failed"] == 1 and list(context["refused"].values()) == [1]
    assert context["attempted"] + sum(context["refused"].values()) == context["selected"]


def test_stop_on_error_measures_nothing_after_it(broken, tools):
    ran = tools(
        "benchmark",
        "--per-op",
        "--verify=none",
        "--stop-on-error",
        "--benchmark-min-time=2x",
        "--benchmark-format=json",
        broken,
    )
    assert ran.code == 1
    rows = {row["op"]: row for row in json.loads(ran.out)["benchmarks"]}
    assert rows["aten::add.Tensor"]["verdict"] == "ok"
    assert "ended the measurement" in rows["aten::sin.default"]["reason"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--kernel=x",), "--kernel needs --per-op"),
        (("--verbose",), "--verbose needs --per-op"),
        (("--top=3",), "--top needs --per-op"),
        (("--group-by=kernel",), "--group-by needs --per-op"),
        (("--per-op", "--top=0"), "0 is not in the range"),
        (("--per-op", "--group-by=thread"), "'thread' is not one of"),
        (("--per-op", "--scope=nowhere"), "--scope=nowhere: "),
        (("--per-op", "--scope=init", "--kernel=aten::mm"), "no op in --scope=init of "),
        (("--per-op", "--benchmark-repetitions=2"), "--benchmark-repetitions is for whole replays"),
        (("--per-op", "--kernel=nothing::*"), "no op of "),
    ],
)
def test_flags_that_do_not_fit_are_wrong_usage(captured, tools, flags, names):
    ran = tools("benchmark", *flags, captured)
    assert ran.code == 2
    assert names in ran.err


def test_describing_and_choosing_ops_makes_no_tensor(captured, monkeypatch):
    def no_tensor(*_args, **_kwargs):
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(torch, "empty", no_tensor)
    with replayfmt.open(captured) as capture:
        chosen = select_ops(capture.reader, pattern=None, limit=None, every=False, progress=quiet)
        assert all(repr(capture.ops.by_ordinal[ordinal]) for ordinal in chosen.by_ordinal)


@pytest.mark.slow
def test_a_slice_gives_every_op_what_it_was_captured_with(dropout):
    with Plan(dropout, keep_going=True) as plan:
        ordinals = sorted(select_ops(plan.reader, pattern=None, limit=None, every=True, progress=quiet).by_ordinal)
        sizes = []
        for ordinal in ordinals:
            result = plan.execute(verify="bitwise", keep_going=True, only=plan.preparation.slice([ordinal]))
            assert {each.verdict for each in result.verdicts} == {"ok"} and result.verdicts[-1].ordinal == ordinal
            assert result.verified.startswith("the part that ran: bitwise") and result.verification.digests
            sizes.append(len(result.verdicts))
    assert sizes[0] == 1 and sizes[-1] < len(ordinals), "neither what raised nor the view after it are needed"


def test_only_what_is_chosen_and_what_it_needs_is_run(broken, tools):
    ran = tools("benchmark", "--per-op", "--kernel=aten::add", "--benchmark-min-time=2x", broken)
    assert ran.code == 0
    assert "attempted 1 = 1 successful + 0 failed; refused 0" in ran.out
    assert "the capture holds nothing to compare the chosen ops with" in ran.out
    with Plan(broken, keep_going=True) as plan:
        names = [
            [each.op for each in plan.execute(keep_going=True, only=plan.preparation.slice([ordinal])).verdicts]
            for ordinal, _op in replayfmt.open(broken).ops.by_ordinal.items()
        ]
    assert [each[-1] for each in names] == [
        "aten::ones.default",
        "aten::add.Tensor",
        "per_op_test::fragile.default",
        "aten::exp.default",
        "aten::sin.default",
    ]
    assert [len(each) for each in names] == [1, 2, 3, 4, 4]
    assert "aten::exp.default" not in names[4] and names[4][2] == "per_op_test::fragile.default"  # it may write


def test_a_filtered_measurement_is_verified_by_the_chosen_ops_alone(tmp_path, tools):
    path = tmp_path / "c.opreplay"
    with replayfmt.capture(path):  # only what is alive at the end has digests
        kept = torch.ones(3).exp()
        torch.ones(3).sin()
    ran = tools("benchmark", "--per-op", "--kernel=aten::sin", "--benchmark-min-time=2x", path)
    assert ran.code == 0
    assert "not verified: the capture holds nothing to compare the chosen ops with (digests=live)" in ran.out
    ran = tools("benchmark", "--per-op", "--kernel=aten::exp", "--benchmark-min-time=2x", path)
    assert ran.code == 0
    assert "the part that ran: bitwise" in ran.out and "1 digest" in ran.out and kept.shape == (3,)


def test_what_is_unsupported_in_a_capture_is_counted_with_its_device_time(tmp_path, tools):
    path = tmp_path / "c.opreplay"
    with ImportedSession(path, imported_session("test", "made")) as session:
        given = plain_tensor(DType.float32, (4,), None, session.device("cpu"))
        session.op(
            Kernel("aten::relu", "default", "aten::relu(Tensor self) -> Tensor"),
            [("self", given)],
            None,
            Moment(device_duration_ns=18_000),
        )
        session.unsupported("cuda_graph", "graph launch", "", Moment(device_duration_ns=41_000), {"count": 2})
        session.unsupported("collective", "c10d::allreduce_", "", Moment(), {})
    ran = tools("benchmark", "--per-op", "--benchmark-min-time=2x", path)
    assert ran.code == 1
    assert "not measured and not included: 3 calls (3 unsupported)" in ran.out
    assert (
        "unsupported in the capture, not measured: 3 calls (2 cuda_graph, 1 collective), 82.0% of the captured "
        "device time"
    ) in ran.out
    assert "captured device time: 100.0 us, 18.0% of it in the ops measured" in ran.out
    assert "WARNING: the capture holds unsupported work" in ran.out
    ran = tools("benchmark", "--per-op", "--benchmark-min-time=2x", "--benchmark-format=json", path)
    assert ran.code == 1
    context = json.loads(ran.out)["context"]
    assert context["unsupported"] == {
        "calls": 3,
        "reasons": {"cuda_graph": 2, "collective": 1},
        "captured_device_us": 82.0,
        "share_of_device_time": 0.82,
    }
    assert context["captured_device_us"] == 100 and context["measured_captured_device_us"] == 18
    # What no replay does is an operator of another name: it was not asked for.
    ran = tools("benchmark", "--per-op", "--kernel=aten::relu", "--benchmark-min-time=2x", path)
    assert ran.code == 0
    assert "all calls are included" in ran.out
    assert re.search(r"^run on +cpu; torch [^,]+, \d+ threads?; \d+ CPUs?$", ran.out, re.MULTILINE)


def test_the_result_of_one_op_comes_back_in_python(captured):
    with replayfmt.open(captured) as capture:
        ordinal = next(number for number, op in capture.ops.by_ordinal.items() if op.kernel.name == "aten::tanh")
        result = capture.ops.by_ordinal[ordinal].replay()
    assert isinstance(result, torch.Tensor) and result.shape == (8, 48) and bool((result.abs() <= 1).all())


def made_of(path, *annotations):
    """A capture of the same call once for each annotation; call number n took n microseconds, from 1."""
    with ImportedSession(path, imported_session("test", "made")) as session:
        device = session.device("cpu")
        for number, annotation in enumerate(annotations, 1):
            given = plain_tensor(DType.float32, (4,), None, device)
            session.op(
                Kernel("aten::relu", "default", "aten::relu(Tensor self) -> Tensor"),
                [("self", given)],
                None,
                Moment(duration_ns=number * 1000),
                annotation,
            )
    return path


def test_the_captured_time_of_a_record_counts_for_each_call_that_it_stands_for(tmp_path):
    with open_capture(made_of(tmp_path / "c.opreplay", {"count": 3}, {})) as reader:
        (group,) = select_ops(reader, pattern=None, limit=None, every=False, progress=lambda *_seen: None).groups
    assert (group.count, group.captured_ns) == (4, (3 * 1000 + 2000) / 4)


@pytest.mark.parametrize("count", ["x", 0, -5, None, 1.5, [1], True])
def test_a_record_that_stands_for_no_number_of_calls_is_one_clear_error(tmp_path, tools, count):
    ran = tools("benchmark", "--per-op", made_of(tmp_path / "c.opreplay", {"count": count}))
    assert ran.code == 3
    assert f"ordinal 1: its annotation has count={count!r}" in ran.err


@pytest.mark.slow
def test_each_op_is_printed_as_soon_as_it_is_measured(captured, tools):
    flags = ("--per-op", "--benchmark-min-time=1x")
    ran = tools("benchmark", *flags, captured)
    places = [line.partition("]")[0] for line in ran.err.splitlines() if line.startswith("[")]
    assert places and places == [f"[{place}/{len(places)}" for place in range(1, len(places) + 1)]
    assert not any(line.startswith("[") for line in ran.out.splitlines())
    ran = tools("benchmark", *flags, "--benchmark-format=jsonl", captured)
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["kind"] for line in lines] == ["measured"] * len(places) + ["row"] * len(places) + ["context"]
    early = {line["name"]: line["estimated_us"] for line in lines if line["kind"] == "measured"}
    late = {line["name"]: line["estimated_us"] for line in lines if line["kind"] == "row"}
    assert early == late and lines[-1]["context"]["selected"] == len(places)


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(captured, tmp_path):
    """As with Ctrl-C: the lines until then, the table, and the file."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "opreplay_tools.benchmark", "--per-op", "--benchmark-min-time=2s"]
    command += ["--benchmark-precision=off", "--benchmark-format=jsonl", f"--benchmark-out={out}", str(captured)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as tool:
        first = json.loads(tool.stdout.readline())
        tool.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in tool.stdout]
    assert tool.returncode == 130 and first["kind"] == "measured" and first["estimated_us"] > 0
    assert rest[-1]["kind"] == "context"
    rows = json.loads(out.read_text())["benchmarks"]
    assert first["name"] in [row["name"] for row in rows if row["verdict"] == "ok"]
    skipped = [row for row in rows if row["verdict"] == "skipped"]
    assert skipped and all("interrupted" in row["reason"] for row in skipped)


@pytest.mark.parametrize("flag", ["--compare", "--reconcile"])
def test_json_lines_are_refused_where_there_are_none(captured, tools, flag):
    ran = tools("benchmark", flag, "--benchmark-format=jsonl", captured)
    assert ran.code == 2 and "jsonl" in ran.err
