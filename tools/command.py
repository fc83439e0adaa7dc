"""What every tool's command line has in common: errors as one line and an exit code, --version, --agents-md.

Exit codes: 0 done, and verified as asked; 1 refused, failed or did not match; 2 wrong usage; 3 the capture is missing,
unreadable or not valid. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from replayfmt.errors import OpReplayError

from . import playbook


def agents_md_option(tool: str) -> Callable[[Any], Any]:
    """`--agents-md`: print the tool's part of the playbook and exit."""

    def show(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            click.echo(playbook.text(tool), nl=False)
            context.exit(0)

    return click.option("--agents-md", is_flag=True, is_eager=True, expose_value=False, callback=show,
                        help="Print this tool's playbook for agents and exit.")


def tool(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command called `name` out of a function, with the options that every tool has."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, context_settings={"help_option_names": ["-h", "--help"]})(function)
        command = agents_md_option(name)(command)
        return click.version_option(package_name="opreplay", prog_name=name)(command)

    return decorate


def report(error: OpReplayError) -> None:
    """Print an error as the tools do: `STATUS: message` on stderr, then its findings, one a line."""
    click.echo(f"{error.status}: {one_line(str(error))}", err=True)
    for finding in getattr(error, "findings", ()):
        click.echo(f"  {one_line(finding)}", err=True)


def one_line(text: str) -> str:
    """Text that stays on its line and cannot steer a terminal: messages quote what captures and paths contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def discard_output() -> None:
    """Let what is still buffered for stdout go nowhere: it cannot be written, and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_tool(command: click.Command) -> None:
    """Run a tool and leave the process with its exit code. The commands return their exit code, None for 0."""
    try:
        # Not command.main(), which turns a closed pipe into exit code 1.
        with command.make_context(command.name, sys.argv[1:]) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): that ends the tool, and is no error of ours.
        discard_output()
        code = 0
    except OpReplayError as error:
        report(error)
        code = error.exit_code
    sys.exit(code or 0)
