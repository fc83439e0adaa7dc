"""The comparison sees what it is for: a program that is changed by a capture, or of which a capture holds nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import replayfmt
from replayfmt.recording import recorder

from . import comparing, sweep
from .comparing import Comparison, Report, is_whole
from .documented import Found, document, documented, documented_version
from .modes import Case


class One:
    """An entry of one case."""

    name = "one"

    def __init__(self, program: Callable[[], Any]) -> None:
        self._program = program

    def why_not(self, mode: str) -> str | None:
        return None

    def cases(self, mode: str) -> Iterator[Case]:
        yield Case("case", self._program)


def compare(program: Callable[[], Any], folder: Path) -> Report:
    return Comparison(One(program), "plain", folder).run()


def is_captured() -> bool:
    return recorder._active is not None


def bits(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32).view(torch.float32)


def warn() -> None:
    warnings.warn("seen", stacklevel=1)


def fail() -> None:
    raise ValueError


def draw() -> None:
    torch.rand(1)


def nothing() -> None:
    pass


# What a program gives alone and under a capture, where that differs, and in what.
CHANGES: list[tuple[Callable[[], Any], Callable[[], Any], str, str]] = [
    (lambda: torch.ones(2), lambda: torch.ones(2).double(), "result", "dtype"),
    (lambda: torch.ones(2, 2), lambda: torch.ones(2, 2).t().contiguous().t(), "result", "strides"),
    (lambda: torch.ones(2), lambda: torch.ones(1, 2), "result", "shape"),
    (lambda: torch.ones(2), lambda: torch.ones(2).to_sparse(), "result", "layout"),
    (lambda: torch.zeros(2), lambda: -torch.zeros(2), "result", "sign of zero"),
    (lambda: 0.0, lambda: -0.0, "result", "sign of zero"),
    (lambda: bits(0x7FC00000), lambda: bits(0x7FC00001), "result", "payload of NaN"),
    (lambda: torch.ones(2), lambda: torch.nextafter(torch.ones(2), torch.zeros(2)), "result", "rounding"),
    (lambda: torch.ones(2), lambda: torch.zeros(2), "result", "values"),
    (lambda: torch.ones(2), lambda: torch.ones(2).requires_grad_(), "result", "requires_grad"),
    (lambda: torch.ones(2), lambda: torch.ones(2).add_(0), "result", "version"),
    (lambda: [torch.ones(2)] * 2, lambda: [torch.ones(2), torch.ones(2)], "result", "memory"),
    (nothing, draw, "state", "values"),
    (nothing, fail, "exception", "presence"),
    (nothing, warn, "warnings", "texts"),
]


@pytest.mark.parametrize(("alone", "under", "place", "kind"), CHANGES, ids=[f"{c[2]}-{c[3]}" for c in CHANGES])
def test_what_a_capture_changes_is_the_recorders(
    alone: Callable[[], Any], under: Callable[[], Any], place: str, kind: str, tmp_path: Path
) -> None:
    report = compare(lambda: [torch.ones(1) + 1, under() if is_captured() else alone()], tmp_path)
    assert (place, kind, "recorder") in {(each["place"], each["kind"], each["cause"]) for each in report.differences}
    assert report.compared == 1 and not is_whole(report) and not report.unseen


def test_what_a_mode_that_does_nothing_changes_is_the_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch keeps it for the whole process: threads that leave their modes in another order than they entered them in
    # have left it as it should not be.
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
    report = compare(lambda: torch.ones(1) * (2 if is_in_torch_dispatch_mode() else 1), tmp_path)
    assert [(each["place"], each["kind"], each["cause"]) for each in report.differences] == [
        ("result", "values", "mode")
    ]
    assert is_whole(report)


def test_a_program_that_nothing_changes_is_whole_and_replayed(tmp_path: Path) -> None:
    report = compare(lambda: torch.ones(1) + 1, tmp_path)
    assert is_whole(report) and report.replays == {"verified": 1} and (report.cases, report.compared) == (1, 1)


def test_a_program_that_is_not_equal_to_itself_is_left_out(tmp_path: Path) -> None:
    numbers = itertools.count()
    report = compare(lambda: torch.ones(1) + next(numbers), tmp_path)
    assert (report.compared, report.left_out) == (0, {"not equal to itself": 1})


def test_a_program_that_differs_from_itself_now_and_then_is_no_finding(tmp_path: Path) -> None:
    numbers = itertools.count()  # two runs alone, two under a capture, and those that are made because they differ
    report = compare(lambda: torch.ones(1) + (next(numbers) in (2, 9)), tmp_path)
    assert (report.compared, report.left_out) == (0, {"equal to itself only sometimes": 1})
    assert is_whole(report) and not report.differences


def test_what_ran_and_left_nothing_in_the_capture_is_unseen(tmp_path: Path) -> None:
    ready = iter([torch.ones(2) for _ in range(9)])
    report = compare(lambda: next(ready) if is_captured() else torch.ones(2), tmp_path)
    assert report.unseen and "aten.ones.default" in report.unseen[0] and not is_whole(report)


def test_a_composite_that_runs_no_part_is_not_unseen(tmp_path: Path) -> None:
    given = torch.ones(2)

    def program() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cartesian_prod(given)

    with comparing.Counting() as counting:
        program()
    assert not counting.seen
    assert is_whole(compare(program, tmp_path))


def test_a_replay_that_differs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(replayfmt.Plan):
        def execute(self, **_options: Any) -> Any:
            return SimpleNamespace(outcome="failed", divergence="op 0 differs")

    monkeypatch.setattr(comparing.replayfmt, "Plan", Other)
    report = compare(lambda: torch.ones(1) + 1, tmp_path)
    assert "op 0 differs" in report.failed[0] and not is_whole(report)


def test_the_recorder_is_asked_for_and_another_one_in_its_place_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def capture(path: Path, *, recorder: str, **options: Any) -> Any:
        asked.append(recorder)
        return record(path, recorder="python", **options)

    record = replayfmt.capture
    monkeypatch.setattr(comparing.replayfmt, "capture", capture)
    report = Comparison(One(lambda: torch.ones(1) + 1), "plain", tmp_path, recorder="native").run()
    assert asked == ["native"]
    assert "recorded instead of native" in report.failed[0] and not is_whole(report)


def test_a_process_that_ends_is_a_finding() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    row = sweep._ask(worker, "add", "grad", "python")
    assert sweep.found_in(row) == ["the process ended with 3"]
    assert "add (grad): the process ended with 3" in sweep.summary({("add", "grad"): row})


@pytest.mark.sweep
def test_a_sweep_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.jsonl"
    options = ["--entries=abs", "--mode=plain", "--mode=grad", "--samples=2", "--jobs=1", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["sweep", *options])
    assert sweep.main() == 0
    whole = out.read_text()
    first, second = whole.splitlines()
    assert [json.loads(line)["mode"] for line in (first, second)] == ["plain", "grad"]
    assert "no difference of the recorder" in capsys.readouterr().out
    out.write_text(first + "\n" + second[: len(second) // 2])  # it was stopped while it wrote
    assert sweep.main() == 0
    assert "1 of 2 to do" in capsys.readouterr().err
    assert sweep.main() == 0
    assert "0 of 2 to do" in capsys.readouterr().err


def test_another_recorders_findings_are_not_documented_as_those_of_the_one_in_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "--recorder=native", "--document"])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2 and "leave --recorder out" in capsys.readouterr().err


def test_what_is_written_into_the_document_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "exactness.md"
    monkeypatch.setattr("exactness.documented.DOCUMENT", copy)
    copy.write_text("before\n<!-- found:begin -->\nold\n<!-- found:end -->\nafter\n")
    found: Found = {("prod", "grad"): {("input.grad", "rounding"), ("input.grad", "version"), ("result", "dtype")}}
    differences = [{"place": p, "kind": k, "cause": "mode"} for p, k in sorted(found["prod", "grad"])]
    row = {"entry": "prod", "mode": "grad", "cases": 2, "compared": 2, "left_out": {}, "differences": differences}
    document({("prod", "grad"): row}, "2.13.0", "AVX2")
    assert documented() == found and documented_version() == "2.13.0"
    assert copy.read_text().startswith("before\n") and copy.read_text().endswith("after\n")
