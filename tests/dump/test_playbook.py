"""The playbook for agents: one text in the package, printed by every tool; nothing in it is made up."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.resources import files
from pathlib import Path

import click
import pytest
from opreplay_tools.__main__ import TOOLS
from opreplay_tools.command import playbook_text

ROOT = Path(__file__).parents[2]
WHOLE = (ROOT / "tools" / "playbook.md").read_text(encoding="utf-8")


def command(tool: str) -> click.Command:
    cli = importlib.import_module(f"opreplay_tools.{TOOLS[tool]}").cli
    assert isinstance(cli, click.Command)
    return cli


def flags(tool: str) -> set[str]:
    return {name for parameter in command(tool).params for name in parameter.opts}


def test_the_playbook_has_a_section_for_every_tool_and_for_failures() -> None:
    headings = re.findall(r"^## (.+)$", WHOLE, re.MULTILINE)
    assert headings == [*(f"opreplay-{tool}" for tool in TOOLS), "Failure contract", "Troubleshooting"]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_prints_its_part_and_run_prints_all(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"opreplay-{tool}", "--agents-md"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"opreplay_tools.{TOOLS[tool]}").main()
    assert not left.value.code
    printed = capsys.readouterr().out
    assert printed == playbook_text(f"opreplay-{tool}")
    if tool == "run":
        assert printed == WHOLE
    else:
        assert printed.startswith(f"## opreplay-{tool}\n") and printed in WHOLE
        assert re.findall(r"^## (.+)$", printed, re.MULTILINE) == [f"opreplay-{tool}"]


def test_every_flag_in_the_playbook_exists() -> None:
    known = set().union(*(flags(tool) for tool in TOOLS)) | {"--help"}
    script = files("replayfmt.export").joinpath("replay_script.py").read_text(encoding="utf-8")  # of an export
    known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', script))
    ours = re.sub(r"^nvidia-smi .*$", "", WHOLE, flags=re.MULTILINE)  # another tool's command
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours)) <= known
    for tool in TOOLS:
        for line in re.findall(rf"^(?:\$ )?opreplay-{tool} (.+)$", WHOLE, re.MULTILINE):
            given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line.partition("|")[0]))
            assert given <= flags(tool)


def test_the_playbook_names_the_flags_that_matter_of_every_tool() -> None:
    common = {"--help", "--version", "--agents-md"}
    unnamed = {"--format", "--output"}  # said by their values, or by -o
    for tool in TOOLS:
        wanted = {flag for flag in flags(tool) if flag.startswith("--")} - common - unnamed
        assert {flag for flag in wanted if flag not in WHOLE} == set(), tool


def test_the_messages_of_the_troubleshooting_table_are_ones_that_the_code_can_say() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for folder in ("replayfmt", "tools") for path in (ROOT / folder).rglob("*.py")
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that go on over lines
    table = WHOLE.partition("## Troubleshooting")[2]
    messages = [
        message
        for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
        if not message.startswith("opreplay-")
    ]
    assert len(messages) > 12
    for message in messages:
        # What stands for something else in the message: a number, a device, a list.
        for part in re.split(r"\bN\b|…|\d+(?:\.\d)?|\bcuda\b|reasons|(?<=unsupported,)|(?<=verified:)", message):
            assert part.strip() in sources, message
