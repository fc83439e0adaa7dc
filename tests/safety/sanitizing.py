"""Runs the native recorder under AddressSanitizer and UndefinedBehaviorSanitizer, or under ThreadSanitizer: what
strains it, and its tests.

    PYTHONPATH=tests python -m safety.sanitizing [--sanitizer=thread] [--build=DIR] [TEST ...]

Its C++ parts are built with the sanitizer into a cache of their own; PyTorch and Python are as they are, so that memory
and locks are watched everywhere, reads and writes in the recorder's own code. Before that, a library with a mistake of
the kind must be reported. Exit code 1 if anything was reported, or anything failed. It needs GCC with its sanitizers'
libraries; ThreadSanitizer also setarch, because it knows only fixed places for the program's memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
TESTED = (
    "recording/test_native_recorder.py",
    "recording/test_hot_path.py",
    "recording/test_late_work.py",
    "recording/test_threads.py",
    "recording/test_several_threads.py",
    "recording/test_thread_watch.py",
    "recording/test_interrupts.py",
    "recording/test_strange_types.py",
)
_MISTAKE = """
#include <thread>
extern "C" __attribute__((visibility("default"))) int mistake(int index) {
  volatile int* numbers = new int[4]();
  std::thread other([&] { numbers[0] = numbers[0] + 1; });
  numbers[0] = numbers[0] + 1;
  other.join();
  const int read = numbers[index];
  delete[] numbers;
  return read;
}
"""
# The C library hands memory of thread-local variables from an ended thread to another, under a lock of its own. PyTorch
# frees a storage when its own code, which is not built with the sanitizer, has counted the last reference down: perhaps
# just after the recorder has dropped its weak one in another thread.
_NO_RACES = "race:_dl_deallocate_tls\nrace:c10::weak_intrusive_ptr<c10::StorageImpl*::reset_\n"


@dataclass(frozen=True)
class Sanitizer:
    """`preloaded`: its library; `mark`: in what is built with it; `options`: where {log} and {suppressions} are named;
    `run`: what a program that it watches is run by; `unfit`: tests of which it reports what others do."""

    flags: str
    preloaded: str
    mark: bytes
    options: dict[str, str]
    run: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


# What Python and PyTorch keep until the end is no finding. `verify_asan_link_order`: LD_PRELOAD does what it asks for.
SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined",
        "libasan.so",
        b"__asan_init",
        {
            "ASAN_OPTIONS": "detect_leaks=0:log_path={log}:exitcode=99:verify_asan_link_order=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
        },
    ),
    "thread": Sanitizer(
        "-fsanitize=thread",
        "libtsan.so",
        b"__tsan_init",
        {
            "TSAN_OPTIONS": "log_path={log}:exitcode=99:die_after_fork=0:suppressions={suppressions}",
            "OMP_NUM_THREADS": "1",  # it does not know the locks of OpenMP, which is not built with it
        },
        ("setarch", "-R"),
        ("recording/test_thread_watch.py",),  # OpenMP's threads, and processes that PyTorch starts
    ),
}
_BUILD = """
import sys
from pathlib import Path
from replayfmt.native import building
for source in sorted(each.name for each in Path(building.__file__).parent.glob("*.cpp")):
    name = building._name(source)
    path = building._cache() / name
    if not path.exists():
        building._build(source, path)
    assert sys.argv[1].encode() in path.read_bytes(), f"{path} is not built with the sanitizer"
    assert not (building._CARRIED / name).exists(), f"{source} would be taken from {building._CARRIED}"
"""


def library(name: str, compiler: str) -> str:
    """The path of one of the compiler's libraries. Ends the program where it is not there."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}: install the sanitizers' libraries of GCC")
    return path


def environment(sanitizer: Sanitizer, build: Path, logs: Path) -> dict[str, str]:
    """To run Python in. Reports are written to `logs`."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("there is no g++")
    preloaded = [library(sanitizer.preloaded, compiler), library("libstdc++.so.6", compiler)]
    build.mkdir(parents=True, exist_ok=True)
    suppressions = build / "suppressions"
    suppressions.write_text(_NO_RACES)
    options = {
        name: value.format(log=logs / "report", suppressions=suppressions.resolve())
        for name, value in sanitizer.options.items()
    }
    return {
        **os.environ,
        **options,
        "CXX": f"{compiler} -g1 -O1 -fno-omit-frame-pointer {sanitizer.flags}",
        "XDG_CACHE_HOME": str(build.resolve()),
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": str(_TESTS),
        "PYTHONMALLOC": "malloc",
    }


def reports(logs: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(logs.iterdir()) if path.stat().st_size]


def check_sees_mistakes(sanitizer: Sanitizer, build: Path, found: dict[str, str], preloaded: dict[str, str]) -> None:
    """Ends the program where the sanitizer reports nothing of a library that has a mistake of its kind."""
    source = build / "mistake.cpp"
    source.write_text(_MISTAKE)
    made = source.with_suffix(".so")
    subprocess.run([*found["CXX"].split(), "-shared", "-fPIC", str(source), "-o", str(made)], env=found, check=True)
    call = f"import ctypes; ctypes.CDLL({str(made.resolve())!r}).mistake(4)"  # beyond the four that there are
    with tempfile.TemporaryDirectory() as logs:
        watched = {**environment(sanitizer, build, Path(logs)), **preloaded}
        subprocess.run([*sanitizer.run, sys.executable, "-c", call], env=watched)
        if not reports(Path(logs)):
            raise SystemExit("the sanitizer did not report a mistake that was made on purpose")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizer", choices=SANITIZERS, default="address")
    parser.add_argument("--build", type=Path, default=_TESTS.parent / "build" / "sanitized")
    parser.add_argument("tests", nargs="*", help="test files; without them, all that concern the native recorder")
    given = parser.parse_args()
    sanitizer, build = SANITIZERS[given.sanitizer], given.build / given.sanitizer
    python = [*sanitizer.run, sys.executable]
    tests = given.tests or [str(_TESTS / test) for test in TESTED if test not in sanitizer.unfit]
    failed = []
    with tempfile.TemporaryDirectory() as logs:
        found = environment(sanitizer, build, Path(logs))
        # Apart, because a compiler with the sanitizer preloaded takes many times as long.
        preloaded = {name: found.pop(name) for name in ("LD_PRELOAD", "PYTHONMALLOC")}
        check_sees_mistakes(sanitizer, build, found, preloaded)
        subprocess.run(
            [sys.executable, "-c", _BUILD, sanitizer.mark.decode()], env=found, cwd=_TESTS.parent, check=True
        )
        found |= preloaded
        for command in ([*python, "-m", "safety.straining"], [*python, "-m", "pytest", "-q", "-k", "native", *tests]):
            if subprocess.run(command, env=found, cwd=_TESTS.parent).returncode:
                failed.append(" ".join(command[-1 if "safety.straining" in command else 0 :]))
        told = reports(Path(logs))
    print("\n".join(told))
    print(f"{len(told)} reports; failed: {', '.join(failed) or 'nothing'}")
    sys.exit(bool(told or failed))


if __name__ == "__main__":
    main()
