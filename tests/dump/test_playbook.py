"""The playbook for agents: pages in the package, printed by every tool; nothing in it is made up."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.resources import files
from pathlib import Path

import click
import pytest
from opreplay_tools.__main__ import TOOLS
from opreplay_tools.__main__ import main as opreplay
from opreplay_tools.command import TOPICS, playbook_text

ROOT = Path(__file__).parents[2]
PAGES = {name: playbook_text(name) for name in ("opreplay", *TOOLS, *TOPICS)}
WHOLE = "\n".join(PAGES.values())


def command(tool: str) -> click.Command:
    cli = importlib.import_module(f"opreplay_tools.{TOOLS[tool]}").cli
    assert isinstance(cli, click.Command)
    return cli


def flags(tool: str) -> set[str]:
    return {name for parameter in command(tool).params for name in parameter.opts}


def test_every_tool_has_a_page_and_the_first_page_names_every_page() -> None:
    assert {path.stem for path in (ROOT / "tools/playbook").iterdir()} == {"opreplay", *TOOLS}
    first = PAGES["opreplay"]
    named = set(re.findall(r"`([a-z-]+)`", first))
    assert set(TOOLS) <= named
    assert re.findall(r"`([a-z-]+)`", first.rpartition("Topics:")[2]) == TOPICS
    for tool in TOOLS:
        assert PAGES[tool].startswith(f"# opreplay-{tool}\n")
        topics = (
            re.findall(r"`([a-z-]+)`", PAGES[tool].rpartition("\nTopics:")[2]) if "\nTopics:" in PAGES[tool] else []
        )
        assert set(topics) <= set(TOPICS), tool


def printed(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", argv)
    module = argv[0].removeprefix("opreplay").removeprefix("-")
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"opreplay_tools.{TOOLS[module]}").main() if module else opreplay()
    assert not left.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_prints_its_page_and_run_the_first(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES["opreplay" if tool == "run" else tool]
    assert printed([f"opreplay-{tool}", "--agents-md"], monkeypatch, capsys) == page
    assert printed([f"opreplay-{tool}", f"--agents-md={tool}"], monkeypatch, capsys) == PAGES[tool]
    assert printed([f"opreplay-{tool}", "--agents-md=failures"], monkeypatch, capsys) == PAGES["failures"]


def test_opreplay_prints_the_first_page_or_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(["opreplay", "--agents-md"], monkeypatch, capsys) == PAGES["opreplay"]
    assert printed(["opreplay", "--agents-md=run"], monkeypatch, capsys) == PAGES["run"]
    assert printed(["opreplay", "--agents-md", "graphs"], monkeypatch, capsys) == PAGES["graphs"]


def test_a_page_that_is_not_there_is_wrong_usage_and_names_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["opreplay", "--agents-md=../README"])
    with pytest.raises(SystemExit) as left:
        opreplay()
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith("INVALID_ARGUMENT: --agents-md=../README: ")
    assert "failures" in error and "trim" in error


def test_every_flag_in_the_playbook_exists() -> None:
    known = set().union(*(flags(tool) for tool in TOOLS)) | {"--help"}
    for package, script in (("export", "replay_script.py"), ("benchmark.candidates", "check_script.py")):  # of exports
        text = files(f"replayfmt.{package}").joinpath(script).read_text(encoding="utf-8")
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))
    ours = re.sub(
        r"^(?:- run: )?(?:nvidia-smi|python3? -m venv) .*$", "", WHOLE, flags=re.MULTILINE
    )  # others' commands
    # An example's, launchers' own, and a simulator's.
    launchers = r"torchrun --nproc-per-node=\S+|accelerate launch --no_python"
    ours = re.sub(rf"--steps 2\b|{launchers}|--(?:workload|comm-group)-configuration\b", "", ours)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours)) <= known
    for tool in TOOLS:
        for line in re.findall(rf"^(?:\$ )?opreplay-{tool} (.+)$", WHOLE, re.MULTILINE):
            line = re.sub(r"(--replay-options)='[^']*'", r"\1", line)  # those of another tool
            given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line.partition("|")[0].partition(" examples/")[0]))
            assert given <= flags(tool)


def test_the_playbook_names_the_flags_that_matter_of_every_tool() -> None:
    common = {"--help", "--version", "--agents-md"}
    unnamed = {"--format", "--output"}  # said by their values, or by -o
    for tool in TOOLS:
        wanted = {flag for flag in flags(tool) if flag.startswith("--")} - common - unnamed
        assert {flag for flag in wanted if flag not in WHOLE} == set(), tool


def test_the_messages_of_the_tables_of_failures_are_ones_that_the_code_can_say() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for folder in ("replayfmt", "tools") for path in (ROOT / folder).rglob("*.py")
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that go on over lines
    tables = PAGES["opreplay"].partition("## When something fails")[2] + PAGES["failures"].partition("## Unsup")[2]
    messages = [
        message
        for row in re.findall(r"^\| ([^|]+) \|", tables, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
        if not message.startswith("opreplay-")
    ]
    assert len(messages) > 30
    for message in messages:
        # What stands for something else in the message: a number, a device, a list.
        for part in re.split(r"\bN\b|…|\d+(?:\.\d)?|\bcuda\b|reasons|(?<=unsupported,)|(?<=verified:)", message):
            assert part.strip() in sources, message
