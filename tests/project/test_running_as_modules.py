"""The tools as modules, where their commands are not on PATH: `python -m replayfmt run`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from opreplay_tools.__main__ import TOOLS

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def as_module(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: str) -> object:
    """What `python -m MODULE ARGUMENTS…` exits with, in this process."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    for imported in (module, f"{module}.__main__", "opreplay_tools.__main__"):  # or runpy warns
        monkeypatch.delitem(sys.modules, imported, raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return left.value.code


def test_every_command_is_known_by_its_short_name() -> None:
    assert SCRIPTS.pop("opreplay") == "opreplay_tools.__main__:main"
    assert {f"opreplay-{name}": f"opreplay_tools.{module}:main" for name, module in TOOLS.items()} == SCRIPTS


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_a_tool_runs_as_a_module_as_it_does_as_a_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, *first in ((f"opreplay_tools.{TOOLS[name]}",), ("opreplay_tools", name), ("replayfmt", name)):
        assert as_module(monkeypatch, module, *first, "--version") == 0
        assert capsys.readouterr().out.startswith(f"opreplay-{name}, version "), module
        assert as_module(monkeypatch, module, *first, "--no-such-flag") == 2, module
        assert "--no-such-flag" in capsys.readouterr().err, module


def test_a_wrong_tool_is_one_line_and_none_prints_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (("no\x1b[31msuch",), ("command",), ("--no-such-flag",)):
        assert as_module(monkeypatch, "replayfmt", *arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("INVALID_ARGUMENT: ") and "\x1b" not in printed.err
        assert printed.err.endswith(" (opreplay --help)\n") and len(printed.err.splitlines()) == 1
    for help_asked in (("--help",), ()):
        assert as_module(monkeypatch, "replayfmt", *help_asked) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in TOOLS) and "..." not in shown


@pytest.mark.slow
def test_a_program_is_captured_and_replayed_by_modules(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, torch\nprint(__name__, sys.argv, sys.path[0])\ntorch.ones(3).exp().sum().item()\nsys.exit(5)\n"
    )
    command = [sys.executable, "-m", "opreplay_tools.capture", "-o", "one.opreplay", "program.py", "--flag"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (5, f"__main__ ['program.py', '--flag'] {tmp_path}\n")
    command = [sys.executable, "-m", "replayfmt", "run", "one.opreplay"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "verified: bitwise" in done.stdout


@pytest.mark.slow
def test_the_tools_work_where_the_package_is_on_the_path_and_not_installed(tmp_path: Path) -> None:
    others = tmp_path / "site"
    others.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for each in Path(installed).iterdir():
            if "opreplay" not in each.name and not (others / each.name).exists():
                (others / each.name).symlink_to(each)
    for name, folder in (("replayfmt", "replayfmt"), ("opreplay_tools", "tools")):
        (others / name).symlink_to(ROOT / folder)

    def tool(name: str, *arguments: object) -> str:
        command = [sys.executable, "-S", "-P", "-m", "opreplay_tools", name, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(others)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "program.py").write_text("import torch\n(torch.ones(3) + 1).sum().item()\n")
    capture, measured, page = tmp_path / "c.opreplay", tmp_path / "b.json", tmp_path / "page.html"
    assert tool("run", "--version") == "opreplay-run, version not installed\n"
    tool("capture", "-o", capture, tmp_path / "program.py")
    assert "verified" in tool("run", capture)
    tool("benchmark", "--benchmark-min-time=1x", f"--benchmark-out={measured}", capture)
    assert json.loads(measured.read_text())["context"]["library_version"] == "not installed"
    tool("report", f"--benchmark={measured}", "-o", page, capture)
    assert "not installed" in page.read_text()
