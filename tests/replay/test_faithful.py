"""A replay does what the program did: aliasing, writes in place, metadata changed in place, randomness, settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import replayfmt
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.scan import WindowSize

from .conftest import Captured

WINDOWS = (WindowSize(), WindowSize(1, 1), WindowSize(2, 5))


def replay(path: Path, **options: Any) -> None:
    """Every window size, verified bit for bit, then twice fast and once more verified: state is restored each time."""
    for window in WINDOWS:
        with Plan(path, window=window, **options) as plan:
            for verify in ("bitwise", "none", "none", "auto"):
                result = plan.execute(verify=verify)
                assert result.outcome == "ok", (window, verify, str(result.divergence))
                assert result.verification.scalars > 0, "the fast path is verified by what the program read"
                if verify != "none":
                    assert result.verification.mode == "bitwise"
                    assert result.verification.digests > 0


def views_of_every_kind() -> None:
    x = torch.arange(24.0)
    y = x.view(4, 6)
    z = y.t()
    z.add_(1)
    y[1] = 7
    x[3:9].mul_(2)
    torch.as_strided(x, (3, 3), (2, 1)).sum().item()
    torch.ones(3).expand(2, 3).sum().item()
    torch.ones(2, 3).unbind(0)[1].add_(1).sum().item()
    torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).add(1).sum().item()
    x.sum().item()


def tensors_made_without_an_op() -> None:
    x = torch.arange(6.0)
    x.data[0] = 5
    p = torch.nn.Parameter(torch.ones(3))
    p.data = torch.full((4,), 3.0)
    (p * 2).sum().item()
    one, other = torch.ones(3), torch.zeros(3)
    torch.utils.swap_tensors(one, other)
    (one + 2 * other).sum().item()


def metadata_changed_in_place() -> None:
    x = torch.arange(12.0).view(3, 4)
    before = x.detach()
    x.t_()
    (before + x.t()).sum().item()
    x.unsqueeze_(0)
    x.squeeze_(0)
    x.transpose_(0, 1)
    (x * before).sum().item()
    x.as_strided_((2, 2), (4, 1))
    (x + before[:2, :2]).sum().item()


def storages_taken_over_and_resized() -> None:
    x = torch.arange(8.0)
    taken = torch.zeros(4).set_(x.untyped_storage(), 2, (3,), (2,))
    taken.add_(1)
    x.sum().item()
    grown = torch.zeros(3)
    grown.resize_(5).fill_(2)
    grown.sum().item()
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    out.sum().item()
    x.untyped_storage().resize_(400)
    wide = torch.empty(0).set_(x.untyped_storage(), 0, (30,))
    wide[8:].fill_(1)
    wide.sum().item()


def lazy_conjugates_and_negatives() -> None:
    h = torch.randn(3, dtype=torch.complex64)
    k = h.conj()
    (k * h).sum().item()
    k.imag.neg().sum().item()
    h.real.add_(1)
    torch.view_as_real(h).sum().item()


def forward_mode_and_vmap() -> None:
    x = torch.randn(3, 2)
    torch.func.jvp(torch.sin, (x,), (x,))
    torch.func.vmap(lambda row: row.sin().sum())(x)
    torch.func.hessian(lambda v: (v**3).sum())(torch.ones(2))


def lists_and_results_of_every_kind() -> None:
    parts = list(torch.ones(6).split(2))
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul(parts, parts)
    x = torch.arange(12.0).view(3, 4)
    x[:, torch.tensor([1, 3])] = 0
    torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    torch.linalg.qr(x)
    torch.topk(x, 2)
    torch.equal(x, x)
    bool(x.sum() > 0)
    torch.histc(x)
    torch.nonzero(x)
    torch.empty(0, 3).sum().item()
    torch.randn(3).to(torch.float8_e4m3fn).float()


def composite_layouts() -> None:
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0]), (2, 3))
    torch.sparse.mm(coo.coalesce() * 2, torch.ones(3, 2)).sum().item()
    csr = coo.to_dense().to_sparse_csr()
    csr.values().add_(1)
    csr.to_dense().sum().item()
    columns = csr.to_dense().to_sparse_csc()
    (columns + columns).to_dense().sum().item()  # only of one and the same tensor
    once_more = torch.sparse_csr_tensor(torch.tensor([0, 3, 3]), torch.tensor([1, 0, 1]), torch.ones(3), (2, 2))
    (once_more @ torch.ones(2, 4)).sum().item()  # indices that are not sorted, and more than there are columns
    q = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.quint8)
    q.view(2, 2).dequantize().sum().item()
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 0, torch.qint8).dequantize().sum().item()
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    (nested * 2).to_padded_tensor(0.0).sum().item()


def a_tensor_attached_to_its_own_memory() -> None:
    x = torch.arange(12.0).view(3, 4)
    x.set_(x.untyped_storage(), 2, (2, 2)).mul_(3)
    x.set_(x).sum().item()


def draws_from_default_and_own_generators() -> None:
    own = torch.Generator()
    own.manual_seed(3)
    torch.randn(3, generator=own)
    torch.manual_seed(5)
    torch.rand(2)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        torch.randn(2)
    torch.randperm(5)
    F.dropout(torch.ones(5))
    torch.nn.init.normal_(torch.empty(3))
    torch.seed()
    torch.rand(2).sum().item()
    torch.randn(3, generator=own).sum().item()


def settings_changed_on_the_way() -> None:
    torch.use_deterministic_algorithms(True)
    torch.ones(3).sum().item()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    torch.ones(2).sum().item()
    torch.set_default_dtype(torch.float32)
    torch.ones(2).sum().item()


def an_op_that_raises() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2) @ torch.ones(3)
    torch.ones(2).sum().item()


@pytest.mark.slow
def results_that_only_inputs_with_gradients_have() -> None:
    dense = torch.arange(24.0).view(4, 6) % 5
    for reduce, wanted in (("amax", True), ("amin", True), ("amax", False), ("mean", True)):
        sparse = dense.to_sparse_csr().requires_grad_(wanted)
        other = torch.arange(12.0).view(6, 2).requires_grad_(wanted)
        if wanted:
            torch.sparse.mm(sparse, other, reduce).sum().backward()
            other.grad.sum().item()
        with torch.no_grad():
            torch.sparse.mm(sparse, other, reduce).sum().item()
    lstm, steps = torch.nn.LSTM(4, 5), torch.ones(3, 2, 4)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            lstm(steps)[0].sum().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        views_of_every_kind,
        tensors_made_without_an_op,
        metadata_changed_in_place,
        results_that_only_inputs_with_gradients_have,
        storages_taken_over_and_resized,
        lazy_conjugates_and_negatives,
        forward_mode_and_vmap,
        lists_and_results_of_every_kind,
        composite_layouts,
        a_tensor_attached_to_its_own_memory,
        draws_from_default_and_own_generators,
        settings_changed_on_the_way,
        an_op_that_raises,
    ],
    ids=lambda program: program.__name__,
)
def test_replays_bit_for_bit_whatever_the_windows(program: Callable[[], None], captured: Captured) -> None:
    replay(captured(program))


def test_a_storage_written_from_outside_gets_its_new_content(captured: Captured) -> None:
    array = np.ones(4, dtype=np.float32)
    shared = torch.from_numpy(array)

    def program() -> None:
        (shared + 1).sum()
        array[1] = 5
        (shared * 2).sum().item()

    replay(captured(program))


@pytest.mark.slow
def test_a_training_step_replays_bit_for_bit_with_each_optimizer(captured: Captured) -> None:
    for name, make in {
        "loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    }.items():
        layers = (torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(8, 2))
        model = torch.nn.Sequential(*layers)
        optimizer = make(model.parameters())
        batch = torch.randn(3, 4)

        def program(model: Any = model, optimizer: Any = optimizer, batch: torch.Tensor = batch) -> None:
            for step in range(2):
                with replayfmt.scope(f"step {step}"):
                    optimizer.zero_grad()
                    loss = model(batch).pow(2).sum()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    loss.item()

        replay(captured(program, name))


@pytest.mark.slow
def test_a_transformer_trains_and_generates_bit_for_bit(captured: Captured) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 8))

    def train() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        loss.item()

    def generate() -> None:
        model.eval().generate(tokens, max_new_tokens=3, do_sample=True, pad_token_id=0).sum().item()

    def infer() -> None:
        with torch.inference_mode():
            model.eval()(tokens).logits.sum().item()

    for program in (train, generate, infer):
        replay(captured(program, program.__name__))


def test_batch_norm_writes_its_running_statistics_afresh_in_every_run(captured: Captured) -> None:
    # Its schema does not say that it writes them.
    norm = torch.nn.BatchNorm2d(3)
    batch = torch.randn(2, 3, 4, 4)
    replay(captured(lambda: (norm(batch), norm.running_mean.sum().item())))


def test_custom_operators_run_under_the_autocast_they_were_captured_with(captured: Captured) -> None:
    @torch.library.custom_op("replaytest::project", mutates_args=())
    def project(x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.ones(3, 3)).float()

    @torch.library.custom_op("replaytest::shift_", mutates_args=("x",))
    def shift(x: torch.Tensor, by: float) -> None:
        x.add_(by)

    x = torch.randn(3, 3)

    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            project(x)
        project(x)
        shift(x, 2.0)
        x.sum().item()

    replay(captured(program))


@pytest.mark.slow
def test_custom_operators_may_use_tensor_subclasses_inside(captured: Captured) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    @torch.library.custom_op("replaytest::both", mutates_args=())
    def both(x: torch.Tensor) -> torch.Tensor:
        pair = TwoTensor(x, x + 1) * 2
        return pair.a + pair.b

    x = torch.randn(3)
    replay(captured(lambda: both(x).sum().item()))


def test_one_op_alone_gives_its_results(captured: Captured) -> None:
    weight = torch.randn(3, 3)
    sums = []

    def program() -> None:
        doubled = weight * 2
        sums.append(doubled.sum())
        sums.append((doubled @ weight).sum())

    with replayfmt.open(captured(program)) as capture:
        by_name: dict[str, list[Any]] = {}
        for op in capture.ops:
            by_name.setdefault(op.kernel.name, []).append(op)
        assert torch.equal(by_name["aten::mul"][0].replay(), weight * 2)  # straight from what was imported
        assert torch.equal(by_name["aten::sum"][0].replay(), sums[0])  # after the op before it
        assert torch.equal(by_name["aten::sum"][1].replay(device="cpu"), sums[1])


def test_a_replay_leaves_everything_around_it_as_it_was(captured: Captured) -> None:
    from replayfmt.pytorch.environment import read_settings

    def program() -> None:
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.rand(3)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(False)
        torch.ones(2).sum()
        torch.set_grad_enabled(True)

    path = captured(program)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(2)
    try:
        before, state = read_settings(), torch.get_rng_state()
        with Plan(path) as plan:
            assert plan.execute(verify="auto").outcome == "ok"
        assert read_settings() == before
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.ones(1, requires_grad=True).mul(2).requires_grad
    finally:
        torch.set_default_dtype(torch.float32)
