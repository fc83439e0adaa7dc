"""Original against substituted: what pairs of times decide, how rounds are made, and what is printed of it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.benchmark.comparison import _row, make_compare_report, measure_both
from replayfmt.benchmark.measure import Options
from replayfmt.benchmark.meters import Clock, Readings
from replayfmt.benchmark.statistics import MinTime, compare_pairs
from replayfmt.errors import ReplayMismatch, SubstitutionRejected, UsageError
from replayfmt.replay.plan import Plan
from replayfmt.replay.substitution.loading import Substitution

from .conftest import Captured, Kernels, Tool

# ----------------------------------------------------------------------------------------------------- the decision


def noisy(seed: int, factor: float, rounds: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Pairs whose rounds drift together by tens of percent, each with a percent of its own noise."""
    random = np.random.default_rng(seed)
    drift = 1000 * (1 + np.abs(np.cumsum(random.normal(0, 0.1, rounds))))
    return (drift * np.exp(random.normal(0, 0.01, rounds)), factor * drift * np.exp(random.normal(0, 0.01, rounds)))


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.1, "slower"), (0.98, "faster"), (1.02, "slower")])
def test_a_difference_shows_through_drift_that_is_much_larger(factor: float, verdict: str) -> None:
    for seed in range(20):
        found = compare_pairs(*noisy(seed, factor))
        assert found.verdict == verdict
        assert found.ratio == pytest.approx(factor, rel=0.02) and found.interval is not None
        assert found.interval.low <= found.ratio <= found.interval.high and found.interval.confidence >= 0.95


def test_the_same_thing_twice_is_no_measurable_difference() -> None:
    verdicts = [compare_pairs(*noisy(seed, 1.0)).verdict for seed in range(200)]
    assert verdicts.count("no measurable difference") >= 185  # 95% of 200, and a little for chance


def test_a_few_disturbed_rounds_do_not_decide() -> None:
    mine, theirs = noisy(3, 1.0)
    theirs[[4, 9, 20]] *= 50
    assert compare_pairs(mine, theirs).verdict == "no measurable difference"


def test_too_few_rounds_and_a_clock_that_stands_still_are_not_known() -> None:
    found = compare_pairs([100.0] * 5, [50.0] * 5)
    assert (found.verdict, found.ratio, found.interval) == ("not known", pytest.approx(0.5), None)
    assert "5 rounds cannot enclose the ratio with 95% confidence; 6 are needed" in found.reason
    assert compare_pairs([100.0] * 6, [50.0] * 6).verdict == "faster"
    still = compare_pairs([0.0, 5.0], [1.0, 5.0])
    assert (still.verdict, still.ratio) == ("not known", None) and "clock" in still.reason
    for wrong in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError, match="do not make pairs"):
            compare_pairs(*wrong)


# -------------------------------------------------------------------------------------------------------- measuring


def program() -> None:
    x = torch.randn(8, 8)
    with replayfmt.scope("execute"):
        for _ in range(3):
            x = torch.mm(x, x).tanh()
        torch.mm(x[:2], x)


class Ticking:
    """A clock that only the kernels move: `original` and `mine` nanoseconds a call, everything else takes one."""

    def __init__(self) -> None:
        self.now = 0

    def clock(self) -> Clock:
        return Clock(real=self.tick, cpu=lambda: self.now)

    def tick(self) -> int:
        self.now += 1
        return self.now

    def taking(self, nanoseconds: int) -> Any:
        def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.now += nanoseconds
            return torch.mm(a, b)

        return mm


def test_rounds_pair_both_sides_and_take_turns(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = Ticking()
    order: list[str] = []
    with Plan(captured(program), substitutions=[Substitution("aten::mm", ticking.taking(5000))]) as plan:
        run_with = plan.run_with

        def noted(stand_in: Any, *args: Any, **kwargs: Any) -> Any:
            order.append(
                "original"
                if stand_in is None
                else "substituted"
                if stand_in is plan.substitution.table
                else "timed"
                if type(stand_in).__name__ == "_Timed"
                else "check"
            )
            return run_with(stand_in, *args, **kwargs)

        monkeypatch.setattr(plan, "run_with", noted)
        run = measure_both(plan, Options(MinTime(iterations=8), warmup=1, scopes=("execute",)), clock=ticking.clock())
    assert run.rounds == 8 and run.cut_short is None
    # Before and after the verified replay that frames the rounds on either side.
    assert order[:2] == ["check", "check"] and order[-1] == "check" and order.count("check") == 3
    timed = order[2 + 4 : -1]
    assert timed == (["original", "substituted", "timed", "timed"] + ["substituted", "original", "timed", "timed"]) * 4
    whole, scope, wide, narrow = run.rows
    assert (whole.name, scope.name) == ("whole replay", "scope execute")
    assert (wide.name, wide.calls) == ("aten::mm.default(float32[8,8], float32[8,8])", 3)
    assert (narrow.name, narrow.calls) == ("aten::mm.default(float32[2,8], float32[8,8])", 1)
    assert wide.replacement == "mm"
    # Only the replacements move the clock: three calls of 5000 ns against three of nothing but the clock's own tick.
    assert float(np.median(wide.comparison.substituted)) == 3 * 5001
    assert float(np.median(wide.comparison.original)) == 3
    assert {row.comparison.verdict for row in run.rows} == {"slower"}


@pytest.mark.slow
def test_seconds_make_rounds_until_they_are_over_but_enough_for_a_verdict(captured: Captured) -> None:
    ticking = Ticking()
    with Plan(captured(program), substitutions=[Substitution("aten::mm", ticking.taking(10**9))]) as plan:
        run = measure_both(plan, Options(MinTime(seconds=0.001), warmup=0, verify="none"), clock=ticking.clock())
        assert run.rounds == 6 and run.before is None
        longer = measure_both(plan, Options(MinTime(seconds=100.0), warmup=0, verify="none"), clock=ticking.clock())
        assert longer.rounds == 25 and longer.cut_short is None  # four seconds a round


def test_a_wrong_kernel_is_never_timed(captured: Captured) -> None:
    for verify in ("auto", "none"):
        with (
            Plan(
                captured(program, f"wrong-{verify}"),
                substitutions=[Substitution("aten::mm", lambda a, b: torch.mm(a, b) + 1)],
            ) as plan,
            pytest.raises(SubstitutionRejected),
        ):
            measure_both(plan, Options(MinTime(iterations=1), verify=verify))


def test_a_replacement_that_goes_wrong_later_gives_no_times(captured: Captured) -> None:
    calls = []

    def later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(a)
        return torch.mm(a, b) * (2.0 if len(calls) > 20 else 1.0)

    def read() -> None:
        program()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2)).sum().item()

    with (
        Plan(captured(read), substitutions=[Substitution("aten::mm", later)]) as plan,
        pytest.raises(ReplayMismatch, match="so there are no times to report"),
    ):
        measure_both(plan, Options(MinTime(iterations=6)))


def test_a_plan_without_substitutions_has_nothing_to_compare(captured: Captured) -> None:
    with Plan(captured(program)) as plan, pytest.raises(UsageError, match="there is nothing to compare with"):
        measure_both(plan, Options())


# ------------------------------------------------------------------------------------------------------ the report


@pytest.fixture
def flag(kernels: Kernels) -> str:
    file = kernels("def mm(self, mat2): return (self.double() @ mat2.double()).float()")
    return f"--replay-kernel-substitution=aten::mm={file}"


def test_the_table_has_a_line_for_everything_compared(captured: Captured, flag: str, tool: Tool) -> None:
    code, out, _err = tool(
        "benchmark", "--compare", flag, "--scope=execute", "--benchmark-min-time=7x", captured(program)
    )
    assert code == 0
    lines = out.splitlines()
    assert "checked   substituted: 4 calls of 2 signatures, each checked against the original kernel" in lines
    for name in (
        "whole replay",
        "scope execute",
        "aten::mm.default(float32[8,8], float32[8,8]) by kernels.py:mm, 3 calls",
        "aten::mm.default(float32[2,8], float32[8,8]) by kernels.py:mm, 1 call",
    ):
        figures = lines[lines.index(name) + 1]
        assert figures.endswith(("faster", "slower", "no measurable difference", "too noisy to tell"))
        assert " to " in figures
    assert any(line.startswith("medians over 7 rounds") for line in lines)


def test_too_few_rounds_say_so_instead_of_a_verdict(captured: Captured, flag: str, tool: Tool) -> None:
    code, out, _err = tool("benchmark", "--compare", flag, "--benchmark-min-time=2x", captured(program))
    assert code == 0 and "not known" in out
    assert "whole replay: not known: 2 rounds cannot enclose the ratio with 95% confidence; 6 are needed" in out


def test_json_is_google_benchmarks_with_the_comparisons_beside(
    captured: Captured, flag: str, tool: Tool, tmp_path: Path
) -> None:
    file = tmp_path / "compared.json"
    code, out, _err = tool(
        "benchmark",
        "--compare",
        flag,
        "--benchmark-min-time=6x",
        "--benchmark-format=json",
        f"--benchmark-out={file}",
        captured(program),
    )
    assert code == 0
    document = json.loads(out)
    assert json.loads(file.read_text())["comparisons"] == document["comparisons"]
    names = [row["name"] for row in document["benchmarks"]]
    assert names[:2] == ["BM_original/whole replay", "BM_substituted/whole replay"] and len(names) == 6
    for row in document["benchmarks"]:
        assert row["run_type"] == "iteration" and row["time_unit"] == "ns" and row["iterations"] == 6
        assert row["real_time"] > 0 and len(row["samples"]["real_time"]) == 6
    for each in document["comparisons"]:
        assert each["verdict"] in ("faster", "slower", "no measurable difference", "too noisy to tell")
        assert each["ratio_low"] <= each["ratio"] <= each["ratio_high"] and each["confidence"] >= 0.95
        outside = each["ratio_high"] < 1 or each["ratio_low"] > 1
        assert outside or each["verdict"] not in ("faster", "slower")
    whole, wide, _narrow = document["comparisons"]
    assert whole["calls"] is None and whole["replacement"] is None
    assert (wide["calls"], wide["replacement"], wide["rounds"]) == (3, "kernels.py:mm", 6)
    assert document["context"]["rounds"] == 6 and document["context"]["verified"].startswith("close (kernels are subst")


def test_csv_has_a_line_for_each_thing_compared(captured: Captured, flag: str, tool: Tool) -> None:
    code, out, _err = tool(
        "benchmark", "--compare", flag, "--benchmark-min-time=2x", "--benchmark-format=csv", captured(program)
    )
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["name"] for row in rows][0] == "whole replay" and len(rows) == 3
    assert rows[1]["calls"] == "3" and rows[1]["verdict"] == "not known" and rows[1]["ratio_low"] == ""
    assert math.isfinite(float(rows[1]["ratio"])) and "6 are needed" in rows[1]["reason"]


def test_an_interval_too_wide_to_see_differences_is_a_warning(captured: Captured) -> None:
    with Plan(captured(program), substitutions=[Substitution("aten::mm", lambda a, b: torch.mm(a, b))]) as plan:
        run = measure_both(plan, Options(MinTime(iterations=6), warmup=0))
        mine = np.array([100.0, 200, 100, 200, 100, 200])
        wide = run.rows[0].__class__("whole replay", compare_pairs(mine, mine[::-1]), (mine, mine))
        report = make_compare_report(run.__class__(**{**vars(run), "rows": [wide]}), plan)
    assert report.comparisons[0]["verdict"] == "too noisy to tell"
    assert any("the ratio is only known to be between 0.500 and 2.000" in text for text in report.context["warnings"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--compare needs --replay-kernel-substitution"),
        (["FLAG", "--per-op"], "--compare and --per-op are two ways to measure"),
        (["FLAG", "--benchmark-repetitions=2"], "--benchmark-repetitions does not go with --compare"),
        (
            ["FLAG", "--device-profiling-mode=host-ops", "--device-profiling-output=t.json"],
            "--device-profiling-mode does not go with --compare",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_use(
    captured: Captured, flag: str, tool: Tool, flags: list[str], said: str
) -> None:
    given = [flag if each == "FLAG" else each for each in flags]
    code, out, err = tool("benchmark", "--compare", *given, captured(program))
    assert (code, out) == (2, "") and said in err


def test_a_slow_kernel_on_one_thread_is_not_judged_faster_because_others_wait_for_processors() -> None:
    """A good kernel on two threads takes 1 undisturbed, and a time slice where one of the threads has no processor; a
    bad one on one thread takes 5, seldom disturbed."""
    random = np.random.default_rng(5)
    for _ in range(200):
        good = np.where(random.random(40) < 0.7, 145.0, 1.0) * random.lognormal(0, 0.05, 40)
        bad = 5.0 * random.lognormal(0, 0.05, 40)
        assert compare_pairs(good, bad).verdict != "faster"
    assert (
        compare_pairs(good, bad).verdict == "too noisy to tell" and "other programs" in compare_pairs(good, bad).reason
    )
    quiet = random.lognormal(0, 0.05, 40)
    assert compare_pairs(quiet, bad).verdict == "slower" and compare_pairs(bad, quiet).verdict == "faster"


@pytest.mark.parametrize(("load", "verdict"), [(99.0, "too noisy to tell"), (0.1, "faster")])
def test_waiting_for_a_processor_on_a_busy_machine_is_no_difference_of_kernels(
    load: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round of the original waited, so not even its shortest time is its own."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    waited, bad = ([Readings(real, 2e6, None)] * 10 for real in (100e6, 2e6))
    found = _row("whole replay", waited, bad).comparison
    assert found.verdict == verdict
    assert ("the original side had a processor for 2% of its time" in found.reason) == (load > 1)
