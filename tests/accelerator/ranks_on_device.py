"""A job of one rank whose tensors are on an accelerator. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import replayfmt
from replayfmt import Plan
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

register()
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
    for name in ("allgather_", "allreduce_", "broadcast_"):
        library.impl(name, _on_the_host(name), "PrivateUse1")
    dist.init_process_group("cpu:gloo,sim:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    library._destroy()


def trained(**options: Any) -> list[float]:
    """Train a model with parameters that no loss reaches, in several buckets, which are made anew after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)).to(DEVICE)
    hook = options.pop("hook", None)
    if "find_unused_parameters" in options:
        model[2].unused = nn.Linear(2, 2).to(DEVICE)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer, x, losses = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.randn(4, 8, device=DEVICE), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"hook": fp16_compress_hook},
    ],
    ids=" ".join,
)
def test_training_with_ddp_replays_bitwise_whatever_its_c_code_fills_and_moves_to_the_device(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = tmp_path / "a.opreplay"
    expected = trained(**options)
    with replayfmt.capture(path):
        assert trained(**options) == expected
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert find_races(reader) == []
    with Plan(path) as plan:
        result = plan.execute(verify="bitwise")
        assert result.outcome == "ok", str(result.divergence)
