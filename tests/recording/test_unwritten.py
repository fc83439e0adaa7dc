"""Memory that nobody wrote: what only passes through it is no work, and is never compared."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from unseen import write_unseen

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.replay.plan import Plan

from .conftest import Capture

CAPTURE = str(Path(sys.executable).with_name("opreplay-capture"))


def leave_behind(value: float) -> None:
    """Freed memory of small tensors holds this value: what `empty` gives next."""
    kept = [torch.full((size,), value) for size in range(1, 200) for _ in range(4)]
    del kept


def test_circular_padding_copies_unwritten_corners_that_are_not_compared(capture: Capture) -> None:
    x = torch.randn(1, 2, 4, 4)

    def program() -> Any:
        leave_behind(1e30)
        return torch.nn.functional.pad(x, (1, 1, 2, 1), mode="circular") + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def test_what_was_copied_from_unwritten_memory_is_compared_again_once_it_is_written(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        half = torch.empty(8)
        half[:4] = 1
        copied = half.clone()
        known = torch.zeros(8).copy_(half)
        known.fill_(3)
        return copied, known, known + 1

    captured = capture(program, digests="ops")
    leave_behind(2.0)
    captured.replays()


def test_a_convolutions_gradients_read_what_they_are_gradients_through(capture: Capture) -> None:
    """`torch.nn.grad` gives memory without content for the input, or the weight, that a gradient does not need."""
    x, weight, grad = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 6, 6)

    def program() -> Any:
        leave_behind(1e30)
        return (torch.nn.grad.conv2d_weight(x, weight.shape, grad), torch.nn.grad.conv2d_input(x.shape, weight, grad))

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def test_noise_of_rrelu_is_only_written_and_read_in_training(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        results = []
        for training in (False, True):
            x = torch.randn(5, requires_grad=True)
            y = torch.nn.functional.rrelu(x, training=training)
            y.sum().backward()
            results += [y.detach(), x.grad]
        with torch.no_grad():
            results.append(torch.nn.functional.rrelu_(torch.randn(5)))
            # As compiled code calls it.
            x = torch.randn(5)
            results += torch.ops.aten.rrelu_with_noise_functional(x, torch.empty_like(x), 0.1, 0.3, True)
        return results

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def rwkv_initialization(parameter: torch.Tensor) -> None:
    """As transformers' RWKV does it: a computation with memory that nobody wrote lends its shape alone."""
    zigzag = torch.tensor([(i + 1) % 3 - 1 for i in range(len(parameter))], dtype=parameter.dtype) * 0.5
    with torch.no_grad():
        parameter.copy_(torch.ones_like(parameter * -1.2 + zigzag))


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["full", "integers", "none"])
def test_what_is_computed_for_its_shape_alone_is_no_unseen_write(capture: Capture, payload: str) -> None:
    def program() -> Any:
        leave_behind(1e30)
        parameter = torch.nn.Parameter(torch.empty(7))
        rwkv_initialization(parameter)
        unread = torch.empty(7)
        del unread
        return parameter * 2

    captured = capture(program, payload=payload, digests="ops" if payload == "full" else "none")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    with Plan(captured.path) as plan:
        assert plan.execute(verify="bitwise" if payload == "full" else "none").outcome == "ok"


def a_sum(values: torch.Tensor) -> None:
    values.sum()


def kept_in_place_of_another(values: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(values)
    kept.copy_(values.clone())
    return kept


def kept_in_part(values: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(9)
    kept[1:8] = values
    kept[0] = 1
    return kept


USES: dict[str, Any] = {
    "sum": a_sum,
    "copy": kept_in_place_of_another,
    "copy to a part": kept_in_part,
    "keep": lambda values: values,
    "write in place": lambda values: values.mul_(0),
    "tolist": lambda values: values.tolist() and None,
    "numpy": lambda values: values.numpy().sum() and None,
    "item": lambda values: values[2].item() and None,
    "choose": lambda values: torch.where(values > 0, 1.0, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_what_is_computed_from_memory_that_nobody_wrote_replays_as_it_was(capture: Capture, use: Any) -> None:
    kept = []

    def program() -> Any:
        leave_behind(3.0)
        kept.append(use(torch.empty(7) * 2 + 1))

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    [first, *_] = captured.records(RecordKind.storage_import)
    assert first.argument("reason") == "uninitialized_read"
    leave_behind(2.0)
    captured.replays()


@pytest.mark.slow
@pytest.mark.recorder("python")  # the native one looks at memory in C++
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_where_nobody_can_know_who_wrote_it_the_use_is_an_unseen_write(
    capture: Capture, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the memory of devices."""
    monkeypatch.setattr("replayfmt.recording.storages.identity.sample", lambda storage: b"")
    kept = []

    def program() -> Any:
        leave_behind(3.0)
        kept.append(use(torch.empty(7) * 2 + 1))

    assert set(capture(program).unsupported()) == {"unseen_write"}


def test_an_unexplained_result_that_is_overwritten_is_none_any_more(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        overwritten, refilled = torch.empty(6) * 2, torch.empty(2, 3).exp()
        overwritten.copy_(torch.arange(6.0))
        refilled.t().fill_(4)
        return overwritten + refilled.flatten()

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


@pytest.mark.parametrize("elements", [5, 4000])
@pytest.mark.parametrize("use", [lambda given: given + 1, lambda given: given.sum(), lambda given: given.clone()])
def test_what_something_unseen_wrote_is_an_unseen_write(capture: Capture, elements: int, use: Any) -> None:
    def program() -> Any:
        leave_behind(1e30)
        given = torch.empty(elements)
        write_unseen(given)
        return use(given) * 2

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {"unseen_write": 1}
    [record] = [r for r in captured.records(RecordKind.unsupported)]
    assert "something that the capture does not see has written it" in str(record.argument("detail"))


def test_what_something_unseen_wrote_beside_a_captured_write_is_one(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        given = torch.empty(8)
        given[:4] = 1
        write_unseen(given, 16)
        return given * 2

    assert capture(program).unsupported() == {"unseen_write": 1}


def test_the_tensor_that_a_composite_makes_of_a_list_is_no_unseen_write(capture: Capture) -> None:
    def program() -> list[Any]:
        losses = []
        for lengths in ([3, 2], [3, 2], [1, 3]):  # once more, and others
            odds = torch.randn(6, 2, 5).log_softmax(2).requires_grad_()
            loss = torch.nn.functional.ctc_loss(odds, torch.tensor([[1, 2, 3], [2, 3, 4]]), [6, 6], lengths)
            loss.backward()
            losses += [loss.item(), odds.grad]
        return losses

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_other_memory_that_an_unseen_write_filled_after_it_is_one(capture: Capture) -> None:
    def program() -> torch.Tensor:
        odds = torch.randn(6, 2, 5).log_softmax(2)
        torch.nn.functional.ctc_loss(odds, torch.tensor([[1, 2, 3], [2, 3, 4]]), [6, 6], [3, 2], reduction="none")
        filled = torch.empty(2)
        ctypes.memmove(torch._C.StorageBase.data_ptr(filled.untyped_storage()), (ctypes.c_float * 2)(3, 4), 8)
        return filled.clamp_min(1).mean()

    assert capture(program).unsupported() == {"unseen_write": 1}


@pytest.mark.parametrize("inference", [False, True])
def test_pooling_that_a_composite_does_itself_is_recorded_whole(capture: Capture, inference: bool) -> None:
    pool = torch.nn.MaxPool1d(2)
    x, weight = torch.randn(1, 2, 8), torch.randn(1, 2, 8, requires_grad=True)

    def program() -> list[torch.Tensor]:
        with torch.inference_mode(inference):
            without = [pool(x), pool(x * 2)]
        with torch.no_grad():
            without.append(pool(weight))
        pool(weight).sum().backward()
        assert weight.grad is not None
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(pool(dual)).tangent
        return [*without, weight.grad, tangent.clone()]

    expected = program()
    weight.grad = None
    captured = capture(program)
    assert captured.unsupported() == {}
    assert captured.ops().count("aten::max_pool1d.default") == 3
    assert all(map(torch.equal, captured.returned, expected))
    captured.replays()


# What the out-of-place form of an operator that overwrites a tensor makes of memory that nobody wrote.
FUNCTIONAL: dict[str, Any] = {
    "copy": lambda new: torch.ops.aten.copy(new, torch.ones(4)),
    "fill": lambda new: torch.ops.aten.fill(new, 3.0),
    "fill with a tensor": lambda new: torch.ops.aten.fill(new, torch.tensor(3.0)),
    "zero": torch.ops.aten.zero,
    "uniform": torch.ops.aten.uniform,
    "normal": torch.ops.aten.normal_functional,
    "random": torch.ops.aten.random,
    "random below": lambda new: torch.ops.aten.random(new, 9),
    "random between": lambda new: torch.ops.aten.random(new, 2, 9),
    "bernoulli": lambda new: torch.ops.aten.bernoulli(new, torch.full((4,), 0.5)),
    "exponential": torch.ops.aten.exponential,
    "geometric": lambda new: torch.ops.aten.geometric(new, 0.5),
    "cauchy": torch.ops.aten.cauchy,
    "log_normal": torch.ops.aten.log_normal,
    "foreach copy": lambda new: torch.ops.aten._foreach_copy([new], [torch.ones(4)]),
    "foreach zero": lambda new: torch.ops.aten._foreach_zero([new]),
}


@pytest.mark.slow
@pytest.mark.parametrize("operator", FUNCTIONAL.values(), ids=FUNCTIONAL.keys())
def test_out_of_place_forms_of_what_overwrites_a_tensor_do_not_read_it(capture: Capture, operator: Any) -> None:
    """Functionalization, ahead of compilation, turns operators in place into these."""

    def program() -> Any:
        leave_behind(1e30)
        return operator(torch.empty(4))

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


# What makes a copy of memory that nobody wrote, and overwrites a part of it: of 4 elements all, here.
INTO_A_COPY: dict[str, Any] = {
    "index_put": lambda new: torch.index_put(new, [torch.arange(4)], torch.ones(4)),
    "scatter": lambda new: torch.scatter(new, 0, torch.arange(4), torch.ones(4)),
    "index_copy": lambda new: torch.index_copy(new, 0, torch.arange(4), torch.ones(4)),
    "index_fill": lambda new: torch.index_fill(new, 0, torch.arange(4), 3.0),
    "masked_fill": lambda new: torch.masked_fill(new, torch.tensor([True] * 4), 3.0),
    "masked_scatter": lambda new: torch.masked_scatter(new, torch.tensor([True] * 4), torch.ones(4)),
    "put": lambda new: torch.ops.aten.put(new, torch.arange(4), torch.ones(4)),
    "slice_scatter": lambda new: torch.slice_scatter(
        torch.slice_scatter(new, torch.ones(2), 0, 0, 2), torch.ones(2), 0, 2
    ),
    "select_scatter": lambda new: torch.select_scatter(new[:1], torch.tensor(1.0), 0, 0),
    "diagonal_scatter": lambda new: torch.diagonal_scatter(new.view(4, 1), torch.ones(1)),
    "as_strided_scatter": lambda new: torch.as_strided_scatter(new, torch.ones(4), (4,), (1,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("operator", INTO_A_COPY.values(), ids=INTO_A_COPY.keys())
def test_what_overwrites_a_part_of_a_copy_does_not_read_the_rest(capture: Capture, operator: Any) -> None:
    def program() -> Any:
        leave_behind(1e30)
        made = operator(torch.empty(4))
        return made[torch.arange(1)] + 1

    captured = capture(program)
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def test_what_adds_to_a_part_of_a_copy_reads_it(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(3.0)
        return torch.index_put(torch.empty(4), [torch.arange(4)], torch.ones(4), accumulate=True)

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def warm_up() -> torch.Tensor:
    leave_behind(1e30)
    written = torch.empty(4, 4)
    write_unseen(written)
    return written @ torch.ones(4, 4)


def test_in_a_scope_where_it_is_expected_unwritten_memory_is_read_as_it_is(capture: Capture) -> None:
    def program() -> Any:
        with replayfmt.scope("warm-up"):
            first = warm_up()
        return first, first + 1

    captured = capture(program, digests="ops", reads_unwritten=["warm-up"])
    assert captured.unsupported() == {}
    assert captured.reader.session.policies["reads-unwritten"] == "warm-up"
    leave_behind(2.0)
    captured.replays()


@pytest.mark.parametrize("scope", ["warm-up", "other"])
def test_outside_of_that_scope_it_is_an_unseen_write(capture: Capture, scope: str) -> None:
    def program() -> Any:
        with replayfmt.scope("warm-up"):
            torch.ones(2)
        with replayfmt.scope("work"):
            return warm_up()

    assert capture(program, reads_unwritten=[scope]).unsupported() == {"unseen_write": 1}


def test_a_scope_without_such_a_read_is_reported(tmp_path: Any) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay", reads_unwritten=["warm-up"]) as recorder:
        torch.ones(2)
    assert recorder.unmatched() == [
        "--reads-unwritten=warm-up: no memory that nothing wrote was read in a scope of that name"
    ]


def test_arguments_that_a_kernel_makes_longer_are_recorded_as_they_were_given(capture: Capture) -> None:
    """The first call of an observer for quantization-aware training finds no range and no scales."""
    on = torch.ones(1, dtype=torch.int64)

    def program() -> list[torch.Tensor]:
        lowest, highest = torch.tensor([]), torch.tensor([])
        scales, zero_points = torch.empty(0), torch.empty(0, dtype=torch.int32)
        results = [
            torch.fused_moving_avg_obs_fake_quant(
                torch.randn(8, 3), on, on, lowest, highest, scales, zero_points, 0.01, -128, 127, 0, True, True
            )
            for _ in range(3)
        ]
        return [*results, lowest, highest, scales, zero_points]

    captured = capture(program)
    assert not captured.unsupported()
    captured.replays()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_a_composite_of_pytorchs_fills_through_an_address_replays(
    capture: Capture, batch_first: bool, grad: bool
) -> None:
    rnn = torch.nn.utils.rnn
    x = torch.randn(6, 3, 4, requires_grad=grad)

    def program() -> Any:
        results = []
        for lengths in ([6, 4, 2], [3, 3, 3]):
            leave_behind(1e30)
            packed = rnn.pack_padded_sequence(x, lengths)
            out, found = rnn.pad_packed_sequence(packed, batch_first=batch_first)
            assert found.tolist() == lengths
            results += [found - 1, out]
            if grad:
                out.sum().backward()
        return results

    captured = capture(program)
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


@pytest.mark.slow
def test_where_nobody_can_know_who_wrote_it_the_captures_last_line_names_the_flag(tmp_path: Any) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from replayfmt.recording.storages import identity\n"
        "identity.sample = lambda storage: b''  # as for the memory of devices\n"
        "print(torch.empty(7).sum().shape, (torch.empty(3) * 2).sum().shape)\n"
    )
    command = [CAPTURE, "--recorder=python", "-o", "x.opreplay", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    summary, last = done.stderr.splitlines()
    assert summary.endswith("unsupported: unseen_write 2") and last.endswith(": --reads-unwritten=SCOPE")
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.run(tmp_path / "x.opreplay")
    assert all("--reads-unwritten=SCOPE" in finding for finding in refused.value.findings)


@pytest.mark.slow
def test_the_captures_last_line_says_how_much_written_memory_a_replay_does_not_compare(tmp_path: Any) -> None:
    """Digests list a limited number of written ranges."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "kept = [torch.empty(7000) for _ in range(2)] + [torch.empty(5)]\n"
        "for memory in kept[:2]:\n"
        "    for part in memory.split(100):\n"
        "        part[::2] = 1\n"
        "kept[2][1:3] = 1\n"
    )
    command = [CAPTURE, "-o", "x.opreplay", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    summary, last = done.stderr.splitlines()
    assert summary.endswith("unsupported: none")
    assert last.startswith(
        "opreplay-capture: note: 2 of the storages were written in part, at places that are not known"
    )
    assert last.endswith("a replay does not compare all that was written there")
    assert replayfmt.run(tmp_path / "x.opreplay").outcome == "ok"
