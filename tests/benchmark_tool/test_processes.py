"""`--processes`: one measurement of several, each made by a process of its own."""

import json

import pytest

from replayfmt.benchmark.baseline import compare_with_baseline
from replayfmt.benchmark.processes import put_together

OPS = {"complete": True, "failed": 0, "successful": 2, "estimated_us": 0.0}


def document(times, share=0.0, warnings=("nothing was verified",), **context):
    """Of one process: a row of the whole replay, or (by name) of ops."""
    rows = [
        {"name": name, "iterations": 10, "real_time": time, "warnings": [f"{name} was noisy: {time}"]}
        | (
            {"median_real_time": time, "ops": 4, "ops_per_second": 1.0, "samples": {"real_time": [time] * 10}}
            if name == "BM_replay"
            else {f"estimated_us{end}": time for end in ("", "_low", "_high", "_shortest")}
        )
        for name, time in times.items()
    ]
    about = {"others_share": share, "warnings": list(warnings), "gpus": [], "torch_num_threads": 1, "devices": ["cpu"]}
    return {"context": about | {"capture_session": "1", "json_schema_version": 1} | context, "benchmarks": rows}


def test_the_interval_is_over_the_medians_of_the_processes():
    medians = [100.0, 104.0, 98.0, 101.0, 99.0, 110.0]
    context, (row,) = put_together([document({"BM_replay": each}, share=each / 1000) for each in medians])
    assert row["samples"] == {"real_time": medians} and row["median_real_time"] == 100.5 and row["iterations"] == 60
    assert 95 < row["median_real_time_low"] < 98 and 110 < row["median_real_time_high"] < 116  # of another run, too
    assert row["real_time"] == pytest.approx(102) and row["ops_per_second"] == pytest.approx(4 / 102e-9)
    assert context["others_share"] == 0.11 and context["processes"] == 6
    assert context["warnings"] == ["nothing was verified"] and row["warnings"] == []  # not of the times of one process


def test_ops_are_ranked_by_what_all_processes_say():
    of_each = [{"BM_op/a": 10.0, "BM_op/b": 12.0, "BM_op/c": 1.0}] + [
        {"BM_op/a": 11.0, "BM_op/b": 10.5, "BM_op/c": 1.0}
    ] * 5
    context, rows = put_together([document(each, **OPS) for each in of_each])
    assert [row["name"] for row in rows] == ["BM_op/a", "BM_op/b", "BM_op/c"]
    assert [(row["rank"], row["rank_low"], row["rank_high"]) for row in rows] == [(1, 1, 2), (2, 1, 2), (3, 3, 3)]
    assert rows[1]["estimated_us_low"] == 10.5 and 12 < rows[1]["estimated_us_high"] < 13.5
    assert context["estimated_us"] == 22.5 and sum(row["share"] for row in rows) == pytest.approx(1)


def test_too_few_processes_for_an_interval_tell_nothing_of_the_order():
    context, rows = put_together([document({"BM_op/a": 10.0, "BM_op/b": 1.0}, **OPS)] * 2)
    assert [(row["rank_low"], row["rank_high"]) for row in rows] == [(1, 2), (1, 2)]
    assert all("2 processes cannot enclose" in row["estimated_us_low_reason"] for row in rows)


def test_what_only_one_process_was_too_short_for_has_no_reason_any_more():
    documents = [document({"BM_replay": each}) for each in (100.0, 104.0, 98.0, 101.0, 99.0, 110.0)]
    documents[0]["benchmarks"][0] |= {"median_confidence": None, "median_confidence_reason": "5 iterations"}
    row = put_together(documents)[1][0]
    assert row["median_confidence"] >= 0.95 and "median_confidence_reason" not in row


def test_an_op_that_one_process_could_not_measure_has_no_time():
    documents = [document({"BM_op/a": 10.0}, **OPS) for _ in range(6)]
    documents[3]["benchmarks"][0] = {"name": "BM_op/a", "error_occurred": True, "error_message": "failed: why"}
    context, (row,) = put_together(documents)
    assert row["error_message"] == "failed: why" and context["estimated_us"] is None


@pytest.mark.parametrize("faster, verdict", [(0.97, "no measurable difference"), (0.9, "faster")])
def test_one_process_does_not_tell_differences_that_another_process_makes(faster, verdict):
    one, two = (document({"BM_replay": 1e6 * each}) for each in (1.0, faster))
    assert compare_with_baseline("old.json", one, two).rows[0].verdict == verdict
    many = [
        dict(zip(("context", "benchmarks"), put_together([document({"BM_replay": each * 1e6})] * 6), strict=True))
        for each in (1.0, faster)
    ]
    assert compare_with_baseline("old.json", *many).rows[0].verdict == "faster"


def compared(name, before, after):
    """The row of two runs whose processes took these times."""
    runs = [put_together([document({name: 1e6 * each}, **OPS) for each in run]) for run in (before, after)]
    return compare_with_baseline(
        "old.json", *({"context": context, "benchmarks": rows} for context, rows in runs)
    ).rows[0]


@pytest.mark.parametrize("name", ["BM_replay", "BM_op/a"])
def test_processes_that_nothing_disturbed_decide_where_most_were_disturbed(name):
    alone, disturbed = [1.0, 1.01], [1.3, 1.5, 1.55, 1.6]
    slower = compared(name, alone + disturbed, [1.1, 1.11, *disturbed])
    assert slower.verdict == "slower" and slower.ratio == pytest.approx(1.11 / 1.01) and slower.ratio_low > 1
    assert "two processes on each side" in slower.reason
    assert compared(name, [1.1, 1.11, *disturbed], alone + disturbed).verdict == "faster"
    for other in ([*alone, *disturbed[:3], 1.4], [*alone, 1.0, 1.0, 1.02, 1.6], [1.03, 1.04, *disturbed]):
        assert compared(name, alone + disturbed, other).verdict == "too noisy to tell"
    # One alone may be the only one that was measured while the processor ran at its highest clock.
    assert compared(name, alone + disturbed, [0.9, *disturbed, 1.4]).verdict == "too noisy to tell"


@pytest.mark.slow
def test_the_tool_measures_in_fresh_processes(tools, captured, tmp_path):
    out = tmp_path / "times.json"
    flags = ("--per-op", "--op-limit=1", "--benchmark-min-time=6x", "--verify=none", "--threads=1")
    ran = tools("benchmark", "--processes=2", *flags, f"--benchmark-out={out}", captured)
    document = json.loads(out.read_text())
    assert ran.code == 0 and document["context"]["processes"] == 2 and document["context"]["torch_num_threads"] == 1
    (row,) = document["benchmarks"]
    assert len(row["samples"]["real_time"]) == row["processes"] == 2
    assert "2 processes cannot enclose the median" in row["estimated_us_low_reason"]
    assert "6 are needed" in row["estimated_us_low_reason"]


@pytest.mark.slow
def test_what_the_processes_cannot_do_is_said(tools, captured, tmp_path, monkeypatch):
    ran = tools("benchmark", "--processes=2", "--memory", captured)
    assert ran.code == 2 and "--memory does not go with --processes" in ran.err
    ran = tools("benchmark", "--processes=2", tmp_path)  # the folder of all ranks
    assert ran.code == 2 and "--processes does not go with" in ran.err
    monkeypatch.setenv("WORLD_SIZE", "2")
    ran = tools("benchmark", "--processes=2", "--per-op", captured)
    assert ran.code == 2 and "--processes does not go with" in ran.err
    monkeypatch.delenv("WORLD_SIZE")
    ran = tools("benchmark", "--processes=2", "--scope=nowhere", captured)
    assert ran.code == 1 and "a measurement in a fresh process failed: " in ran.err and "nowhere" in ran.err
