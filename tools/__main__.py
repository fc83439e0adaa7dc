"""`opreplay TOOL …`: the tools as one command; also `python -m replayfmt TOOL …`, if the commands are not on PATH."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click
from click.shell_completion import get_completion_class

from .command import agents_md_option, run_tool, version_option

# The short name of each tool, and its module. `python -m opreplay_tools.MODULE` runs it, too.
TOOLS = {
    "capture": "capture",
    "run": "run",
    "benchmark": "benchmark",
    "dump": "dump",
    "check": "check",
    "compare": "compare",
    "trim": "trim",
    "import": "importer",
    "export": "export",
    "probe": "probe",
    "energy": "energy",
    "report": "report",
    "examples": "examples",
}


class _Tools(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(TOOLS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        module = TOOLS.get(name)
        return None if module is None else import_module(f".{module}", __package__).cli  # type: ignore[no-any-return]

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError as error:
            meant = get_close_matches(args[0], TOOLS, 1)
            raise click.UsageError(f"{error.message}{''.join(f' Did you mean {each!r}?' for each in meant)}") from None


def _complete(context: click.Context, _parameter: click.Parameter, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        script = get_completion_class(shell)
        assert script is not None  # it is one of the choices
        for command in ("opreplay", *(f"opreplay-{name}" for name in TOOLS)):
            variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
            click.echo(script(cli, {}, command, variable).source())
        context.exit(0)


@click.command(
    "opreplay",
    _Tools,
    no_args_is_help=False,
    subcommand_metavar="TOOL [ARGUMENTS]",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`opreplay TOOL …` is `opreplay-TOOL …`.",
)
@version_option("opreplay")
@agents_md_option("opreplay")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_complete,
    help='Print what completes all commands in this shell, and exit: eval "$(opreplay --completion=bash)".',
)
def cli() -> None:
    """Capture the work of a PyTorch program, and replay it without the program."""


def main() -> None:
    """Run the tool that the first argument names, with the other arguments; without any, print the help."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name in TOOLS:
        sys.argv = [f"opreplay-{name}", *sys.argv[2:]]
        import_module(f".{TOOLS[name]}", __package__).main()
    else:
        sys.argv = [sys.argv[0], *(sys.argv[1:] or ["--help"])]
        run_tool(cli)


if __name__ == "__main__":
    main()
