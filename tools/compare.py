"""opreplay-compare: where two captures part, and what one capture computes another way. Two files need no torch, unless
results or tolerances come from replays."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from replayfmt.compare.comparison import compare
from replayfmt.dump.row_templates import encode
from replayfmt.errors import UsageError

from .command import record_bar, run_tool, say, tool
from .replay_flags import ReplayFlags, flag_of, options_of_plans, threads_option


@tool(
    "opreplay-compare",
    ("opreplay-compare before.opreplay after.opreplay", "Which op differs first, by the captures' digests:"),
    ("opreplay-compare --replay before.opreplay after.opreplay", "The same for captures without digests of ops:"),
    ("opreplay-compare --tolerance=auto cpu.opreplay cuda.opreplay", "Only what rounding does not explain:"),
    (
        "opreplay-compare --isolate --device=cuda:0 --against=cpu step.opreplay",
        "Each op on two devices, on the same inputs:",
    ),
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
    "--isolate",
    is_flag=True,
    help="Of A alone: run each op in two ways on the same inputs, as the capture says and another way (--against, "
    "--set, --replay-kernel-substitution), and compare; the table is by kernel, worst first.",
)
@click.option("--against", metavar="DEVICE", help="The other way: run ops on this device.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="The other way: run ops under this setting, such as num_threads=1, mkldnn=off, deterministic=on, "
    "matmul_precision=medium, tf32=off, or any that a capture's session names. Repeatable.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "jsonl"]), default="text", show_default=True, help="How to print."
)
@options_of_plans
@threads_option
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="[B]", type=click.Path(), required=False)
@click.pass_context
def cli(
    context: click.Context,
    /,
    a: str,
    b: str | None,
    tolerance: str,
    replay: bool,
    isolate: bool,
    against: str | None,
    settings: tuple[str, ...],
    form: str,
    flags: ReplayFlags,
) -> int:
    """Find the op at which captures A and B part.

    Says whether their results are equal, and if not, which op differs first.

    Exits with 0 if every result that both hold is equal within the tolerance, 1 if something differs, if nothing could
    be compared or the captures have nothing in common, 2 for wrong usage, 3 if a capture is missing, unreadable or not
    valid.
    """
    if isolate:
        if b is not None:
            raise UsageError(f"--isolate compares two ways to run one capture; {b} is a second one")
        found: Any = _isolated(a, against, settings, tolerance, flags)
    elif against is not None or settings:
        raise UsageError(f"--{'set' if settings else 'against'} says how to run one capture another way: add --isolate")
    elif b is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "b")
        )
    else:
        found = compare(a, b, tolerance=tolerance, replay=replay, **_options(context, flags, replay, tolerance))
    if form == "jsonl":
        for row in found.rows:
            click.echo(encode(row))
    else:
        for line in found.text.splitlines():
            say(line)
    sys.stdout.flush()
    return 0 if found.ok else 1


def _options(context: click.Context, flags: ReplayFlags, replay: bool, tolerance: str) -> Any:
    """The options of replays. Raises UsageError if some are given and nothing is replayed."""
    if replay or tolerance == "auto":
        return flags.options()
    for each in fields(ReplayFlags):
        if context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{flag_of(each.name)} is for replays: add --replay or --tolerance=auto")
    return {}


def _isolated(a: str, against: str | None, settings: tuple[str, ...], tolerance: str, flags: ReplayFlags) -> Any:
    from replayfmt.compare.isolated import isolate_plan
    from replayfmt.compare.tolerances import parse_tolerance
    from replayfmt.compare.ways import OtherWay

    with flags.plan(a) as plan:
        way = OtherWay(plan, against, settings)
        with record_bar("replaying", plan.reader.record_count) as on_progress:
            return isolate_plan(plan, way, parse_tolerance(tolerance), on_progress)


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
