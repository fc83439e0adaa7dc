"""What was faster or slower, added and removed in another capture, by the same alignment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.compare.results import Times
from replayfmt.errors import UsageError

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/comparing-captures.schema.json").read_text())
Made = Callable[[str, Callable[[torch.Tensor], object]], Path]


@torch.library.custom_op("paced::wait", mutates_args=())
def wait(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(name: str, program: Callable[[torch.Tensor], object]) -> Path:
        path = tmp_path / f"{name}.opreplay"
        with replayfmt.capture(path, digests="ops"):
            program(torch.arange(6.0))
        return path

    return make


def times_of(a: Path, b: Path, **options: object) -> Times:
    found = replayfmt.compare(a, b, times=True, **options)
    assert found.times is not None
    return found.times


@pytest.mark.slow
def test_captured_times_are_compared_by_kernel_and_those_alone_are_added_and_removed(made: Made) -> None:
    a = made("a", lambda x: torch.ops.paced.wait(x.sin(), 0.0).exp().tan())
    b = made("b", lambda x: torch.ops.paced.wait(x.sin(), 0.2).exp().log())
    times = times_of(a, b)
    assert times.source == "captured host times"
    by_name = {each.kernel: each for each in times.kernels}
    assert by_name["paced::wait.default"].ns[1] >= 200_000_000 and by_name["paced::wait.default"].calls == 1
    assert (by_name["aten::tan.default"].removed[0], by_name["aten::log.default"].added[0]) == (1, 1)
    assert by_name["aten::exp.default"].calls == 1
    assert sum(each.difference_ns for each in times.kernels) == times.ns[1] - times.ns[0]


def measured(path: Path, ns: dict[str, float]) -> str:
    """A file as opreplay-benchmark --per-op writes it."""
    with replayfmt.open(path) as opened:
        rows = [
            {"name": f"BM_op/{op.kernel.name}", "ordinal": op.ordinal, "median_real_time": ns[op.kernel.name]}
            for op in opened.ops
            if op.kernel.name in ns
        ]
        context = {"capture_session": opened.session.session_id, "json_schema_version": 1}
    out = path.with_suffix(".json")
    out.write_text(json.dumps({"context": context, "benchmarks": rows}))
    return str(out)


@pytest.mark.slow
def test_two_benchmarks_give_the_times_of_replays(made: Made, tools: Tools) -> None:
    a, b = made("a", lambda x: x.sin().exp().exp()), made("b", lambda x: x.sin().exp().exp())
    files = measured(a, {"aten::sin": 100, "aten::exp": 1000}), measured(b, {"aten::sin": 300, "aten::exp": 400})
    ran = tools("compare", "--format=jsonl", *(f"--benchmark={each}" for each in files), a, b)
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0, ran.err
    for row in rows:
        jsonschema.validate(row, SCHEMA)
    kernels = {row["kernel"]: row["ns"] for row in rows if row["kind"] == "kernel_times"}
    first = next(row for row in rows if row["kind"] == "op_times")
    assert next(iter(kernels)) == "aten::exp.default" and first["ns"] == [1000, 400]
    assert kernels["aten::exp.default"] == [2000, 800] and kernels["aten::sin.default"] == [100, 300]
    assert "medians measured in replays" in tools("compare", *(f"--benchmark={each}" for each in files), a, b).out


def test_benchmarks_of_another_capture_or_of_one_alone_are_refused(made: Made) -> None:
    a, b = made("a", lambda x: x.sin()), made("b", lambda x: x.sin())
    file = measured(a, {"aten::sin": 1})
    with pytest.raises(UsageError, match="another capture"):
        replayfmt.compare(a, b, benchmarks=(file, file))
    with pytest.raises(UsageError, match="two files"):
        replayfmt.compare(a, b, benchmarks=(file,))


@pytest.mark.slow
def test_the_page_has_a_section_on_another_capture(made: Made, tools: Tools, tmp_path: Path) -> None:
    a, b = made("a", lambda x: x.mul(2).exp()), made("b", lambda x: x.mul(3).exp())
    page = tmp_path / "page.html"
    ran = tools("report", f"--compare={b}", a, "-o", page)
    assert ran.code == 0, ran.err
    text = page.read_text()
    assert "Another capture" in text and "Where they part" in text and "Times (captured host times)" in text
    missing = tools("report", f"--compare={tmp_path / 'no.opreplay'}", a, "-o", tmp_path / "other.html")
    assert missing.code == 3 and not (tmp_path / "other.html").exists()
