"""opreplay-capture from the outside: flags, files, exit codes, and programs that behave as under python."""

import platform
import re
import resource
import subprocess

import pytest

from replayfmt.format.codes import RecordKind

from .running import CAPTURE, CHECK, LOSSES, Captured, capture, environment, plain

# --------------------------------------------------------------------------------------------------------- usage


USAGE = {
    "": "Missing argument 'PROGRAM'",
    "-o x.opreplay": "Missing argument 'PROGRAM'",
    "no_torch.py": "Missing option '-o'",
    "-o x.opreplay missing.py": "missing.py: no such script",
    "-o x.opreplay --nonsense no_torch.py": "No such option",
    "-o x.opreplay --payload=some no_torch.py": "'some' is not one of 'full', 'integers', 'none'",
    "-o x.opreplay --digests=some no_torch.py": "'some' is not one of 'live', 'ops', 'none'",
    "-o x.opreplay --compiled=some no_torch.py": "'some' is not one of 'kernels', 'keep', 'eager'",
    "-o x.opreplay --payload=none --digests=ops no_torch.py": "digests='ops' cannot be recorded",
    "-o x.opreplay --start-op=-1 no_torch.py": "-1 is not in the range x>=0",
    "-o x.opreplay --start-op=5 --stop-op=5 no_torch.py": "leaves nothing to record",
    "-o x.opreplay --mark=nonsense no_torch.py": "expected MODULE:CALLABLE=SCOPE",
    "-o x.opreplay -m": "Missing argument 'PROGRAM'",
}
REFUSED = {
    "-o there.opreplay no_torch.py": "there.opreplay: exists already; remove it, write elsewhere, or use --force",
    "-o left.opreplay no_torch.py": "left.opreplay.partial: exists already",
    "-o missing/x.opreplay no_torch.py": "there is no directory missing",
    "-o folder no_torch.py": "folder: a folder is for the files of the ranks that torchrun starts",
    "-o none/ no_torch.py": "none/: a folder is for the files of the ranks that torchrun starts",
}
DRIVER = """
import json, sys
sys.modules["torch"] = None  # importing it would fail
from opreplay_tools.capture import main
for line in json.loads(sys.argv[1]):
    sys.argv[:] = ["opreplay-capture", *line.split()]
    print(f"#{line}", file=sys.stderr, flush=True)
    try:
        main()
    except SystemExit as leaving:
        print(f"={leaving.code}", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_usage_errors_and_refusals_come_before_torch_is_imported_and_the_program_started(tmp_path):
    import json

    (tmp_path / "no_torch.py").write_text("print('ran')")
    (tmp_path / "there.opreplay").write_text("precious")
    (tmp_path / "left.opreplay.partial").write_text("precious")
    (tmp_path / "folder").mkdir()
    lines = [*USAGE, *REFUSED]
    done = plain(tmp_path, "-c", DRIVER, json.dumps(lines))
    outcomes = dict(re.findall(r"^#(.*)\n((?:[^#].*\n)*)", done.stderr, re.MULTILINE))
    for code, expected in ((2, USAGE), (1, REFUSED)):
        for line, message in expected.items():
            assert message in outcomes[line], line
            assert outcomes[line].endswith(f"={code}\n"), line
            assert "Traceback" not in outcomes[line]
    assert done.stdout == ""
    assert (tmp_path / "there.opreplay").read_text() == "precious"


@pytest.mark.slow
def test_several_ranks_need_a_name_for_each(folder):
    done = capture(folder, "-o", "ranks.opreplay", "train.py", WORLD_SIZE="2", RANK="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "put {rank} or {pid} into the name" in done.stderr
    assert capture(folder, "-o", "ranks.opreplay", "train.py", WORLD_SIZE="two").returncode == 2
    done = capture(folder, "-o", "ranks.{rank}.{pid}.{host}.opreplay", "train.py", WORLD_SIZE="2", RANK="1")
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("ranks.*")
    assert re.fullmatch(rf"ranks\.1\.\d+\.{re.escape(platform.node())}\.opreplay", path.name)
    session = Captured(path).session
    assert (session.rank, session.world_size) == (1, 2)


# --------------------------------------------------------------------------------------------------- the ordinary run


@pytest.mark.slow
def test_a_program_without_scopes_is_one_execute_scope_and_prints_what_it_prints(folder, ordinary):
    expected, done, captured = ordinary
    assert (done.returncode, done.stdout) == (0, expected)
    assert "elsewhere" in done.stdout, "flags after the script are the script's own"
    assert captured.complete
    assert [scope for scope in captured.scopes() if "#" not in scope] == ["+execute", "-execute"]
    inside = [
        path.partition("/")[0]
        for record, path in zip(captured.records, captured.scope_paths, strict=True)
        if record.kind is RecordKind.op
    ]
    assert set(inside) == {"execute"}
    assert captured.session.argv == ("train.py", "--force", "-o", "elsewhere", "--", "-m")
    assert {"aten::addmm.default", "aten::threshold_backward.default"} <= set(captured.op_names)
    [line] = done.stderr.splitlines()
    assert re.fullmatch(
        r"opreplay-capture: plain\.opreplay: [\d,]+ ops of [\d,]+ kernels, 1 scope, [\d,]+ bytes; unsupported: none",
        line,
    )
    assert subprocess.run([CHECK, folder / "plain.opreplay"], env=environment()).returncode == 0


@pytest.mark.slow
def test_what_the_program_sets_before_it_imports_torch_has_its_effect(folder, tmp_path):
    (tmp_path / "threads.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads(), torch.ones(1))\n"
    )
    done = capture(tmp_path, "-o", "t.opreplay", "threads.py", OMP_NUM_THREADS="2")
    assert (done.returncode, done.stdout) == (0, "1 tensor([1.])\n")


@pytest.mark.slow
def test_a_module_runs_as_under_python_m_and_force_replaces_a_file(folder, ordinary):
    (folder / "module.opreplay").write_text("old")
    done = capture(folder, "-o", "module.opreplay", "--force", "-m", "package.train", "--mark", "--force")
    assert (done.returncode, done.stdout) == (0, f"{LOSSES.match(ordinary[0])[0]} ['--mark', '--force']\n")
    assert Captured(folder / "module.opreplay").complete


# --------------------------------------------------------------------------------------------------- failing programs

FAILING = """
import atexit, sys, threading
import torch

def late():
    threading.main_thread().join()
    torch.full((5,), 1.0).erfinv_()
    print("late thread")

def at_exit():
    torch.full((5,), 1.0).lgamma_()
    print("at exit")

def fail(how):
    if how == "raise":
        torch.ones(2) @ torch.ones(3)
    if how == "system exit":
        sys.exit("a reason")
    if how == "code":
        sys.exit(7)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "closed":
        sys.stdout.close()
        sys.stderr.close()
        sys.exit(3)

atexit.register(at_exit)
threading.Thread(target=late).start()
fail(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), [("raise", 1), ("system exit", 1), ("code", 7), ("interrupt", 130), ("closed", 3)]
)
def test_however_a_program_ends_its_exit_code_is_passed_on_and_the_capture_complete(tmp_path, how, code):
    (tmp_path / "failing.py").write_text(FAILING)
    expected = plain(tmp_path, "failing.py", how)
    done = capture(tmp_path, "-o", "f.opreplay", "failing.py", how)
    assert (done.returncode, done.stdout) == (code, expected.stdout)
    assert code in (expected.returncode, 130)
    captured = Captured(tmp_path / "f.opreplay")
    assert captured.complete
    assert {"aten::erfinv_.default", "aten::lgamma_.default"} <= set(captured.op_names), "threads and atexit handlers"
    if how == "closed":
        return
    *trace, summary = done.stderr.splitlines()
    assert summary.startswith("opreplay-capture: f.opreplay: ")
    program_lines = [line for line in trace if "failing.py" in line or "Error" in line or "reason" in line]
    assert program_lines == [
        line for line in expected.stderr.splitlines() if "failing.py" in line or "Error" in line or "reason" in line
    ]
    if how in ("raise", "interrupt"):
        assert trace[0] == "Traceback (most recent call last):"
        assert "failing.py" in trace[1], "none of our own frames come first"


@pytest.mark.slow
def test_a_capture_that_cannot_be_written_leaves_the_program_running_and_exits_with_1(tmp_path):
    (tmp_path / "big.py").write_text(
        "import sys, torch, numpy\nfor i in range(4):\n    torch.from_numpy(numpy.random.rand(100_000)) + 1\n"
        "print('done')\nsys.exit(int(sys.argv[1]))\n"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    for code, expected in ((0, 1), (4, 4)):
        done = subprocess.run(
            [CAPTURE, "-o", f"big{code}.opreplay", "big.py", str(code)],
            cwd=tmp_path,
            text=True,
            env=environment(),
            capture_output=True,
            preexec_fn=limit,
            timeout=600,
        )
        assert (done.returncode, done.stdout) == (expected, "done\n"), done.stderr
        assert "File too large" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / f"big{code}.opreplay").exists()


@pytest.mark.slow
def test_a_program_that_issues_no_op_fails_and_names_the_children_it_saw(tmp_path):
    (tmp_path / "parent.py").write_text("""
import multiprocessing, os, subprocess, sys
def child():
    import torch
    torch.ones(3)
if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", "print('in child', flush=True)", "an argument"])
    process = multiprocessing.get_context("spawn").Process(target=child, name="the spawned one")
    process.start()
    process.join()
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and process.exitcode == 0
    print(pid, process.pid)
""")
    done = capture(tmp_path, "-o", "none.opreplay", "parent.py")
    assert done.returncode == 1
    [first, second] = done.stdout.splitlines()
    forked, spawned = second.split()
    assert first == "in child"
    [line] = done.stderr.splitlines()
    assert "none.opreplay: no op was captured, because the program never imported torch" in line
    assert f"{forked} (forked)" in line
    assert f"{spawned} (multiprocessing the spawned one running __main__:child)" in line
    assert re.search(r"\d+ \(\S*python\S* -c .* 'an argument'\)", line)
    assert (
        "child processes are not recorded: capture those of multiprocessing with --children=record, and the command of "
        "each other one with its own opreplay-capture" in line
    )
    assert not list(tmp_path.glob("none.opreplay*"))


@pytest.mark.slow
def test_a_program_that_imports_torch_and_issues_no_op_leaves_no_file(tmp_path):
    (tmp_path / "idle.py").write_text("import torch\nprint('idle')\n")
    done = capture(tmp_path, "-o", "idle.opreplay", "idle.py")
    assert (done.returncode, done.stdout) == (1, "idle\n")
    # Importing torch as it is built for CUDA may run ldconfig.
    children = r"(no child process was seen|1 child process seen: \d+ \(/sbin/ldconfig.*)"
    assert re.search(rf"no op was captured; {children}; the empty file was removed", done.stderr)
    assert not list(tmp_path.glob("idle.opreplay*"))
    done = capture(tmp_path, "-o", "idle.opreplay", "--start-op=5", "idle.py")
    assert "no op was captured within the limits of what is to be recorded" in done.stderr
    done = capture(tmp_path, "-o", "out/", "idle.py", WORLD_SIZE="2", RANK="1")
    assert done.returncode == 0 and "no op was captured" in done.stderr  # torchrun would end the other ranks


@pytest.mark.slow
def test_torch_first_imported_by_another_thread_fails_the_capture_alone(tmp_path):
    (tmp_path / "thread.py").write_text(
        "import threading\nthread = threading.Thread(target=__import__, args=('torch',), name='importer')\n"
        "thread.start()\nthread.join()\nimport torch\nprint(torch.ones(2).sum().item())\n"
    )
    done = capture(tmp_path, "-o", "thread.opreplay", "thread.py")
    assert (done.returncode, done.stdout) == (1, "2.0\n")
    [line] = done.stderr.splitlines()
    assert "torch was first imported by the thread importer" in line


@pytest.mark.slow
def test_a_mistake_of_the_recorders_own_is_no_good_capture(tmp_path):
    (tmp_path / "sabotage.py").write_text(
        "import torch\nfrom replayfmt.recording import capture_session\ntorch.ones(1)\n"
        "capture_session.CaptureSession.finish = lambda self: 1 / 0\nprint('done')\n"
    )
    done = capture(tmp_path, "-o", "s.opreplay", "sabotage.py")
    assert (done.returncode, done.stdout) == (1, "done\n")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("opreplay-capture: FAILED_PRECONDITION: ") and said.endswith(
        "s.opreplay: recording failed on an unexpected ZeroDivisionError('division by zero')"
    )
    assert (tmp_path / "s.opreplay.partial").exists()
