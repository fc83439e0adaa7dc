"""Which kernels and calls, run another way, move the end result: a minimal set, with proof both ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import jsonschema
import pytest
import torch
from in_process import Tools

import replayfmt
import replayfmt.compare.bisected as bisected
from replayfmt.compare import bisect
from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.replay.run.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/comparing-captures.schema.json").read_text())
Capture = Callable[[Callable[[torch.Tensor], object]], Path]
TWO = ["num_threads=2"]


@torch.library.custom_op("steered::off", mutates_args=())
def off(x: torch.Tensor, far: float) -> torch.Tensor:
    """Is off by `far` on two threads."""
    return x + far if torch.get_num_threads() == 2 else x.clone()


@torch.library.custom_op("steered::restless", mutates_args=())
def restless(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return x + calls


calls = 0
held: float


@torch.library.custom_op("steered::hold", mutates_args=())
def hold(x: torch.Tensor) -> torch.Tensor:
    global held
    held = float(x.sum())
    return x + 1


@torch.library.custom_op("steered::held", mutates_args=())
def add_held(x: torch.Tensor) -> torch.Tensor:
    return x + held


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    def make(program: Callable[[torch.Tensor], object]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.opreplay"
        with replayfmt.capture(path):
            program(torch.arange(1.0, 7.0))
        return path

    return make


def chain(x: torch.Tensor, *fars: float) -> None:
    for far in fars:
        x = torch.ops.steered.off(x.sin().cos().mul_(2).abs(), far).add(1)
    x.sum().item()


def ordinals_of(path: Path, name: str) -> list[int]:
    with replayfmt.open(path) as opened:
        return [op.ordinal for op in opened.ops if op.kernel.name == name]


@pytest.mark.slow
def test_the_one_call_that_moves_the_result_is_found_and_proved(capture: Capture) -> None:
    path = capture(lambda x: chain(x, 0, 0, 0.5, 0, 0))
    found = bisect(path, settings=TWO)
    assert found.outcome == "found" and len(found.sets) == 1
    wanted = ordinals_of(path, "steered::off")[2]
    assert found.sets[0].kernels == {"steered::off.default": (wanted,)}
    assert "against" in found.sets[0].off_by and found.replays < 40
    for row in found.rows:
        jsonschema.validate(json.loads(json.dumps(row)), SCHEMA)


@pytest.mark.slow
def test_a_replay_goes_on_from_where_it_parts_from_an_earlier_one(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(x: torch.Tensor) -> None:
        total = torch.zeros(6)
        for far in (0.5, 0, 0, 0.25, 0, 0, 0, 0, 0, 0.5, 0, 0):
            y = torch.ops.steered.off(torch.rand(6).add_(x), far)
            total.view(2, 3)[1].add_(y[3:])
            x.mul_(1.001).t_()
        total.sum().item()

    path = capture(program)
    found = bisect(path, settings=TWO)
    assert found.run < 0.9 and "was run: the rest is as in earlier ones" in found.text
    monkeypatch.setattr(Checkpoints, "keep", lambda *_: None)
    whole = bisect(path, settings=TWO)
    assert (whole.sets, whole.run, len(whole.sets)) == (found.sets, 1.0, 3)


@pytest.mark.slow
def test_an_operator_with_a_state_of_its_own_does_not_change_the_answer(capture: Capture) -> None:
    def program(x: torch.Tensor) -> None:
        y = torch.ops.steered.hold(torch.ops.steered.off(x, 0.5).clone())
        for _ in range(10):
            y = torch.ops.steered.off(y.sin(), 0)
        torch.ops.steered.held(y.sin()).sum().item()

    path = capture(program)
    said: list[str] = []
    found = bisect(path, settings=TWO, on_progress=said.append)
    assert [each.ordinals for each in found.sets] == [(ordinals_of(path, "steered::off")[0],)]
    assert any("a state of its own" in line for line in said)


def test_two_causes_are_two_sets_and_without_both_the_result_is_not_off(capture: Capture) -> None:
    path = capture(lambda x: chain(x, 0.25, 0, 0, 0.5))
    calls = ordinals_of(path, "steered::off")
    found = bisect(path, settings=TWO)
    assert found.outcome == "found"
    assert sorted(each.ordinals for each in found.sets) == [(calls[0],), (calls[3],)]


def test_ops_that_only_together_move_the_result_are_one_set(capture: Capture) -> None:
    def program(x: torch.Tensor) -> None:
        one, other = torch.ops.steered.off(x.mul(0), 1.0), torch.ops.steered.off(x.mul(0), 2.0)
        (one.sin().round() * other).sum().item()

    path = capture(program)
    found = bisect(path, settings=TWO)
    assert [each.ordinals for each in found.sets] == [tuple(ordinals_of(path, "steered::off"))]


def test_a_result_within_the_tolerance_is_not_off(capture: Capture) -> None:
    path = capture(lambda x: chain(x, 1e-3))
    assert bisect(path, settings=TWO, tolerance="0,1").outcome == "not off"
    assert bisect(path, settings=TWO).outcome == "found"


@pytest.mark.slow
def test_a_digest_and_a_function_can_be_the_judge(capture: Capture, tmp_path: Path) -> None:
    path, all_digests = capture(lambda x: chain(x, 0, 0.5)), tmp_path / "ops.opreplay"
    calls = ordinals_of(path, "steered::off")
    assert bisect(path, judge=f"digest:{calls[1] + 1}", settings=TWO).sets[0].ordinals == (calls[1],)
    assert bisect(path, judge=f"digest:{calls[0]}", settings=TWO).outcome == "not off"
    with replayfmt.capture(all_digests, digests="ops"):
        chain(torch.ones(6), 0.5)
    assert bisect(all_digests, judge="digest", settings=TWO).outcome == "found"
    script = tmp_path / "judge.py"
    script.write_text(
        "def far(one, other):\n    ordinal = max(k for k in one if isinstance(one[k], list))\n"
        "    return abs(one[ordinal][0] - other[ordinal][0]) > 0.1\n"
    )
    assert bisect(path, judge=f"{script}:far", settings=TWO).sets[0].ordinals == (calls[1],)


@pytest.mark.slow
def test_an_interrupted_bisection_goes_on(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Tools
) -> None:
    path, state = capture(lambda x: chain(x, 0, 0.5, 0, 0, 0, 0)), tmp_path / "state.json"
    run, count = bisected._Trials._run, 0

    def interrupted(self: bisected._Trials, chosen: Collection[int]) -> bisected.Values:
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return run(self, chosen)

    with monkeypatch.context() as changed:
        changed.setattr(bisected._Trials, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bisect(path, settings=TWO, state=state)
    whole = bisect(path, settings=TWO)
    rest = bisect(path, settings=TWO, state=state)
    assert rest.sets == whole.sets and rest.replays == whole.replays - 4  # two are for reference each time
    for text in (state.read_text(), "[" * 100_000, "[]", '{"about": "9", "off": 1}'):
        state.write_text(text)
        other = tools("compare", "--bisect", "--set=num_threads=1", f"--state={state}", path)
        assert other.code == 2 and "is not of this bisection" in other.err


def test_a_judge_that_raises_or_is_nondeterministic_is_one_clear_statement(capture: Capture, tmp_path: Path) -> None:
    path = capture(lambda x: chain(x, 0.5))
    script = tmp_path / "judge.py"
    script.write_text(
        "seen = []\ndef raises(one, other):\n    return 1 / 0\n"
        "def moody(one, other):\n    seen.append(0)\n    return len(seen) > 2 and len(seen) % 2\n"
        "def strict(one, other):\n    return True\n"
    )
    for name, text in (
        ("raises", "raised ZeroDivisionError"),
        ("moody", "does not say the same of the same values"),
        ("strict", "of two replays that ran alike the judge"),
    ):
        with pytest.raises(ReplayFailed, match=text):
            bisect(path, judge=f"{script}:{name}", settings=TWO)


def test_a_result_that_differs_from_itself_cannot_be_bisected(capture: Capture) -> None:
    path = capture(lambda x: torch.ops.steered.restless(x).sum().item())
    with pytest.raises(ReplayFailed, match="--repeat names an op"):
        bisect(path, settings=TWO)


@pytest.mark.slow
def test_the_tool_says_how_many_replays_it_needs_and_exits_with_1_if_something_moves_the_result(
    tools: Tools, capture: Capture
) -> None:
    ran = tools("compare", "--bisect", "--set=num_threads=2", capture(lambda x: chain(x, 0.5)))
    assert ran.code == 1 and "steered::off.default: ordinal" in ran.out
    assert "about" in ran.err.splitlines()[0] and "replays" in ran.err.splitlines()[0]
    assert tools("compare", "--bisect", "--set=num_threads=2", capture(lambda x: chain(x, 0))).code == 0


def test_wrong_usage_of_bisect_is_one_line(tools: Tools, capture: Capture, tmp_path: Path) -> None:
    path = capture(lambda x: x.sum())
    for arguments, text in (
        (("--bisect", path), "nothing says how the other way differs"),
        (("--bisect", "--set=num_threads=2", path), "has no host read"),
        (("--bisect", "--judge=digest:99", "--set=num_threads=2", path), "has no digest there"),
        (("--bisect", "--judge=loss", "--set=num_threads=2", path), "expected digest, host_read"),
        (("--bisect", f"--judge={tmp_path}/no.py:f", "--set=num_threads=2", path), "does not load"),
        (("--bisect", "--tolerance=auto", "--set=num_threads=2", path), "--tolerance=auto"),
        (("--judge=digest", path, path), "--bisect, which is missing"),
        (("--bisect", "--isolate", "--set=num_threads=2", path), "--isolate or --bisect"),
    ):
        ran = tools("compare", *arguments)
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1), ran.err
        assert text in ran.err
    with pytest.raises(UsageError):
        bisect(path)
