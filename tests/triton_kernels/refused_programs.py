"""Programs that launch Triton kernels of which a capture cannot say how a replay would launch them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

from tests.triton_kernels.programs import applied_kernel, double_kernel

REFUSED: dict[str, Callable[[], object]] = {}
TABLE = torch.arange(4.0)


def refused(function: Callable[[], object]) -> Callable[[], object]:
    REFUSED[function.__name__] = function
    return function


@triton.jit
def global_kernel(out):
    tl.store(out, TABLE.shape[0])


@refused
def a_global_tensor():
    out = torch.zeros(1)
    global_kernel[(1,)](out)
    return out


@refused
def a_function_that_is_not_tritons():
    x = torch.ones(6)
    applied_kernel[(1,)](x, x, 6, BLOCK=8, function=lambda value: value + 1, into=tl.float32)
    return x


@triton.jit
def cast_kernel(addresses, out):
    tl.store(out, tl.load(tl.load(addresses).to(tl.pointer_type(tl.float32))))


@refused
def addresses_in_memory():
    x, out = torch.ones(1), torch.zeros(1)
    cast_kernel[(1,)](torch.tensor([x.data_ptr()]), out)
    return out


@refused
def addresses_as_arguments():
    x, out = torch.ones(1), torch.ones(1)
    double_kernel[(1,)](out, x.data_ptr(), BLOCK=1)
    return out


hooked_kernel = triton.jit(double_kernel.fn)
hooked_kernel.add_pre_run_hook(lambda x, *args, **kwargs: x.add_(1))


@refused
def hooks():
    x = torch.ones(4)
    hooked_kernel[(1,)](x, 4, BLOCK=4)
    return x


@refused
def the_launcher_of_a_compiled_kernel():
    x = torch.ones(4)
    launcher = CudaLauncher.__new__(CudaLauncher)  # as `compiled.run` gives one
    launcher(1, 1, 1, 0, object(), (), None, None, None, x, 4)
    return x
