"""`--isolate`: a replay that ends its process is a failure like another, with the op's name and exit code 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import Tools

DEADLY = """
import os, signal, torch
library = torch.library.Library("deadly", "DEF")
library.define("end(Tensor x, int signal) -> Tensor")

def end(x, number):
    if os.environ.get("DEADLY"):
        os.kill(os.getpid(), number)
    return x * 2

library.impl("end", end, "CompositeExplicitAutograd")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture whose sixth record ends the process, where the environment says so."""
    folder = tmp_path_factory.mktemp("deadly")
    (folder / "deadly_operators.py").write_text(DEADLY)
    (folder / "program.py").write_text(
        "import torch, replayfmt, deadly_operators\n"
        "for number in (11, 6, 9):\n"
        "    with replayfmt.capture(f'{number}.opreplay'), replayfmt.scope('execute'):\n"
        "        x = torch.ones(3) + 1\n"
        "        y = torch.ops.deadly.end(x, number).exp()\n"
        "        del x, y\n"
    )
    subprocess.run([sys.executable, "program.py"], cwd=folder, check=True, timeout=600)
    return folder


def _run(commands: Path, folder: Path, tool: str, *arguments: str, deadly: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [commands / f"opreplay-{tool}", "--allow-import=deadly_operators", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **({"DEADLY": "1"} if deadly else {})},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.guarantee("isolate")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name", "arguments"),
    [
        (11, "SIGSEGV", ("run",)),
        (6, "SIGABRT", ("run", "--keep-going")),
        (9, "SIGKILL", ("run",)),
        (11, "SIGSEGV", ("benchmark", "--benchmark-min-time=1x")),
    ],
)
def test_the_death_of_a_replay_is_a_failure_with_the_ops_name(
    folder: Path, commands: Path, number: int, name: str, arguments: tuple[str, ...]
) -> None:
    done = _run(commands, folder, arguments[0], "--isolate", *arguments[1:], f"{number}.opreplay", deadly=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    (line,) = [line for line in done.stderr.splitlines() if "was killed by" in line]
    assert line.startswith(f"FAILED_PRECONDITION: {number}.opreplay: the worker process was killed by {name}"), line
    if number != 9:  # nobody can write down anything then
        assert "(deadly::end.default)" in line and "at ordinal" in line
    else:
        assert "or later" in line and "no memory left" in line


@pytest.mark.slow
def test_without_it_the_process_ends_as_it_does(folder: Path) -> None:
    own = Path(sys.executable).parent
    assert _run(own, folder, "run", "11.opreplay", deadly=True).returncode == -11


@pytest.mark.guarantee("isolate")
@pytest.mark.slow
def test_a_replay_that_lives_prints_and_exits_as_without(
    folder: Path, commands: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _run(commands, folder, "run", "--format=jsonl", "11.opreplay", deadly=False)
    apart = _run(commands, folder, "run", "--isolate", "--format=jsonl", "11.opreplay", deadly=False)
    assert plain.returncode == apart.returncode == 0
    assert len(plain.stdout.splitlines()) == len(apart.stdout.splitlines()) >= 1 and plain.stderr == apart.stderr
    monkeypatch.chdir(folder)
    for arguments, code in ((("nowhere.opreplay",), 3), (("--verify=what", "11.opreplay"), 2)):
        done = _run(commands, folder, "run", "--isolate", *arguments, deadly=False)
        assert done.returncode == code and done.stderr == tools("run", *arguments).err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_that_works_does_not_outlive_the_one_that_waits(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "endless.py").write_text(
        "import time\ndef main():\n    print('works', flush=True)\n    time.sleep(90)\n"
    )
    (tmp_path / "waiting.py").write_text(
        "import click, endless\n"
        "from opreplay_tools.replay_flags import isolate_option\n"
        "def main(): pass\n"
        "main.__module__ = 'endless'\n"
        "isolate_option(click.command()(main)).main()\n"
    )
    waiting = subprocess.Popen(
        [sys.executable, "waiting.py", "--isolate"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "works\n"
        waiting.send_signal(number)
        waiting.communicate(timeout=60)  # returns when nobody holds the pipe: the worker has ended, too
    if number == signal.SIGTERM:
        assert waiting.returncode == 128 + number and not list(tmp_path.glob("opreplay-*"))
