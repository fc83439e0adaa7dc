"""Ops run in two ways on the same inputs: which kernels differ by themselves, and by how much."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.compare import isolate
from replayfmt.errors import UsageError
from replayfmt.replay.substitution.distance import Tolerance

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/comparing-captures.schema.json").read_text())
Capture = Callable[[Callable[[torch.Tensor], object]], Path]


@torch.library.custom_op("sided::threads", mutates_args=())
def threads(x: torch.Tensor, far: float) -> torch.Tensor:
    """Is off by `far` on two threads."""
    y = x.clone()
    if torch.get_num_threads() == 2:
        y[1] += far
    return y


@torch.library.custom_op("sided::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    if torch.get_num_threads() == 2:
        raise RuntimeError("not on two threads")
    return x.clone()


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    def make(program: Callable[[torch.Tensor], object]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.opreplay"
        with replayfmt.capture(path):
            program(torch.arange(1.0, 7.0))
        return path

    return make


def sided(x: torch.Tensor) -> None:
    y = torch.ops.sided.threads(x, 1e-3).exp()
    torch.ops.sided.threads(y.add_(1), 0.5).log().sum().item()


@pytest.mark.slow
def test_each_ops_own_error_is_seen_without_what_it_inherits_worst_first(capture: Capture) -> None:
    found = isolate(capture(sided), settings=["num_threads=2"])
    assert found.outcome == "different" and found.divergence is None
    assert [each.kernel for each in found.kernels if each.different] == ["sided::threads.default"]
    (worst,) = (each for each in found.kernels if each.different)
    assert (worst.calls, worst.different, worst.beyond) == (2, 2, 2) and worst.worst is not None
    assert worst.worst.distance.largest_absolute == pytest.approx(0.5) and worst.worst.distance.different == 1
    assert found.kernels[0] is worst and "element [1]" in worst.worst.worst
    for row in found.rows:
        jsonschema.validate(json.loads(json.dumps(row)), SCHEMA)


@pytest.mark.slow
def test_a_tolerance_clears_what_is_within_it(capture: Capture) -> None:
    path = capture(lambda x: torch.ops.sided.threads(x, 1e-3))
    assert isolate(path, settings=["threads=2"], tolerance="0,0.01").outcome == "equal"
    assert isolate(path, settings=["threads=2"], tolerance="0,1e-6").outcome == "different"
    assert isolate(path, settings=["threads=2"], tolerance="auto").outcome == "different"
    path = capture(lambda x: torch.ops.sided.threads(x, 2e-7))
    assert isolate(path, settings=["threads=2"], tolerance="ulp:1").outcome == "equal"
    assert isolate(path, settings=["threads=2"], tolerance="auto").outcome == "equal"


def test_ops_that_write_and_ops_that_draw_run_both_ways_on_the_same_state(capture: Capture) -> None:
    def program(x: torch.Tensor) -> None:
        y = x.add_(1).view(2, 3)
        y[0].mul_(torch.rand(3)).sub_(x[:3])
        torch.nn.functional.dropout(y, 0.5).cumsum(0).sum().item()

    found = isolate(capture(program), settings=["num_threads=2"])
    assert found.outcome == "equal" and found.compared >= 7 and not found.skipped


def test_a_substituted_kernel_is_the_other_way(capture: Capture, tmp_path: Path) -> None:
    file = tmp_path / "off.py"
    file.write_text("import torch\ndef exp(self):\n    return torch.exp(self) + 0.125\n")
    found = isolate(
        capture(lambda x: x.exp().log().exp()),
        substitutions=[f"aten::exp={file}:exp"],
        substitution_tolerance=Tolerance(1.0, 1.0),
    )
    assert [(each.kernel, each.beyond) for each in found.kernels] == [("aten::exp.default", 2)]


def test_deriving_the_tolerance_of_an_op_that_draws_draws_nothing_from_the_replay(
    capture: Capture, tmp_path: Path
) -> None:
    def program(x: torch.Tensor) -> None:
        torch.empty_like(x).normal_().mul(x).add(torch.rand(6)).sum().item()

    file = tmp_path / "off.py"
    file.write_text("def normal(self, mean=0.0, std=1.0, generator=None):\n    return self.normal_().add_(1e-7)\n")
    found = isolate(
        capture(program),
        substitutions=[f"aten::normal_={file}:normal"],
        substitution_tolerance=Tolerance(1.0, 1.0),
        tolerance="auto",
    )
    assert found.divergence is None and found.outcome == "equal", found.text
    assert sum(each.different for each in found.kernels) == 1


def test_an_op_that_cannot_run_the_other_way_is_named_and_the_replay_goes_on(capture: Capture) -> None:
    found = isolate(capture(lambda x: torch.ops.sided.refuses(x).add(1)), settings=["num_threads=2"])
    assert found.compared == 3 and found.outcome == "different"
    assert "not on two threads" in found.text


def test_bytes_that_nothing_wrote_are_not_compared(capture: Capture) -> None:
    def program(x: torch.Tensor) -> None:
        x.clone().resize_(64).fill_(1).sum().item()

    assert isolate(capture(program), settings=["num_threads=2"]).outcome == "equal"


@torch.library.custom_op("sided::restless", mutates_args=())
def restless(x: torch.Tensor) -> torch.Tensor:
    restless.calls = getattr(restless, "calls", 0) + 1  # type: ignore[attr-defined]
    return x + restless.calls  # type: ignore[attr-defined]


def test_an_op_that_differs_from_itself_is_marked(capture: Capture) -> None:
    found = isolate(capture(lambda x: torch.ops.sided.restless(x)), settings=["num_threads=2"])
    (kernel,) = (each for each in found.kernels if each.different)
    assert kernel.worst is not None and kernel.worst.nondeterministic
    assert "differs from itself" in found.text


def test_the_device_of_the_other_way_gets_the_same_inputs(tools: Tools, capture: Capture) -> None:
    path = capture(lambda x: (x.view(2, 3).t() @ x.view(2, 3)).sum() + torch.rand(1))
    ran = tools("compare", "--isolate", "--against=cpu", path)
    assert ran.code == 0 and "draws random numbers" in ran.out, ran.out + ran.err


def test_wrong_usage_of_isolate_is_one_line(tools: Tools, capture: Capture) -> None:
    path = capture(lambda x: x.sum())
    for arguments, text in (
        (("--isolate", path), "nothing says how the other way differs"),
        (("--isolate", "--set=num_threads=1", path, path), "a second one"),
        (("--isolate", "--set=hope=on", path), "expected NAME=VALUE"),
        (("--isolate", "--set=mkldnn=perhaps", path), "no value of mkldnn_enabled"),
        (("--isolate", "--against=moon:1", path), "--against=moon:1"),
        (("--set=num_threads=1", path, path), "add --isolate"),
        (("--against=cpu", path, path), "add --isolate"),
    ):
        ran = tools("compare", *arguments)
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1) and text in ran.err
    with pytest.raises(UsageError, match="nothing says"):
        isolate(path)
