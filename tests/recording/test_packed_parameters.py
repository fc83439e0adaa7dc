"""Quantized modules: what their packed parameters hold is recorded, and packed again."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.mkldnn import to_mkldnn

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.initializers import Initializer
from replayfmt.pytorch.tensors.composites import put_together, take_apart
from replayfmt.pytorch.tensors.memory import INTEGERS
from replayfmt.replay.plan import Plan

from .conftest import Capture

ops = torch.ops.quantized
pytestmark = pytest.mark.filterwarnings("ignore")


def per_tensor(*sizes: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(sizes), 0.05, 0, torch.qint8)


def per_channel(*sizes: int, axis: int = 0) -> torch.Tensor:
    scales = torch.rand(sizes[axis]) / 10 + 0.01
    return torch.quantize_per_channel(
        torch.randn(sizes), scales, torch.zeros(sizes[axis], dtype=torch.long), axis, torch.qint8
    )


def rows(count: int, length: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_channel(
        torch.randn(count, length), torch.rand(count) / 10 + 0.01, torch.zeros(count), 0, dtype
    )


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
    uses = [
        op
        for op in captured.records(RecordKind.op)
        if "linear_dynamic" in captured.reader.kernels[op.signature.kernel].name
    ]
    assert len(uses) == 2
    first, second = (use.args[1].parts[0] for use in uses)
    assert first == second


def test_a_model_that_is_quantized_under_the_capture_replays(capture: Capture) -> None:
    captured = capture(lambda: quantized_model()(torch.randn(3, 2, 8)), digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_memory_that_nobody_wrote_enters_as_it_is_where_its_packed_form_is_used(capture: Capture) -> None:
    def program() -> Any:
        weight = torch._empty_affine_quantized([4, 8], scale=0.1, zero_point=0, dtype=torch.qint8)
        return ops.linear_dynamic(torch.randn(2, 8), ops.linear_prepack(weight, None))

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is without oneDNN")


@mkldnn
@pytest.mark.parametrize("before", [True, False])
def test_a_model_in_onednns_layout_replays(capture: Capture, before: bool) -> None:
    """Whether it was laid out before the capture or under it. Its weights enter once, though they are read at each
    use."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    ).eval()
    ready = to_mkldnn(model) if before else None

    def program() -> Any:
        packed = ready if ready is not None else to_mkldnn(model)
        return [packed(torch.randn(2, 3, 8, 8).to_mkldnn()).to_dense() for _ in range(2)]

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()
    entered = [r.argument("storage") for r in captured.records(RecordKind.storage_import)]
    assert len(entered) == len(set(entered))
    convolutions = [
        op
        for op in captured.records(RecordKind.op)
        if captured.reader.kernels[op.signature.kernel].name == "aten::mkldnn_convolution"
    ]
    assert len({op.args[1].parts[0] for op in convolutions}) == 1


@mkldnn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_in_onednns_layout_is_seen_in_it(capture: Capture, dtype: torch.dtype) -> None:
    """In place, also through another tensor on the same memory."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no instructions for it")

    def program() -> Any:
        x = torch.randn(3, 4).to(dtype).to_mkldnn()
        first = x.to_dense()
        x.add_(x)
        x.detach().relu_()
        return first, x.to_dense(), (x * x).to_dense()

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


@mkldnn
def test_weights_that_inductor_packs_for_onednn_replay(capture: Capture) -> None:
    weight, x = torch.randn(8, 6, 3, 3), torch.randn(1, 6, 9, 9)
    ways = [1, 1], [1, 1], [1, 1], 1
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *ways, [1, 6, 9, 9])
    captured = capture(
        lambda: torch.ops.mkldnn._convolution_pointwise(x, packed, None, *ways, "relu", [], None) + 1, digests="ops"
    )
    assert captured.unsupported() == {}
    captured.replays()


PACKED: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "linear": (
        lambda: ops.linear_prepack(per_channel(4, 8), torch.randn(4)),
        lambda packed: ops.linear(image(3, 8), packed, 0.1, 4),
    ),
    "conv1d": (
        lambda: ops.conv1d_prepack(per_tensor(4, 3, 3), torch.randn(4), [2], [1], [1], 1),
        lambda packed: ops.conv1d(image(2, 3, 9), packed, 0.1, 4),
    ),
    "conv2d": (
        lambda: ops.conv2d_prepack(per_channel(4, 2, 3, 3), None, [1, 2], [1, 0], [2, 1], 2),
        lambda packed: ops.conv2d(image(1, 4, 9, 9), packed, 0.1, 4),
    ),
    "conv_transpose2d": (
        lambda: ops.conv_transpose2d_prepack(per_tensor(4, 3, 3, 3), torch.randn(3), [2, 2], [1, 1], [1, 1], [1, 1], 1),
        lambda packed: ops.conv_transpose2d(image(1, 4, 5, 5), packed, 0.1, 4),
    ),
    "conv3d": (
        lambda: ops.conv3d_prepack(per_tensor(4, 2, 2, 2, 2), torch.randn(4), [1] * 3, [0] * 3, [1] * 3, 1),
        lambda packed: ops.conv3d(image(1, 2, 4, 4, 4), packed, 0.1, 4),
    ),
    "embedding": (
        lambda: ops.embedding_bag_prepack(rows(10, 16)),
        lambda packed: ops.embedding_byte(packed, torch.tensor([1, 2, 1])),
    ),
    "embedding_4bit": (
        lambda: ops.embedding_bag_prepack(rows(10, 16, torch.quint4x2)),
        lambda packed: ops.embedding_4bit(packed, torch.tensor([1, 2, 1])),
    ),
    "cell": (
        lambda: ops.make_quantized_cell_params_dynamic(
            *(ops.linear_prepack(per_tensor(12, length), torch.randn(12)) for length in (8, 4)),
            torch.randn(12),
            torch.randn(12),
            False,
        ),
        lambda packed: torch.quantized_gru(
            torch.ones(4, 2, 8), torch.zeros(1, 2, 4), [packed], True, 1, 0.0, False, False, False
        )[0],
    ),
}


@pytest.mark.slow
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


RECURRENT = {
    "LSTM": lambda: (torch.nn.LSTM(8, 6, num_layers=2, bidirectional=True), None),
    "GRU": lambda: (torch.nn.GRU(8, 6, batch_first=True), None),
    "GRU of a packed sequence": lambda: (torch.nn.GRU(8, 6), torch.tensor([3, 2])),
    "LSTMCell": lambda: (torch.nn.LSTMCell(8, 6), None),
    "RNNCell": lambda: (torch.nn.RNNCell(8, 6), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("name", RECURRENT)
def test_dynamically_quantized_recurrent_networks_replay(capture: Capture, name: str, dtype: torch.dtype) -> None:
    network, lengths = RECURRENT[name]()
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(network), {type(network)}, dtype=dtype)[0]
    assert "quantized" in type(model).__module__
    x = torch.randn(2, 8) if "Cell" in name else torch.randn(3, 2, 8)
    given = x if lengths is None else torch.nn.utils.rnn.pack_padded_sequence(x, lengths)

    captured = capture(lambda: [model(given), model(given)], digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.slow
def test_recurrent_networks_that_are_quantized_per_channel_under_the_capture_replay(capture: Capture) -> None:
    def program() -> Any:
        packed = [ops.linear_prepack(per_channel(12, length), torch.randn(12)) for length in (8, 3)]
        cell = ops.make_quantized_cell_params_dynamic(*packed, torch.randn(12), torch.randn(12), True)
        state = [torch.randn(1, 2, 3), torch.randn(1, 2, 3)]
        return torch.quantized_lstm(
            torch.randn(4, 2, 8), state, [cell], True, 1, 0.0, False, False, False, dtype=torch.qint8, use_dynamic=True
        )

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_an_object_of_another_class_or_kind_stays_unsupported(capture: Capture) -> None:
    weights = [torch.randn(12, 8), torch.randn(12, 3)]
    cell = ops.make_quantized_cell_params(*weights, torch.randn(12), torch.randn(12))
    state = [torch.randn(1, 2, 3), torch.randn(1, 2, 3)]

    def program() -> Any:
        return torch.quantized_lstm(torch.randn(4, 2, 8), state, [cell], True, 1, 0.0, False, False, False)

    captured = capture(program)
    assert captured.unsupported() == {"opaque_argument": 1}
    [record] = captured.records(RecordKind.unsupported)
    assert "rnn.CellParamsBase that is quantized" in str(record.argument("detail"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_what_packed_parameters_hold_is_embedded_or_asked_of_initializers(capture: Capture, kind: str) -> None:
    pack, use = PACKED[kind]
    packed = pack()
    with Plan(capture(lambda: use(packed), payload="integers").path) as plan:
        assert plan.execute().outcome == "ok"
    captured = capture(lambda: use(packed), payload="none")
    assert captured.unsupported() == {}
    with pytest.raises(ReplayRefused) as refused:
        Plan(captured.path)
    assert all("--replay-initializer=FILE.py" in finding for finding in refused.value.findings)
    ours = Initializer(
        "zeros", lambda request: torch.zeros(request.tensor.sizes, dtype=request.tensor.dtype), dtypes=INTEGERS
    )
    with Plan(captured.path, initializers=[ours]) as plan:
        assert plan.execute().outcome == "ok"


@pytest.mark.slow
def test_a_part_of_a_capture_keeps_what_its_packed_parameters_hold(capture: Capture, tmp_path: Path) -> None:
    model, x = quantized_model(), torch.randn(3, 2, 8)
    captured = capture(lambda: model(x))
    ordinals = [
        r.ordinal
        for r in captured.records(RecordKind.op)
        if "linear_dynamic" in captured.reader.kernels[r.signature.kernel].name
    ]
    trimmed = tmp_path / "trimmed.opreplay"
    selected = f"--ops={ordinals[0]}:{ordinals[0] + 1}"
    command = [sys.executable, "-m", "opreplay_tools.trim", selected, str(captured.path), str(trimmed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with Plan(trimmed) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def hostile() -> list[tuple[str, Callable[[list[Any]], None]]]:
    linear, conv, bag, cell = "linear", "conv2d", "embedding", "cell"
    bytes_of_pairs = torch.zeros(11, 8, dtype=torch.uint8)
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
        ("embedding_4bit", lambda parts: parts.__setitem__(2, parts[2][:3])),
        ("embedding_4bit", lambda parts: parts.__setitem__(0, bytes_of_pairs[1:])),
        ("embedding_4bit", lambda parts: parts.__setitem__(0, bytes_of_pairs.t()[:, :10])),
        ("embedding_4bit", lambda parts: parts.__setitem__(0, parts[0].view(torch.int8))),
        (cell, lambda parts: parts.pop()),
        (cell, lambda parts: parts.__setitem__(-1, 1)),
        (cell, lambda parts: parts.__setitem__(-2, torch.zeros(3))),
        (cell, lambda parts: parts.__setitem__(-3, None)),
        (cell, lambda parts: parts.__setitem__(5, parts[5][:8])),
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
    form, parts = take_apart(PACKED["embedding"][0]())  # its scales are a window on the object, which is gone
    assert form == "packed_embedding_per_channel"
    assert all(part.untyped_storage().resizable() for part in parts if isinstance(part, torch.Tensor))


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_copied_modules_replay_though_pytorch_unpacks_their_weights_without_an_operator(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")

    def program() -> Any:
        if kind == "conv":
            module, weight, x = torch.ao.nn.quantized.Conv2d(3, 4, 3), per_channel(4, 3, 3, 3), image(1, 3, 5, 5)
        else:
            module, weight, x = torch.ao.nn.quantized.Linear(12, 4), per_channel(4, 12), image(2, 12)
        module.set_weight_bias(weight, torch.zeros(4))
        return module(x).dequantize(), copy.deepcopy(module)(x).dequantize()

    captured = capture(program)
    assert torch.equal(*captured.returned)
    assert captured.unsupported() == {}
    captured.replays()
