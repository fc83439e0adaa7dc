"""Children of a program under capture do not record, and the parent's capture does not notice them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.recording.program.children import AfterFork, ChildrenSeen, runs_python_program

from .running import Captured, capture, plain

LOADING = """
import multiprocessing, os, signal, sys, time, warnings
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        # Operators that only workers issue.
        return torch.full((3,), float(index)).square().lgamma(), torch._C._len_torch_dispatch_stack()

def in_child(queue):
    torch.ones(3).erfinv()
    queue.put("child done")

def sleeping(queue):
    queue.put("ready")
    while True:
        time.sleep(0.05)

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # PyTorch warns of more workers than processors, where there is only one
    torch.set_num_threads(1)
    total = torch.zeros(3)
    stacks = set()
    for batch, depth in DataLoader(Squares(), batch_size=2, num_workers=2):
        total += batch.sum(0)
        stacks.update(depth.tolist())
    print(total, stacks)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=in_child, args=(queue,))
        process.start()
        print(queue.get(), process.join(), process.exitcode)
    process = multiprocessing.get_context("fork").Process(target=sleeping, args=(queue,))
    process.start()
    print(queue.get())
    process.terminate()
    print(process.join(), process.exitcode, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    pid = os.fork()
    torch.arange(4).cumsum(0)
    if pid == 0:
        sys.exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_workers_forked_and_spawned_children_run_as_ever_and_are_not_recorded(tmp_path):
    (tmp_path / "loading.py").write_text(LOADING)
    expected = plain(tmp_path, "loading.py")
    done = capture(tmp_path, "-o", "loading.opreplay", "loading.py")
    assert done.returncode == 0, done.stderr
    ours, theirs = done.stdout.replace("-15 False", "-15 True"), expected.stdout
    assert ours == theirs
    captured = Captured(tmp_path / "loading.opreplay")
    assert captured.complete
    assert not {"aten::lgamma.default", "aten::erfinv.default"} & set(captured.op_names)
    assert captured.op_names.count("aten::cumsum.default") == 1, "the parent's, not the child's"
    said, note = done.stderr.splitlines()  # and no child says anything of the capture
    assert "unsupported: child_work 5" in said, "one of the six ran no operator"
    assert (
        note.startswith("opreplay-capture: note: 6 child processes seen: ")
        and "child processes are not recorded" in note
    )
    assert "multiprocessing" in note and "running __main__:in_child" in note and "(forked)" in note


WORKING = """
import multiprocessing, sys
import torch

class Multiplies(multiprocessing.get_context(sys.argv[1]).Process):
    def run(self):
        print(float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()), flush=True)

def multiply():
    print(float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()), flush=True)

def idle():
    print("idle", flush=True)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    print(float(torch.ones(2).sum()), flush=True)
    for process in (context.Process(target=idle), context.Process(target=multiply), Multiplies()):
        process.start()
        process.join()
        assert process.exitcode == 0 and "run" not in vars(process)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_capture_and_its_replay_say_which_children_worked_and_each_can_be_captured_beside(tmp_path, tools, method):
    (tmp_path / "working.py").write_text(WORKING)
    done = capture(tmp_path, "--children=record", "-o", "x.opreplay", "working.py", method)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(tmp_path, "working.py", method).stdout
    files = sorted(path.name for path in tmp_path.glob("*.opreplay"))
    assert len(files) == 3 and files[-1] == "x.opreplay", "that of the process, and of the two children that worked"
    for name in files[:-1]:
        assert "aten::mm.default" in Captured(tmp_path / name).op_names
        assert tools("run", "--verify=bitwise", tmp_path / name).code == 0
    replayed = tools("run", "--verify=bitwise", tmp_path / "x.opreplay")
    assert replayed.code == 0
    assert "verified, without the work of child processes: bitwise" in replayed.out
    lines = [line for line in replayed.out.splitlines() if line.startswith("not in the capture: ")]
    assert len(lines) == 2 and all("ran operators" in line for line in lines), "the third was idle"
    assert all(any(name in line for line in lines) for name in files[:-1])
    assert Captured(tmp_path / "x.opreplay").summary.unsupported == {"child_work": 2}


def test_from_python_too_a_capture_says_which_children_worked(tmp_path):
    with replayfmt.capture(tmp_path / "x.opreplay"):
        torch.ones(2).sum().item()
        for works in (False, True):
            pid = os.fork()
            if pid == 0:
                if works:
                    torch.ones(2).sum()
                os._exit(0)
            os.waitpid(pid, 0)
    with replayfmt.open(tmp_path / "x.opreplay") as opened:
        assert opened.summary.unsupported == {"child_work": 1}
    result = replayfmt.run(tmp_path / "x.opreplay")
    assert result.outcome == "ok" and result.verified.startswith("this process alone: ")
    assert f"not in the capture: the child process {pid} (forked) ran operators" in str(result)


FORKED_INSIDE = """
import os, sys, time
import torch
import replayfmt

def forked_during_an_op():
    @torch.library.custom_op("capture_tests::forking", mutates_args=())
    def forking(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 1:
            pids.append(os.fork())
            if pids[-1] == 0:
                time.sleep(0.5)  # what waits in the parent's capture is overdue then, and not the child's to write
        return x + 1
    forking(torch.ones(1))  # from now on it is recorded in another way
    forking(torch.ones(2))

pids = []
codes = []
try:
    with replayfmt.capture("inside.opreplay") as recorder:
        with replayfmt.scope("outer"):
            torch.ones(1)
            pids.append(os.fork())
            if pids[-1] != 0:
                forked_during_an_op()
            torch.ones(2).erf()
            in_child = pids[-1] == 0
            if in_child:
                # A child may go on for long, compile, and record on its own account.
                assert torch._C._len_torch_dispatch_stack() == 0 or len(pids) == 2
                assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
            else:
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if in_child:
        with replayfmt.capture(f"own{len(pids)}.opreplay"):
            torch.ones(3).sin()
        sys.exit(40 + len(pids))
finally:
    if codes:
        print(codes)
"""


@pytest.mark.slow
def test_a_forked_child_leaves_the_with_block_quietly_and_may_capture_on_its_own(tmp_path):
    (tmp_path / "inside.py").write_text(FORKED_INSIDE)
    done = plain(tmp_path, "inside.py")
    assert (done.returncode, done.stdout) == (0, "[41, 42]\n"), done.stderr
    captured = Captured(tmp_path / "inside.opreplay")
    assert captured.complete
    assert captured.op_names.count("aten::erf.default") == 1
    assert captured.scopes() == ["+outer", "-outer"]
    for number in (1, 2):
        assert Captured(tmp_path / f"own{number}.opreplay").op_names == ["aten::ones.default", "aten::sin.default"]
    assert {path.name for path in tmp_path.glob("*.opreplay*")} == {"inside.opreplay", "own1.opreplay", "own2.opreplay"}


@pytest.fixture
def children():
    children = ChildrenSeen()
    children.install()
    yield children
    children.remove()


def test_after_fork_calls_back_in_the_child_only_and_once():
    read, write = os.pipe()
    after = AfterFork(lambda: os.write(write, b"x"))
    stopped = AfterFork(lambda: os.write(write, b"stopped"))
    stopped.stop()
    pid = os.fork()
    if pid == 0:
        grandchild = os.fork()
        if grandchild:
            os.waitpid(grandchild, 0)
        os._exit(0)
    os.waitpid(pid, 0)
    after.stop()
    after.stop()
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"x"


def test_children_are_seen_with_what_is_known_of_them(children):
    assert children.sentence() == "no child process was seen"
    spawned = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], os.environ)
    os.waitpid(spawned, 0)
    popen = subprocess.Popen("exit 0 # by the shell", shell=True)
    popen.wait()
    assert children.seen == {spawned: f"{sys.executable} -c pass", popen.pid: "exit 0 # by the shell"}
    assert children.sentence() == (
        f"2 child processes seen: {spawned} ({sys.executable} -c pass), {popen.pid} (exit 0 # by the shell)"
    )


def test_many_children_and_long_commands_are_cut_short(children):
    for number in range(10):
        subprocess.run(["true", "x" * 200, str(number)], check=True)
    assert children.sentence().endswith("… and 2 more") or children.sentence().endswith(" and 2 more")
    assert len(children.sentence()) < 8 * 150 + 100


@pytest.mark.parametrize(
    ("command", "works"),
    [
        (["python", "-m", "engine.worker"], True),
        (["/usr/bin/python3.12", "-X", "dev", "-u", "worker.py", "--rank=0"], True),
        ([sys.executable, "-c", "import torch; torch.ones(3)"], True),
        ([b"python3", b"worker.py"], True),
        (["python3", "-"], True),
        ("CUDA_VISIBLE_DEVICES=1 exec python worker.py > log", True),
        ("pypy3 worker.py", True),
        (["git", "rev-parse", "HEAD"], False),
        (["nvcc", "--version"], False),
        ("uname -a", False),
        (Path("/bin/true"), False),
        ("echo 'never closed", False),
        ([], False),
        (["grep", "python", "worker.py"], False),
        (["python", "--version"], False),
        (["python3", "-m", "pip", "list"], False),
        (["python3", "-W", "ignore", "-m", "torch.utils.collect_env"], False),
        (["python3", "/lib/torch/_inductor/compile_worker/__main__.py", "--workers=2"], False),
        (["python3", "-s", "-c", "from multiprocessing.resource_tracker import main;main(5)"], False),
        (
            ["python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
            False,
        ),
        (["python3", "setup.py", "build_ext"], False),
        (["python3", "-c", '\nimport sys\nfrom ctypes import cdll\ncdll.LoadLibrary("/tmp/probe.so")\n'], False),
        (["python3", "-c", 'from ctypes import cdll; cdll.LoadLibrary("/tmp/engine.so").serve()'], True),
    ],
)
def test_python_programs_are_told_from_other_commands_and_from_helpers(command, works):
    assert runs_python_program(command) is works
    assert not runs_python_program(command, executable="/bin/git")


@pytest.mark.slow
def test_only_children_that_may_do_the_programs_work_are_workers(children):
    subprocess.run(["true"], check=True)
    subprocess.run([sys.executable, "--version"], check=True, stdout=subprocess.DEVNULL)
    assert len(children.seen) == 2 and children.workers() == ""
    worker = subprocess.Popen("python -c pass", shell=True, executable="/bin/sh")
    worker.wait()
    assert children.workers() == ""  # what the shell runs is not looked into where another shell is named
    worker = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    worker.wait()
    assert children.workers() == f"1 child process seen: {worker.pid} ({sys.executable} -S -c pass)"


ENGINE = """
import subprocess, sys, torch
torch.ones(3).add(1)
subprocess.run([sys.executable, "-S", "-m", "worker"], check=True)
subprocess.run(["uname"], check=True, stdout=subprocess.DEVNULL)
"""


@pytest.mark.slow
def test_a_python_command_that_may_have_done_the_work_is_named_beside_the_few_ops_that_were_recorded(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "worker.py").write_text("")
    done = capture(tmp_path, "-o", "engine.opreplay", "engine.py")
    assert done.returncode == 0, done.stderr
    said, note = done.stderr.splitlines()
    assert "2 ops" in said and "unsupported: none" in said, "it is no part of this program"
    assert note.startswith("opreplay-capture: note: 1 child process seen: ") and "-S -m worker)" in note
    assert "the command of each other one with its own opreplay-capture" in note
