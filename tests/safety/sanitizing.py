"""Runs the native recorder under AddressSanitizer and UndefinedBehaviorSanitizer: what strains it, and its tests.

    PYTHONPATH=tests python -m safety.sanitizing [--build=DIR] [TEST ...]

Its C++ parts are built with the sanitizer into a cache of their own; PyTorch and Python are as they are, so that memory
and locks are watched everywhere, reads and writes in the recorder's own code. Exit code 1 if anything was reported, or
anything failed. It needs GCC with its sanitizers' libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
TESTED = (
    "recording/test_native_recorder.py",
    "recording/test_hot_path.py",
    "recording/test_late_work.py",
    "recording/test_threads.py",
    "recording/test_thread_watch.py",
    "recording/test_interrupts.py",
    "recording/test_strange_types.py",
)
FLAGS = (
    "-g1 -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
)
# What Python and PyTorch keep until the end is no finding. `verify_asan_link_order`: LD_PRELOAD does what it asks for.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:log_path={log}:exitcode=99:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
}
_BUILD = """
from pathlib import Path
from replayfmt.native import building
for source in sorted(each.name for each in Path(building.__file__).parent.glob("*.cpp")):
    name = building._name(source)
    path = building._cache() / name
    if not path.exists():
        building._build(source, path)
    assert b"__asan_init" in path.read_bytes(), f"{path} is not built with the sanitizer"
    assert not (building._CARRIED / name).exists(), f"{source} would be taken from {building._CARRIED}"
"""


def library(name: str, compiler: str) -> str:
    """The path of one of the compiler's libraries. Ends the program where it is not there."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}: install the sanitizers' libraries of GCC")
    return path


def environment(build: Path, log: Path) -> dict[str, str]:
    """To run Python in."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("there is no g++")
    preloaded = [library("libasan.so", compiler), library("libstdc++.so.6", compiler)]
    build.mkdir(parents=True, exist_ok=True)
    options = {name: value.format(log=log) for name, value in OPTIONS.items()}
    return {
        **os.environ,
        **options,
        "CXX": f"{compiler} {FLAGS}",
        "XDG_CACHE_HOME": str(build.resolve()),
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONPATH": str(_TESTS),
        "PYTHONMALLOC": "malloc",
    }


def reports(logs: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(logs.iterdir()) if path.stat().st_size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=_TESTS.parent / "build" / "sanitized")
    parser.add_argument("tests", nargs="*", help="test files; without them, all that concern the native recorder")
    given = parser.parse_args()
    python = [sys.executable]
    failed = []
    with tempfile.TemporaryDirectory() as logs:
        found = environment(given.build, Path(logs, "report"))
        # Apart, because a compiler with the sanitizer preloaded takes many times as long.
        preloaded = {name: found.pop(name) for name in ("LD_PRELOAD", "PYTHONMALLOC")}
        subprocess.run([sys.executable, "-c", _BUILD], env=found, cwd=_TESTS.parent, check=True)
        found |= preloaded
        for command in (
            [*python, "-m", "safety.straining"],
            [*python, "-m", "pytest", "-q", "-k", "native", *(given.tests or [str(_TESTS / test) for test in TESTED])],
        ):
            if subprocess.run(command, env=found, cwd=_TESTS.parent).returncode:
                failed.append(" ".join(command[-1 if "safety.straining" in command else 0 :]))
        told = reports(Path(logs))
    print("\n".join(told))
    print(f"{len(told)} reports; failed: {', '.join(failed) or 'nothing'}")
    sys.exit(bool(told or failed))


if __name__ == "__main__":
    main()
