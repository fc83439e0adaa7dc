"""Values of any kind for every option of every tool that works on a capture: one error line and a documented exit code,
or the work is done; nothing is written half.

opreplay-capture runs a program in its own process, once; tests/capture_tool has its options.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from opreplay_tools.__main__ import TOOLS

# What is called without the option that is tried.
COMMANDS = {
    "run": ["step.opreplay"],
    "benchmark": ["--benchmark-min-time=1x", "step.opreplay"],
    "dump": ["step.opreplay"],
    "check": ["step.opreplay"],
    "trim": ["--ops=:", "--verify=none", "step.opreplay", "out.opreplay"],
    "import": ["--output=out.opreplay", "trace.json"],
    "export": ["step.opreplay", "out.zip"],
    "energy": ["windows.jsonl", "power.csv", "--output=out.json"],
    "probe": ["report", "schedule", "step.opreplay"],
    "report": ["--output=out.html", "step.opreplay"],
}
VALUES = (
    "",
    "-1",
    "99999999999999999999",
    "nan",
    "a=\udcff",
    ":12",
    "aten::mul=fifo",
    "fifo",
    "nothing/here",
    "x" * 5000,
)
# These may be any number: what is asked for so often, or for so long, is done so often.
_COUNTS = ("--benchmark-min-time", "--benchmark-warmup", "--benchmark-repetitions")
pytestmark = pytest.mark.usefixtures("ends_in_time")


def options() -> Iterator[tuple[str, click.Option]]:
    """Every option with the first tool that has it."""
    known: set[tuple[str, str | None]] = set()
    for tool in COMMANDS:
        command = importlib.import_module(f"opreplay_tools.{TOOLS[tool]}").cli
        for option in command.params:
            if isinstance(option, click.Option) and (_name(option), option.help) not in known:
                known.add((_name(option), option.help))
                yield tool, option


def _name(option: click.Option) -> str:
    return max(option.opts, key=len)


def _files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def _call(
    tool: str, arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> int:
    before = _files(folder)
    monkeypatch.setattr(sys, "argv", [f"opreplay-{tool}", *arguments])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"opreplay_tools.{TOOLS[tool]}").main()
    printed = capsys.readouterr()
    code, after = int(left.value.code or 0), _files(folder)
    assert code in (0, 1, 2, 3), arguments
    assert "Traceback" not in printed.out + printed.err
    assert not any(".partial" in name for name in after), arguments
    if code:
        errors = [line for line in printed.err.splitlines() if not line.startswith("  ")]
        assert len(errors) == 1 or errors[0].startswith("Usage: "), (arguments, printed.err)
        assert after == before, arguments
    for path in sorted((folder / name for name in after.keys() - before.keys()), reverse=True):  # folders last
        path.unlink() if path.is_file() else path.rmdir()
    assert {name: after[name] for name in before} == before, arguments
    return code


ALL = list(options())


@pytest.mark.sweep
@pytest.mark.parametrize(("tool", "option"), ALL, ids=[f"{tool} {_name(option)}" for tool, option in ALL])
def test_an_option_with_a_value_of_any_kind_ends_in_one_error_or_in_what_was_asked(
    tool: str, option: click.Option, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, command = _name(option), [each for each in COMMANDS[tool] if not each.startswith(f"{_name(option)}=")]
    if option.is_flag:
        assert _call(tool, [f"{name}=x", *command], folder, capsys, monkeypatch) == 2
        _call(tool, [name, *command], folder, capsys, monkeypatch)
        return
    values = [value for value in VALUES if name not in _COUNTS or not value.isdigit()]
    codes = {_call(tool, [f"{name}={value}", *command], folder, capsys, monkeypatch) for value in values}
    assert codes & {1, 2, 3}, "no value at all is refused"


WRITERS = [tool for tool, command in COMMANDS.items() if any("out." in each for each in command)]


@pytest.mark.parametrize("tool", WRITERS)
@pytest.mark.parametrize("out", ["", "folder", "fifo", "nothing/here", "x" * 254, "x" * 5000, "\udcff/x"])
def test_a_place_where_nothing_can_be_written_is_one_error(
    tool: str, out: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [re.sub(r"out\.(opreplay|zip|json|html)", lambda _: out, each) for each in COMMANDS[tool]]
    refused = (1, 2, 3) if tool == "import" else (1, 2)  # an import may refuse the trace first, which has no ops
    assert _call(tool, arguments, folder, capsys, monkeypatch) in refused


@pytest.mark.parametrize("tool", COMMANDS)
@pytest.mark.parametrize("value", ["fifo", "folder", "nothing", "trace.json", "/dev/null", "\udcff", "x" * 5000])
def test_what_is_no_capture_and_no_trace_is_one_error(
    tool: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ("step.opreplay", "trace.json", "power.csv")
    arguments = [value if each in read else each for each in COMMANDS[tool]]
    expected = {"import": {0, 1, 3}, "energy": {2}}.get(tool, {3})
    assert _call(tool, arguments, folder, capsys, monkeypatch) in expected
