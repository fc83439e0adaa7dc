"""--cuda-graph: calls of an op launched together, without the gaps in which a device waits for the host."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import replayfmt
from replayfmt.benchmark.meters import Clock
from replayfmt.benchmark.per_op.measuring import NoGraph, graph_of, graphs_of, measure_ops
from replayfmt.benchmark.per_op.op_report import make_op_report
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.statistics import MinTime
from replayfmt.errors import UsageError
from replayfmt.pytorch import accelerators
from replayfmt.replay.plan import Plan

TICK_NS = 100_000  # the clock moves so far each time it is read; a call between two readings takes no more


class Device:
    """A device that is made up: the calls in a graph take half a millisecond together, putting back takes nothing."""

    def __init__(self):
        self.now = 0
        self.recorded = []

    def clock(self):
        def real():
            self.now += TICK_NS
            return self.now

        return Clock(real=real, cpu=lambda: 0)

    def record(self, work):
        self.recorded.append(work)
        work()
        return lambda: self.launch(work)

    def launch(self, work):
        calls = 0 if "restore" in work.__qualname__ else TICK_NS * 5
        self.now += calls
        work()


def measured(path, device, record=None, **options):
    with Plan(path, keep_going=True) as plan:
        asked = OpOptions(MinTime(iterations=3), "none", cuda_graph=True, **options)
        run = measure_ops(
            plan, asked, clock=device.clock(), progress=lambda *_: None, record_graph=record or device.record
        )
        return run, make_op_report(run, plan)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "calls.opreplay"
    with replayfmt.capture(found, digests="none"):
        x = torch.ones(8)
        x.mul_(2)
        torch.sin(x)
    return found


def test_a_graph_holds_many_calls_and_its_time_is_theirs(path):
    device = Device()
    run, report = measured(path, device, pattern="aten::sin")
    (op,) = run.ops
    assert op.graph_calls == 5 and op.eager_ns == TICK_NS  # half a millisecond of calls of 100 us
    assert set(op.samples) == {(TICK_NS * 5 + TICK_NS) / 5} and op.calls == 5 * len(op.samples)
    (row,) = report.rows
    assert row["graphs"] == 1 and row["no_graph"] is None and row["eager_time"] == TICK_NS
    assert report.context["cuda_graph"] and report.context["inputs"].startswith("hot")


def test_putting_back_what_a_call_writes_is_in_a_graph_of_its_own_and_subtracted(path):
    device = Device()
    run, _report = measured(path, device, pattern="aten::mul_")
    (op,) = run.ops
    assert len(device.recorded) == 2 and op.graph_calls == 5
    assert set(op.samples) == {TICK_NS * 5 / 5}  # what reading the clock takes is in both, and in neither


def test_an_op_in_a_graph_leaves_the_replay_as_it_was(path):
    run, _report = measured(path, Device())
    assert {op.verdict for op in run.ops} == {"ok"}
    with Plan(path, keep_going=True) as plan:
        before = plan.execute(verify="none", keep_going=True)
    assert before.outcome == "ok"


def test_what_cannot_be_put_into_a_graph_is_measured_call_by_call_and_says_why(path):
    def refuse(_work):
        raise NoGraph("RuntimeError: operation not permitted when stream is capturing")

    run, report = measured(path, Device(), refuse, pattern="aten::sin")
    (op,) = run.ops
    assert op.graph_calls is None and op.times is not None and op.times.median == TICK_NS
    (row,) = report.rows
    assert row["graphs"] == 0 and "eager_time" not in row
    assert row["no_graph"] == ["RuntimeError: operation not permitted when stream is capturing"]
    assert any(
        warning.startswith("1 op could not be put into a graph") and "1 x RuntimeError" in warning
        for warning in report.context["warnings"]
    )


def test_an_op_that_moves_the_memory_that_it_writes_has_no_graph():
    places = iter([(1,), (2,)])
    op = SimpleNamespace(
        writes=True, restore=lambda: None, calls=lambda count: None, addresses=lambda: next(places), ordinal=0
    )
    with pytest.raises(NoGraph, match="it moves the memory that it writes"):
        graph_of(op, 1000.0, lambda work: work)


class CudaOf211:
    """What PyTorch 2.11 has of graphs: those of torch.cuda, and none of torch.accelerator. Streams by their names.

    A capture that `refuses` ends neither what its pool is for nor the generator's part in it.
    """

    def __init__(self, patch):
        self.current, self.log, self.refuses = "default", [], False
        self.pools, self.released, self.draws = [], [], True
        numbers = iter(range(9))
        cuda = self

        class CUDAGraph:
            def replay(self):
                self.work()

        class Graph:
            def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
                self.graph, self.pool, self.stream, self.mode = cuda_graph, pool, stream, capture_error_mode

            def __enter__(self):
                self.before, cuda.current = cuda.current, self.stream
                cuda.log.append(("begin", self.stream, self.mode))
                cuda.pools.append(self.pool)
                cuda.draws = False

            def __exit__(self, *_error):
                cuda.log.append(("end", self.stream))
                if cuda.refuses:
                    cuda.refuses = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.pools.remove(self.pool)
                cuda.draws = True
                self.graph.work = lambda: cuda.log.append("replayed")
                cuda.current = self.before

        def end(_index, pool):
            if pool not in self.pools:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.pools.remove(pool)

        patch.delattr(torch.accelerator, "Graph", raising=False)
        patch.setattr(torch, "Stream", lambda _device: nullcontext())
        for module, name, value in (
            (torch.cuda, "CUDAGraph", CUDAGraph),
            (torch.cuda, "graph", Graph),
            (torch.cuda, "Stream", lambda: "a stream"),
            (torch.cuda, "graph_pool_handle", lambda: (0, next(numbers))),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "_sleep", lambda _cycles: None),
            (torch._C, "_cuda_endAllocateToPool", end),
            (torch._C, "_cuda_releasePool", lambda *pool: self.released.append(pool)),
            (torch.cuda, "device", lambda _device: nullcontext()),
            (torch.accelerator, "synchronize", lambda _device: None),
            (torch.accelerator, "current_stream", lambda _device: self.current),
            (torch.accelerator, "set_stream", lambda stream: setattr(self, "current", stream)),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "set_device_index", lambda _index: None),
        ):
            patch.setattr(module, name, value)


def test_pytorch_2_11_records_calls_into_a_graph_of_torch_cuda(monkeypatch):
    cuda = CudaOf211(monkeypatch)
    launch = graphs_of([torch.device("cuda:0")])(lambda: cuda.log.append(f"issued to {cuda.current}"))
    captured = [("begin", "a stream", "thread_local"), "issued to a stream", ("end", "a stream")]
    assert cuda.log == ["issued to default", *captured]  # once to warm up
    launch()
    assert cuda.log[-1] == "replayed" and cuda.current == "default"


@pytest.mark.parametrize("refuses", [True, False])
def test_work_that_cannot_be_captured_gives_its_own_reason_and_all_back(monkeypatch, refuses):
    """The stream, the allocator and the generator; `refuses`: CUDA does, not the work itself."""
    cuda = CudaOf211(monkeypatch)
    monkeypatch.setattr(accelerators, "_spoilt", kept := [])

    def work():
        if cuda.current != "default":
            cuda.refuses = refuses
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NoGraph, match="operation not permitted when stream is capturing"):
        graphs_of([torch.device("cuda:0")])(work)
    assert (cuda.current, cuda.pools, cuda.draws) == ("default", [], True)
    assert (cuda.released, len(kept)) == (([(0, (0, 0))], 1) if refuses else ([], 0))  # PyTorch points to what is kept


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--per-op", "--cuda-graph"], "such as a CUDA device, and the replay works on cpu: leave it out"),
        (
            ["--cuda-graph"],
            "--cuda-graph needs a device that has graphs, such as a CUDA device, and the replay works on cpu",
        ),
        (["--cuda-graph", "--reconcile"], "--cuda-graph does not go with --reconcile"),
        (["--cuda-graph", "--energy"], "--cuda-graph does not go with --energy"),
        (["--per-op", "--cuda-graph", "--inputs=cold"], "leave --inputs=cold out"),
    ],
)
def test_graphs_that_cannot_be_are_one_line(tools, path, flags, words):
    ran = tools("benchmark", *flags, path)
    assert ran.code == 2 and words in ran.err and len(ran.err.splitlines()) == 1 and not ran.out


def test_a_replay_that_uses_no_cuda_device_and_one_of_two_have_no_graphs():
    with pytest.raises(UsageError, match="the replay works on cpu"):
        graphs_of([torch.device("cpu")])
    with pytest.raises(UsageError, match="measures one device, and the replay works on cuda:0, cuda:1"):
        graphs_of([torch.device("cuda:0"), torch.device("cuda:1")])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calls_in_a_cuda_graph_take_less_than_calls_one_by_one(tools, tmp_path):
    path, out = tmp_path / "gpu.opreplay", tmp_path / "results.json"
    with replayfmt.capture(path, digests="none"):
        x = torch.ones(64, device="cuda")
        x.mul_(2)
        x.t()
        torch.sin(x).sum().item()
    assert tools("benchmark", "--per-op", "--cuda-graph", f"--benchmark-out={out}", path).code == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["benchmarks"]}
    (sine,) = (row for name, row in rows.items() if "aten::sin" in name)
    assert sine["graphs"] == 1 and sine["real_time"] < sine["eager_time"] and sine["host_time"] > 0
    (view,) = (row for name, row in rows.items() if "aten::t." in name)
    (read,) = (row for name, row in rows.items() if "_local_scalar_dense" in name)
    assert "launches nothing" in view["no_graph"][0] and read["no_graph"]
    assert torch.randn(4, device="cuda").isfinite().all()  # the captures that failed keep no generator


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scope", [False, True])
def test_a_replay_in_one_cuda_graph_takes_less_than_op_by_op(tools, tmp_path, scope):
    path, out = tmp_path / "gpu.opreplay", tmp_path / "results.json"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(16, 64, device="cuda")
    with replayfmt.capture(path), replayfmt.scope("step"):
        model(batch).square().mean().backward()
        optimizer.step()
    flags = ["--scope=step"] if scope else []
    assert tools("benchmark", "--cuda-graph", *flags, f"--benchmark-out={out}", path).code == 0
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert row["graph"] is True, row["no_graph"]
    assert row["real_time"] < row["eager_time"] and row["host_time"] > 0 and "bit for bit" in row["graph_compared"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_that_cuda_cannot_capture_is_told(tools, tmp_path):
    path, out, x = tmp_path / "gpu.opreplay", tmp_path / "results.json", torch.ones(64)
    with replayfmt.capture(path):
        (x.cuda() * 2).relu()
    assert tools("benchmark", "--cuda-graph", f"--benchmark-out={out}", path).code == 0
    (row,) = json.loads(out.read_text())["benchmarks"]
    assert row["graph"] is False and "cuda could not capture it: ordinal" in row["no_graph"]
    assert torch.randn(4, device="cuda").isfinite().all()  # the capture that failed keeps no generator
