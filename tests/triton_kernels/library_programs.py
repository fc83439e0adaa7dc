"""Programs that launch kernels as libraries of kernels write them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.triton_kernels import helpers
from tests.triton_kernels.programs import calling_kernel, program


class FirstFit(triton.runtime.Autotuner):
    """It tries in its own way."""

    def _bench(self, *args, config, **meta):
        self.fn.run(*args, **meta, **config.all_kwargs())
        return [1.0 / config.kwargs["BLOCK"]] * 3


fitted_kernel = FirstFit(
    calling_kernel, calling_kernel.arg_names, [triton.Config({"BLOCK": size}) for size in (4, 8)], ["n"], None, None
)


@program
def autotuned_by_a_class_of_its_own():
    x, out = torch.randn(10), torch.zeros(10)
    for _ in range(2):
        fitted_kernel[lambda meta: (triton.cdiv(10, meta["BLOCK"]),)](x, out, 10)
    assert "_bench" not in vars(fitted_kernel)
    return out


def value_of(given):
    return given.value if isinstance(given, tl.constexpr) else given


@tl.constexpr
def bits_of(dtype: tl.constexpr) -> tl.dtype:
    return tl.core.get_int_dtype(value_of(dtype).primitive_bitwidth, False)


@tl.constexpr
def half_of(number):
    return value_of(number) // helpers.HALVES


@triton.jit
def sorted_bits_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = tl.load(x + at).to(bits_of(tl.float32), bitcast=True)
    tl.store(out + at, (bits >> half_of(BLOCK)).to(tl.int32))


@program
def functions_of_python_for_constants():
    out = torch.zeros(8, dtype=torch.int32)
    sorted_bits_kernel[(1,)](torch.randn(8), out, BLOCK=8)
    return out
