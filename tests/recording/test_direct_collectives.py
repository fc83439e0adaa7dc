"""Collectives that no operator tells of: on a backend itself, by a group written in Python, in flight at the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.pytorch.operators import operator_named

BEGIN = """
import sys
import torch, torch.distributed as dist
import replayfmt
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
group = dist.group.WORLD
backend = group._get_backend(torch.device("cpu"))
x = torch.ones(4)

class Own(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)

    def allreduce(self, tensors, options=None):
        for tensor in tensors:
            torch.from_numpy(tensor.numpy()).mul_(2)
own = Own()
"""
PROGRAMS = {
    "on the backend": ("", "backend.allreduce([x]).wait()"),
    "on the backend, by another method": ("", "backend.broadcast([x]).wait()"),
    "on a group of its own class": ("", "own.allreduce([x])"),
    "on a group of a class that is new": (
        "",
        """
    class Newer(Own):
        def allreduce(self, tensors, options=None):
            return Own.allreduce(self, tensors)
    Newer().allreduce([x])""",
    ),
    "in flight": ("work = dist.all_reduce(x, async_op=True)", "work.wait()"),
    "in flight, a future": ("future = dist.all_reduce(x, async_op=True)", "future.get_future().wait()"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_collective_that_no_operator_tells_of_is_refused(tmp_path: Path, recorder: str) -> None:
    lines = [BEGIN]
    for number, (before, inside) in enumerate(PROGRAMS.values()):
        lines += [
            before,
            f"with replayfmt.capture('{number}.opreplay', recorder='{recorder}'):",
            "    y = x + 1",
            f"    {inside.strip()}",
            "    z = (x @ x).relu()",
        ]
    # Those that pass an operator are recorded.
    lines += [
        f"with replayfmt.capture('operator.opreplay', recorder='{recorder}'):",
        "    dist.all_reduce(x); y = x + 1",
        f"with replayfmt.capture('none.opreplay', recorder='{recorder}'):",
        "    y = x + 1",
        "assert type(own).allreduce.__closure__ is None, 'methods are put back'",
    ]
    store = f"file://{tmp_path / 'store'}"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), store], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for number, name in enumerate(PROGRAMS):
        path = tmp_path / f"{number}.opreplay"
        with replayfmt.open(path) as capture:
            assert set(capture.summary.unsupported) == {"collective"}, name
        with pytest.raises(ReplayRefused) as refused:
            replayfmt.run(path)
        assert any("unsupported, collective: " in each for each in refused.value.findings)
    with replayfmt.open(tmp_path / "operator.opreplay") as capture:
        assert not capture.summary.unsupported
    with replayfmt.open(tmp_path / "none.opreplay") as capture:
        assert not capture.summary.unsupported


def test_operators_of_serving_engines_that_share_memory_are_collectives() -> None:
    for name in ("_C::shm_allreduce", "_C::shm_gather", "_C::init_shm_manager", "_C_custom_ar::all_reduce"):
        assert operator_named(name).collective, name
    assert not operator_named("_C::rms_norm").collective
