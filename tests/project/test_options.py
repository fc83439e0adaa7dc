"""What holds for every option of every command: a value that is given is a value that counts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest
from opreplay_tools.__main__ import TOOLS

from replayfmt.errors import UsageError


def options() -> Iterator[tuple[click.Command, click.Option]]:
    for module in TOOLS.values():
        command = importlib.import_module(f"opreplay_tools.{module}").cli
        yield from ((command, each) for each in command.params if isinstance(each, click.Option))


def named(pair: tuple[click.Command, click.Option]) -> str:
    return f"{pair[0].name} {max(pair[1].opts, key=len)}"


WITH_VALUES = [pair for pair in options() if not pair[1].is_flag]


def test_every_tool_is_looked_at() -> None:
    assert {command.name for command, _option in WITH_VALUES} == {f"opreplay-{name}" for name in TOOLS}
    assert len(WITH_VALUES) > 60


@pytest.mark.parametrize(("command", "option"), WITH_VALUES, ids=map(named, WITH_VALUES))
def test_an_option_is_repeatable_and_says_so_or_is_refused_when_it_is_given_twice(
    command: click.Command, option: click.Option
) -> None:
    assert option.nargs == 1
    says_so = "repeat" in (option.help or "").lower()
    assert says_so == option.multiple, option.help
    name = max(option.opts, key=len)
    twice = [f"{name}={value}" if name.startswith("--") else f"{name}{value}" for value in ("1", "2")]

    def parsed(*args: str) -> object:
        return command.make_parser(click.Context(command)).parse_args([*args])[0][option.name]

    if option.multiple:
        assert parsed(*twice) == ["1", "2"]
        return
    with pytest.raises(UsageError, match=f"^{name} is given 2 times; it takes one value$"):
        parsed(*twice)
    with pytest.raises(UsageError, match="is given 3 times"):
        parsed(*twice, option.opts[0], "1")
    assert parsed(twice[0]) == "1"
