"""Portable replacements: each is run, and its results compared with those of the operator's definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from replayfmt.format.codes import DType, Layout, StorageOrigin, TensorFlag
from replayfmt.format.model import Kernel, TensorMeta
from replayfmt.importers.common.synthesis import Tensor, TracedStorage, contiguous
from replayfmt.importers.rewrites.portable import Portable
from replayfmt.importers.rewrites.rewriting import Rewritten
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, TORCH_DTYPE


class Machine:
    """Runs rewritten calls: what a replay does, without a capture."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.kept: list[Tensor] = []

    def given(self, value: Any) -> Any:
        """A captured value of a real one."""
        return self.new(tuple(value.shape), value.dtype, value) if isinstance(value, torch.Tensor) else value

    def new(
        self,
        sizes: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        value: torch.Tensor | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Tensor:
        meta = TensorMeta(DTYPE_CODE[dtype], Layout.strided, 1, sizes, strides or contiguous(sizes), TensorFlag(0))
        tensor = Tensor(TracedStorage(0, 1, StorageOrigin.op), meta)
        self.kept.append(tensor)
        if value is not None:
            self.values[id(tensor)] = value
        return tensor

    def run(self, rewritten: Rewritten) -> None:
        for kernel, arguments, results in rewritten.calls:
            namespace, _, base = kernel.name.partition("::")
            overload = getattr(getattr(getattr(torch.ops, namespace), base), kernel.overload)
            positional = {argument.name for argument in overload._schema.arguments if not argument.kwarg_only}
            given = {name: self._real(value) for name, value in arguments}
            ordered = [
                given[argument.name]
                for argument in overload._schema.arguments
                if argument.name in positional and argument.name in given
            ]
            assert [name for name in given if name in positional] == [
                argument.name
                for argument in overload._schema.arguments
                if argument.name in given and argument.name in positional
            ]
            returned = overload(*ordered, **{name: value for name, value in given.items() if name not in positional})
            values = returned if isinstance(returned, tuple | list) else [returned]
            for captured, value in zip(results or [], values, strict=True):
                if isinstance(captured, Tensor):
                    assert tuple(value.shape) == captured.meta.sizes
                    assert value.dtype == TORCH_DTYPE[captured.meta.dtype]
                    self.kept.append(captured)
                    self.values[id(captured)] = value

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.values[id(value)]
        if isinstance(value, DType):
            return TORCH_DTYPE[value]
        return [self._real(each) for each in value] if isinstance(value, list) else value


def rewrite(name: str, given: dict[str, Any], results: list[Any], machine: Machine) -> list[Any]:
    """The results of what takes a call's place, None for those that are no tensors."""
    arguments = [(key, machine.given(value)) for key, value in given.items()]
    base, _separator, overload = name.partition(".")
    rewritten = Portable().rewrite(Kernel(base, overload or "default", ""), arguments, results)
    assert isinstance(rewritten, Rewritten), rewritten
    machine.run(rewritten)
    return [machine.values[id(each)] if isinstance(each, Tensor) else None for each in results]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def test_batch_norm_of_cudnn_forward_and_backward() -> None:
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    weight, bias = torch.rand(3, requires_grad=True), torch.randn(3, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    expected = torch.nn.functional.batch_norm(x, mean.clone(), variance.clone(), weight, bias, True, 0.1, 1e-5)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    machine = Machine()
    running = mean.clone(), variance.clone()
    out, saved_mean, saved_scale, reserve = rewrite(
        "aten::cudnn_batch_norm",
        {
            "input": x.detach(),
            "weight": weight.detach(),
            "bias": bias.detach(),
            "running_mean": running[0],
            "running_var": running[1],
            "training": True,
            "exponential_average_factor": 0.1,
            "epsilon": 1e-5,
        },
        [machine.new((4, 3, 5, 5)), machine.new((3,)), machine.new((3,)), machine.new((7,), torch.uint8)],
        machine,
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(running[0], 0.1 * x.detach().mean((0, 2, 3)))
    assert reserve.shape == (7,)

    grads = rewrite(
        "aten::cudnn_batch_norm_backward",
        {
            "input": x.detach(),
            "grad_output": grad,
            "weight": weight.detach(),
            "running_mean": running[0],
            "running_var": running[1],
            "save_mean": saved_mean,
            "save_var": saved_scale,
            "epsilon": 1e-5,
            "reserveSpace": reserve,
        },
        [machine.new((4, 3, 5, 5)), machine.new((3,)), machine.new((3,))],
        machine,
    )
    for got, wanted in zip(grads, (x.grad, weight.grad, bias.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def convolution(**more: Any) -> dict[str, Any]:
    return {
        "padding": [1, 1],
        "stride": [2, 2],
        "dilation": [1, 1],
        "groups": 1,
        "benchmark": False,
        "deterministic": False,
        **more,
    }


def test_convolutions_of_cudnn_and_miopen() -> None:
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(6, 3, 3, 3), torch.randn(6)
    plain = torch.nn.functional.conv2d(x, weight, None, 2, 1)
    machine = Machine()
    (out,) = rewrite(
        "aten::cudnn_convolution",
        {"self": x, "weight": weight, **convolution(allow_tf32=True)},
        [machine.new((2, 6, 4, 4))],
        machine,
    )
    torch.testing.assert_close(out, plain)
    (out,) = rewrite(
        "aten::miopen_convolution",
        {"self": x, "weight": weight, "bias": bias, **convolution()},
        [machine.new((2, 6, 4, 4))],
        machine,
    )
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, weight, bias, 2, 1))
    (out,) = rewrite(
        "aten::cudnn_convolution_add_relu",
        {"self": x, "weight": weight, "z": plain, "alpha": 0.5, "bias": bias, **convolution()},
        [machine.new((2, 6, 4, 4))],
        machine,
    )
    torch.testing.assert_close(out, torch.relu(torch.nn.functional.conv2d(x, weight, bias, 2, 1) + 0.5 * plain))
    transposed = torch.randn(3, 6, 3, 3)
    (out,) = rewrite(
        "aten::cudnn_convolution_transpose",
        {"self": x, "weight": transposed, **convolution(output_padding=[1, 1], allow_tf32=True)},
        [machine.new((2, 6, 16, 16))],
        machine,
    )
    torch.testing.assert_close(out, torch.nn.functional.conv_transpose2d(x, transposed, None, 2, 1, 1))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> tuple[Any, Any]:
    """Output and logarithms of sums, by the definition, in float64."""
    q, k, v = (each.double() for each in (query, key, value))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_forward_and_backward(causal: bool, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 3, 8, 16).to(dtype).requires_grad_() for _ in range(3))
    expected, sums = attention(query, key, value, causal)
    grad = torch.randn_like(expected).to(dtype)
    expected.backward(grad.double())
    low = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}

    machine = Machine()
    shape, strides = (2, 3, 8, 16), (384, 16, 48, 1)  # as the kernel returns it: [batch, length, heads, width]
    given = {"query": query.detach(), "key": key.detach(), "value": value.detach()}
    out, logarithms, *others = rewrite(
        "aten::_scaled_dot_product_flash_attention",
        {**given, "dropout_p": 0.0, "is_causal": causal, "return_debug_mask": False},
        [
            machine.new(shape, dtype, strides=strides),
            machine.new((2, 3, 8)),
            None,
            None,
            8,
            8,
            machine.new((), torch.int64),
            machine.new((), torch.int64),
            machine.new((0,), dtype),
        ],
        machine,
    )
    assert out.stride() == strides
    torch.testing.assert_close(out.double(), expected.detach(), **low)
    torch.testing.assert_close(logarithms.double(), sums.detach(), rtol=1e-3, atol=1e-3)
    assert others[-1].shape == (0,)

    grads = rewrite(
        "aten::_scaled_dot_product_flash_attention_backward",
        {
            "grad_out": grad,
            **given,
            "out": out,
            "logsumexp": logarithms,
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": 8,
            "max_k": 8,
            "dropout_p": 0.0,
            "is_causal": causal,
        },
        [machine.new(shape, dtype) for _ in range(3)],
        machine,
    )
    for got, leaf in zip(grads, (query, key, value), strict=True):
        torch.testing.assert_close(got.double(), leaf.grad.double(), **low)


def test_memory_efficient_attention_pads_its_logarithms() -> None:
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    bias = torch.randn(1, 2, 5, 7)
    machine = Machine()
    scores = query @ key.transpose(-2, -1) * 0.25 + bias
    out, logarithms = rewrite(
        "aten::_scaled_dot_product_efficient_attention",
        {
            "query": query,
            "key": key,
            "value": value,
            "attn_bias": bias,
            "compute_log_sumexp": True,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": 0.25,
        },
        [machine.new((1, 2, 5, 8)), machine.new((1, 2, 32))],
        machine,
    )
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ value)
    torch.testing.assert_close(logarithms[..., :5], torch.logsumexp(scores, -1))
    assert logarithms[..., 5:].abs().max() == 0


@pytest.mark.parametrize(("queries", "keys", "causal"), [(8, 8, False), (8, 8, True), (5, 9, True), (1, 9, False)])
def test_the_kernels_of_flash_attention_have_the_length_before_the_heads(queries: int, keys: int, causal: bool) -> None:
    query = torch.randn(2, queries, 4, 16).requires_grad_()
    key, value = (torch.randn(2, keys, 4, 16).requires_grad_() for _ in range(2))
    q, k, v = (each.double().transpose(1, 2) for each in (query, key, value))
    scores = q @ k.transpose(-2, -1) * 0.25
    if causal:  # the last query sees up to the last key
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), -math.inf)
    expected = (torch.softmax(scores, -1) @ v).transpose(1, 2)
    grad = torch.randn(expected.shape)
    expected.backward(grad.double())

    machine = Machine()
    given = {"query": query.detach(), "key": key.detach(), "value": value.detach()}
    packing = {
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": queries,
        "max_k": keys,
        "dropout_p": 0.0,
        "is_causal": causal,
    }
    unset = {"window_size_left": None, "window_size_right": -1}
    out, logarithms, *_others = rewrite(
        "aten::_flash_attention_forward",
        {**given, **packing, "return_debug_mask": False, **unset},
        [machine.new((2, queries, 4, 16)), machine.new((2, 4, queries)), machine.new((2,), torch.uint64), None, None],
        machine,
    )
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logarithms.double(), torch.logsumexp(scores, -1).detach(), rtol=1e-4, atol=1e-4)
    state = torch.zeros(2, dtype=torch.int64)
    grads = rewrite(
        "aten::_flash_attention_backward",
        {
            "grad_out": grad,
            **given,
            "out": out,
            "logsumexp": logarithms,
            **packing,
            "rng_state": state,
            "unused": state,
            **unset,
        },
        [machine.new((2, queries, 4, 16)), machine.new((2, keys, 4, 16)), machine.new((2, keys, 4, 16))],
        machine,
    )
    for got, leaf in zip(grads, (query, key, value), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(got, leaf.grad, rtol=1e-3, atol=1e-4)


def test_flash_attention_shares_the_heads_of_keys() -> None:
    query, key, value = torch.randn(1, 6, 8, 4), torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 4)
    machine = Machine()
    out, *_others = rewrite(
        "aten::_flash_attention_forward",
        {
            "query": query,
            "key": key,
            "value": value,
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": 6,
            "max_k": 6,
            "dropout_p": 0.0,
            "is_causal": True,
            "return_debug_mask": False,
        },
        [machine.new((1, 6, 8, 4)), None],
        machine,
    )
    torch.testing.assert_close(
        out,
        torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(1, 2),
    )


@pytest.mark.parametrize(("mask", "diagonal"), [(0, 99), (1, 1), (2, 3)])
def test_the_kernels_of_memory_efficient_attention_align_their_mask_as_they_are_told(mask: int, diagonal: int) -> None:
    query, key, value = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(diagonal)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(hidden, -math.inf)
    machine = Machine()
    given = {
        "query": query,
        "key": key,
        "value": value,
        "bias": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "max_seqlen_q": None,
        "max_seqlen_k": None,
        "dropout_p": 0.0,
        "custom_mask_type": mask,
        "compute_log_sumexp": True,
    }
    out, logarithms, *_others = rewrite(
        "aten::_efficient_attention_forward",
        given,
        [
            machine.new((1, 5, 2, 8)),
            machine.new((1, 2, 32)),
            machine.new((), torch.int64),
            machine.new((), torch.int64),
            5,
            7,
        ],
        machine,
    )
    torch.testing.assert_close(out, (torch.softmax(scores, -1) @ v).transpose(1, 2))
    torch.testing.assert_close(logarithms[..., :5], torch.logsumexp(scores, -1))
    arguments = [(name, machine.given(value)) for name, value in given.items()]
    for name, value in (("window_size", 3), ("seqlen_k", torch.ones(1)), ("cu_seqlens_q", torch.ones(2))):
        changed = dict(arguments) | {name: machine.given(value)}
        said = Portable().rewrite(
            Kernel("aten::_efficient_attention_forward", "default", ""), list(changed.items()), None
        )
        assert isinstance(said, str) and (name in said or "packed together" in said)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"key": torch.randn(1, 1, 4, 8), "value": torch.randn(1, 1, 4, 8)}, "fewer heads"),
        ({"query": torch.randn(4, 8)}, "that are not"),
    ],
)
def test_what_has_no_equal_keeps_its_place_with_the_reason(change: dict[str, Any], reason: str) -> None:
    machine = Machine()
    given = {
        "query": torch.randn(1, 2, 4, 8),
        "key": torch.randn(1, 2, 4, 8),
        "value": torch.randn(1, 2, 4, 8),
        "dropout_p": 0.0,
        "is_causal": False,
    } | change
    arguments = [(key, machine.given(value)) for key, value in given.items()]
    said = Portable().rewrite(Kernel("aten::_scaled_dot_product_flash_attention", "default", ""), arguments, None)
    assert isinstance(said, str) and reason in said


def test_operators_that_every_device_has_are_left_alone() -> None:
    machine = Machine()
    arguments = [("self", machine.given(torch.ones(2, 2))), ("mat2", machine.given(torch.ones(2, 2)))]
    assert Portable().rewrite(Kernel("aten::mm", "default", ""), arguments, [machine.new((2, 2))]) is None


def test_page_locked_memory_becomes_ordinary_memory() -> None:
    machine = Machine()
    x = torch.randn(3)
    (out,) = rewrite("aten::_pin_memory", {"self": x}, [machine.new((3,))], machine)
    torch.testing.assert_close(out, x)
    rewritten = Portable().rewrite(
        Kernel("aten::empty", "memory_format", ""), [("size", [3]), ("pin_memory", True)], [machine.new((3,))]
    )
    assert isinstance(rewritten, Rewritten)
    assert dict(rewritten.calls[0][1])["pin_memory"] is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_replacements_give_what_the_gpus_operators_give() -> None:
    machine = Machine()
    query, key, value = (torch.randn(2, 3, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    given = {"query": query, "key": key, "value": value, "dropout_p": 0.0, "is_causal": True}
    real = torch.ops.aten._scaled_dot_product_flash_attention.default(*given.values())
    results = [
        machine.new(tuple(each.shape), each.dtype, strides=each.stride())
        if isinstance(each, torch.Tensor) and index < 2
        else None
        for index, each in enumerate(real)
    ]
    out, logarithms, *_others = rewrite("aten::_scaled_dot_product_flash_attention", given, results, machine)
    torch.testing.assert_close(out, real[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(logarithms, real[1], rtol=1e-2, atol=1e-2)

    x = torch.randn(4, 3, 8, 8, device="cuda")
    weight, bias = torch.rand(3, device="cuda"), torch.randn(3, device="cuda")
    normalize = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "running_mean": torch.zeros(3, device="cuda"),
        "running_var": torch.ones(3, device="cuda"),
        "training": True,
        "exponential_average_factor": 0.1,
        "epsilon": 1e-5,
    }
    copies = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in normalize.items()}
    real = torch.ops.aten.cudnn_batch_norm.default(*copies.values())
    results = [machine.new(tuple(each.shape), each.dtype) for each in real]
    for got, wanted in zip(rewrite("aten::cudnn_batch_norm", normalize, results, machine)[:3], real[:3], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalize["running_var"], copies["running_var"])
