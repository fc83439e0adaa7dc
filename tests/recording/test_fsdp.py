"""PyTorch's FSDP2: its own operators are recorded, and are there in a replay once their module may be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINING = """
import sys, torch, replayfmt
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

world = int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with replayfmt.capture(sys.argv[1]):
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""

REPLAYS = """
import sys, replayfmt
from replayfmt.errors import ReplayRefused

for allowed in ([], ["fsdp"]):
    try:
        with replayfmt.Plan(sys.argv[1], allow_imports=allowed) as plan:
            print(plan.execute(verify="bitwise").outcome)
    except ReplayRefused as refused:
        print(*refused.findings, sep=" | ")
"""


def python(*arguments: object) -> str:
    done = subprocess.run([sys.executable, "-c", *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_that_is_sharded_over_one_rank_replays_once_its_operators_may_be_imported(tmp_path: Path) -> None:
    """Gradients are put together by `fsdp::chunk_cat`, which a module of PyTorch's registers that nothing imports.
    Newer versions have an operator for it that is always there."""
    path = tmp_path / "one.opreplay"
    python(TRAINING, path, 1)
    without, allowed = python(REPLAYS, path).splitlines()
    assert allowed == "ok"
    if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):
        assert without == "ok"
    else:
        assert without.startswith("fsdp::chunk_cat.default does not exist") and without.count(" | ") == 0
        assert "--allow-import=fsdp lets it be imported; called 4 times" in without
