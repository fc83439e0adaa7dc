"""make gpu: tried without a GPU, and what becomes of its rows when steps fail, hang or are ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/gpu"
VERDICTS = {"met", "missed", "not measured", "no goal"}


def module(name: str) -> ModuleType:
    """One of the folder's modules that need nothing of what steps import."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def goals() -> ModuleType:
    return module("goals")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = module("check")
    monkeypatch.delitem(sys.modules, "goals", raising=False)
    return found


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def judged(rows: list[dict[str, Any]]) -> None:
    """Every figure has a verdict that follows from its goal, and one that was not measured has the reason."""
    for row in rows:
        assert row["verdict"] in VERDICTS and (row["measured"] is None) == (row["verdict"] == "not measured"), row
        assert row["measured"] is not None or row["details"]["reason"], row
        has_goal = row["at_most"] is not None or row["at_least"] is not None
        assert (row["met"] is not None) == (has_goal and row["measured"] is not None), row


@pytest.mark.sweep
def test_every_figure_has_a_row_without_a_gpu_too(tmp_path: Path, goals: ModuleType) -> None:
    arguments = [f"OUT={tmp_path}", "DEVICE=cpu", "SECONDS=3000", f"VENV={sys.prefix}"]
    done = subprocess.run(
        ["make", "gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GPU_CHECK_PATIENCE": "10"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    figures, steps = [row for row in rows if "what" in row], [row for row in rows if "outcome" in row]
    log = (tmp_path / "steps.log").read_text()[-8000:]
    assert [(row["step"], row["outcome"]) for row in steps] == [(name, "done") for name in goals.STEPS], log
    assert sorted(row["what"] for row in figures) == sorted(goals.FIGURES)
    judged(figures)
    for row in figures:
        if row["unit"] == goals.YES and row["measured"] is not None:
            assert row["measured"] == 1, row
        elif row["measured"] is None:  # nothing but the hardware is missing
            reason = row["details"]["reason"]
            assert "GPU" in reason or "energy" in row["what"] or "adds less than 3%" in reason, (row, log)
    summary = (tmp_path / "summary.txt").read_text()
    assert summary in done.stdout and len(summary.splitlines()) < 60 and "device cpu" in summary
    assert "\n\n| what | measured | target | met |\n" in (tmp_path / "table.md").read_text()


STEPS = """
import importlib.util, json, os, sys, time
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
from goals import FIGURES
first, *others = [figure for figure in FIGURES.values() if figure.step == sys.argv[1]]
found = {name: importlib.util.find_spec(name) is not None for name in ("opreplay_tools", "from_a_wheel")}
print(json.dumps(first.row(1, found)), flush=True)
print('{"what": "half a li', flush=True)
if sys.argv[1] == "capture":
    time.sleep(600)
if sys.argv[1] == "energy":
    os.kill(os.getpid(), 11)
sys.exit(3 if sys.argv[1] == "streams" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The check with steps that tell one figure each; `capture` then hangs, and `streams` fails, `energy` crashes."""
    for name in ("check.py", "goals.py"):
        (tmp_path / "benchmarks/gpu").mkdir(parents=True, exist_ok=True)
        (tmp_path / "benchmarks/gpu" / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "benchmarks/gpu/steps.py").write_text(STEPS)
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(folder / "benchmarks/gpu/check.py"), "--device=cpu", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_step_that_hangs_or_fails_stops_no_other_and_keeps_what_it_told(folder: Path) -> None:
    process = started(folder, "--steps=capture streams probes", "--patience=0.15")
    said = process.communicate()[0]
    assert process.returncode == 0 and "not measured" in said
    rows = rows_of(folder / "build/gpu")
    outcomes = {row["step"]: row["outcome"] for row in rows if "outcome" in row}
    assert "over its limit" in outcomes["capture"] and "exit code 3" in outcomes["streams"]
    assert outcomes["probes"] == "done"
    figures = [row for row in rows if "what" in row]
    judged(figures)
    measured = {row["step"] for row in figures if row["measured"] is not None}
    assert {"capture"} <= measured
    (reason,) = {row["details"]["reason"] for row in figures if row["step"] == "capture" and row["measured"] is None}
    assert "the step did not come so far: it was over its limit" in reason


def test_the_stack_of_a_step_that_crashes_is_in_the_log(folder: Path) -> None:
    process = started(folder, "--steps=energy")
    process.communicate()
    (outcome,) = (row["outcome"] for row in rows_of(folder / "build/gpu") if "outcome" in row)
    assert outcome == "it was ended by SIGSEGV (steps.log has more)"
    assert "Fatal Python error: Segmentation fault" in (log := (folder / "build/gpu/steps.log").read_text())
    assert "steps.py" in log.partition("Current thread")[2]


def test_what_was_measured_is_kept_when_the_check_itself_is_killed(folder: Path) -> None:
    process = started(folder, "--steps=capture")
    results = folder / "build/gpu/results.jsonl"
    while not results.exists() or not results.read_text():
        time.sleep(0.05)
    (step,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    process.send_signal(signal.SIGKILL)
    os.killpg(step, signal.SIGKILL)  # it would wait for ever
    process.communicate()
    (row,) = rows_of(folder / "build/gpu")
    assert row["step"] == "capture" and row["measured"] == 1


@pytest.mark.slow
def test_a_bare_checkout_has_its_tools_the_wheels_beside_it_and_carried_libraries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tools").mkdir()
    (folder / "tools/__init__.py").touch()
    (folder / ".whl").mkdir()
    with zipfile.ZipFile(folder / ".whl/from_a_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("from_a_wheel.py", "")
        wheel.writestr(
            "from_a_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: from_a_wheel\nVersion: 1.0\n"
        )
        wheel.writestr("from_a_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("from_a_wheel-1.0.dist-info/RECORD", "")
    carried, cache = folder / "carried", folder / "cache"
    carried.mkdir()
    (carried / "recorder-abc.so").write_bytes(b"library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    process = started(folder, "--steps=probes", f"--native={carried}", f"--out={folder / 'out'}")
    said = process.communicate()
    assert process.returncode == 0, said
    assert rows_of(folder / "out")[0]["details"] == {"opreplay_tools": True, "from_a_wheel": True}
    assert (cache / "opreplay/native/recorder-abc.so").read_bytes() == b"library"
    assert (cache / "opreplay/native").stat().st_mode & 0o777 == 0o700


def test_a_step_that_there_is_not_is_wrong_usage(folder: Path) -> None:
    process = started(folder, "--steps=speed_of_light")
    assert "no such step: speed_of_light" in process.communicate()[1] and process.returncode == 2


def test_the_summary_names_the_missed_goals_and_counts_reasons(check: ModuleType, goals: ModuleType) -> None:
    names = list(goals.FIGURES)
    rows = [
        {"step": goals.FIGURES[name].step, **goals.FIGURES[name].row(*found)}
        for name, found in zip(
            names,
            [(1, {"machine": {"gpu": "H100", "torch": "2.11.0"}}), (0, {}), (None, {"reason": "it needs a GPU"})],
            strict=False,
        )
    ]
    text = check.summary(rows, 12.3)
    assert text.startswith("OpReplay on gpu H100 · torch 2.11.0")
    assert f"{names[1]}: no, goal yes" in text and "1 × it needs a GPU" in text
    heading, empty, *table = check.table(rows).splitlines()
    assert heading.startswith("`make gpu`, 20") and heading.endswith(": gpu H100 · torch 2.11.0") and not empty
    assert f"| {names[1]} | no | yes | **no** |" in table


WORKERS = [["-n", "2"]] if importlib.util.find_spec("xdist") else []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], *WORKERS])
def test_each_outcome_and_the_traceback_of_a_failure_are_known_before_pytest_ends(
    tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(9))\ndef test_good(n): pass\n\n"
        "def test_bad():\n    given = 3\n    assert given == 4\n\n"
        "@pytest.fixture\ndef broken(): raise OSError('no such board')\n\ndef test_ugly(broken): pass\n"
    )
    (tmp_path / "test_unreadable.py").write_text("import no_module_of_this_name\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "outcomes", "-q", "--tb=short"]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors", *workers],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
    )
    before_the_end = done.stdout.partition("= ERRORS =")[0].splitlines()
    rows = {row["test"]: row for row in map(json.loads, (line for line in before_the_end if line.startswith("{")))}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        **{f"test_three.py::test_good[{n}]": "passed" for n in range(9)},
        "test_three.py::test_bad": "failed",
        "test_three.py::test_ugly": "error",
        "test_unreadable.py": "not collected",
    }, done.stdout
    assert "test_three.py:8: assert 3 == 4" in rows["test_three.py::test_bad"]["message"]
    assert "no such board" in rows["test_three.py::test_ugly"]["message"]
    assert "no_module_of_this_name" in rows["test_unreadable.py"]["message"]
    assert "    assert given == 4" in before_the_end


PARTS = """
import time, types
import figures
from figures import require, telling, tool
from replayfmt.errors import ReplayRefused

names = ["probe dmat on relu: same results, records as calculated", "energy: sum of the kernels / whole"]
names += ["streams, a CUDA graph: replays as captured", "tests marked gpu: all are collected"]
names += ["the native recorder is there"]
with telling(names[0]):
    with telling(names[1]):
        raise ReplayRefused("cannot be replayed here, for 2 reasons", ("a Triton kernel has no source", "the other"))
with telling(names[2], share=1e-9):
    try:
        time.sleep(600)
    except Exception:
        pass
with telling(names[3]):
    require({}, names[2])
figures.importlib = types.SimpleNamespace(import_module=lambda name: types.SimpleNamespace(main=lambda: exit(130)))
with telling(names[4]):
    tool("benchmark")
"""


@pytest.mark.slow
def test_a_part_says_what_refused_a_replay_and_a_long_one_leaves_time_for_the_next() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)]), "GPU_CHECK_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, env=environment)
    # A tool that was interrupted ends the step, whose time is up, and is no reason of its own.
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    refused, unmeasured, late, needing = (row["details"]["reason"] for row in rows)
    assert refused.startswith("ReplayRefused: a Triton kernel has no source (and 1 more)")
    assert unmeasured == "the part ended without it" and late.endswith("its share of the step's time")
    assert needing == f"it needs what was to be measured for `streams, a CUDA graph: replays as captured`: {late}"
    assert "the other" in done.stderr.splitlines()


@pytest.fixture
def kernel_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("GPU_CHECK_DEVICE", "cpu")
    yield module("kernel_steps")
    for name in ("goals", "figures", "programs"):
        sys.modules.pop(name, None)


def test_the_bytes_that_addresses_cover_are_those_of_whole_tensors_alone(kernel_steps: ModuleType) -> None:
    one, other = [*range(4096, 8192, 16)], [*range(1 << 20, (1 << 20) + 512, 8)]
    assert kernel_steps.bytes_between(one + other + one) == 4096 + 512
    assert kernel_steps.bytes_between([0, *one]) != 4096  # a record that was never written
    assert kernel_steps.bytes_between(one[:7] + one[8:]) != 4096


def test_the_time_of_a_profilers_event_belongs_to_the_outermost_recorded_operator_around_it(
    kernel_steps: ModuleType,
) -> None:
    def event(name: str, parent: object, us: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, cpu_parent=parent, us=us)

    backward = event("autograd::engine::evaluate_function: SoftmaxBackward0", None, 0)
    softmax = event("aten::_softmax_backward_data", backward, 5)
    product = event("aten::mul", softmax, 2)
    events = [backward, softmax, product, event("cudaLaunchKernel", product, 3), event("aten::mul", None, 7)]
    events += [event("aten::matmul", None, 11), event("a_kernel", None, 13)]
    found = kernel_steps.by_recorded(events, {"aten::_softmax_backward_data", "aten::mul"}, "us")
    assert found == {"aten::_softmax_backward_data": 10, "aten::mul": 7, "aten::matmul": 11}
