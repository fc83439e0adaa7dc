"""Replays of one capture compared with each other: which op differs from itself, how often, and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.compare import repeat, repeated
from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.format.reader import open_capture

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/comparing-captures.schema.json").read_text())
MODULE = '''
import os
import torch

torch.library.define("moody::third", "(Tensor x) -> Tensor")
calls = 0


@torch.library.impl("moody::third", "CompositeExplicitAutograd")
def third(x):
    """Doubles, but the third time in a process its element 2 is off."""
    global calls
    calls += 1
    y = x * 2
    if calls % 3 == 0:
        y[2] += 1
    return y


torch.library.define("moody::process", "(Tensor x) -> Tensor")


@torch.library.impl("moody::process", "CompositeExplicitAutograd")
def process(x):
    """The same within one process."""
    return x * os.getpid()
'''


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moody")
    (folder / "moody_ops.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        import moody_ops  # noqa: F401
    finally:
        sys.path.remove(str(folder))
    return folder


@pytest.fixture
def capture(tmp_path: Path) -> Callable[[Callable[[torch.Tensor], object]], Path]:
    def make(program: Callable[[torch.Tensor], object]) -> Path:
        path = tmp_path / "step.opreplay"
        with replayfmt.capture(path), replayfmt.scope("execute"):
            program(torch.arange(6.0))
        return path

    return make


Capture = Callable[[Callable[[torch.Tensor], object]], Path]


@pytest.mark.slow
def test_work_that_is_the_same_each_time_is_deterministic(tools: Tools, capture: Capture) -> None:
    ran = tools("run", "--repeat=3", capture(lambda x: torch.rand(3).add(x.sum()).exp().sum().item()))
    assert ran.code == 0 and ran.out.splitlines()[-1].startswith("deterministic: ")


@pytest.mark.slow
def test_the_first_op_that_differs_from_itself_is_named_with_how_often_and_which_elements(
    moody: Path, capture: Capture
) -> None:
    path = capture(lambda x: [x.mul(2).sum().item(), torch.ops.moody.third(x.add(1)).exp().sum()])
    found = repeat(path, 7)
    assert found.outcome == "nondeterministic" and found.first is not None
    with open_capture(path) as reader:  # a replay's recording numbers its records anew
        for each in (found.first, *found.others):
            kernel = reader.kernels[reader.record(each.ordinal).signature.kernel]
            assert kernel is not None and kernel.qualified_name == each.kernel
    assert found.first.kernel == "moody::third.default" and found.first.scope == "execute"
    assert len(found.first.replays) in (2, 3) and found.first.variants == 2
    assert found.first.distance is not None
    assert (found.first.distance.different, found.first.distance.worst) == (1, 2)
    assert [each.kernel for each in found.others] == ["aten::exp.default", "aten::sum.default"]
    for row in found.rows:
        jsonschema.validate(json.loads(json.dumps(row)), SCHEMA)


def test_copies_of_memory_that_nobody_wrote_are_not_compared(capture: Capture) -> None:
    def program(x: torch.Tensor) -> object:
        part = torch.empty(2, 6)
        part[0].copy_(x)
        wide = torch.ones(3, 2, 6).copy_(part)
        return part.clone(), wide, wide[:, 0] + 1

    assert repeat(capture(program), 2).compared == 5


@pytest.mark.slow
def test_what_differs_only_between_processes_is_found_with_a_fresh_process_each(
    moody: Path, tools: Tools, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture(lambda x: torch.ops.moody.process(x).sum().item())
    assert repeat(path, 3).ok
    monkeypatch.syspath_prepend(moody)  # where fresh processes look, too
    ran = tools("run", "--repeat=2", "--processes", "--set=mkldnn=off", "--allow-import=moody_ops", path)
    assert ran.code == 1 and "(moody::process.default, scope execute) is the first" in ran.out, ran.err


@torch.library.custom_op("moody::device", mutates_args=())
def on_device(x: torch.Tensor) -> torch.Tensor:
    """Is off while a device that pretends to be another computes."""
    return x * (1.5 if pretended == "odd:1" else 1.0)


pretended = ""


@pytest.mark.slow
def test_the_device_that_disagrees_with_the_others_is_named(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = capture(lambda x: torch.ops.moody.device(x.add(1)).sum().item())

    def found(*names: str) -> repeated.Repeated:
        def record(name: str, out: str) -> None:
            monkeypatch.setattr(sys.modules[__name__], "pretended", name)
            replayfmt.record_replay(path, out, digests="ops")

        return repeated.repeat_by(str(path), 2, {name: partial(record, name) for name in names}, processes=False)

    three = found("odd:0", "odd:1", "odd:2")
    assert (three.outcome, three.replays, three.compared > 0) == ("devices differ", 6, True)
    assert three.first is not None and three.first.kernel == "moody::device.default"
    assert (three.first.devices, three.first.replays) == (("odd:1",), (2, 5))
    assert "odd:1 computes the same each time, and not what the others do" in three.text
    for row in three.rows:
        jsonschema.validate(json.loads(json.dumps(row)), SCHEMA)
    two = found("odd:1", "odd:0")
    assert two.first is not None and not two.first.majority
    assert "with three or more of them it would be seen which one is off" in two.text
    assert found("odd:0", "odd:2").outcome == "deterministic"


@pytest.mark.slow
def test_a_replay_that_fails_in_its_process_is_one_clear_error(capture: Capture) -> None:
    with pytest.raises(ReplayFailed, match=r"in a fresh process failed.*streams"):
        repeat(capture(lambda x: x.sum()), 2, processes=True, streams="odd")


def test_wrong_usage_of_repeat_is_one_line(tools: Tools, capture: Capture) -> None:
    path = capture(lambda x: x.sum())
    twice = ("--repeat=2", "--device=cpu", "--device=cpu", path)
    for arguments, text in (
        (("--processes", path), "--repeat=N"),
        (("--repeat=1", path), "1"),
        (twice, "--device: cpu, cpu: the same twice"),
    ):
        ran = tools("run", *arguments)
        assert ran.code == 2 and len(ran.err.splitlines()) == 1 and text in ran.err
    with pytest.raises(UsageError, match="at least 2"):
        repeat(path, 1)
    with pytest.raises(UsageError, match="plain options"):
        repeat(path, 2, processes=True, substitutions=[print])
