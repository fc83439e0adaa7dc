"""The folder of all ranks: checked before the first op, then replayed together, with real collectives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_process import Tools

import replayfmt
from replayfmt.benchmark.ranks import bus_factor, combined, lines
from replayfmt.format.codes import DType
from replayfmt.format.model import Kernel
from replayfmt.format.rank_files import LAUNCH, WAIT, describe, judge
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.synthesis import ImportedSession, imported_session, plain_tensor
from replayfmt.pytorch.collectives import Call, played_by
from replayfmt.replay.codegen.lowering import Shapes
from replayfmt.replay.plan import Plan

from . import launching
from .test_one_rank import COLLECTIVES, WAITS

pytestmark = pytest.mark.usefixtures("sooner")


def together(
    folder: Path, *flags: str, rank_1: str = "", tool: str = "run", timeout_s: int = 5
) -> list[tuple[int, str]]:
    """Replay the folder `out`; `rank_1`: more flags of that rank alone."""
    flags = ("--verify=bitwise", f"--collective-timeout={timeout_s}", *flags, "out/")
    run = f"exec opreplay-{tool} {' '.join(flags)} $([ $RANK = 1 ] && echo {rank_1!r})"
    return launching.launch(folder, "sh", "-c", run)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two ranks, captured without the results of its collectives: they have to be done again."""
    folder = tmp_path_factory.mktemp("job")
    launching.captured(folder, COLLECTIVES + WAITS, "--collective-results=none")
    return folder


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    shutil.copytree(job / "out", tmp_path / "out")
    return tmp_path


@pytest.mark.slow
def test_all_ranks_replay_together_bit_for_bit(copy: Path) -> None:
    """With files where two hosts left them, too."""
    out = copy / "out"
    for rank, host in enumerate(("near", "far")):
        (out / host).mkdir()
        (out / f"rank{rank}.opreplay").rename(out / host / f"rank{rank}.opreplay")
    (code, text), (other, silent) = together(copy)
    assert (code, other) == (0, 0), text + silent
    assert "verified: bitwise" in text and "verified" not in silent
    run_tool("check", str(out))
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert [each["file"] for each in manifest["ranks"]] == ["near/rank0.opreplay", "far/rank1.opreplay"]
    shutil.copytree(out / "far", out / "other")
    assert "rank 1 has several files" in findings(copy)


def run_tool(tool: str, *arguments: str) -> str:
    done = subprocess.run([f"opreplay-{tool}", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_a_rank_only_sends_is_waited_for_too(job: Path) -> None:
    """In C++, for instance, by DDP, whose rank 0 writes the buffers that it sends right after that."""
    for rank in range(launching.WORLD):
        wanted = 'select(.kind == "op" and (.op | startswith("opreplay::"))) | .op'
        ops = Counter(run_tool("dump", "--jq", wanted, str(job / f"out/rank{rank}.opreplay")).split())
        assert ops[f'"{LAUNCH}"'] - ops[f'"{WAIT}"'] == 1  # the one that the program never waits for


def findings(folder: Path, world: int = 2) -> str:
    return "\n".join(judge([describe(str(folder / "out"), rank, world) for rank in range(world)]))


@pytest.mark.slow
def test_files_that_do_not_belong_together_are_found_before_the_first_op(copy: Path, tmp_path: Path) -> None:
    out, spare = copy / "out", copy / "spare"
    manifest = json.loads((out / "manifest.json").read_text())  # whoever was captured last wrote it
    (out / "manifest.json").unlink()
    assert run_tool("check", str(out)).endswith("valid; manifest.json written\n")
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert manifest["problems"] == [] and [each["complete"] for each in manifest["ranks"]] == [True, True]
    assert [each["instance"] for each in manifest["groups"]] == [0, 1]
    rows = run_tool("dump", "--jq", 'select(.op == "opreplay::collective") | .rank', str(out)).split()
    assert rows.count("0") == rows.count("1") == manifest["ranks"][0]["collectives"]
    assert findings(copy) == ""
    assert "was captured with 2 ranks, and there are 3" in findings(copy, 3)
    (out / "rank0.opreplay").rename(spare)
    assert "rank0.opreplay" in findings(copy) and "no such file" in findings(copy).lower()
    (out / "rank1.opreplay").rename(out / "rank0.opreplay")
    spare.rename(out / "rank1.opreplay")
    refused = together(copy)
    assert [code for code, _text in refused] == [1, 1]
    said = "".join(text for _code, text in refused)
    assert said.count("rank0.opreplay: is the capture of rank 1") == 1  # by all ranks together
    edited = bytearray((out / "rank1.opreplay").read_bytes())
    edited[len(edited) // 2] ^= 1
    (out / "rank1.opreplay").write_bytes(edited)
    assert "rank1.opreplay" in findings(copy)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_of_them(copy: Path) -> None:
    """Its exit code is everyone's. Nobody waits for a rank that fails before its first collective; those that wait for
    a later one say for which collective, and that it failed."""
    (code, text), (other, _why) = together(copy, rank_1="--device=cuda:7", timeout_s=300)
    assert code == other != 0
    assert "nothing more was run: rank 1 failed" in text
    (copy / "raises.py").write_text("def kernel(*arguments):\n    raise RuntimeError('as it should')\n")
    given = "--replay-kernel-substitution=aten::mul.Tensor=raises.py:kernel"
    (code, text), (other, why) = together(copy, rank_1=given, timeout_s=300)
    assert code == other != 0 and "as it should" in why, why
    assert "c10d::allreduce_, collective 1 of the group of ranks 0,1, did not end" in text
    assert "rank 1 failed" in text


SLEEPS = "[time.sleep(0.05) for _ in iter(lambda: os.path.exists('told'), True)]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how"),
    [
        (0, "os.kill(os.getpid(), 9)"),
        (1, "os.kill(os.getpid(), 9)"),
        (1, SLEEPS),
        pytest.param(0, SLEEPS, marks=pytest.mark.sweep),  # whoever is asked, the store answers
    ],
)
def test_a_rank_that_does_not_come_is_named(copy: Path, who: int, how: str) -> None:
    """Whether it was killed, with the store perhaps, or does something else meanwhile."""
    (copy / "late.py").write_text(
        f"import os, time\ndef kernel(a, b):\n    if os.environ['RANK'] == '{who}':\n        {how}\n    return a * b\n"
    )
    run = "opreplay-run --collective-timeout=2 out/ --replay-kernel-substitution="
    wait = f"sh -c '{run}aten::mul.Tensor=late.py:kernel'; code=$?; touch told; exit $code"
    launched = launching.launch(copy, "sh", "-c", wait)
    assert all(code for code, _text in launched), launched
    said = launched[1 - who][1]
    assert "c10d::allreduce_, collective 1 of the group of ranks 0,1, did not end" in said, launched
    killed_with_the_store = who == 0 and how != SLEEPS
    assert ("does not answer" if killed_with_the_store else f"not launched by rank {who}") in said, launched
    assert "Traceback" not in said


RESTARTED = """
a = torch.ones(4) * (rank + 1)
dist.all_reduce(a)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 1:
        sys.exit(3)
    dist.all_reduce(a)      # rank 1 does not come
out("sum", a * 2)
"""


@pytest.mark.slow
def test_a_job_that_torchrun_starts_again_is_captured_again(tmp_path: Path) -> None:
    """As it would have gone on without a capture, beside what the first start left."""
    # The store outlives a start, and gloo would find the addresses of the earlier one.
    own = """"gloo", rank=int(os.environ["RANK"]), world_size=2, store=dist.PrefixStore(
    os.environ["TORCHELASTIC_RESTART_COUNT"],
    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False))"""
    program = launching.BEGIN.replace('"gloo"', own) + RESTARTED + launching.END
    (tmp_path / "program.py").write_text(program)
    torchrun = [launching.BIN / "torchrun", "--nproc-per-node=2", "--max-restarts=1", "--standalone", "--no-python"]
    done = subprocess.run(
        [*torchrun, launching.BIN / "opreplay-capture", "-o", "out/", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/rank1.opreplay").exists()  # that of the first start
    again = tmp_path / "out/restart1"
    assert json.loads((again / "manifest.json").read_text())["problems"] == []
    (tmp_path / "out").rename(tmp_path / "all")
    (tmp_path / "all/restart1").rename(tmp_path / "out")
    (code, text), (other, silent) = together(tmp_path)
    assert (code, other) == (0, 0), text + silent


SCOPES = """
import replayfmt
weights, flying = torch.randn(8), None
for step in range(3):
    with replayfmt.scope("step"):
        for _ in range(step + 1 + rank):      # the ranks' ordinals differ
            weights = weights * 0.5
        dist.all_reduce(weights)
        if step == 1:
            flying = dist.all_reduce(torch.ones(4), async_op=True)
with replayfmt.scope("late"):
    flying.wait()
    out("weights", weights * 2)
"""


@pytest.mark.slow
def test_the_same_part_of_every_rank_is_trimmed_and_replays_together(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching.captured(tmp_path, SCOPES)
    monkeypatch.chdir(tmp_path)
    refused = tools("trim", "out/", "part/", "--scope=late", "--verify=none")
    assert refused.code == 1 and "waits for collectives that are not launched" in refused.err
    assert not (tmp_path / "part").exists()
    itself = tools("trim", "out/", "out", "--scope=step", "--force")
    assert itself.code == 2 and "name another" in itself.err
    for place in ("out/rank0.opreplay", ""):
        nowhere = tools("trim", "out/", place, "--scope=step", "--force")
        assert nowhere.code == 1 and "cannot be made" in nowhere.err, nowhere.err
    for code in (0, 1):  # the second time the files are there
        done = tools("trim", "out/", "part/", "--scope=step")
        assert done.code == code, done.err
        assert ("part/rank1.opreplay: " in done.out) is not bool(code)
    assert sorted(each.name for each in (tmp_path / "part").iterdir()) == [
        "manifest.json",
        "rank0.opreplay",
        "rank1.opreplay",
    ]
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "part").rename(tmp_path / "out")
    (code, text), (other, silent) = together(tmp_path)
    assert (code, other) == (0, 0), text + silent
    assert "verified: bitwise" in text


TRACED = """
from torch.profiler import ExecutionTraceObserver, profile
import torch.distributed._functional_collectives as functional
observer = ExecutionTraceObserver().register_callback(f"et{rank}.json")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
observer.start()
with profile(record_shapes=True) as profiler:
    whole, part, peer = torch.ones(6, 2), torch.ones(3, 2) * 2, 1 - rank
    dist.all_gather_into_tensor(whole, part)
    dist.reduce_scatter_tensor(part, whole + 1)
    dist.broadcast(part * 1, src=1)
    both = [dist.P2POp(dist.isend, part[0], peer), dist.P2POp(dist.irecv, part[1], peer)]   # on one memory
    for work in dist.batch_isend_irecv(both):
        work.wait()
    dist.all_to_all_single(torch.ones(4), part.view(-1)[:4] + 1, *[[1 + 2 * rank, 3 - 2 * rank]] * 2)
    functional.all_reduce(part, "sum", dist.group.WORLD) + 1
    dist.barrier()
    model(torch.randn(2, 4)).sum().backward()
observer.stop()
observer.unregister_callback()
profiler.export_chrome_trace(f"kineto{rank}.json")
"""
C10D = [
    *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::broadcast_", "c10d::send", "c10d::recv_"),
    *("c10d::alltoall_base_", "_c10d_functional::all_reduce", "c10d::barrier"),
]


@pytest.mark.slow
def test_traces_of_all_ranks_become_a_folder_whose_collectives_are_real(
    tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching.plain(tmp_path, TRACED)
    monkeypatch.chdir(tmp_path)
    assert tools("import", "kineto0.json", "kineto1.json", "-o", "profiled/").code == 0
    for folder, ours in (("profiled", [*C10D[:6], "c10d::allreduce_", *C10D[7:]]), ("out", C10D)):
        if folder == "out":
            made = tools("import", "et0.json", "et1.json", "-o", "out/")
            assert made.code == 0 and "reduction=SUM: the trace does not record it" in made.out
        said = [describe(folder, rank, 2) for rank in range(2)]
        assert judge(said) == []
        for each in said:
            launched = [event["operator"] for event in each["events"] if "wait" not in event]
            assert launched[: len(ours)] == ours and launched[-1] == "c10d::allreduce_"  # that of DDP
            assert {event["work"] for event in each["events"] if "wait" not in event} == {
                event["wait"] for event in each["events"] if "wait" in event
            }
    for flags, code, words in ((), 1, "are not in the trace"), (("--collectives=none",), 0, "left out"):
        alone = tools("run", "out/rank1.opreplay", *flags)
        assert alone.code == code and words in alone.out + alone.err
    (code, text), (other, silent) = launching.launch(tmp_path, "opreplay-run", "out/")
    assert (code, other) == (0, 0), text + silent
    assert "not verified: the content of" in text


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 1)), batch_size=2, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x, y in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print("losses", accelerator.gather_for_metrics(loss.detach().reshape(1)).tolist())
accelerator.print("weights", float(accelerator.unwrap_model(model)[0].weight.double().sum()))
"""


@pytest.mark.sweep
def test_what_accelerate_launches_is_captured_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCELERATED)
    # Without --multi_gpu it starts one process for the CPU, or needs MPI.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--no_python"]
    launcher += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def printed(*command: object) -> list[str]:
        ran = subprocess.run(
            [*launcher, *map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    assert printed(launching.BIN / "opreplay-capture", "-o", "out/", "train.py") == printed(sys.executable, "train.py")
    assert [code for code, _text in together(tmp_path)] == [0, 0]
    alone = [launching.BIN / "opreplay-run", "--verify=bitwise", "out/rank1.opreplay"]
    assert subprocess.run(alone, cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_all_ranks_are_measured_together(copy: Path) -> None:
    (code, text), (other, silent) = together(
        copy,
        "--benchmark-min-time=0.1s",  # they agree on a number of replays
        "--benchmark-warmup=0",
        "--benchmark-format=json",
        "--benchmark-out=result.json",
        tool="benchmark",
        timeout_s=60,
    )
    assert (code, other) == (0, 0), text + silent
    document = json.loads((copy / "result.json").read_text())
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == document and "{" not in silent
    assert [row["name"] for row in document["benchmarks"]] == ["BM_replay/rank:0", "BM_replay/rank:1"]
    ranks = document["ranks"]
    assert [row["iterations"] for row in document["benchmarks"]] == [ranks["replays"]] * 2
    assert [row["rank"] for row in ranks["by_rank"]] == [0, 1]
    assert all(row["median_real_time"] > row["blocked_ns"] > 0 for row in ranks["by_rank"])
    assert sum(row["slowest_of_replays"] for row in ranks["by_rank"]) == ranks["replays"]
    calls = Counter({(each["operator"], each["bytes"]): each["calls"] for each in ranks["collectives"]})
    assert calls["c10d::allreduce_", 1 << 16] == 1 and calls["c10d::send", 32] + calls["c10d::recv_", 32] == 2
    with open_capture(copy / "out/rank0.opreplay") as reader:
        launches = sum(
            kernel is not None and kernel.name == LAUNCH
            for record in reader.records()
            for kernel in [reader.kernels[record.signature.kernel]]
        )
    assert calls.total() >= launches


@pytest.mark.slow
def test_the_ops_of_one_capture_are_shared_out_and_rank_0_has_the_times_of_all(job: Path, tmp_path: Path) -> None:
    flags = ("--per-op", "--roofline", "--peak-flops=1G", "--peak-bandwidth=1G", "--benchmark-min-time=2x")
    flags += ("--collectives=none", "--kernel=aten::*", "--op-limit=5", "--benchmark-out=ops.json")
    launched = launching.launch(tmp_path, "opreplay-benchmark", *flags, job / "out/rank1.opreplay")
    assert [code for code, _text in launched] == [0, 0], launched
    assert launched[0][1] and not launched[1][1]
    rows = json.loads((tmp_path / "ops.json").read_text())["benchmarks"]
    assert Counter(row["measured_on"] for row in rows) == {"rank 0, cpu": 3, "rank 1, cpu": 2}
    assert all(row["verdict"] == "ok" and row["real_time"] > 0 and row["bytes_read"] is not None for row in rows)


@pytest.mark.slow
def test_what_ranks_say_of_their_times_is_put_together() -> None:
    def said(number: int, time_ns: float, operator: str = "c10d::allreduce_", **more: Any) -> dict[str, Any]:
        about = {"operator": operator, "ranks": [0, 1], "instance": 0, "number": number, "peer": None, "tag": 0}
        return about | {"bytes": 1000, "time_ns": time_ns} | more

    first = [said(0, 500.0), said(1, 100.0), said(0, 50.0, "c10d::send", peer=1)]
    second = [said(0, 200.0), said(1, 900.0), said(0, 40.0, "c10d::recv_", peer=0)]
    heard = [
        {"real_ns": [1000.0, 1100.0, 1200.0], "blocked_ns": [650, 650, 650], "why_not": "", "collectives": first},
        {"real_ns": [1300.0, 1000.0, 1500.0], "blocked_ns": [1140, 1140, 1140], "why_not": "", "collectives": second},
    ]
    found = combined(heard)
    assert (found["slowest_ns"], found["skew_ns"]) == (1300, 300)
    assert [row["slowest_of_replays"] for row in found["by_rank"]] == [1, 2]
    assert [row["waited_for_ns"] for row in found["by_rank"]] == [800, 300 + 10]
    assert found["by_rank"][0]["waited_for_at"] == "c10d::allreduce_, collective 1"
    reduced, sent = found["collectives"]
    # Of both all-reduces the rank that came last saw the time of the transfer alone; two ranks move each byte once.
    assert (reduced["calls"], reduced["total_ns"], reduced["median_ns"]) == (2, 300, 150)
    assert reduced["bus_bytes_per_second"] == pytest.approx(1000 / 150e-9)
    assert (sent["calls"], sent["median_ns"]) == (1, 40)
    assert bus_factor("_c10d_functional::all_reduce", 4) == 1.5 and bus_factor("c10d::broadcast_", 4) == 1
    assert bus_factor("c10d::_reduce_scatter_base_", 4) == bus_factor("c10d::alltoall_", 4) == 0.75
    unknown = combined(
        [each | {"collectives": None, "why_not": "a wait does not block", "blocked_ns": None} for each in heard]
    )
    assert unknown["by_rank"][0]["blocked_ns"] is None and "does not block" in unknown["collectives_reason"]
    assert "not measured" in lines(unknown)[-1] and not any("blocked in" in line for line in lines(unknown))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--per-op"], "--per-op does not go"),
        (["--fail-above=5%"], "--fail-above=5% needs --baseline"),
        ([], "=N opreplay-benchmark"),
    ],
)
def test_a_folder_is_measured_under_torchrun_and_as_a_whole(job: Path, flags: list[str], said: str) -> None:
    command = ["opreplay-benchmark", *flags, "out/"]
    done = subprocess.run(command, cwd=job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr


def event(operator: str, work: int, number: int = 0, peer: int = -1, ranks: str = "0,1", run: str = "a") -> Any:
    size = [["float32", 4]]
    rest = {"instance": 0, "reduction": "SUM", "tag": 0, "run": run, "in": size, "out": size}
    return {"operator": f"c10d::{operator}", "ranks": ranks, "peer": peer, "number": number, "work": work} | rest


def job_of(*events: list[Any]) -> list[dict[str, Any]]:
    return [{"problems": [], "session": str(rank), "events": each} for rank, each in enumerate(events)]


def test_sequences_that_would_hang_are_refused() -> None:
    """Other runs, another order, a receive without a send, and groups that are interleaved in another order."""
    first, second = event("allreduce_", 0), event("broadcast_", 1, number=1, peer=0)
    wait = {"wait": 0}
    assert judge(job_of([first, second, wait], [first, second, wait])) == []
    assert "several runs" in judge(job_of([first], [event("allreduce_", 0, run="b")]))[0]
    assert "collective 0 is" in judge(job_of([first, second], [second, first]))[0]
    assert "nothing on rank 1" in judge(job_of([first, second], [first]))[0]
    send, receive = event("send", 0, peer=1), event("recv_", 0, peer=0)
    assert judge(job_of([send, wait], [receive, wait])) == []
    assert "0 sends and 1 receives" in judge(job_of([], [receive]))[0]
    assert "rank 0: waits for collectives that are not launched in its file: 3" in judge(job_of([{"wait": 3}], []))[0]
    one, two = event("allreduce_", 0), event("allreduce_", 1) | {"instance": 1}
    waits = {"wait": 0}, {"wait": 1}
    crossed = job_of([one, waits[0], two, waits[1]], [two, waits[1], one, waits[0]])
    assert "wait for each other for ever" in judge(crossed)[0]
    assert judge(job_of([one, two, *waits], [two, one, *waits])) == []


@pytest.mark.slow
def test_without_collectives_the_rest_is_timed_and_every_output_says_so(
    job: Path, tmp_path: Path, commands: Path
) -> None:
    """Of one rank alone, whose file has no results of collectives, and of all of them."""
    left_out = "the collectives were left out (--collectives=none)"
    one = "out/rank0.opreplay"

    def said(tool: str, *arguments: str) -> tuple[int, str]:
        command = [commands / f"opreplay-{tool}", *arguments]
        done = subprocess.run(command, cwd=job, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    assert said("run", one)[0] == 1  # this file has no results of its collectives
    code, text = said("run", "--collectives=none", one)
    assert code == 0 and f"not verified: {left_out}" in text
    code, text = said("run", "--collectives=none", "--format=jsonl", one)
    assert code == 0 and left_out in text
    code, text = said("run", "--collectives=none", "--verify=bitwise", one)
    assert code == 1 and left_out in text
    out = str(tmp_path / "times.json")
    quick = ("--benchmark-min-time=2x", f"--benchmark-out={out}")
    for verify in ("auto", "none"):
        code, text = said("benchmark", "--collectives=none", f"--verify={verify}", *quick, "--force", one)
        assert code == 0 and left_out in text and left_out in json.loads(Path(out).read_text())["context"]["verified"]
    for mode, capture in (("real", one), ("recorded", "out/")):
        code, text = said("run", f"--collectives={mode}", capture)
        assert code == 2 and f"--collectives={mode} takes" in text
    command = ("opreplay-benchmark", "--collectives=none", *quick, "--force", "out/")
    (code, text), (other, silent) = launching.launch(job, *command)
    assert (code, other) == (0, 0), text + silent
    section = json.loads(Path(out).read_text())["ranks"]
    assert section["collectives_reason"] == left_out and section["by_rank"][0]["blocked_ns"] is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": 3}, "a collective's ranks is 3, expected text"),
        ({"ranks": "9" * 5000}, "are not the ranks of a group"),
        ({"ranks": "0,0"}, "are not the ranks of a group"),
        ({"operator": "c10d::send", "peer": 17}, "peer=17, expected a rank of 2"),
        ({"peer": None}, "a collective's peer is None, expected a number"),
        ({"inputs": [3]}, "a collective's inputs is [3], expected a list of tensors"),
        ({"work": [1]}, "a collective's work is [1], expected a number"),
        ({"operator": "other::op"}, "'other::op' is no collective that Chakra has"),
    ],
)
def test_a_launch_of_other_arguments_is_one_error(
    changed: dict[str, Any], words: str, tmp_path: Path, tools: Tools
) -> None:
    folder, call = tmp_path / "out", {**event("allreduce_", 0), "group": "0", "backend": "gloo", "instance": 0}
    folder.mkdir()
    kernel = Kernel(LAUNCH, "default", str(torch.ops.opreplay.collective.default._schema))
    for rank in range(2):
        about = imported_session("trace", "made", rank=rank, world_size=2)
        with ImportedSession(folder / f"rank{rank}.opreplay", about) as capture:
            tensor = plain_tensor(DType.float32, (3,), None, capture.device("cpu"))
            given = call | {"input_splits": [], "output_splits": [], "inputs": [tensor], "outputs": [tensor]} | changed
            names = [each.name for each in torch.ops.opreplay.collective.default._schema.arguments]
            capture.op(kernel, [(name, given[name]) for name in names], [])
    found = [
        tools("check", folder),
        tools("report", folder, "-o", tmp_path / "page.html"),
        tools("export", "--format=perfetto", folder, tmp_path / "lanes.json"),
        tools("export", "--format=chakra", folder, tmp_path / "traces"),
    ]
    assert words in found[-1].err and found[-1].code
    if "operator" not in changed or "peer" in changed:
        assert words in found[0].out + found[0].err and found[0].code


@pytest.mark.slow
def test_a_thousand_ranks_are_judged_at_once() -> None:
    """Each waits for all others 20 times, which takes as long as there are launches, not as many times as ranks."""
    world, everyone = 1000, ",".join(map(str, range(1000)))

    def events(swapped: bool) -> list[Any]:
        numbers = [*range(18), 19, 18] if swapped else range(20)
        launches = [event("allreduce_", at, number, ranks=everyone) for at, number in enumerate(numbers)]
        return [each for launch in launches for each in (launch, {"wait": launch["work"]})]

    assert judge(job_of(*(events(False) for _rank in range(world)))) == []
    assert judge(job_of(*(events(rank == 7) for rank in range(world))))[0].startswith("ranks 0-999 would wait")
    alone = job_of([], *(events(False) for _rank in range(world - 1)))
    assert len(judge(alone)) == 1 and judge(alone)[0].endswith("on ranks 1-999")


def test_results_that_were_recorded_are_not_read_where_collectives_are_done(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with replayfmt.capture(tmp_path / "rank0.opreplay"):
            y = torch.ones(4).exp()
            dist.all_reduce(y)
            y.neg()
    finally:
        dist.destroy_process_group()
    heard: list[tuple[int, int]] = []

    class Doubling:
        def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            outputs[0].mul_(2)

        def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
            heard.append((len(outputs), len(results)))

    with Plan(tmp_path / "rank0.opreplay") as plan:
        read = sum(len(window.staged) for window in plan.windows(checks=False, shapes=Shapes.all)[0])
        assert plan.execute(verify="none").outcome == "ok"
    with played_by(Doubling()), Plan(tmp_path / "rank0.opreplay") as plan:
        assert sum(len(window.staged) for window in plan.windows(checks=False, shapes=Shapes.all)[0]) == read - 1
        assert plan.execute(verify="none").outcome == "ok"
    assert heard == [(1, 0)]
