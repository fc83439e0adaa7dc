"""Programs that launch Triton kernels."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.triton_kernels import helpers, namesakes
from tests.triton_kernels.conftest import WRAPS_INTERPRETED
from tests.triton_kernels.helpers import into as put
from tests.triton_kernels.helpers import scaled

PROGRAMS: dict[str, Callable[[], object]] = {}
SCALE = tl.constexpr(5)  # another one than the helpers'
ENDING = 2.5
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
YES, NO = (True, False) if VERSION >= (3, 8) else (1, 0)  # the interpreter before takes no bool


def program(function: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[function.__name__] = function
    return function


@triton.jit
def softmax_kernel(out, x, stride_out, stride_x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + at, mask=at < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride_out + at, values / tl.sum(values, axis=0), mask=at < columns)


@program
def softmax():
    x = torch.randn(5, 13)
    out = torch.empty_like(x)
    softmax_kernel[(5,)](out, x, out.stride(0), x.stride(0), 13, BLOCK=16, num_warps=4)
    return out * 2


@triton.jit
def matmul_kernel(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr):
    rows, columns, inner = (
        tl.program_id(0) * M + tl.arange(0, M),
        tl.program_id(1) * N + tl.arange(0, N),
        tl.arange(0, K),
    )
    a_at = a + rows[:, None] * k + inner[None, :]
    b_at = b + inner[:, None] * n + columns[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, K)):
        left = tl.load(a_at, mask=(rows[:, None] < m) & (inner[None, :] < k - step * K), other=0.0)
        right = tl.load(b_at, mask=(inner[:, None] < k - step * K) & (columns[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
        a_at += K
        b_at += K * n
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0)
    at = c + rows[:, None] * n + columns[None, :]
    tl.store(at, total.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))


@program
def matmul():
    a, b = torch.randn(20, 24).half(), torch.randn(24, 36).half()
    c = torch.empty(20, 36, dtype=torch.half)
    grid = lambda meta: (triton.cdiv(20, meta["M"]), triton.cdiv(36, meta["N"]))  # noqa: E731
    matmul_kernel[grid](a, b, c, 20, 36, 24, M=16, N=16, K=16, ACTIVATION="relu")
    return c


@triton.jit
def norm_forward(x, y, w, b, mean, rstd, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + at, mask=at < n, other=0.0)
    m = tl.sum(values, axis=0) / n
    centered = tl.where(at < n, values - m, 0.0)
    r = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / n + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    weight, bias = tl.load(w + at, mask=at < n), tl.load(b + at, mask=at < n)
    tl.store(y + row * stride + at, centered * r * weight + bias, mask=at < n)


@triton.jit
def norm_backward(dx, dy, dw, db, x, w, mean, rstd, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    values = tl.load(x + row * stride + at, mask=mask, other=0.0)
    grad = tl.load(dy + row * stride + at, mask=mask, other=0.0)
    weight = tl.load(w + at, mask=mask, other=0.0)
    m, r = tl.load(mean + row), tl.load(rstd + row)
    hat = tl.where(mask, (values - m) * r, 0.0)
    wdy = weight * grad
    c1, c2 = tl.sum(hat * wdy, axis=0) / n, tl.sum(wdy, axis=0) / n
    tl.store(dx + row * stride + at, (wdy - (hat * c1 + c2)) * r, mask=mask)
    tl.atomic_add(dw + at, grad * hat, mask=mask)
    tl.atomic_add(db + at, grad, mask=mask)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(context, x, w, b):
        y, mean, rstd = torch.empty_like(x), torch.empty(len(x)), torch.empty(len(x))
        norm_forward[(len(x),)](x, y, w, b, mean, rstd, x.stride(0), x.shape[1], 1e-5, BLOCK=16)
        context.save_for_backward(x, w, mean, rstd)
        return y

    @staticmethod
    def backward(context, dy):
        x, w, mean, rstd = context.saved_tensors
        dx, dw, db = torch.empty_like(x), torch.zeros_like(w), torch.zeros_like(w)
        norm_backward[(len(x),)](dx, dy, dw, db, x, w, mean, rstd, x.stride(0), x.shape[1], BLOCK=16)
        return dx, dw, db


@program
def layer_norm():
    x = torch.randn(6, 11, requires_grad=True)
    w, b = torch.randn(11, requires_grad=True), torch.randn(11, requires_grad=True)
    LayerNorm.apply(x, w, b).square().sum().backward()
    return x.grad, w.grad, b.grad


@triton.jit
def attention_inner(total, norm, most, q, k_at, v_at, k_step, v_step, at_n, length, scale, N: tl.constexpr):
    for start in range(0, length, N):
        k = tl.load(k_at, mask=(start + at_n)[None, :] < length, other=0.0)
        scores = tl.dot(q, k) * scale + tl.where((start + at_n)[None, :] < length, 0.0, -1.0e6)
        most_now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - most_now[:, None])
        correction = tl.exp(most - most_now)
        norm = norm * correction + tl.sum(weights, 1)
        v = tl.load(v_at, mask=(start + at_n)[:, None] < length, other=0.0)
        total = total * correction[:, None] + tl.dot(weights.to(v.dtype), v)
        most = most_now
        k_at += N * k_step
        v_at += N * v_step
    return total, norm, most


@triton.jit
def flash_attention_kernel(q, k, v, out, scale, stride, length, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    at_m, at_n, at_d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    head = tl.program_id(1) * length * stride
    queries = tl.load(q + head + at_m[:, None] * stride + at_d[None, :], mask=at_m[:, None] < length, other=0.0)
    k_at = k + head + at_n[None, :] * stride + at_d[:, None]
    v_at = v + head + at_n[:, None] * stride + at_d[None, :]
    most = tl.zeros([M], dtype=tl.float32) - float("inf")
    norm, total = tl.zeros([M], dtype=tl.float32), tl.zeros([M, D], dtype=tl.float32)
    total, norm, most = attention_inner(total, norm, most, queries, k_at, v_at, stride, stride, at_n, length, scale, N)
    total = total / norm[:, None]
    tl.store(out + head + at_m[:, None] * stride + at_d[None, :], total, mask=at_m[:, None] < length)


@program
def flash_attention():
    q, k, v = (torch.randn(2, 40, 16) for _ in range(3))
    out = torch.empty_like(q)
    flash_attention_kernel[(triton.cdiv(40, 16), 2)](q, k, v, out, 0.25, 16, 40, M=16, N=16, D=16)
    return out


@triton.jit
def count_kernel(x, counts, most, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(counts + values, 1, mask=at < n)
    tl.atomic_max(most + values * 0, values, mask=at < n)


@program
def atomics():
    x = torch.randint(0, 7, (50,), dtype=torch.int32)
    counts, most = torch.zeros(7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    count_kernel[(triton.cdiv(50, 16),)](x, counts, most, 50, BLOCK=16)
    return counts, most


@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@program
def in_place():
    x = torch.randn(30)
    y = x + 1
    for _ in range(3):
        double_kernel[(4,)](y, 30, BLOCK=8)
    return y - x


@triton.jit
def strided_kernel(x, out, stride_0, stride_1, rows, columns, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    mask = (r < rows) & (c < columns)
    tl.store(out + r * columns + c, tl.load(x + r * stride_0 + c * stride_1, mask=mask), mask=mask)


@program
def strided():
    whole = torch.randn(12, 20)
    x = whole[2:9, 3:15:2].t()  # six by seven, of every other column
    out = torch.zeros(6, 7)
    strided_kernel[(1,)](x, out, *x.stride(), 6, 7, R=8, C=8)
    part = torch.zeros(40)
    strided_kernel[(1,)](x, part[8:], *x.stride(), 3, 5, R=8, C=8)  # writes a part of it alone
    return out, part


@triton.jit
def fill_kernel(out, value, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, mask=at < n) + value, mask=at < n)


def slowest_first(call, quantiles):
    """Stands for a benchmark, which needs a device: the configuration that is tried last is the best."""
    call()
    slowest_first.tried += 1
    return [1.0 / slowest_first.tried] * len(quantiles)


slowest_first.tried = 0
tuned_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": size}, num_warps=size // 4) for size in (8, 16, 32)],
    key=["n"],
    restore_value=["out"],
    do_bench=slowest_first,
)(fill_kernel)
untidy_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": size}) for size in (8, 16)], key=["n"], do_bench=slowest_first
)(fill_kernel)
heuristic_kernel = triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})(fill_kernel)


@program
def autotuned():
    out, other = torch.zeros(50), torch.zeros(20)
    grid = lambda meta: (triton.cdiv(50, meta["BLOCK"]),)  # noqa: E731
    tuned_kernel[grid](out, 1.5, 50)
    tuned_kernel[grid](out, 0.5, 50)
    heuristic_kernel[(1,)](other, 3.0, 20)
    return out, other


@program
def autotuned_without_care():
    out = torch.zeros(50)
    untidy_kernel[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](out, 1.0, 50)  # the trial launches write, too
    return out * 2


@triton.jit
def calling_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = scaled(tl.load(x + at, mask=at < n)) + SCALE
    values = helpers.scaled(values) + helpers.BLOCK + ENDING
    put(out, at, values, at < n)


@program
def calling():
    x, out = torch.randn(20), torch.empty(20)
    calling_kernel[(3,)](x, out, 20, BLOCK=8)
    return out


@triton.jit
def scaled_shifted(x):
    return scaled(x) + SCALE


@triton.jit
def run(x, n, BLOCK: tl.constexpr):
    inputs = tl.arange(0, BLOCK)
    tl.store(x + inputs, scaled_shifted(tl.load(x + inputs, mask=inputs < n)), mask=inputs < n)


@program
def names_of_a_script():
    x, out = torch.randn(5, 13), torch.empty(5, 13)
    softmax_kernel[(5,)](out, x, out.stride(0), x.stride(0), 13, BLOCK=16, num_warps=4)
    run[(1,)](out, 40, BLOCK=64)
    namesakes.t3[(1,)](out, 30, BLOCK=32)
    calling_kernel[(3,)](out, x, 20, BLOCK=8)
    return out, x


@triton.jit
def applied_kernel(x, out, n, BLOCK: tl.constexpr, function: tl.constexpr, into: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, function(tl.load(x + at, mask=at < n)).to(into), mask=at < n)


@program
def given_a_function():
    x, out = torch.randn(6), torch.empty(6)
    applied_kernel[(1,)](x, out, 6, BLOCK=8, function=scaled, into=tl.float16)
    return out


@triton.jit
def constexprs_kernel(
    out,
    whole: tl.constexpr,
    part: tl.constexpr,
    yes: tl.constexpr,
    text: tl.constexpr,
    nothing: tl.constexpr,
    dtype: tl.constexpr,
    made: tl.constexpr,
    several: tl.constexpr,
    function: tl.constexpr,
):
    value = tl.full((4,), part, dtype) + whole + made + several[0][1] + several[1]
    if yes and text == "add" and nothing is None:
        value = function(value)
    tl.store(out + tl.arange(0, 4), value)


@program
def constexprs_of_each_kind():
    out = torch.zeros(4)
    constexprs_kernel[(1,)](out, 3, 0.5, True, "add", None, tl.float32, tl.constexpr(7), ((1, 2), 4), scaled)
    constexprs_kernel[(1,)](out, -3, 1e-30, False, "é\n", 7, tl.float16, tl.constexpr(-1), ((1, 2), 4), scaled)
    return out


@triton.jit
def optional_kernel(x, bias, out, n, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    if HAS_BIAS:
        values += tl.load(bias + at, mask=at < n)
    tl.store(out + at, values, mask=at < n)


@program
def stand_ins_that_are_not_read():
    x, out, unused = torch.randn(6), torch.zeros(6), torch.empty(1)  # memory that nobody ever wrote
    optional_kernel[(1,)](x, unused, out, 6, BLOCK=8, HAS_BIAS=False)
    optional_kernel[(1,)](out, x, out, 6, BLOCK=8, HAS_BIAS=True)
    return out


def scaling_by(SCALE):
    """The interpreter runs a kernel's text in its module, and so with its SCALE; compiled, it scales by this one."""

    @triton.jit
    def scaling_kernel(x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) * SCALE, mask=at < n)

    return scaling_kernel


@program
def in_a_function_that_hides_a_global():
    x = torch.ones(8)
    scaling_by(tl.constexpr(7))[(1,)](x, 8, BLOCK=8)
    return x


Pair = namedtuple("Pair", ["left", "right"])


@triton.jit
def tuples_kernel(sources, outs, bias, flag, n, BLOCK: tl.constexpr, SHIFTS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.load(sources.left + at, mask=at < n) + tl.load(sources.right + at, mask=at < n)
    if bias is not None:
        total += tl.load(bias + at, mask=at < n)
    if flag:
        total = -total
    tl.store(outs[0] + at, total + SHIFTS[0], mask=at < n)
    tl.store(outs[1] + at, total + SHIFTS[1], mask=at < n)


@program
def tuples_and_none():
    a, b, bias = torch.randn(7), torch.randn(7), torch.randn(7)
    outs = torch.zeros(7), torch.zeros(7)
    tuples_kernel[(1,)](Pair(a, b), outs, None, YES, 7, BLOCK=8, SHIFTS=(1, 2))
    tuples_kernel[(1,)](Pair(a, b), outs, bias, NO, 7, BLOCK=8, SHIFTS=(1, 2))
    return outs


@triton.jit
def described_kernel(x, out, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    out.store([row, column], (x.load([row, column]) + 1).to(out.dtype))


@program
def descriptors():
    x, out = torch.randn(16, 32), torch.zeros(16, 32)
    given = TensorDescriptor.from_tensor(x, [8, 16]), TensorDescriptor(out, [16, 32], [32, 1], [8, 16])
    described_kernel[(2, 2)](*given, M=8, N=16)
    return out


@triton.jit
def launch_grid_kernel(x, grid, num_stages: tl.constexpr):
    tl.store(x + tl.program_id(0), grid + num_stages)


@program
def names_that_launches_have():
    x = torch.zeros(3)
    launch_grid_kernel[(3,)](x, 4, num_stages=2)
    return x


if VERSION >= (3, 9):

    @triton.jit
    def named_kernel(x, *, value, BLOCK: tl.constexpr = 4):
        tl.store(x + tl.arange(0, BLOCK), value)

else:  # which have no parameters that are given by name alone

    @triton.jit
    def named_kernel(x, value, BLOCK: tl.constexpr = 4):
        tl.store(x + tl.arange(0, BLOCK), value)


@program
def given_by_name_alone():
    x = torch.zeros(8)
    named_kernel[(1,)](x=x, value=2.0)
    named_kernel[(1,)](x[4:], value=3.0)
    return x


@program
def written_through_an_array_between():
    array = np.ones(6, np.float32)
    x, out = torch.from_numpy(array), torch.empty(8)
    double_kernel[(2,)](x, 6, BLOCK=4)
    array[0] = 5
    softmax_kernel[(1,)](out, x, 0, 0, 6, BLOCK=8, num_warps=4)
    out.numpy()[6:] = 7  # what the launch left as nobody wrote it
    double_kernel[(2,)](out, 8, BLOCK=4)
    return out.clone()


@triton.jit
def random_kernel(out, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.rand(seed, at))


@program
def random_numbers():
    out = torch.empty(16)
    random_kernel[(1,)](out, 17, BLOCK=16)
    return out


@torch.library.triton_op("opreplay_triton_tests::add_one", mutates_args=())
def add_one(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    torch.library.wrap_triton(fill_kernel)[(1,)](out, 1.0, x.numel(), BLOCK=16)
    return out + x


def inside_an_operator():
    return add_one(torch.randn(9))


if WRAPS_INTERPRETED:
    program(inside_an_operator)


CACHE = torch.zeros(9)


@torch.library.custom_op("opreplay_triton_tests::keep", mutates_args=())
def keep(x: torch.Tensor) -> torch.Tensor:
    fill_kernel[(1,)](CACHE, 2.0, x.numel(), BLOCK=16)  # memory that is no argument
    return CACHE + x


@program
def inside_an_operator_with_state():
    return keep(torch.randn(9)) + keep(torch.randn(9))
