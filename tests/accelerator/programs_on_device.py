"""Programs that use streams as people write them. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from torch import nn
from torch.utils.checkpoint import checkpoint

import replayfmt
from replayfmt import Plan
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

sim = register()
DEVICE = "sim:0"


def current(device: str = DEVICE) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def recorded(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def gradients(model: nn.Module) -> list[float]:
    return [each.grad.sum().item() for each in model.parameters() if each.grad is not None]


def prefetching_batches() -> list[float]:
    """The next batch travels from pinned memory on a stream of its own while the model trains on this one."""
    torch.manual_seed(0)
    side, model = torch.Stream(DEVICE), nn.Linear(4, 2).to(DEVICE)
    batches = iter([torch.randn(8, 4).pin_memory() for _ in range(3)])
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

    def preload() -> torch.Tensor | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with side:
            return batch.to(DEVICE, non_blocking=True)

    following = preload()
    while following is not None:
        current().wait_stream(side)
        batch = following
        batch.record_stream(current())
        following = preload()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def pipeline_over_two_devices() -> list[float]:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).to("sim:0"), nn.Linear(4, 2).to("sim:1")
    one, two, losses = torch.Stream("sim:0"), torch.Stream("sim:1"), []
    one.wait_stream(current("sim:0"))
    two.wait_stream(current("sim:1"))
    for batch in [torch.randn(3, 4) for _ in range(3)]:
        with one:
            hidden = first(batch.to("sim:0")).relu()
        two.wait_event(recorded(one))
        with one, two:
            losses.append(second(hidden.to("sim:1")).square().mean())
    with one, two:
        torch.stack(losses).sum().backward()
    for device, stream in (("sim:0", one), ("sim:1", two)):
        torch.accelerator.synchronize(device)
        current(device).wait_stream(stream)
    return gradients(first) + gradients(second)


def microbatches_on_streams() -> list[float]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to(DEVICE), torch.randn(6, 4, device=DEVICE)
    streams, losses = [torch.Stream(DEVICE) for _ in range(3)], []
    for number, stream in enumerate(streams):
        stream.wait_stream(current())
        with stream:
            x.record_stream(stream)
            losses.append(model(x[number * 2 : number * 2 + 2]).square().sum())
    for stream, loss in zip(streams, losses, strict=True):
        current().wait_stream(stream)
        loss.record_stream(current())
    torch.stack(losses).sum().backward()
    return gradients(model)


class TwiceOnSideInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        side = torch.Stream(DEVICE)
        side.wait_stream(current())
        with side:
            gradient.record_stream(side)
            result = gradient * 2
        current().wait_stream(side)
        result.record_stream(current())
        return result


def stream_in_backward() -> list[float]:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    TwiceOnSideInBackward.apply(x * 3).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()  # type: ignore[no-any-return]


def sharded_weights() -> list[float]:
    """Weights are gathered one layer ahead into memory that is freed after use, gradients reduced on a third stream."""
    torch.manual_seed(0)
    ahead, after, layers = torch.Stream(DEVICE), torch.Stream(DEVICE), range(3)
    shards = [[torch.randn(8, device=DEVICE) for _ in range(2)] for _ in layers]
    full = [torch.empty(16, device=DEVICE) for _ in layers]
    for each in full:
        each.untyped_storage().resize_(0)
    gathered, released = dict[int, torch.Event](), dict[int, torch.Event]()
    ahead.wait_stream(current())

    def gather(layer: int) -> None:
        with ahead:
            if layer in released:
                ahead.wait_event(released[layer])
            full[layer].untyped_storage().resize_(64)
            torch.cat(shards[layer], out=full[layer])
            gathered[layer] = recorded(ahead)

    x, inputs, reduced = torch.randn(4, 4, device=DEVICE), [], []
    gather(0)
    for layer in layers:
        if layer + 1 in layers:
            gather(layer + 1)
        current().wait_event(gathered[layer])
        inputs.append(x)
        x = torch.tanh(x @ full[layer].view(4, 4))
        released[layer] = recorded(current())
    gradient = torch.ones_like(x)
    for layer in reversed(layers):
        gather(layer)
        current().wait_event(gathered[layer])
        of_weight = inputs[layer].t() @ gradient
        gradient = gradient @ full[layer].view(4, 4).t()
        released[layer] = recorded(current())
        after.wait_stream(current())
        with after:
            of_weight.record_stream(after)
            part = of_weight.reshape(-1).chunk(2)[0] * 0.5
            shards[layer][0].sub_(part)
        current().wait_stream(after)
        part.record_stream(current())
        reduced.append(part)
    return [each.sum().item() for each in (*reduced, *(shard[0] for shard in shards))]


def activations_on_the_host() -> list[float]:
    """Saved tensors travel to pinned memory on a stream of their own, and back."""
    torch.manual_seed(0)
    side = torch.Stream(DEVICE)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.is_leaf:
            return tensor
        side.wait_stream(current())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with side:
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(side)
        return host, recorded(side)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        current().wait_event(packed[1])
        return packed[0].to(DEVICE, non_blocking=True)  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    x = torch.randn(5, 4, device=DEVICE)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (model(x) ** 2).mean()
    loss.backward()
    return gradients(model)


def reduced_in_buckets() -> list[float]:
    """Each gradient is reduced on a stream of its own as soon as it is there."""
    torch.manual_seed(0)
    model, side = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE), torch.Stream(DEVICE)
    events = []

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        side.wait_stream(current())
        with side:
            parameter.grad.record_stream(side)
            parameter.grad.mul_(0.5)
        events.append(recorded(side))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    model(torch.randn(3, 4, device=DEVICE)).square().sum().backward()
    for event in events:
        current().wait_event(event)
    return gradients(model)


def checkpointed_on_a_stream() -> list[float]:
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh()).to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    side = torch.Stream(DEVICE)
    side.wait_stream(current())
    with side:
        x = torch.randn(3, 4, device=DEVICE, requires_grad=True)
        head(checkpoint(model, x, use_reentrant=False)).sum().backward()
    current().wait_stream(side)
    return gradients(model)


def threads_with_streams() -> list[float]:
    base, found = torch.ones(4, device=DEVICE) * 2, dict[int, float]()
    torch.accelerator.synchronize()

    def work(number: int) -> None:
        stream = torch.Stream(DEVICE)
        with stream:
            found[number] = (base * number + number).sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(3)]


@pytest.mark.parametrize(
    "program",
    [
        prefetching_batches,
        pipeline_over_two_devices,
        microbatches_on_streams,
        stream_in_backward,
        sharded_weights,
        activations_on_the_host,
        reduced_in_buckets,
        checkpointed_on_a_stream,
        threads_with_streams,
    ],
)
def test_programs_with_streams_replay_bitwise(tmp_path: Path, program: Callable[[], list[float]]) -> None:
    path = tmp_path / "a.opreplay"
    expected = program()
    for device in ("sim:0", "sim:1"):
        torch.accelerator.synchronize(device)
    with replayfmt.capture(path):
        assert program() == expected
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert find_races(reader) == []
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:  # type: ignore[arg-type]
            assert plan.execute(verify="bitwise").outcome == "ok"
            callers = torch.Stream(DEVICE)
            with callers:
                result = plan.execute(verify="bitwise")
                assert current() == callers, "the caller's stream is current again"
            assert result.outcome == "ok", str(result.divergence)


def test_attention_that_returns_lengths_missing_tensors_and_unwritten_seeds_replays(tmp_path: Path) -> None:
    """As flash attention does on a GPU; what a backward pass is to get is alive at the end."""
    q = torch.randn(2, 4, 32, 16, device="sim:0")
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), torch.no_grad():
        kept = [torch.ops.aten._scaled_dot_product_flash_attention(q, q, q) for _ in range(3)]
        assert [kept[0][index] for index in (2, 3, 4, 5)] == [None, None, 32, 32]
        y = kept[2][0] + 1
    assert not open_capture(path).summary.unsupported
    with Plan(path) as plan:
        for _ in range(2):
            result = plan.execute(verify="auto")
            assert result.outcome == "ok" and not result.nondeterministic, result.divergence
    del kept, y
