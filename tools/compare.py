"""opreplay-compare: where two captures part. Needs no torch, unless results or tolerances come from replays."""

from __future__ import annotations

import sys
from typing import Any

import click

from replayfmt.compare.comparison import compare
from replayfmt.dump.row_templates import encode
from replayfmt.errors import UsageError

from .command import run_tool, say, tool

_OF_REPLAYS = {
    "device": "devices",
    "replay_file_remap": "file_remaps",
    "allow_imports": "allow_imports",
    "allow_operators": "allow_operators",
    "allow_code": "allow_code",
    "allow_incomplete": "allow_incomplete",
}


@tool(
    "opreplay-compare",
    ("opreplay-compare before.opreplay after.opreplay", "Which op differs first, by the captures' digests:"),
    ("opreplay-compare --replay before.opreplay after.opreplay", "The same for captures without digests of ops:"),
    ("opreplay-compare --tolerance=auto cpu.opreplay cuda.opreplay", "Only what rounding does not explain:"),
)
@click.option(
    "--tolerance",
    default="exact",
    show_default=True,
    metavar="auto|exact|ulp:N|RTOL,ATOL|FILE.json",
    help="How far results may be apart. auto: by what rounding and the inputs' own differences do to each op, learned "
    "by a replay of A. ulp:N: units in the last place. RTOL,ATOL: ATOL + RTOL * |a|; DTYPE=RTOL,ATOL;… by dtype. "
    "FILE.json: an object of these by kernel name. Without a replay, of the up to 64 elements that a digest holds.",
)
@click.option(
    "--replay", is_flag=True, help="Compare results of replays made here, of both captures, which stay as they are."
)
@click.option(
    "--format", "form", type=click.Choice(["text", "jsonl"]), default="text", show_default=True, help="How to print."
)
@click.option("--device", multiple=True, metavar="DEVICE", help="As with opreplay-run. Repeatable.")
@click.option(
    "--replay-file-remap",
    multiple=True,
    metavar="CAPTURED=REPLAY",
    help="External files are elsewhere now, as with opreplay-run. Repeatable.",
)
@click.option(
    "--allow-import", "allow_imports", multiple=True, metavar="NAME", help="As with opreplay-run. Repeatable."
)
@click.option(
    "--allow-operator", "allow_operators", multiple=True, metavar="OPERATOR", help="As with opreplay-run. Repeatable."
)
@click.option("--allow-code", is_flag=True, help="Run the code that is in the captures, as with opreplay-run.")
@click.option("--allow-incomplete", is_flag=True, help="Replay what there is of captures that were never closed.")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
def cli(a: str, b: str, tolerance: str, replay: bool, form: str, **flags: Any) -> int:
    """Find the op at which captures A and B part.

    Says whether their results are equal, and if not, which op differs first.

    Exits with 0 if every result that both hold is equal within the tolerance, 1 if something differs, if nothing could
    be compared or the captures have nothing in common, 2 for wrong usage, 3 if a capture is missing, unreadable or not
    valid.
    """
    options = {_OF_REPLAYS[name]: value for name, value in flags.items() if value}
    if options and not replay and tolerance != "auto":
        name = next(name for name, value in flags.items() if value).removesuffix("s").replace("_", "-")
        raise UsageError(f"--{name} is for replays: add --replay or --tolerance=auto")
    made = compare(a, b, tolerance=tolerance, replay=replay, **options)
    if form == "jsonl":
        for row in made.rows:
            click.echo(encode(row))
    else:
        for line in made.text.splitlines():
            say(line)
    sys.stdout.flush()
    return 0 if made.ok else 1


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
