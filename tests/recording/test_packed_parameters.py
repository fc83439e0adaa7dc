"""Quantized modules: what their packed parameters hold is recorded, and packed again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.format.codes import RecordKind
from replayfmt.pytorch.tensors.composites import put_together, take_apart

from .conftest import Capture

ops = torch.ops.quantized
pytestmark = pytest.mark.filterwarnings("ignore")


def per_tensor(*sizes: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(sizes), 0.05, 0, torch.qint8)


def per_channel(*sizes: int, axis: int = 0) -> torch.Tensor:
    scales = torch.rand(sizes[axis]) / 10 + 0.01
    return torch.quantize_per_channel(torch.randn(sizes), scales, torch.zeros(sizes[axis], dtype=torch.long), axis,
                                      torch.qint8)


def rows(count: int, length: int) -> torch.Tensor:
    return torch.quantize_per_channel(torch.randn(count, length), torch.rand(count) / 10 + 0.01, torch.zeros(count), 0,
                                      torch.quint8)


def image(*sizes: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(sizes), 0.05, 3, torch.quint8)


def quantized_model(dtype: torch.dtype = torch.qint8) -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = torch.nn.LSTM(8, 6), torch.nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0])

    kinds = {torch.nn.Linear}
    return torch.ao.quantization.quantize_dynamic(Model(), kinds, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_a_dynamically_quantized_model_that_was_there_before_replays(capture: Capture, dtype: torch.dtype) -> None:
    model, x = quantized_model(dtype), torch.randn(3, 2, 8)
    captured = capture(lambda: [model(x), model(x + 1)], digests="ops")
    assert captured.unsupported() == {}
    captured.replays()
    # The weight entered once, though it was unpacked at each use.
    weights = [r for r in captured.records(RecordKind.storage_import) if r.argument("reason") == "first_use"]
    assert len(weights) == len({r.argument("storage") for r in weights})
    uses = [op for op in captured.records(RecordKind.op) if "linear_dynamic" in
            captured.reader.kernels[op.signature.kernel].name]
    assert len(uses) == 2
    first, second = (use.args[1].parts[0] for use in uses)
    assert first == second


def test_a_model_that_is_quantized_under_the_capture_replays(capture: Capture) -> None:
    captured = capture(lambda: quantized_model()(torch.randn(3, 2, 8)), digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_memory_that_nobody_wrote_is_unseen_where_its_packed_form_is_used(capture: Capture) -> None:
    def program() -> Any:
        weight = torch._empty_affine_quantized([4, 8], scale=0.1, zero_point=0, dtype=torch.qint8)
        return ops.linear_dynamic(torch.randn(2, 8), ops.linear_prepack(weight, None))

    assert capture(program).unsupported() == {"unseen_write": 1}


PACKED: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "linear": (lambda: ops.linear_prepack(per_channel(4, 8), torch.randn(4)),
               lambda packed: ops.linear(image(3, 8), packed, 0.1, 4)),
    "conv1d": (lambda: ops.conv1d_prepack(per_tensor(4, 3, 3), torch.randn(4), [2], [1], [1], 1),
               lambda packed: ops.conv1d(image(2, 3, 9), packed, 0.1, 4)),
    "conv2d": (lambda: ops.conv2d_prepack(per_channel(4, 2, 3, 3), None, [1, 2], [1, 0], [2, 1], 2),
               lambda packed: ops.conv2d(image(1, 4, 9, 9), packed, 0.1, 4)),
    "conv_transpose2d": (
        lambda: ops.conv_transpose2d_prepack(per_tensor(4, 3, 3, 3), torch.randn(3), [2, 2], [1, 1], [1, 1], [1, 1], 1),
        lambda packed: ops.conv_transpose2d(image(1, 4, 5, 5), packed, 0.1, 4)),
    "conv3d": (lambda: ops.conv3d_prepack(per_tensor(4, 2, 2, 2, 2), torch.randn(4), [1] * 3, [0] * 3, [1] * 3, 1),
               lambda packed: ops.conv3d(image(1, 2, 4, 4, 4), packed, 0.1, 4)),
    "embedding": (lambda: ops.embedding_bag_prepack(rows(10, 16)),
                  lambda packed: ops.embedding_byte(packed, torch.tensor([1, 2, 1]))),
}


@pytest.mark.parametrize("kind", PACKED)
def test_every_kind_replays_packed_before_and_under_the_capture(capture: Capture, kind: str) -> None:
    pack, use = PACKED[kind]
    packed = pack()

    def program() -> Any:
        return [each.dequantize() if each.is_quantized else each for each in (use(packed), use(pack()))]

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_weights_are_integers_that_are_embedded_where_floats_are_not(capture: Capture) -> None:
    import replayfmt

    model, x = quantized_model(), torch.randn(3, 2, 8)
    captured = capture(lambda: model(x), payload="integers")
    assert captured.unsupported() == {}
    with replayfmt.open(captured.path) as opened, replayfmt.Plan(opened) as plan:
        assert plan.execute().outcome == "ok"


def test_an_object_of_another_class_stays_unsupported(capture: Capture) -> None:
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.LSTM(8, 6)), {torch.nn.LSTM})
    assert capture(lambda: model(torch.randn(3, 2, 8))).unsupported() == {"opaque_argument": 1}


def test_a_part_of_a_capture_keeps_what_its_packed_parameters_hold(capture: Capture, tmp_path: Path) -> None:
    model, x = quantized_model(), torch.randn(3, 2, 8)
    captured = capture(lambda: model(x))
    ordinals = [r.ordinal for r in captured.records(RecordKind.op)
                if "linear_dynamic" in captured.reader.kernels[r.signature.kernel].name]
    trimmed = tmp_path / "trimmed.opreplay"
    selected = f"--ops={ordinals[0]}:{ordinals[0] + 1}"
    command = [sys.executable, "-m", "opreplay_tools.trim", selected, str(captured.path), str(trimmed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    from replayfmt.replay.plan import Plan

    with Plan(trimmed) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def hostile() -> list[tuple[str, Callable[[list[Any]], None]]]:
    linear, conv, bag = "linear", "conv2d", "embedding"
    return [
        (linear, lambda parts: parts.pop()),
        (linear, lambda parts: parts.__setitem__(-1, torch.zeros(3))),
        (linear, lambda parts: parts.__setitem__(-1, torch.zeros(4, dtype=torch.int32))),
        (linear, lambda parts: parts.__setitem__(0, parts[0].reshape(2, 2, 8))),
        (linear, lambda parts: parts.__setitem__(4, 1)),
        (conv, lambda parts: parts.__setitem__(-6, [0, 1])),
        (conv, lambda parts: parts.__setitem__(-6, [1])),
        (conv, lambda parts: parts.__setitem__(-5, [-1, 0])),
        (conv, lambda parts: parts.__setitem__(-3, [1 << 40, 1])),
        (conv, lambda parts: parts.__setitem__(-2, 0)),
        (conv, lambda parts: parts.__setitem__(-2, 3)),
        (conv, lambda parts: parts.__setitem__(-1, 2)),
        (bag, lambda parts: parts.__setitem__(0, parts[0][:0])),
        (bag, lambda parts: parts.__setitem__(2, parts[2][:3])),
    ]


@pytest.mark.parametrize("case", range(len(hostile())))
def test_parts_that_make_no_packed_parameters_are_one_error(case: int) -> None:
    kind, change = hostile()[case]
    form, parts = take_apart(PACKED[kind][0]())
    changed = list(parts)
    assert put_together(form, changed) is not None
    change(changed)
    with pytest.raises((ValueError, RuntimeError)):
        put_together(form, changed)


def test_what_an_object_held_outlives_it() -> None:
    form, parts = take_apart(PACKED["embedding"][0]())      # its scales are a window on the object, which is gone
    assert form == "packed_embedding_per_channel"
    assert all(part.untyped_storage().resizable() for part in parts if isinstance(part, torch.Tensor))
