"""The file of one rank: replayed alone, without a process group, with the recorded results of its collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.rank_files import events_of
from replayfmt.format.reader import open_capture

from . import launching

COLLECTIVES = """
t = torch.randn(8) + rank
peer = 1 - rank
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
    a = t.clone(); dist.all_reduce(a, op); out(op, a * 2)
parts = [torch.empty(8) for _ in range(world)]; dist.all_gather(parts, t); out("gather lists", *parts)
y = torch.empty(16); dist.all_gather_into_tensor(y, t); out("gather", y + 1)
z = torch.empty(4); dist.reduce_scatter_tensor(z, t); out("scatter sums", z + 1)
b = t.clone(); dist.broadcast(b, 0); out("broadcast", b + 1)
given = [torch.empty(8) for _ in range(world)] if rank == 0 else None
dist.gather(t, given, 0); out("to one", *(given or [t]))
s = torch.empty(8); dist.scatter(s, [t, t + 1] if rank == 0 else None, 0); out("from one", s + 1)
counts = torch.tensor([3, 5]) if rank else torch.tensor([6, 2])
theirs = torch.empty_like(counts); dist.all_to_all_single(theirs, counts)
mixed = torch.empty(int(theirs.sum()))
dist.all_to_all_single(mixed, t, theirs.tolist(), counts.tolist()); out("uneven", mixed + 1)
got = torch.empty(8)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, got, peer)]):
    work.wait()
out("ring", got + t)
objects = [None, None]; dist.all_gather_object(objects, {"rank": rank}); print(rank, "objects", objects)
laid_out = {"turned": torch.randn(4, 6).t(), "holes": torch.randn(8, 8)[:, :4], "values": torch.arange(6) // 2}
laid_out["negated"] = torch.randn(4, dtype=torch.complex64).conj().imag
for name, a in laid_out.items():
    dist.all_reduce(a, dist.ReduceOp.MAX); out(name, a + 1)
small = dist.new_group([0, 1]); c = t.clone(); dist.all_reduce(c, group=small); out("subgroup", c + 1)
dist.barrier()
"""
WAITS = """
if rank == 0:
    try:
        dist.all_gather([torch.empty(3)] * 2, torch.ones(2))      # raises, and meets nobody
    except RuntimeError:
        pass
pair = torch.ones(2, 1 << 14) * (rank + 1); pair = pair * 1
work = dist.all_reduce(pair[0], async_op=True)
other = pair[1] * 3                       # of the same storage, not in flight
work.wait(); work.wait(); out("half", pair[0] * 2, other)
a, b = torch.randn(8) + rank, torch.randn(8) * rank
first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
second.wait(); c = b + 1; first.wait(); out("other order", a + c)
d = torch.randn(8) + rank
future = dist.all_reduce(d, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
out("future", future.wait() + 1)
e = torch.randn(8) + rank
work = dist.all_reduce(e, async_op=True)
while not work.is_completed():
    time.sleep(0.001)
out("polled", e * 2)
f = torch.randn(8) + rank
never = dist.all_reduce(f, async_op=True)  # never waited for, never used
import torch.distributed._functional_collectives as functional
x = torch.ones(1 << 14) * (rank + 1)
y = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
v = y.view(128, 128)                       # used before it is there
torch.ops._c10d_functional.wait_tensor(y)
out("functional", v.sum() * 2)
g = functional.all_gather_tensor(torch.randn(4) * rank, 0, dist.group.WORLD); out("gathered", g + 1)
h = torch.ones(4) * (rank + 1)
dist._broadcast_coalesced(dist.group.WORLD, [h], 1 << 20, 0)  # waited for in C++
out("waited for in C++", h.add_(1))
del work, first, second, future, never     # they keep the group's threads, which Python's end may stop in the middle
"""
MODELS = """
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = torch.nn.parallel.DistributedDataParallel(layer, bucket_cap_mb=0.0001)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(4, 8) + rank).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
out("ddp", *model.parameters())
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(3)
sharded = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
fully_shard(sharded, mesh=mesh)
sharded(torch.randn(4, 8) + rank).square().mean().backward()
out("fsdp2", *(p.grad.to_local() for p in sharded.parameters()))
tensors = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
parallelize_module(tensors, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
tensors(torch.ones(4, 8)).square().mean().backward()
out("tensor parallel", *(p.grad.to_local() for p in tensors.parameters()))
"""


def files(folder: Path) -> list[Path]:
    found = [folder / "out" / f"rank{rank}.opreplay" for rank in range(launching.WORLD)]
    for path in found:
        with open_capture(path) as reader:
            assert not reader.summary.unsupported
    return found


@pytest.fixture(scope="module")
def said_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return launching.plain(tmp_path_factory.mktemp("plain"), COLLECTIVES + WAITS)


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_rank_replays_alone_bit_for_bit_and_its_program_computes_what_it_would(
    tmp_path: Path, recorder: str, said_alone: list[str]
) -> None:
    """Collectives in every form, on tensors of any layout, waited for at once, late, twice, in another order, by a
    future, by asking, never, or first used as a view."""
    said = launching.captured(tmp_path, COLLECTIVES + WAITS, f"--recorder={recorder}")
    assert len(said) == 46 and said == said_alone
    for path in files(tmp_path):
        assert replayfmt.run(path, verify="bitwise").outcome == "ok"


@pytest.mark.slow
def test_models_that_are_spread_over_ranks_replay_alone(tmp_path: Path) -> None:
    said = launching.captured(tmp_path, MODELS)
    assert said == launching.plain(tmp_path, MODELS)
    for path in files(tmp_path):
        assert replayfmt.run(path, verify="bitwise", allow_imports=["fsdp"]).outcome == "ok"


@pytest.mark.slow
@pytest.mark.usefixtures("sooner")
def test_a_llama_that_is_spread_over_ranks_generates_and_replays(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "tensor_parallel_llama.py"
    capture = launching.launch(tmp_path, launching.BIN / "opreplay-capture", "-o", "out/", example, "--tokens=2")
    assert [code for code, _text in capture] == [0, 0] and "tokens 1 2 3 4 5 6 7 8 " in capture[0][1]
    assert replayfmt.run(files(tmp_path)[1], verify="bitwise").outcome == "ok"
    together = launching.launch(tmp_path, "opreplay-run", "--verify=bitwise", "out/")
    assert [code for code, _text in together] == [0, 0] and "verified: bitwise" in together[0][1]


LISTENING = """
import datetime, threading
store, heard = dist.distributed_c10d._get_default_store(), []
def listen():
    store.wait(["go"], datetime.timedelta(seconds=20))
    heard.append("go")
listener = threading.Thread(target=listen)
if rank == 0:
    listener.start()
    time.sleep(0.5)
a = torch.ones(4)
dist.all_reduce(a)
if rank == 1:
    store.set("go", "")      # which comes after what both of them do
else:
    listener.join()
print(rank, "heard", heard, flush=True)
"""


@pytest.mark.slow
def test_a_thread_that_waits_in_the_store_holds_up_no_collective(tmp_path: Path) -> None:
    assert launching.captured(tmp_path, LISTENING) == ["0 heard ['go']", "1 heard []"]
    runs = {event["run"] for path in files(tmp_path) for event in events_of(open_capture(path)) if event.get("run")}
    assert len(runs) == 1


@pytest.mark.slow
def test_results_are_recorded_once_and_only_the_bytes_that_were_written(tmp_path: Path) -> None:
    """A collective on a part of a storage does not keep the rest; without results, one rank is refused alone."""
    program = "big = torch.zeros(1 << 20)\nfor _ in range(4):\n    dist.all_reduce(big[:64])\nout('sum', big[:64] + 1)"
    launching.captured(tmp_path, program)
    for path in files(tmp_path):
        with open_capture(path) as reader:
            assert reader.summary.storage_payload_bytes <= 4 * 256
        assert path.stat().st_size < 40_000
    (tmp_path / "none").mkdir()
    launching.captured(tmp_path / "none", program, "--collective-results=none")
    for path in files(tmp_path / "none"):
        with pytest.raises(ReplayRefused) as refused:
            replayfmt.run(path)
        assert "--collective-results=none" in " ".join(refused.value.findings)
