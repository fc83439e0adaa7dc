"""Small programs, each of one family of hard cases. Each returns tensors that live until the capture ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Program = Callable[[], Any]


def training_step() -> Any:
    layer = torch.nn.Linear(4, 3)
    loss = torch.relu(layer(torch.randn(2, 4))).sum()
    loss.backward()
    loss.item()
    return layer.weight.grad, loss


def views() -> Any:
    x = torch.randn(4, 4)
    y = x.t()
    y.add_(1)
    x[1].zero_()
    x.as_strided((2, 2), (1, 2), 1).mul_(3)
    x.as_strided((3, 2), (1, 1)).sum()  # overlaps itself
    wide = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) + 1
    return x, wide, torch.zeros(0, 3) + 1, torch.tensor(3.0) * 2, x.expand(2, 4, 4).sum(), x.unbind()[2]


def changed_metadata() -> Any:
    x = torch.randn(3, 4)
    x.t_()
    x.unsqueeze_(0)
    x.resize_(5, 5)
    x.zero_()
    taken = torch.empty(0)
    taken.set_(x.untyped_storage(), 2, (2,), (3,))
    taken.add_(1)
    out = torch.empty(0)
    torch.add(x, x, out=out)
    return x, taken, out


def parameters_given_other_data() -> Any:
    p = torch.nn.Parameter(torch.randn(3))
    p.data = torch.ones(5)
    p.data.add_(1)
    (p * 2).sum().backward()
    one, other = torch.randn(3), torch.randn(4)
    torch.utils.swap_tensors(one, other)
    return p.grad, one * 2, other * 3


def complex_numbers() -> Any:
    c = torch.randn(4, dtype=torch.complex64)
    c.real.add_(1)
    return c, c.conj().imag + 1, c.conj() * 2, torch.view_as_real(c).sum(), c * (1 + 2j), torch.full((2,), 1 - 1j)


def small_floats() -> Any:
    x = torch.randn(4)
    return [x.to(dtype).float() for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)]


def transforms() -> Any:
    x = torch.randn(4, 3)
    return (
        torch.vmap(lambda v: v * 2 + 1)(x),
        torch.func.jvp(torch.sin, (x,), (x,)),
        torch.func.grad(lambda v: (v * v).sum())(x),
        torch.func.hessian(lambda v: (v**3).sum())(torch.ones(2)),
        torch.func.functionalize(lambda v: v.clone().add_(1))(x),
    )


def uninitialized_memory() -> Any:
    rows = torch.empty(4, 4)
    rows[:2] = 1
    rows[2:] = 2
    columns = torch.empty(8, 8)
    columns[:, ::2] = 1
    columns[:, 1::2] = 3
    inverse = torch.empty(4, dtype=torch.long)
    inverse[torch.randperm(4)] = torch.arange(4)
    product = torch.baddbmm(torch.empty(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 2), beta=0)
    return (
        rows.sum(),
        columns.sum(),
        inverse + 1,
        product,
        torch.empty(3).normal_() + 1,
        torch.empty_like(rows).copy_(rows),
    )


def partly_written_memory() -> Any:
    cache = torch.empty(4, 8)
    cache[:, 2:5] = 1
    return cache, cache[:, 2:5] * 2


def resized_storages() -> Any:
    x = torch.randn(5, 5)
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(100)
    x.fill_(2)
    return x, x * 2


def lists() -> Any:
    parts = list(torch.ones(6).split(2))
    torch._foreach_add_(parts, 1.0)
    made = torch._foreach_mul(parts, parts)
    x = torch.arange(12.0).view(3, 4)
    x[:, torch.tensor([1, 3])] = 0
    return parts, made, x, torch.cat(parts), torch.stack(made), x[torch.tensor([True, False, True])]


def results_of_every_kind() -> Any:
    x = torch.arange(10)
    return (
        torch.unique(x % 3, return_inverse=True),
        torch.nonzero(x > 3),
        torch.linalg.svd(torch.randn(3, 3)),
        torch.fft.rfft(torch.randn(8)),
        torch.einsum("ij,jk", torch.randn(2, 3), torch.randn(3, 2)),
        torch.equal(x, x),
        torch.bincount(x),
        x.sort(),
        torch.topk(x, 3),
        torch.result_type(x, 1.0),
        x.float().max(dim=0),
        torch.stft(torch.randn(64), 16, return_complex=True, window=torch.hann_window(16)),
    )


def recurrence() -> Any:
    lstm = torch.nn.LSTM(4, 5, 2)
    output, _ = lstm(torch.randn(3, 2, 4))
    output.sum().backward()
    with torch.no_grad():
        again, _ = lstm(torch.randn(3, 2, 4))
    return output, again


def inference_mode() -> Any:
    with torch.inference_mode():
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q, k, v)
        return layer(torch.randn(2, 5, 16)), attended, F.linear(q, v[0, 0]), F.layer_norm(q, (8,))


def exceptions() -> Any:
    x = torch.randn(2, 3)
    for wrong in (lambda x: x @ x, lambda x: x.view(7)):
        try:
            wrong(x)
        except RuntimeError:
            x = x + 1
    return x


def random_numbers() -> Any:
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randn(3, generator=generator), torch.randn(3), torch.randperm(5, generator=generator)]
    torch.manual_seed(3)
    drawn += [F.dropout(torch.ones(10)), torch.bernoulli(torch.full((4,), 0.5), generator=torch.default_generator)]
    torch.default_generator.manual_seed(5)
    drawn += [torch.rand(3), torch.nn.init.trunc_normal_(torch.empty(4)), torch.multinomial(torch.ones(4), 2)]
    generator.manual_seed(9)
    # The generator lives on: another one at the address of a dead one would go under the dead one's id.
    return drawn, torch.rand(2, generator=generator), generator


def settings() -> Any:
    image, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    made = []
    torch.set_flush_denormal(True)
    made.append(torch.tensor([1e-40]) * 1)
    torch.set_flush_denormal(False)
    made.append(torch.tensor([1e-40]) * 1)
    torch.backends.mkldnn.enabled = False
    made.append(F.conv2d(image, weight))
    torch.backends.mkldnn.enabled = True
    made.append(F.conv2d(image, weight))
    torch.set_default_dtype(torch.float64)
    made.append(torch.ones(3) * 2.0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    made.append(torch.empty(3) + 1)  # filled: no unseen write
    torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made.append(torch.ones(4, 4) @ torch.ones(4, 4))
    return made


def shared_memory() -> Any:
    array = np.ones(4, np.float32)
    t = torch.from_numpy(array)
    again = torch.from_numpy(t.numpy())
    again.add_(1)
    x = torch.randn(4)
    whole, part = torch.from_dlpack(x), torch.from_dlpack(x[1:])
    whole.add_(1)
    part.mul_(2)
    return t + 1, x * 3, whole, part + 1


def sparse_and_quantized() -> Any:
    dense = torch.randn(4, 4).relu()
    coo = dense.to_sparse()
    twice = (coo + coo).coalesce()
    coo.add_(coo)
    coo._values().mul_(2)
    compressed = [
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ]
    per_tensor = torch.quantize_per_tensor(dense, 0.1, 5, torch.quint8)
    per_channel = torch.quantize_per_channel(dense, torch.rand(4) + 0.1, torch.zeros(4).long(), 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    return (
        twice.to_dense(),
        coo.to_dense(),
        [c.to_dense() for c in compressed],
        compressed[0] @ torch.ones(4, 1),
        per_tensor.dequantize(),
        per_tensor.int_repr(),
        per_channel.dequantize(),
        (nested * 2).to_padded_tensor(0.0),
    )


PLAIN: tuple[Program, ...] = (
    training_step,
    views,
    changed_metadata,
    parameters_given_other_data,
    complex_numbers,
    small_floats,
    transforms,
    uninitialized_memory,
    partly_written_memory,
    resized_storages,
    lists,
    results_of_every_kind,
    recurrence,
    inference_mode,
    exceptions,
    random_numbers,
    settings,
    shared_memory,
    sparse_and_quantized,
)
