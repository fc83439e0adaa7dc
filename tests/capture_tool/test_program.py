"""A program that we run behaves as under `python script.py` and `python -m module`: each is run both ways."""

import subprocess
import sys
import zipfile

import pytest

RUNNER = """
import sys
from replayfmt.recording.program.running import Program
module = sys.argv[1] == "-m"
target, *arguments = sys.argv[1 + module:]
sys.exit(Program(target, tuple(arguments), module).run())
"""

SCRIPT = '''
"""A docstring."""
import __main__, atexit, inspect, multiprocessing, os, pickle, sys, threading

class Picklable:
    def __eq__(self, other):
        return type(other) is type(self)

def fail(depth):
    if depth:
        fail(depth - 1)
    raise LookupError("deep")

def child(queue):
    queue.put((__name__, sys.argv, type(Picklable()).__module__))

class Last:
    def __del__(self):
        print("finalized", __name__, sys is not None)

def later():
    threading.main_thread().join()
    print("thread done")

def main(what):
    print(sorted(globals()), globals() is vars(__main__), __name__, __doc__)
    print(__file__, __package__, __cached__, type(__loader__).__name__, __spec__ and (__spec__.name, __spec__.origin))
    print(sys.argv, sys.path[0], sys.orig_argv[1:])
    print(pickle.loads(pickle.dumps(Picklable())) == Picklable(), inspect.getsource(fail).count("deep"))
    print(sys.stdin.read().upper())
    if what == "raise":
        fail(2)
    if what == "hook":
        sys.excepthook = lambda kind, error, trace: print("hooked", kind, trace.tb_frame.f_code.co_name)
        fail(0)
    if what == "broken hook":
        sys.excepthook = lambda *_: 1 / 0
        fail(0)
    if what == "finalizers":
        local = globals()["kept"] = Last()
        local.other = Last()
        fail(0)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what.startswith("exit "):
        sys.exit(eval(what[5:]))
    if what == "os._exit":
        os._exit(9)
    if what == "at exit":
        atexit.register(print, "exit handler")
        threading.Thread(target=later).start()
    if what == "closed":
        sys.stdout.close()
    if what == "spawn":
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        process.join()
        print(process.exitcode, queue.get())

if __name__ == "__main__":
    main(sys.argv[1])
'''

CASES = [
    "return",
    "raise",
    "hook",
    "broken hook",
    "finalizers",
    "exit 0",
    "exit 3",
    "exit None",
    "exit 'a message'",
    "exit 256 + 4",
    "exit True",
    "os._exit",
    "at exit",
    "closed",
    "spawn",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "script.py").write_text(SCRIPT)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SCRIPT)
    (package / "module.py").write_text(SCRIPT)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "link").symlink_to(package)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
    return tmp_path


def both(folder, *command):
    outcomes = []
    for runner in ((), (str(folder / "runner.py"),)):
        done = subprocess.run(
            [sys.executable, *runner, *command], cwd=folder, input="input", capture_output=True, text=True, timeout=600
        )
        outcomes.append((done.returncode, done.stdout.splitlines(), done.stderr.splitlines()))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_a_script_behaves_as_under_python(folder, what):
    plain, ours = both(folder, "script.py", what)
    assert ours == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "package", "raise"),
        ("-m", "package.module", "spawn"),
        ("-m", "package.missing"),
        ("-m", "missing"),
        ("package", "raise"),
        ("archive.pyz", "raise"),
        ("./link/../script.py", "raise"),
        ("link/module.py", "return"),
        ("syntax.py",),
    ],
)
def test_modules_directories_and_odd_paths_behave_as_under_python(folder, command):
    plain, ours = both(folder, *command)
    assert ours == plain


def test_an_interrupt_shows_the_same_and_gives_130(folder):
    # The interpreter itself dies by the signal, which a shell reports as 130.
    plain, ours = both(folder, "script.py", "interrupt")
    assert (plain[0], ours[0]) == (-2, 130)
    assert ours[1:] == plain[1:]
