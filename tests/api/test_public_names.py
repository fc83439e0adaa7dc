"""What `import replayfmt` gives: its names, without PyTorch, and types that a program can be checked against."""

from __future__ import annotations

import os
import pydoc
import subprocess
import sys
import typing
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import replayfmt
from replayfmt.benchmark.convenience import benchmark
from replayfmt.recording.options import CaptureKeywords, CaptureOptions

ROOT = Path(__file__).parents[2]

PROGRAM = """
from pathlib import Path
from typing import Any
from typing import Any, assert_type

import replayfmt
from replayfmt import OpReplayError, ReplayMismatch


def look(path: Path) -> list[str]:
    with replayfmt.open(path) as capture:
        assert_type(capture, replayfmt.Capture)
        assert_type(capture.ops[3], replayfmt.Op)
        assert_type(capture.ops[3:10], list[replayfmt.Op])
        op = capture.ops[0]
        assert_type(op.duration_ns, int | None)
        assert_type(op.inputs(replay=True, devices=["cpu"]), dict[str, Any])
        assert_type(op.results(), list[Any])
        assert_type(op.kernel.qualified_name, str)
        capture.to_pandas()
        return list(capture.scopes)


def replay(path: str) -> None:
    try:
        replayed = replayfmt.run(path, verify="bitwise", allow_imports=["mylib"])
    except ReplayMismatch as error:
        raise SystemExit(str(error)) from error
    except OpReplayError:
        raise
    assert_type(replayed, replayfmt.Replayed)
    assert_type(replayed.elapsed_ns, int)
    measured = replayfmt.benchmark(path, scopes=["step"], min_time="20x")
    assert_type(measured, replayfmt.Benchmarked)
    assert_type(measured.median_ns, float)
    assert_type(replayfmt.__version__, str)


def record(path: str) -> None:
    with replayfmt.capture(path, payload="none"), replayfmt.scope("step"):
        pass
    recorder = replayfmt.Recorder(path)
    recorder.start()
    recorder.close()
    replayfmt.Plan(path).execute(verify="auto")
"""


def check_types(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """mypy --strict over a user's program. What the library itself imports is looked at as far as it goes."""
    (tmp_path / "program.py").write_text(program)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-site-packages",
            "--follow-imports=silent",
            "--cache-dir",
            str(tmp_path / "cache"),
            "program.py",
        ],
        cwd=tmp_path,
        text=True,
        timeout=600,
        capture_output=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_a_strictly_typed_program_can_use_the_public_names(tmp_path: Path) -> None:
    done = check_types(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = check_types(
        PROGRAM.replace('verify="bitwise"', 'verify="bits"')
        .replace('min_time="20x"', "min_time=20")
        .replace('payload="none")', 'digest=True, digests="opps")'),
        tmp_path,
    )
    assert wrong.returncode == 1
    assert wrong.stdout.count("[arg-type]") == 3 and wrong.stdout.count("[call-arg]") == 1, wrong.stdout


def test_the_keywords_of_a_capture_are_the_fields_of_its_options() -> None:
    hints = typing.get_type_hints
    assert hints(CaptureKeywords) == {each.name: hints(CaptureOptions)[each.name] for each in fields(CaptureOptions)}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (replayfmt.capture, ["digests: Literal['live', 'ops', 'none'] = 'live'", "`payload`: `full` embeds the bytes"]),
        (replayfmt.run, ["allow_code: bool = False", "`file_remaps` are CAPTURED=REPLAY pairs", "-> 'Replayed'"]),
        (benchmark, ["min_time: 'str' = '0.5s'", "graphs: Literal[", "`min_time` is"]),
    ],
)
def test_help_shows_and_explains_every_keyword(function: Any, said: list[str]) -> None:
    text = pydoc.plain(pydoc.render_doc(function))
    assert not [each for each in said if each not in text] and "Unpack[" not in text
    told = "from replayfmt.benchmark.convenience import benchmark; help(benchmark)"
    assert f"`{told}`" in str(replayfmt.benchmark.__doc__)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "replayfmt/py.typed").is_file()


def test_every_public_name_is_there_and_is_listed() -> None:
    assert set(replayfmt.__all__) <= set(dir(replayfmt))
    for name in replayfmt.__all__:
        assert getattr(replayfmt, name) is not None, name
    assert replayfmt.__version__ == metadata.version("opreplay")
    assert set(replayfmt._HOME) | {"OpReplayError", "ReplayMismatch", "ReplayRefused", "__version__"} == set(
        replayfmt.__all__
    )


@pytest.mark.slow
def test_importing_listing_and_opening_need_no_torch(small: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None     # importing it raises ImportError
import replayfmt
assert "capture" in dir(replayfmt) and replayfmt.__version__
with replayfmt.open({str(small)!r}) as capture:
    ops = capture.ops[0:20]
    assert ops and repr(capture) and capture._repr_html_()
    from replayfmt.export.tables import op_column_frames
    assert sum(len(each["op"]) for each in op_column_frames(capture.reader)) == len(capture.ops)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_benchmark_can_be_called_whatever_was_imported_before() -> None:
    import replayfmt.benchmark.measure

    assert callable(replayfmt.benchmark)
    assert replayfmt.benchmark.measure.Options


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(replayfmt, "nothing_of_this_name")
