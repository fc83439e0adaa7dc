"""Scripts of Triton kernels: they have the kernels' sources, and give the captured results without the capture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from replayfmt.trim.script_triton import with_names
from tests.triton_kernels.conftest import run_python

# Writes a script of the launches in each capture of a directory, into a directory of its own.
WRITE = """
import os, sys
from opreplay_tools import trim

source, target, *names = sys.argv[1:]
for name in names:
    out = os.path.join(target, name)
    sys.argv = ["opreplay-trim", "--kernel=triton::*", "--allow-code", os.path.join(source, name + ".opreplay")]
    sys.argv += [f"--script={out}.py", f"--script-data={out}.safetensors"]
    try:
        trim.main()
    except SystemExit as left:
        assert not left.code, (name, left)
"""
# Runs scripts where OpReplay cannot be imported.
RUN = """
import runpy, sys
sys.modules.update(replayfmt=None, opreplay_tools=None, safetensors=None)
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        assert left.code == 0, (script, left)
"""
OTHERS = (
    "autotuned",
    "calling",
    "descriptors",
    "functions_of_python_for_constants",
    "given_a_function",
    "given_by_name_alone",
    "in_place",
    "layer_norm",
    "names_that_launches_have",
    "strided",
    "tuples_and_none",
)


@pytest.fixture(scope="module")
def scripts(captures: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    done = run_python("-c", WRITE, str(captures[0]), str(folder), "names_of_a_script", *OTHERS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def outcomes(printed: str) -> list[str]:
    """What is said of each result."""
    lines = printed.splitlines()
    return [lines[i].strip() for i in range(len(lines)) if lines[i].startswith("  ") and lines[i].lstrip()[:1] in "aC"]


def digests(printed: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in printed.splitlines() if " sha256 " in line]


@pytest.mark.slow
def test_a_script_runs_as_it_is_and_gives_what_was_captured(scripts: Path) -> None:
    done = run_python(str(scripts / "names_of_a_script.py"), cache=scripts / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done.stdout) == ["as captured"] and len(digests(done.stdout)) == 1
    assert "4 ops: median " in done.stdout


@pytest.mark.slow
def test_names_of_the_script_and_of_other_kernels_get_numbers(scripts: Path) -> None:
    text = (scripts / "names_of_a_script.py").read_text()
    for line in (
        "def softmax_kernel(out, x,",
        "def run_2(x, n, BLOCK: tl.constexpr):",  # the script has a run
        "def t3_2(x, n, BLOCK: tl.constexpr):",  # its variables are called t3
        "    return x * SCALE\n",
        "    return x / SCALE_3\n",
        "scaled_2(tl.load(x + at, mask=at < n))",
        "    inputs = tl.arange(0, BLOCK)\n",  # a variable of a function is its own
    ):
        assert line in text, line


@pytest.mark.slow
def test_a_script_with_another_kernel_says_what_was_captured_and_fails(scripts: Path, tmp_path: Path) -> None:
    text = (scripts / "names_of_a_script.py").read_text()
    assert text.count("x / SCALE_3") == 1
    changed = tmp_path / "names_of_a_script.py"
    changed.write_text(text.replace("x / SCALE_3", "x * SCALE_3"))
    shutil.copy(scripts / "names_of_a_script.safetensors", tmp_path)
    done = run_python(str(changed))
    assert done.returncode == 1, done.stderr
    assert [each.split()[0] for each in outcomes(done.stdout)] == ["CAPTURED"]


@pytest.mark.slow
def test_every_kind_of_argument_can_be_in_a_script(scripts: Path) -> None:
    done = run_python("-c", RUN, *(str(scripts / f"{name}.py") for name in OTHERS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ops: median ") == len(OTHERS)
    said = outcomes(done.stdout)
    assert len(said) == len(digests(done.stdout)) >= len(OTHERS) and set(said) == {"as captured"}


@pytest.mark.slow
def test_a_script_without_data_has_the_kernels_and_synthesizes_inputs(
    captures: tuple[Path, dict[str, Any]], tmp_path: Path, tools: Tools
) -> None:
    out = tmp_path / "softmax.py"
    capture = captures[0] / "softmax.opreplay"
    ran = tools("trim", "--kernel=triton::*", "--allow-code", f"--script={out}", capture)
    assert ran.code == 0, ran.err
    done = run_python(str(out))
    assert done.returncode == 0, done.stderr
    assert len(digests(done.stdout)) == 1 and outcomes(done.stdout) == []


@pytest.mark.guarantee("written-python")
def test_without_leave_no_script_gets_the_source(
    captures: tuple[Path, dict[str, Any]], tmp_path: Path, tools: Tools
) -> None:
    capture, out = captures[0] / "softmax.opreplay", tmp_path / "out.py"
    ran = tools("trim", "--kernel=triton::*", f"--script={out}", capture)
    assert ran.code == 1 and "which runs with the script; --allow-code allows that" in ran.err
    ran = tools("trim", "--kernel=triton::*", f"--script={out}", f"--script-data={tmp_path / 'data'}", capture)
    assert ran.code == 1 and "runs only with --allow-code" in ran.err
    assert list(tmp_path.iterdir()) == []


MODULE = '''\
import triton
import math as m
LIMIT = 3
part = m


@triton.jit
def first(x, LIMIT):
    """LIMIT first"""
    return x + LIMIT


@triton.jit
def second(x, *, first_one=LIMIT): return first(x, LIMIT) + m.pi + part.LIMIT
'''


def test_new_names_reach_what_means_the_modules() -> None:
    assert (
        with_names(MODULE, {"LIMIT": "LIMIT_2", "first": "first_2", "m": "m_2"})
        == '''\
import triton
import math as m_2
LIMIT_2 = 3
part = m_2


@triton.jit
def first_2(x, LIMIT):
    """LIMIT first"""
    return x + LIMIT


@triton.jit
def second(x, *, first_one=LIMIT_2): return first_2(x, LIMIT_2) + m_2.pi + part.LIMIT
'''
    )


def test_a_name_that_means_two_things_in_one_function_is_refused() -> None:
    source = "LIMIT = 3\n\n\ndef first(x):\n    return (lambda LIMIT: x)(LIMIT)\n"
    with pytest.raises(ValueError, match="means two things by LIMIT"):
        with_names(source, {"LIMIT": "LIMIT_2"})
