"""A job of one rank whose tensors are on an accelerator. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import replayfmt
from replayfmt import Plan
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

sim = register()
DEVICE = "sim:0"


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_map(each, function) for each in value]
    return function(value) if isinstance(value, torch.Tensor) else value


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for each in value for tensor in _flat(each)]


def _on_the_host(name: str) -> Callable[..., Any]:
    """A collective of tensors on the device, by gloo."""

    def run(written: Any, *args: Any) -> Any:
        there = _map(written, torch.Tensor.cpu)
        *results, work = getattr(torch.ops.c10d, name).default(there, *_map(args, torch.Tensor.cpu))
        dist.Work.unbox(work).wait()
        for tensor, host in zip(_flat(written), _flat(there), strict=True):
            tensor.copy_(host)
        return (written, work) if results else work

    return run


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    library = torch.library.Library("c10d", "IMPL")
    for name in ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allreduce_", "broadcast_"):
        library.impl(name, _on_the_host(name), "PrivateUse1")
    dist.init_process_group("cpu:gloo,sim:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    library._destroy()


def with_ddp(hook: Any = None, **options: Any) -> nn.Module:
    """A model with parameters that no loss reaches, in several buckets, which are made anew after a step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)).to(DEVICE)
    if "find_unused_parameters" in options:
        model[2].unused = nn.Linear(2, 2).to(DEVICE)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


def with_shards() -> nn.Module:
    mesh = init_device_mesh("sim", (1,))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(DEVICE)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def trained(made: Callable[[], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model = made()
    optimizer, x, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8, device=DEVICE), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "made",
    [
        with_ddp,
        partial(with_ddp, find_unused_parameters=True),
        partial(with_ddp, static_graph=True, gradient_as_bucket_view=True),
        partial(with_ddp, fp16_compress_hook),
        with_shards,
    ],
    ids=["ddp", "ddp, unused parameters", "ddp, static graph", "ddp, hook", "fsdp2"],
)
def test_training_replays_bitwise_whatever_ddp_fills_in_c_and_moves_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], nn.Module]
) -> None:
    for name, value in {  # what FSDP asks of a device's module
        "Stream": lambda **_: torch.Stream(DEVICE),
        "Event": lambda **_: torch.Event(DEVICE),
        "current_stream": lambda *_: torch.accelerator.current_stream(DEVICE),
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(sim, name, value, raising=False)
    path = tmp_path / "a.opreplay"
    expected = trained(made)
    with replayfmt.capture(path):
        assert trained(made) == expected
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert find_races(reader) == []
    with Plan(path) as plan:
        result = plan.execute(verify="bitwise")
        assert result.outcome == "ok", str(result.divergence)


def summed_on_a_stream_of_its_own() -> float:
    """The host waits for nothing: what a library's own streams do for a collective orders it before the wait."""
    main, side = torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)
    x = torch.arange(4.0, device=DEVICE)
    side.wait_stream(main)
    with side:
        y = x * 3
        work = dist.all_reduce(y, async_op=True)
    work.wait()
    return (y + 1).sum().item()


def test_a_wait_on_another_stream_comes_after_what_the_collective_came_after(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    sim.tolerate_races(True)  # gloo knows nothing of these streams
    try:
        with replayfmt.capture(path):
            assert summed_on_a_stream_of_its_own() == 22
    finally:
        sim.tolerate_races(False)
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert find_races(reader) == []
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:  # type: ignore[arg-type]
            assert plan.execute(verify="bitwise").outcome == "ok"
