"""A replay that ran and gave something else, or could not: the first divergence is named, and the exit code is 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools

from replayfmt.replay.plan import Plan

from .table import recorded


class Drifting:
    """An operator that adds a number nobody can see in its arguments: the environment it ran in."""

    def __init__(self) -> None:
        self.number, self.fails = 1.0, False
        self.next: Iterator[float] = iter(())  # numbers of the next calls
        self._library = torch.library.Library("failure_drift", "DEF")
        self._library.define("shift(Tensor x) -> Tensor")
        self._library.impl("shift", self._shift, "CompositeExplicitAutograd")
        self.shift = torch.ops.failure_drift.shift

    def _shift(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the machine it needs is gone\nand that is all")
        return x + next(self.next, self.number)

    def close(self) -> None:
        self._library._destroy()


@pytest.fixture
def drifting() -> Iterator[Drifting]:
    drifting = Drifting()
    yield drifting
    drifting.close()


def _digest(op: Callable[..., Any]) -> Any:
    return op(torch.ones(4)).mul_(2)


def _scalar(op: Callable[..., Any]) -> Any:
    return torch.ones(2) if op(torch.ones(1)).item() > 1.5 else torch.zeros(3)


def _host_read(op: Callable[..., Any]) -> Any:
    return torch.tensor(op(torch.ones(3)).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("program", [_digest, _scalar, _host_read], ids=["digest", "scalar", "host read"])
@pytest.mark.parametrize("digests", ["ops", "live"])
def test_the_first_divergence_is_named_by_run_and_benchmark(
    tools: Tools, tmp_path: Path, drifting: Drifting, program: Callable[..., Any], digests: str
) -> None:
    path = recorded(tmp_path, lambda: program(drifting.shift), digests=digests)
    assert tools("run", path).code == 0
    drifting.number = 2.0
    done = tools("run", path)
    assert done.code == 1
    assert re.match(rf"DATA_LOSS: {re.escape(str(path))}: the replay differs from the capture: ordinal \d+ ", done.err)
    if digests == "ops":
        assert "(failure_drift::shift.default), result 0, scope execute: " in done.err
    # What is alive when a scope ends is compared after it.
    scope = "" if digests == "live" and program is _digest else "execute"
    assert (f"scope {scope}" in done.err) is bool(scope) and "expected" in done.err and "got" in done.err
    _said, *advice = done.err.splitlines()
    no_op_showed_it = digests == "live"
    assert len(advice) == no_op_showed_it and all("capture with --digests=ops to find it" in each for each in advice)
    assert ("; last written by ordinal " in done.err) is no_op_showed_it
    assert "; replayed again up to there, it differs in the same way" in done.err
    (row,) = map(json.loads, tools("run", "--format=jsonl", path).out.splitlines())
    assert row["outcome"] == "mismatched" and row["divergence"]["scope"] == scope
    assert row["divergence"]["ordinal"] > 0 and row["divergence"]["expected"] != row["divergence"]["got"]
    assert row["divergence"]["sample"]["absolute"] in (1.0, 2.0) and row["divergence"]["sample"]["relative"] == 0.5
    assert row["divergence"]["again"] == "differs in the same way"

    measured = tools("benchmark", "--benchmark-min-time=1x", path)
    assert measured.code == 1 and measured.err.startswith("DATA_LOSS: "), measured.err
    assert f"ordinal {row['divergence']['ordinal']} " in measured.err
    assert "BM_replay" not in measured.out, "nothing was timed"

    kept = tools("run", "--keep-going", "--format=jsonl", path)
    head, *verdicts = map(json.loads, kept.out.splitlines())
    assert kept.code == 1 and head["verdicts"]["mismatched"] >= 1
    assert sum(head["verdicts"].values()) == len(verdicts) == head["ops"]


@pytest.mark.parametrize("digests", ["ops", "live"])
def test_what_differs_once_is_said_to_agree_when_it_is_replayed_again(
    tools: Tools, tmp_path: Path, drifting: Drifting, monkeypatch: pytest.MonkeyPatch, digests: str
) -> None:
    path = recorded(tmp_path, lambda: drifting.shift(torch.ones(4)).mul(2), digests=digests)
    # The search for ops that differ from themselves would use up the numbers.
    monkeypatch.setattr(Plan, "_explain", lambda *_arguments, **_options: (False, ()))
    for said, numbers in (("agrees", [2.0]), ("differs otherwise", [2.0, 3.0])):
        drifting.next = iter(numbers)
        done = tools("run", "--format=jsonl", path)
        assert json.loads(done.out)["divergence"]["again"] == said
        assert done.code == 1 and f"; replayed again up to there, it {said}" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("digests", ["ops", "live"])
def test_consequences_are_folded_under_their_cause(
    tools: Tools, tmp_path: Path, drifting: Drifting, digests: str
) -> None:
    def program() -> Any:
        x, other = drifting.shift(torch.ones(4)), drifting.shift(torch.zeros(4))
        signs = other.sign()  # equal again
        made = [x.exp(), x.exp().mul(2).add_(1), drifting.shift(signs)]
        return x, other, made, torch.ones(2).neg()

    path = recorded(tmp_path, program, digests=digests)
    drifting.number = 2.0
    head, *verdicts = map(json.loads, tools("run", "--keep-going", "--format=jsonl", path).out.splitlines())
    found = {each["ordinal"]: each for each in verdicts if each["verdict"] == "mismatched"}
    assert head["verdicts"]["mismatched"] == len(found) and head["verdicts"]["ok"] >= 3
    shifts = [number for number, each in found.items() if each["op"].startswith("failure_drift::shift")]
    causes = [number for number, each in found.items() if each["cause"] is None]
    # That signs were equal again is only known where each op was compared.
    assert causes == (shifts if digests == "ops" else shifts[:2]) and len(shifts) == 3
    assert {each["cause"] for each in found.values() if "exp" in each["op"]} == {shifts[0]}
    said = tools("run", "--keep-going", path).out
    assert said.count(": mismatched: ") == len(causes)
    following = sum(each["cause"] == shifts[0] for each in found.values())
    assert f"    {following} ops after it differ, on what follows from it; --format=jsonl lists them" in said


def test_the_largest_distance_is_stated_when_close_passes(tools: Tools, tmp_path: Path, drifting: Drifting) -> None:
    path = recorded(tmp_path, lambda: drifting.shift(torch.ones(3)).sum().item(), digests="ops")
    drifting.number = 1.00001
    done = tools("run", "--verify=close", path)
    assert done.code == 0, done.err
    assert re.search(r" differ within the tolerances, at most by float32 \S+e-06, scalars \S+e-06\n", done.out), (
        done.out
    )
    (row,) = map(json.loads, tools("run", "--verify=close", "--format=jsonl", path).out.splitlines())
    assert row["verification"]["largest"] == pytest.approx({"float32": 5e-6, "scalars": 5e-6}, rel=0.1)


def test_an_op_that_fails_ends_the_run_with_its_ordinal_and_name(
    tools: Tools, tmp_path: Path, drifting: Drifting
) -> None:
    path = recorded(tmp_path, lambda: drifting.shift(torch.ones(3)).exp())
    drifting.fails = True
    for name, flags in (("run", []), ("benchmark", ["--benchmark-min-time=1x"])):
        done = tools(name, *flags, path)
        assert done.code == 1 and len(done.err.splitlines()) == 1
        assert re.match(
            rf"FAILED_PRECONDITION: {re.escape(str(path))}: ordinal \d+ \(failure_drift::shift\.default, "
            r"scope execute\) failed: ",
            done.err,
        ), done.err
        assert "the machine it needs is gone" in done.err
    kept = tools("run", "--keep-going", "--format=jsonl", path)
    head, *verdicts = map(json.loads, kept.out.splitlines())
    assert head["verdicts"] == {"ok": 1, "refused": 0, "failed": 1, "mismatched": 0, "skipped": 1}
    said = tools("run", "--keep-going", path).out
    assert "replayed: 1 of 3 ops" in said and "\nverified, the part that ran: bitwise" in said, said
    failed = next(each for each in verdicts if each["verdict"] == "failed")
    assert failed["reason"] == "RuntimeError: the machine it needs is gone"


@pytest.mark.slow
def test_an_op_that_raised_when_it_was_captured_has_to_raise_again(
    tools: Tools, tmp_path: Path, drifting: Drifting
) -> None:
    def program() -> torch.Tensor:
        drifting.fails = True
        with pytest.raises(RuntimeError):
            drifting.shift(torch.ones(3))
        return torch.ones(2).exp()

    path = recorded(tmp_path, program)
    assert tools("dump", path, "--jq", 'select(.kind=="op") | .status').out.split().count('"raised"') == 1
    assert tools("run", path).code == 0
    assert json.loads(tools("run", "--keep-going", "--format=jsonl", path).out.splitlines()[0])["verdicts"]["ok"] == 4
    drifting.fails = False
    done = tools("run", path)
    assert done.code == 1 and "it raised an exception when it was captured, and now it does not" in done.err
    head, *verdicts = map(json.loads, tools("run", "--keep-going", "--format=jsonl", path).out.splitlines())
    assert head["verdicts"] == {"ok": 3, "refused": 0, "failed": 0, "mismatched": 1, "skipped": 0}
    assert sum(head["verdicts"].values()) == len(verdicts) == head["ops"] == 4


def test_bitwise_where_there_is_nothing_to_compare_is_refused_and_auto_says_so(tools: Tools, tmp_path: Path) -> None:
    path = recorded(tmp_path, lambda: torch.ones(3).exp(), digests="none")
    for name, flags in (("run", []), ("benchmark", ["--benchmark-min-time=1x"])):
        done = tools(name, "--verify=bitwise", *flags, path)
        assert done.code == 1 and "nothing to compare with" in done.err
    done = tools("run", path)
    assert done.code == 0 and "not verified: the capture holds nothing to compare with (digests=none)" in done.out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def exp(self, scale):\n    return self\n", r"exp.*(scale|bind|argument)"),
        ("def other(x):\n    return x\n", r"exp"),
        ("def exp(self):\n    return self.exp().double()\n", r"dtype|float64"),
        ("def exp(self):\n    return self.exp()[:1]\n", r"sizes|\[1\]"),
        ("def exp(self):\n    return self.exp_()\n", r"argument|alias|memory|wrote|writes"),
        ("def exp(self):\n    return self.exp() * 1.5\n", r"tolerance|off|differs|error"),
    ],
    ids=["signature", "no such function", "dtype", "sizes", "writes its argument", "wrong values"],
)
def test_a_replacement_that_does_not_fit_fails_before_anything_is_timed(
    tools: Tools, tmp_path: Path, source: str, said: str
) -> None:
    path = recorded(tmp_path, lambda: torch.ones(3).exp().mul(2))
    replacement = tmp_path / "replacement.py"
    replacement.write_text(source)
    flag = f"--replay-kernel-substitution=aten::exp={replacement}"
    for name, flags in (("run", []), ("benchmark", ["--benchmark-min-time=1x"])):
        done = tools(name, flag, *flags, path)
        assert done.code in (1, 2), done
        assert re.search(said, done.err + done.out), done.err + done.out
        assert "BM_replay" not in done.out and "time: " not in done.out
