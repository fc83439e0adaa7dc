"""What cannot be reproduced is an unsupported record with its reason, and the program goes on."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt
from replayfmt.errors import CaptureFailed
from replayfmt.format.codes import RecordKind

from .conftest import Capture


def test_memory_read_before_anybody_wrote_it_enters_as_it_is(capture: Capture) -> None:
    captured = capture(lambda: torch.empty(4) + 1)
    assert captured.unsupported() == {}
    entered = captured.records(RecordKind.storage_import)
    assert [record.argument("reason") for record in entered] == ["uninitialized_read"]
    captured.replays()


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.empty(4).zero_(),
        lambda: torch.empty(4).view(2, 2).t(),
        lambda: torch.empty_like(torch.empty(4)),
        lambda: torch.zeros_like(torch.empty(4)),
        lambda: torch.add(torch.ones(2), 1, out=torch.empty(2)),
        lambda: torch.empty(0) + 1,
        lambda: torch.addmm(torch.empty(2, 2), torch.ones(2, 2), torch.ones(2, 2), beta=0),
        lambda: torch.empty(4).scatter_(0, torch.tensor([0, 1, 2, 3]), torch.ones(4)).sum(),
        lambda: torch.nn.Linear(3, 4)(torch.ones(2, 3)),
        lambda: torch.nn.BatchNorm1d(3)(torch.ones(2, 3)),
        lambda: (torch.empty(3).to("meta"), torch.empty(3, device="meta").copy_(torch.empty(3))),
    ],
    ids=range(11),
)
def test_uninitialized_memory_that_is_only_written_or_looked_at_is_no_unseen_write(capture: Capture, program) -> None:
    assert capture(program).unsupported() == {}


def test_weights_that_are_packed_before_there_are_any_are_no_unseen_writes(capture: Capture) -> None:
    """Static quantization makes its modules with empty weights, packs these, and then packs the true ones."""
    captured = capture(lambda: (torch.ao.nn.quantized.Linear(3, 4), torch.ao.nn.quantized.Conv2d(3, 4, 3)))
    assert "unseen_write" not in captured.unsupported()
    assert {"quantized::linear_prepack.default", "quantized::conv2d_prepack.default"} <= {
        kernel.qualified_name for kernel in captured.reader.kernels[1:]
    } or "opaque_argument" in captured.unsupported(), "they were met"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch is without MKL")
def test_a_weight_in_mkls_own_layout_is_named(capture: Capture) -> None:
    captured = capture(lambda: [torch.ops.mkl._mkl_reorder_linear_weight(torch.randn(4, 4), 2), torch.ones(2) + 1])
    assert set(captured.unsupported()) == {"mkldnn_layout"}
    assert captured.ops()[-1] == "aten::add.Tensor"


def test_integers_beyond_64_bits_are_named(capture: Capture) -> None:
    captured = capture(lambda: torch.ones(3, dtype=torch.uint64).fill_(2**63 + 1).clone())
    assert captured.unsupported() == {"opaque_argument": 1}
    reasons = [record.argument("reason") for record in captured.records(RecordKind.storage_import)]
    assert reasons == ["outside_write"], "what the op wrote enters again"


@pytest.mark.slow
def test_many_different_unsupported_records_do_not_fill_the_tables(capture: Capture, tmp_path) -> None:
    path = tmp_path / "many.opreplay"
    with replayfmt.capture(path) as recorder:
        torch.ones(1)
        for index in range(5000):
            recorder.unsupported("host_call", "op", f"detail {index}")
    reader = replayfmt.open(path).reader
    assert reader.summary.unsupported == {"host_call": 5000}
    assert len(reader.signatures) < 4200


@pytest.mark.slow
def test_compiled_regions_run_compiled_and_are_named(capture: Capture) -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1) * 2)
    x = torch.randn(8)
    expected = compiled(x)
    captured = capture(lambda: compiled(x) + 1, compiled="keep")
    assert captured.unsupported() == {"compiled_region": 1}
    assert torch.equal(captured.returned, expected + 1), "the compiled code ran"
    assert captured.ops() == ["aten::add.Tensor"]


def test_compiled_regions_can_be_captured_as_their_operators(capture: Capture) -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1) * 2)
    captured = capture(lambda: compiled(torch.ones(8)) + 1, compiled="eager")
    assert captured.unsupported() == {}
    assert "aten::sin.default" in captured.ops()
    assert captured.reader.session.policies["compiled"] == "eager"
    captured.replays()


@pytest.mark.parametrize("policy", ["keep", "kernels", "eager"])
def test_torch_compile_works_as_before_after_a_capture(capture: Capture, policy: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 2

    before = torch.compile(function, backend=counter, fullgraph=True)
    before(torch.ones(3))
    capture(lambda: (before(torch.ones(3)), torch.ones(2) + 1), compiled=policy)
    frames = counter.frame_count
    before(torch.ones(3))
    assert counter.frame_count == frames, "nothing was compiled anew"
    torch.compile(lambda x: x.sinh() + 1, backend=counter, fullgraph=True)(torch.ones(3))
    assert counter.frame_count == frames + 1, "and it still compiles"


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_a_capture_inside_another_mode_is_refused(tmp_path) -> None:
    refused = pytest.raises(CaptureFailed, match="dispatch mode is active .Other.")
    with Other(), refused, replayfmt.capture(tmp_path / "x.opreplay"):
        pass
    assert not (tmp_path / "x.opreplay").exists()


def test_a_mode_above_the_recorder_sees_what_it_would_see(capture: Capture) -> None:
    seen: list[str] = []

    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.name())
            return func(*args, **(kwargs or {})) * 2

    def program() -> torch.Tensor:
        with Doubles():
            return torch.ones(3)

    captured = capture(program, digests="ops")
    assert seen == ["aten::ones"]
    assert captured.ops() == ["aten::ones.default", "aten::mul.Tensor"]
    captured.replays()
