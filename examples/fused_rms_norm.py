"""A faster kernel for `demo::rms_norm`, to use in place of the captured one:

    opreplay-run --replay-kernel-substitution=demo::rms_norm=examples/fused_rms_norm.py norm.opreplay
    opreplay-benchmark --compare --replay-kernel-substitution=demo::rms_norm=examples/fused_rms_norm.py norm.opreplay

Where Triton is installed there is `rms_norm_triton` too, for CUDA or for TRITON_INTERPRET=1:

    ... --replay-kernel-substitution=demo::rms_norm=examples/fused_rms_norm.py:rms_norm_triton ...
"""

import importlib.util

# The original has to be here, because it is what a replacement is checked against: this registers it.
import rms_norm_op  # noqa: F401
import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """One pass over the data: PyTorch has a kernel for exactly this."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _rows(x, weight, out, width, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program normalizes one row."""
        row = tl.program_id(0)
        columns = tl.arange(0, block)
        inside = columns < width
        values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values) / width + eps)
        factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, values * scale * factors, mask=inside)

    def rms_norm_triton(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out = torch.empty_like(rows)
        block = triton.next_power_of_2(rows.shape[1])
        _rows[rows.shape[0],](rows, weight.contiguous(), out, rows.shape[1], eps, block=block)
        return out.view(x.shape)
