"""A benchmark against an earlier one: pairs, verdicts by interval, differences of the machines, and the gate for CI."""

import json

import numpy as np
import pytest
from opreplay_tools.per_op import BaselineFlags

from replayfmt.benchmark.baseline import compare_with_baseline, noise_floor, noise_lines, read_baseline
from replayfmt.benchmark.run_report import Report
from replayfmt.benchmark.statistics import parse_share
from replayfmt.errors import UsageError

CONTEXT = {"json_schema_version": 1, "capture_session": "1234", "host_name": "here", "torch_version": "2.13.0"}


def document(rows, **context):
    return {"context": CONTEXT | context, "benchmarks": rows}


def row(name, times, **fields):
    return {"name": name, "run_type": "iteration", "samples": {"real_time": times}, **fields}


def around(value):
    """Ten times whose median is `value`, known to one percent."""
    return [value * (1 + step / 1000) for step in (-10, -8, -5, -2, 0, 0, 2, 5, 8, 10)]


def compared(before, after):
    return compare_with_baseline("old.json", document([row("a", before)]), document([row("a", after)])).rows[0]


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.5, "slower"), (1.05, "slower"), (1.01, "no measurable difference"), (0.95, "faster"), (0.1, "faster")],
)
def test_the_verdict_is_that_of_the_intervals(factor, verdict):
    found = compared(around(1000.0), around(1000.0 * factor))
    assert found.verdict == verdict and found.ratio == pytest.approx(factor)
    assert found.ratio_low < found.ratio < found.ratio_high
    assert found.ratio_low == pytest.approx(factor * 0.992 / 1.008)  # ranks 2 and 9 of ten


@pytest.mark.parametrize(
    "share, devices, verdict",
    [(0.6, ["cpu"], "too noisy to tell"), (0.1, ["cpu"], "slower"), (0.6, ["cuda:0"], "slower")],
)
@pytest.mark.parametrize("when", ["in the baseline", "here"])
def test_what_was_measured_beside_other_programs_decides_nothing(share, devices, verdict, when):
    """In that time the processors were theirs, or shared with them; a device's times are its own."""
    busy, quiet = {"others_share": share, "devices": devices}, {"others_share": 0.0, "devices": devices}
    before, after = (busy, quiet) if when == "in the baseline" else (quiet, busy)
    old, new = document([row("a", around(1000.0))], **before), document([row("a", around(1300.0))], **after)
    found = compare_with_baseline("old.json", old, new).rows[0]
    assert found.verdict == verdict and found.ratio == pytest.approx(1.3)
    if verdict != "slower":
        assert found.reason == f"{when}, other programs had 60% of the processors' time"
        assert found.failure(0.05).verdict == "cannot be judged" and found.failure(0.5) is None
    new = document([row("a", around(6000.0))], **after)  # twice what the others left is 5 times as long
    assert compare_with_baseline("old.json", old, new).rows[0].verdict == "slower"


def test_times_that_vary_much_decide_nothing_and_pass_a_gate_only_where_they_do_not_look_slower():
    widely = [500.0, 1500.0] * 10
    found = compared(widely, widely)
    assert found.verdict == "too noisy to tell" and found.failure(0.05) is None
    found = compared(widely, [1.1 * each for each in widely])
    assert found.verdict == "too noisy to tell"
    assert found.failure(0.05).reason.startswith("cannot be judged, and looks slower (1.100 x): the ratio lies between")


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 20, 100])
def test_the_same_work_measured_twice_seldom_differs(count):
    random = np.random.default_rng(3)
    pairs = [compared(*(random.lognormal(7, 0.1, count).tolist() for _ in range(2))) for _ in range(400)]
    differing = [pair for pair in pairs if pair.verdict in ("slower", "faster")]
    assert len(differing) < 0.1 * len(pairs)  # what the module says; in practice far fewer:
    assert len(differing) <= 0.02 * len(pairs)
    assert sum("x the baseline" in str(pair.failure(0.01)) for pair in pairs) <= len(differing)
    slower = [
        compared(random.lognormal(7, 0.02, 100).tolist(), random.lognormal(7.2, 0.02, 100).tolist()) for _ in range(20)
    ]
    assert {pair.verdict for pair in slower} == {"slower"}  # and what differs is seen


def test_the_gate_fails_rows_that_are_measurably_slower_by_more_than_it_allows_and_those_it_cannot_judge():
    assert compared(around(1000.0), around(1040.0)).failure(0.05) is None
    assert (
        compared(around(1000.0), around(1100.0)).failure(0.05).reason == "1.100 x the baseline's time, more than 1.05 x"
    )
    assert compared(around(1000.0), around(1100.0)).failure(0.2) is None
    assert compared(around(1000.0), around(500.0)).failure(0.05) is None
    assert "here: 2 iterations cannot enclose" in compared(around(1000.0), [1.0, 2.0]).failure(0.05).reason
    assert "in the baseline: 1 iterations cannot enclose" in compared([1.0], around(1.0)).failure(0.05).reason


def test_a_load_that_slowed_one_side_down_gives_no_verdict():
    """Most times are long, because others used the processors; the undisturbed ones are shorter than before."""
    before = around(1000.0)
    loaded = [900.0, 905.0, *(each * 5 for each in around(1000.0))]
    found = compared(before, loaded)
    assert found.ratio > 4 and found.verdict == "too noisy to tell" and "slowed one side down" in found.reason
    failure = found.failure(0.05)
    assert failure.verdict == "cannot be judged" and failure.interval[0] > 1
    assert compared(before, [1300.0, 1310.0, *(each * 5 for each in around(1000.0))]).verdict == "slower"
    assert compared(loaded, before).verdict == "too noisy to tell"


def test_all_times_of_one_name_count_together_and_aggregates_do_not():
    ten = around(1000.0)
    halves = [row("a", ten[:5]), row("a", ten[5:]), {"name": "a", "run_type": "aggregate", "real_time": 1.0}]
    (found,) = compare_with_baseline("old.json", document([row("a", ten)]), document(halves)).rows
    assert found.ratio == 1 and found.verdict == "no measurable difference"


def test_a_sum_over_ops_is_compared_by_the_bounds_of_the_sum():
    def kernel(value):
        return {
            "name": "BM_op/kernel:aten::mm.default",
            "run_type": "iteration",
            "estimated_us": value,
            "estimated_us_low": value * 0.99,
            "estimated_us_high": value * 1.01,
        }

    (found,) = compare_with_baseline("o", document([kernel(10.0)]), document([kernel(20.0)])).rows
    assert found.verdict == "slower" and found.after.value == 20_000
    unknown = kernel(10.0) | {"estimated_us_low": None, "estimated_us_low_reason": "too few samples for an interval"}
    (found,) = compare_with_baseline("o", document([unknown]), document([kernel(20.0)])).rows
    assert (found.verdict, found.reason) == ("not known", "in the baseline: too few samples for an interval")


def test_rows_that_could_not_be_measured_are_not_known_with_their_reason():
    wrong = {"name": "a", "run_type": "iteration", "error_occurred": True, "error_message": "unmeasurable: noise"}
    (found,) = compare_with_baseline("o", document([row("a", around(1.0))]), document([wrong])).rows
    assert found.verdict == "not known" and found.reason == "here: unmeasurable: noise"


@pytest.mark.parametrize(
    "times",
    [
        [1, 0, 1, 1, 1, 1],
        [1, -1, 1],
        [10**400] * 6,
        [float("nan")] * 6,
        ["1"] * 6,
        [True] * 6,
        [None] * 6,
        [],
        "123456",
        None,
    ],
)
def test_times_that_are_no_positive_numbers_are_not_known(times):
    (found,) = compare_with_baseline("o", document([row("a", times)]), document([row("a", around(1.0))])).rows
    assert found.verdict == "not known" and "no positive numbers" in found.reason


def test_rows_without_a_partner_and_differences_of_the_machines_are_listed():
    old = document([row("a", around(1.0)), row("gone", around(1.0))], devices=["cpu"])
    new = document([row("a", around(1.0)), row("new", around(1.0))], devices=["cpu"], torch_version="2.14.0")
    found = compare_with_baseline("old.json", old, new | {"context": new["context"] | {"host_name": "there"}})
    assert (found.only_before, found.only_after) == (["gone"], ["new"])
    assert found.differences == ["host: here then, there now", "torch: 2.13.0 then, 2.14.0 now"]
    text = list(found.lines())
    assert text[0] == "baseline  old.json" and text[1] == "  another host: here then, there now"
    assert "only in the baseline: gone" in text and "not in the baseline: new" in text
    assert text[-1] == (
        "compared with the baseline: 1 row: 0 slower, 0 faster, 1 no measurable difference; 2 without a partner (50.0%)"
    )


def test_a_baseline_that_has_nothing_in_common_is_refused():
    with pytest.raises(UsageError, match="none of its rows was measured here .it has b."):
        compare_with_baseline("old.json", document([row("b", around(1.0))]), document([row("a", around(1.0))]))


def test_what_two_measurements_of_the_same_work_differ_by_is_no_difference_later():
    first, again = document([row("a", around(1000.0))]), document([row("a", around(1030.0))])
    found = noise_floor(first, again)
    (share,) = (row.apart for row in found.rows)
    assert share == pytest.approx(1.03 * 1.008 / 0.992 - 1)
    assert list(noise_lines(found)) == [
        "noise     a: a difference of less than 4.7% is none (measured twice: 1.000 us and 1.030 us)"
    ]
    known = document([row("a", around(1000.0), noise_floor=share)])
    for factor, verdict in ((1.05, "no measurable difference"), (1.08, "slower"), (0.92, "faster")):
        (judged,) = compare_with_baseline("o", known, document([row("a", around(1000.0 * factor))])).rows
        assert (judged.verdict, judged.noise_floor) == (verdict, share)
    few = noise_floor(document([row("a", [1.0])]), document([row("a", [1.0])]))
    assert few.rows[0].apart is None and "not known: in the first measurement: 1 iterations" in next(noise_lines(few))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no context"),
        ('{"context": {"json_schema_version": 2}}', "has the schema version 2, not 1"),
        ('{"context": {"json_schema_version": 1}, "benchmarks": []}', "is of another benchmark"),
        ('{"context": {"json_schema_version": 1, "capture_session": ""}, "benchmarks": [1]}', "no list of named rows"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "old.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words) as raised:
        read_baseline(path)
    assert "\n" not in str(raised.value)


def scaled(path, factor):
    """A document whose times were all `factor` times as long, and steady."""
    made = json.loads(path.read_text())
    for each in made["benchmarks"]:
        steady = sorted(each["samples"]["real_time"])[len(each["samples"]["real_time"]) // 2]
        each["samples"]["real_time"] = [steady * factor] * 6
    path.write_text(json.dumps(made))


@pytest.mark.slow
def test_the_gate_of_the_tool_fails_with_exit_code_1_and_names_the_rows(tools, captured, tmp_path):
    old = tmp_path / "old.json"
    flags = ["--benchmark-min-time=6x", "--benchmark-warmup=0", "--verify=none"]
    ran = tools("benchmark", captured, *flags, "--noise-floor", f"--benchmark-out={old}")
    assert ran.code == 0 and "noise     BM_replay: a difference of less than " in ran.out
    document = json.loads(old.read_text())
    assert document["benchmarks"][0]["noise_floor"] >= 0 and document["noise_floor"]["rows"][0]["name"] == "BM_replay"
    del document["benchmarks"][0]["noise_floor"]
    old.write_text(json.dumps(document))

    gate = [f"--baseline={old}", "--fail-above=400%"]
    scaled(old, 1e6)  # now it is much faster, however busy the machine is
    ran = tools("benchmark", captured, *flags, *gate)
    assert ran.code == 0 and "1 row: 0 slower, 1 faster" in ran.out and "FAILED" not in ran.out
    scaled(old, 1e-12)
    ran = tools("benchmark", captured, *flags, gate[0])
    assert ran.code == 0 and "1 slower" in ran.out and "FAILED" not in ran.out
    out = tmp_path / "new.json"
    ran = tools("benchmark", captured, *flags, *gate, "--benchmark-format=json", f"--benchmark-out={out}")
    assert ran.code == 1 and "FAILED: BM_replay: " in ran.err and "x the baseline's time" in ran.err
    section = json.loads(ran.out)["baseline"]
    assert section["rows"][0]["verdict"] == "slower" and section["failures"] and section["fail_above"] == 4.0
    assert section["verdict"] == "slower" and section["exit_code"] == 1
    (failure,) = section["failures"]
    assert failure["name"] == "BM_replay" and failure["verdict"] == "slower" and "x the baseline's" in failure["reason"]
    assert failure["interval"][0] <= failure["ratio"] <= failure["interval"][1]
    assert section["passed_again"] == [] and isinstance(section["hidden"], list)
    assert json.loads(out.read_text())["baseline"] == section


class Measured:
    """Made-up measurements, one after the other, as `BaselineFlags.apply` takes them."""

    def __init__(self, *measurements):
        self.left = list(measurements)

    def __call__(self):
        return Report(CONTEXT, [row(name, times) for name, times in self.left.pop(0).items()])


def judged(before, *measurements):
    """What --fail-above=5% makes of them: whether it passes, the lines, and how many measurements it took."""
    flags = BaselineFlags("old.json", document([row(name, times) for name, times in before.items()]), 0.05, False)
    measured = Measured(*measurements)
    _report, lines, code = flags.apply(measured)
    return code == 0, lines, len(measurements) - len(measured.left)


def test_a_row_that_fails_has_to_fail_again():
    steady, slowed = around(1000.0), around(1300.0)  # as if another program had run for as long as that op was measured
    assert judged({"a": steady}, {"a": steady})[::2] == (True, 1)
    passes, lines, taken = judged({"a": steady, "b": steady}, {"a": slowed, "b": steady}, {"a": steady, "b": slowed})
    assert passes and taken == 2 and not any("FAILED" in line for line in lines)
    assert "measured again, since a row failed: 0 failed both times" in lines
    assert "passed the second time: a: 1.300 x the baseline's time, more than 1.05 x; then 1.000 x" in lines
    passes, lines, taken = judged({"a": steady, "b": steady}, {"a": slowed, "b": slowed}, {"a": slowed, "b": steady})
    assert not passes and taken == 2
    assert [line for line in lines if "FAILED" in line] == ["FAILED: a: 1.300 x the baseline's time, more than 1.05 x"]
    assert judged({"a": steady}, {"a": [1.0]}, {"a": [1.0]})[0] is False, "what cannot be judged does not pass"
    assert judged({"a": steady}, {"a": [1.0]}, {"a": steady})[0] is True


@pytest.mark.parametrize("text", ["5", "5%", "5.0", " 5 %".replace(" ", "")])
def test_five_means_five_percent(text):
    assert parse_share("--fail-above", text) == 0.05


def code_of(before, *measurements):
    flags = BaselineFlags("old.json", before, 0.05, False)
    left = list(measurements)
    report, lines, code = flags.apply(lambda: Report(CONTEXT, left.pop(0)["benchmarks"]))
    section = report.sections["baseline"]
    assert section["exit_code"] == code and len(section["failures"]) == sum("FAILED" in line for line in lines)
    return code, section


def test_what_cannot_be_judged_has_an_exit_code_of_its_own_and_slower_outweighs_it():
    steady, few, slow = around(1000.0), [1.0], around(1300.0)
    old = document([row("a", steady), row("b", steady)])
    unknown, both = (document([row("a", few), row("b", times)]) for times in (steady, slow))
    code, section = code_of(old, unknown, unknown)
    assert code == 4 and section["verdict"] == "cannot be judged"
    (failure,) = section["failures"]
    assert (failure["name"], failure["ratio"], failure["interval"]) == ("a", None, None)
    assert code_of(old, both, both)[0] == 1
    code, section = code_of(old, old)
    assert code == 0 and section["verdict"] == "passed" and section["failures"] == []


def op_rows(**values):
    """Rows of --per-op: names with the time of all calls in microseconds, known to two percent."""
    return document(
        [
            row(f"BM_op/{name}", around(value * 1e3), estimated_us=value, estimated_us_low=value * 0.99)
            | {"estimated_us_high": value * 1.01}
            for name, value in values.items()
        ]
    )


def test_the_total_of_ops_is_judged_too():
    old, new = op_rows(a=10.0, b=30.0), op_rows(a=10.0, b=45.0)
    total = compare_with_baseline("o", old, new).rows[-1]
    assert (total.name, total.verdict) == ("BM_op/total", "slower")
    assert total.ratio == pytest.approx(55 / 40) and total.before.value == pytest.approx(40_000)
    assert "BM_op/total" in [each["name"] for each in code_of(old, new, new)[1]["failures"]]
    assert [each.name for each in compare_with_baseline("o", op_rows(a=1.0), op_rows(a=1.0)).rows] == ["BM_op/a"]


def test_many_ops_that_are_each_a_little_slower_are_slower_together():
    names = [f"op{index}" for index in range(20)]
    new = op_rows(**dict.fromkeys(names, 10.4))
    failures = compare_with_baseline("o", op_rows(**dict.fromkeys(names, 10.0)), new).failures(0.03)
    assert failures[-1].name == "BM_op/total" and failures[-1].verdict == "slower"


@pytest.mark.parametrize(("gone", "code"), [(0.5, 0), (5.0, 4)])
def test_a_gate_does_not_judge_where_much_has_no_partner(gone, code):
    old, new = op_rows(a=10.0, b=10.0, gone=gone), op_rows(a=10.0, b=10.0)
    for before, after in ((old, new), (new, old)):  # whichever of the two lacks it
        found, section = code_of(before, after, after)
        assert found == code and section["unmatched_share"] == pytest.approx(gone / (20 + gone))
        if code:
            (failure,) = section["failures"]
            assert failure["name"] == "rows without a partner" and "1 row without a partner" in failure["reason"]


def test_a_row_that_looks_slower_and_passes_within_its_noise_is_a_warning():
    steady = around(1000.0)
    passes, lines, taken = judged({"a": steady}, {"a": around(1150.0)}, {"a": around(1300.0)})
    floor = 1300 * 1.008 / (1150 * 0.992) - 1
    assert passes and taken == 2
    told = [line for line in lines if line.startswith(("WARNING", "passed"))]
    slower, blind = told
    assert slower == (
        f"WARNING: passed, though it looks slower: a: 1.150 x, between 1.132 and 1.169, noise floor {floor:.1%}; "
        "then 1.300 x"
    )
    assert blind == (
        "WARNING: 1 of 1 row could be slower by more than 5% and pass: their noise floor is higher, at most "
        f"{floor:.1%} (a); measure longer, or on a quieter machine"
    )
    widely = [1060 * (1 + step / 100) for step in (-9, -8, -7, -6, 0, 0, 6, 7, 8, 9)]
    passes, lines, taken = judged({"a": steady}, {"a": widely})
    assert passes and taken == 1
    assert "WARNING: passed, though it looks slower: a: 1.060 x, between 0.967 and 1.154" in lines
    many = {f"row {index}": steady for index in range(30)}
    lines = judged(many, dict.fromkeys(many, widely))[1]
    assert sum("though it looks slower" in line for line in lines) == 20 and "WARNING: and 10 more" in lines
    assert not any("WARNING" in line for line in judged({"a": steady}, {"a": steady})[1])


def busy(random, scale):
    """Times on a machine that others use: bursts that last, of half as much again, in a tenth of the times."""
    waits = np.repeat(random.random(40) < 0.1, 10)
    return (scale * random.lognormal(0, 0.02, 400) * (1 + 0.5 * waits * random.random(400))).tolist()


@pytest.mark.slow
def test_the_same_work_on_a_busy_machine_passes_and_a_kernel_a_tenth_slower_does_not():
    random = np.random.default_rng(4)
    for _ in range(100):
        passes, lines, _taken = judged(*({"a": busy(random, 1000.0)} for _ in range(3)))
        assert passes, lines
        passes, lines, taken = judged({"a": busy(random, 1000.0)}, *({"a": busy(random, 1100.0)} for _ in range(2)))
        assert not passes and taken == 2, lines


@pytest.mark.slow
def test_the_same_work_whose_times_depend_on_each_other_passes():
    random = np.random.default_rng(6)
    for _ in range(100):
        runs = []
        for _ in range(3):
            steps = random.normal(size=400) * 0.02
            for place in range(1, 400):
                steps[place] += 0.95 * steps[place - 1]
            runs.append({"a": (1000 * np.exp(steps)).tolist()})
        passes, lines, _taken = judged(*runs)
        assert passes, lines


@pytest.mark.slow
def test_ops_are_compared_with_their_baseline_too(tools, captured, tmp_path):
    old = tmp_path / "old.json"
    flags = ["--per-op", "--kernel=aten::tanh", "--benchmark-min-time=6x"]
    assert tools("benchmark", captured, *flags, "--noise-floor", f"--benchmark-out={old}").code == 0
    scaled(old, 1e-6)
    ran = tools("benchmark", captured, *flags, f"--baseline={old}", "--fail-above=5%")
    assert ran.code == 1 and "FAILED: BM_op/aten::tanh.default(float32[8,48]): " in ran.out


def test_flags_that_make_no_sense_are_refused_before_anything_runs(tools, captured, tmp_path):
    old = tmp_path / "old.json"
    for flags, words in (
        (["--fail-above=5%"], "needs --baseline"),
        ([f"--baseline={old}"], "cannot be read"),
        ([f"--baseline={old}", "--fail-above=five"], "expected a percentage"),
        ([f"--baseline={old}", "--fail-above=0.05"], "a percentage below 1 needs its sign: 0.05%, or 5%"),
        (["--compare", "--replay-kernel-substitution=aten::tanh=x.py", "--noise-floor"], "does not go with --compare"),
    ):
        ran = tools("benchmark", captured, *flags)
        assert ran.code == 2 and words in ran.err and not ran.out
