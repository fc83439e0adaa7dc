"""What every tool's command line has in common: errors as one line and an exit code, help in groups, completion.

Exit codes: 0 done, and verified as asked; 1 refused, failed or did not match; 2 wrong usage; 3 the capture is missing,
unreadable or not valid. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

import click

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.printable import printable

from . import playbook
from .option_groups import groups


def agents_md_option(tool: str) -> Callable[[Any], Any]:
    """`--agents-md`: print the tool's part of the playbook and exit."""

    def show(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            click.echo(playbook.text(tool), nl=False)
            context.exit(0)

    return click.option(
        "--agents-md",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print this tool's playbook for agents and exit.",
    )


class ToolCommand(click.Command):
    """A command whose help has its options in groups and ends with examples, and that refuses an option that takes one
    value and is given several: click would take the last. `examples` are command lines with what each is for."""

    examples: tuple[tuple[str, str], ...] = ()

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, parameters in groups(self.get_params(context)):
            records = [parameter.get_help_record(context) for parameter in parameters]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for command, purpose in self.examples:
                    formatter.write_text(purpose)
                    formatter.write(f"{'':{formatter.current_indent + 2}}{command}\n")

    def make_parser(self, context: click.Context) -> Any:
        parser = super().make_parser(context)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            values, rest, given = parse(args)
            for parameter in given:
                times = given.count(parameter)
                if times > 1 and _takes_one_value(parameter):
                    raise UsageError(f"{max(parameter.opts, key=len)} is given {times} times; it takes one value")
            return values, rest, given

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser


def _takes_one_value(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not (parameter.is_flag or parameter.multiple or parameter.count)


def tool(name: str, *examples: tuple[str, str]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command called `name` out of a function, with the options that every tool has. `examples` for its
    help: a command line and what it is for."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, ToolCommand, context_settings={"help_option_names": ["-h", "--help"]})(function)
        command.examples = examples
        command = agents_md_option(name)(command)
        return click.version_option(package_name="opreplay", prog_name=name)(command)

    return decorate


def report(error: OpReplayError) -> None:
    """Print an error as the tools do: `STATUS: message` on stderr, then its findings, one a line."""
    with said_if_possible():
        say(f"{error.status}: {error}", err=True)
        for finding in getattr(error, "findings", ()):
            say(f"  {finding}", err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print a line for people: messages quote what captures, traces and paths contain."""
    click.echo(printable(text), err=err)


class TorchMissing(OpReplayError):
    """What a tool was asked for needs PyTorch."""


class OutputFailed(OpReplayError):
    """Stdout cannot be written: the disk it goes to is full, for instance."""


class ReaderLeft(Exception):
    """Whoever read stdout went away (`| head`). No OSError: click would exit with 1 for it."""


class _Output(FileIO):
    """What is behind stdout. An OSError alone would not say that it is about the output."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderLeft from error
        except OSError as error:
            raise OutputFailed(f"the output could not be written: {error.strerror}") from error


def _own_streams() -> None:
    """Streams whose failures are told apart; a stand-in for one that the process was started without (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process
    if sys.stdout is sys.__stdout__:
        before = sys.stdout
        # What an encoding cannot say is escaped: names come from anywhere.
        errors = "backslashreplace" if before.errors == "strict" else before.errors
        sys.stdout = TextIOWrapper(
            BufferedWriter(_Output(before.fileno(), "w", closefd=False)),
            before.encoding,
            errors,
            line_buffering=before.line_buffering,
        )


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Around printing a result that is there: where its reader goes away (`| head`), the rest goes nowhere and the tool
    goes on. What it exits with, and the files it writes, do not depend on who reads."""
    try:
        yield
    except ReaderLeft:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: it cannot be written, and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def said_if_possible() -> Iterator[None]:
    """Around messages on stderr. Where that cannot be written there is nobody to tell; the exit code still tells."""
    try:
        yield
    except OSError:
        _discard(sys.stderr)


def run_tool(command: click.Command, *, own_streams: bool = True) -> None:
    """Run a tool and leave the process with its exit code. The commands return their exit code, None for 0.

    `own_streams`: stdout and stderr are the tool's, and not those of a program that it runs.
    """
    if own_streams:
        _own_streams()
    try:
        code = command.main(prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        report(UsageError(f"{' '.join(error.format_message().split())} ({command.name} --help)"))
        code = UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except ReaderLeft:  # that ends the tool, and is no error of ours
        _discard(sys.stdout)
        code = 0
    except OpReplayError as error:
        if isinstance(error, OutputFailed):
            _discard(sys.stdout)
        report(error)
        code = error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        report(
            TorchMissing(
                f"{command.name} needs PyTorch here, which is not installed: pip install torch; "
                "opreplay-dump and opreplay-check do without"
            )
        )
        code = TorchMissing.exit_code
    sys.exit(code or 0)
