"""A replay recorded as a capture: the same ops in the same order, with what this environment computes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.errors import OutputExists, ReplayMismatch
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import RECORDED_FROM

ROOT = Path(__file__).parents[2]
OTHER = "OPREPLAY_OTHER_PYTHON"  # the interpreter of an environment with another PyTorch


def work() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    y = x.tanh().mul_(2)
    (y @ y.t()).sum().item()


@pytest.fixture
def capture(tmp_path: Path) -> Callable[..., Path]:
    def make(digests: str = "ops", program: Callable[[], object] = work) -> Path:
        path = tmp_path / f"{digests}.opreplay"
        with replayfmt.capture(path, digests=digests), replayfmt.scope("execute"):
            program()
        return path

    return make


def ops(path: Path) -> list[tuple[int, str]]:
    with replayfmt.open(path) as opened:
        return [(op.ordinal, op.kernel.qualified_name) for op in opened.ops]


def tanh_that_is_off(tmp_path: Path) -> str:
    file = tmp_path / "off.py"
    file.write_text("import torch\ndef tanh(self):\n    return torch.tanh(self) * 1.001\n")
    return f"aten::tanh={file}:tanh"


@pytest.mark.slow
@pytest.mark.parametrize("digests", ["ops", "live"])
def test_a_recorded_replay_has_the_same_ordinals_and_results_and_replays(
    capture: Callable[..., Path], tmp_path: Path, digests: str
) -> None:
    a, b = capture(digests), tmp_path / "b.opreplay"
    made = replayfmt.record_replay(a, b)
    assert made.ops == len(ops(a)) and ops(b) == ops(a)
    found = replayfmt.compare(a, b)
    assert found.outcome == "equal" and found.divergence.compared and found.alignment.share == 1
    assert replayfmt.run(b, verify="bitwise").outcome == "ok"
    with replayfmt.open(a) as one, replayfmt.open(b) as other:
        assert other.session.policies[RECORDED_FROM] == one.session.session_id


@pytest.mark.slow
def test_every_result_can_be_digested_although_the_capture_has_digests_of_few(
    capture: Callable[..., Path], tmp_path: Path
) -> None:
    a, b, c = capture("live"), tmp_path / "b.opreplay", tmp_path / "c.opreplay"
    replayfmt.record_replay(a, b, digests="ops")
    replayfmt.record_replay(a, c, digests="ops", substitutions=[tanh_that_is_off(tmp_path)], **loose())
    found = replayfmt.compare(b, c)
    assert found.first is not None and found.first.kernels[0] == ("aten::tanh.default",)
    assert found.first.consequences >= 4, str(found)
    assert replayfmt.run(b, verify="bitwise").outcome == "ok"


def loose() -> dict[str, object]:
    from replayfmt.replay.substitution.distance import Tolerance

    return {"substitution_tolerance": Tolerance(0.1, 0.1)}


def test_values_that_the_program_read_are_those_of_the_replay(capture: Callable[..., Path], tmp_path: Path) -> None:
    a, b = capture("none"), tmp_path / "b.opreplay"
    replayfmt.record_replay(a, b, substitutions=[tanh_that_is_off(tmp_path)], **loose())
    read = [
        [op.results()[0] for op in opened.ops if "local_scalar" in op.kernel.name]
        for opened in (replayfmt.open(a), replayfmt.open(b))
    ]
    assert read[0] != read[1] and read[1][0] == pytest.approx(read[0][0], rel=0.01)
    assert "local_scalar" in str(replayfmt.compare(a, b))


@pytest.mark.slow
def test_parts_of_a_recorded_replay_are_aligned_by_what_they_compute(
    tools: Tools, capture: Callable[..., Path], tmp_path: Path
) -> None:
    def steps() -> None:
        x = torch.ones(4)
        for _ in range(4):
            x = x.exp().log().tanh()

    replayfmt.record_replay(capture(program=steps), tmp_path / "b.opreplay")
    parts = [tmp_path / "one.opreplay", tmp_path / "other.opreplay"]
    places = [ordinal for ordinal, name in ops(tmp_path / "b.opreplay") if name == "aten::exp.default"]
    for part, place in zip(parts, (places[0], places[0] + 1), strict=True):
        ran = tools("trim", f"--ops={place}:{place + 8}", tmp_path / "b.opreplay", part)
        assert ran.code == 0, ran.err
    found = replayfmt.compare(*parts)
    assert found.first is None or found.first.kind != "op", found.text


def test_other_threads_are_a_setting_of_the_recorded_capture(
    tools: Tools, capture: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = capture(), tmp_path / "b.opreplay"
    ran = tools("run", "--threads=2", f"--record={b}", a)
    assert ran.code == 0 and f"recorded: {b}" in ran.out
    compared = tools("compare", a, b)
    assert compared.code == 0 and "num_threads: 1 against 2" in compared.out


def test_a_setting_of_the_replay_is_one_of_the_recorded_capture_and_why_it_is_compared_within_tolerances(
    tools: Tools, capture: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = capture(), tmp_path / "b.opreplay"
    ran = tools("run", "--set=mkldnn=off", "--set=num_threads=2", f"--record={b}", a)
    assert (
        ran.code == 0 and "verified: close" in ran.out and "mkldnn_enabled False here, True in the capture" in ran.out
    )
    compared = tools("compare", "--tolerance=1e-5,1e-6", a, b)
    assert compared.code == 0 and "mkldnn_enabled: True against False" in compared.out
    assert "num_threads: 1 against 2" in compared.out
    assert tools("run", "--set=hope=on", a).code == 2


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("deterministic=on", "deterministic_debug_mode", 2),
        ("matmul_precision=medium", "float32_matmul_precision", "medium"),
        ("tf32=on", "fp32_precision.cuda.matmul", "tf32"),
    ],
)
def test_every_kind_of_setting_reaches_the_replay(
    tools: Tools, capture: Callable[..., Path], tmp_path: Path, given: str, name: str, value: object
) -> None:
    a, b = capture(), tmp_path / "b.opreplay"
    assert tools("run", f"--set={given}", f"--record={b}", a).code == 0
    with replayfmt.open(a) as one, replayfmt.open(b) as other:
        assert one.session.settings[name] != other.session.settings[name] == value
    isolated = tools("compare", "--isolate", f"--set={given}", a)
    assert isolated.code == 0 and name in isolated.out


def test_a_result_of_another_form_is_an_error_and_leaves_no_file(capture: Callable[..., Path], tmp_path: Path) -> None:
    a, b = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    with replayfmt.capture(a, payload="none"):  # its content is made up
        torch.tensor([1.0, 0.0, 2.0]).nonzero().sum()
    with pytest.raises(ReplayMismatch, match=r"nonzero.*of another form"):
        replayfmt.record_replay(a, b)
    assert not list(tmp_path.glob("b.*"))


def test_wrong_usage_of_record_is_one_line(tools: Tools, capture: Callable[..., Path], tmp_path: Path) -> None:
    a = capture()
    for arguments, code, text in (
        (("--digests=ops", a), 2, "--record=FILE, which is missing"),
        ((f"--record={a}", a), 2, "is the capture"),
        ((f"--record={tmp_path / 'off.py'}", a), 1, "exists already"),
    ):
        tanh_that_is_off(tmp_path)
        ran = tools("run", *arguments)
        assert (ran.code, len(ran.err.splitlines())) == (code, 1) and text in ran.err
    with pytest.raises(OutputExists):
        replayfmt.record_replay(a, tmp_path / "off.py")


def other_reads() -> None:
    x = torch.arange(5.0)
    x.mul(2).tolist()
    x.add(1).numpy()
    complex(torch.tensor(1 + 2j).mul(2).item())
    bool((x > 2).any())


def partly_written() -> None:
    x = torch.empty(8)
    x[:4].fill_(2)
    x[:4].sum().item()
    torch.ones(4).resize_(9).fill_(1).sum()


def other_layouts() -> None:
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(places, torch.ones(3), (2, 3), check_invariants=True)
    (sparse.coalesce() @ torch.ones(3, 2)).sum().item()


def lists_draws_and_failures() -> None:
    parts = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).split(2)
    torch._foreach_add_(list(parts), 1.0)
    with pytest.raises(RuntimeError):
        parts[0] @ parts[1]
    torch.manual_seed(7)
    torch.stack(parts).add(torch.rand(4)).nonzero().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("program", [other_reads, partly_written, other_layouts, lists_draws_and_failures])
def test_all_kinds_of_records_are_recorded_and_replay(
    capture: Callable[..., Path], tmp_path: Path, program: Callable[[], None]
) -> None:
    for digests in ("ops", "live"):
        a, b = capture(digests, program), tmp_path / f"b-{digests}.opreplay"
        replayfmt.record_replay(a, b, digests="ops")
        assert [name for _ordinal, name in ops(b)] == [name for _ordinal, name in ops(a)]
        assert replayfmt.run(b, verify="bitwise").outcome == "ok"
        assert replayfmt.compare(a, b).outcome != "different"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_training", "moe", "decoder"])
def test_models_are_recorded_with_the_same_digests(intact: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    a, b = intact(model), tmp_path / "b.opreplay"
    replayfmt.record_replay(a, b)
    assert ops(a) == ops(b)
    found = replayfmt.compare(a, b)
    with replayfmt.open(a) as one, replayfmt.open(b) as other:
        counts = [each.summary.records[RecordKind.digest] for each in (one, other)]
    assert found.outcome == "equal" and counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no environment with another PyTorch")
def test_another_pytorch_records_what_it_computes_of_the_same_capture(
    intact: Callable[[str], Path], tmp_path: Path
) -> None:
    a, b = intact("gpt2_training"), tmp_path / "b.opreplay"
    ran = subprocess.run(
        [os.environ[OTHER], "-m", "tools.run", "--allow-import=compare.models", f"--record={b}", str(a)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = replayfmt.compare(a, b, tolerance="auto")
    assert any(each.name == "torch_version" for each in found.structure)
    assert found.alignment.share == 1 and found.outcome == "equal", found.text
