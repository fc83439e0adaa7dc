"""What the command lines say of themselves: help in groups, examples that hold, one line for mistakes, completion."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from in_process import Tools
from opreplay_tools.__main__ import TOOLS
from opreplay_tools.command import FORMATS, GROUPS, ToolCommand, run_tool

COMMANDS: dict[str, ToolCommand] = {
    name: import_module(f"opreplay_tools.{module}").cli for name, module in TOOLS.items()
}


def help_of(command: click.Command) -> str:
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        return command.get_help(context)


def options(command: click.Command) -> list[click.Option]:
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        return [each for each in command.get_params(context) if isinstance(each, click.Option)]


def long_name(option: click.Option) -> str:
    return max(option.opts, key=len)


def test_every_option_has_one_heading_and_every_heading_its_options() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == {long_name(each) for command in COMMANDS.values() for each in options(command)} - {"-m", "-r"}


@pytest.mark.parametrize("name", TOOLS)
def test_help_has_every_option_once_with_its_default_and_ends_with_examples(name: str) -> None:
    text = help_of(COMMANDS[name])
    rows = [
        line.strip().partition("  ")[0].replace(",", " ").split()
        for line in text.splitlines()
        if line.startswith("  -")
    ]
    for option in options(COMMANDS[name]):
        assert sum(long_name(option) in row for row in rows) == 1, option
        if option.show_default:
            assert f"[default: {option.default}" in " ".join(text.split()), option
    assert COMMANDS[name].examples and text.splitlines()[-1].strip() == COMMANDS[name].examples[-1][0]


@pytest.mark.parametrize("name", TOOLS)
def test_the_examples_are_command_lines_that_the_tool_takes(name: str) -> None:
    command = COMMANDS[name]
    for example, _purpose in command.examples:
        tool, *arguments = shlex.split(example)
        assert tool == command.name
        with command.make_context(tool, arguments):  # refuses what it does not know
            pass


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, ["--no-such-flag"]) for name in TOOLS),
        *((name, []) for name in TOOLS if name != "examples"),
        ("run", ["--verify=nonsense", "x"]),
        ("capture", ["-o"]),
        ("examples", ["one", "two"]),
    ],
)
def test_wrong_usage_is_one_line_with_a_status(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"opreplay-{name}", *arguments])
    with pytest.raises(SystemExit) as left:
        run_tool(COMMANDS[name])
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("INVALID_ARGUMENT: ") and printed.err.endswith(f" (opreplay-{name} --help)\n")


@pytest.mark.parametrize(
    ("name", "given", "own"),
    [
        ("benchmark", "--replay-scope=execute", "--scope"),
        ("benchmark", "--op-filter=aten::mm", "--kernel"),
        ("dump", "--replay-scope=execute", "--scope"),
        ("trim", "--op-filter=aten::mm", "--kernel"),
    ],
)
def test_a_selection_has_one_name_in_all_tools(name: str, given: str, own: str) -> None:
    command = COMMANDS[name]
    value = given.partition("=")[2]
    for spelled in (given, f"{own}={value}"):
        with command.make_context(
            command.name, [spelled, "x.opreplay", *(["out"] if name == "trim" else [])]
        ) as context:
            assert value in str(context.params.values())
    assert given.partition("=")[0] not in {long_name(each) for each in options(command)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("dmup", "x"), "dump"),
        (("dump", "--scpoe=execute", "x"), "--scope"),
        (("run", "--kernel-substitution=aten::mm=a.py", "x"), "--replay-kernel-substitution"),
        (("benchmark", "--scopes=execute", "x"), "--scope"),
        (("trim", "--kernels=aten::mm", "x", "y"), "--kernel"),
        (("dump", "--scopes=execute", "x"), "--scope"),
        (("export", "--kernl=aten::mm", "x", "y"), "--kernel"),
        (("benchmark", "--format=jsonl", "x"), "--benchmark-format"),
    ],
)
def test_a_name_that_is_nearly_right_is_refused_with_the_right_one(given: tuple[str, ...], meant: str) -> None:
    command = [sys.executable, "-m", "opreplay_tools", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f" Did you mean '{meant}'? (opreplay" in done.stderr


def test_a_word_of_a_name_finds_the_names_that_have_it(tools: Tools) -> None:
    said = tools("benchmark", "--time=3", "x").err
    assert "--benchmark-min-time" in said and "--benchmark-max-time" in said and "--top" not in said


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_another_tool_writes_is_refused_with_the_command(form: str, tools: Tools) -> None:
    for name in ("dump", "run", "compare", "export"):
        choices = next(each.type for each in options(COMMANDS[name]) if "--format" in each.opts).choices  # type: ignore[attr-defined]
        if form not in choices:
            ran = tools(name, f"--format={form}", "x.opreplay")
            assert ran.code == 2 and f"{FORMATS[form]} writes it" in ran.err
    tool, *flags = FORMATS[form].split()
    named = {each for option in options(COMMANDS[tool.removeprefix("opreplay-")]) for each in option.opts}
    assert all(flag.partition("=")[0] in named for flag in flags)


def completed(words: str) -> list[str]:
    """What bash is offered for the last of these words."""
    tool = shlex.split(words)[0]
    environment = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        f"_{tool.upper().replace('-', '_')}_COMPLETE": "bash_complete",
    }
    done = subprocess.run([Path(sys.executable).with_name(tool)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_shell_completes_tools_flags_choices_and_files() -> None:
    assert completed("opreplay exp") == ["plain,export"]
    assert completed("opreplay run --verif") == ["plain,--verify"]
    assert completed("opreplay-run --verify bit") == ["plain,bitwise"]
    assert completed("opreplay-check st") == ["file,st"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_one_line_completes_all_commands(shell: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("opreplay"), f"--completion={shell}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("", *(f"_{name.upper()}" for name in TOOLS)):
        assert f"_OPREPLAY{name}_COMPLETE={shell}_complete" in done.stdout


def test_bash_takes_that_line() -> None:
    script = 'eval "$(opreplay --completion=bash)" && complete -p opreplay opreplay-run opreplay-report'
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("complete ") == 3, done.stderr
