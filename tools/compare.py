"""opreplay-compare: where two captures part, and what one capture computes another way. Two files need no torch, unless
results or tolerances come from replays."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from replayfmt.compare.comparison import compare
from replayfmt.dump.row_templates import encode
from replayfmt.errors import UsageError

from .command import console_script, emit, is_given, option, record_bar, show, stdout, tool
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
    ("opreplay-compare --bisect --set=mkldnn=off step.opreplay", "Which of them move the end result:"),
)
@option(
    "--tolerance auto|exact|ulp:N|RTOL,ATOL|FILE.json",
    "How far results may be apart. auto: by what rounding and the inputs' own differences do to each op, learned by a "
    "replay of A. ulp:N: units in the last place. RTOL,ATOL: ATOL + RTOL * |a|; DTYPE=RTOL,ATOL;… by dtype. "
    "FILE.json: an object of these by kernel name. Without a replay, of the up to 64 elements that a digest holds.",
    default="exact",
)
@option("--replay", "Compare results of replays made here, of both captures, which stay as they are.")
@option("--times", "Also say what was faster or slower in B, by the captured times.")
@option(
    "--benchmark FILE",
    "The same by files of opreplay-benchmark --per-op --benchmark-out=FILE. Repeat it: of A, then of B.",
    many="benchmarks",
)
@option(
    "--isolate",
    "Of A alone: run each op in two ways on the same inputs, as the capture says and another way (--against, --set, "
    "--replay-kernel-substitution), and compare; the table is by kernel, worst first.",
)
@option(
    "--bisect",
    "Of A alone: find a minimal set of kernels and calls that, run the other way, move the end result. Replays A many "
    "times.",
)
@option(
    "--judge digest|host_read|SCRIPT.py:FUNCTION",
    "With --bisect: what the end result is. The last digest, or the last value that the program read (default), or "
    "with :ORDINAL another one; or a function that is given what two replays computed, by ordinal, and returns "
    "whether the second is off.",
)
@option("--state FILE", "With --bisect: keep in FILE what was tried, and go on from there if the file exists.")
@option("--against DEVICE", "The other way: run ops on this device.")
@option(
    "--set NAME=VALUE",
    "The other way: run ops under this setting, such as num_threads=1, mkldnn=off, deterministic=on, "
    "matmul_precision=medium, tf32=off, or any that a capture's session names. Repeatable.",
    many="settings",
)
@option("--format", "How to print.", name="form", type=["text", "jsonl"], default="text")
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
    times: bool,
    benchmarks: tuple[str, ...],
    isolate: bool,
    bisect: bool,
    judge: str | None,
    state: str | None,
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
    if (judge or state) and not bisect:
        raise UsageError(f"--{'judge' if judge else 'state'}: for --bisect, which is missing")
    if isolate or bisect:
        if b is not None or (isolate and bisect):
            more = f"{b} is a second one" if b is not None else "give --isolate or --bisect"
            raise UsageError(f"--{'isolate' if isolate else 'bisect'} compares two ways to run one capture; {more}")
        found: Any = _two_ways(
            a, against, settings, tolerance, flags, (judge or "host_read", state) if bisect else None
        )
    elif against is not None or settings:
        flag = "set" if settings else "against"
        raise UsageError(f"--{flag} says how to run one capture another way: add --isolate or --bisect")
    elif b is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "b")
        )
    else:
        options = _options(context, flags, replay, tolerance)
        found = compare(a, b, tolerance=tolerance, replay=replay, times=times, benchmarks=benchmarks, **options)
    show(form, found.rows, found.text.splitlines(), encode)
    stdout().flush()
    return 0 if found.ok else 1


def _options(context: click.Context, flags: ReplayFlags, replay: bool, tolerance: str) -> Any:
    """The options of replays. Raises UsageError if some are given and nothing is replayed."""
    if replay or tolerance == "auto":
        return flags.options()
    for each in fields(ReplayFlags):
        if is_given(context, each.name):
            raise UsageError(f"{flag_of(each.name)} is for replays: add --replay or --tolerance=auto")
    return {}


def _two_ways(
    a: str,
    against: str | None,
    settings: tuple[str, ...],
    tolerance: str,
    flags: ReplayFlags,
    bisect: tuple[str, str | None] | None,
) -> Any:
    """What `--isolate` finds, or with a judge and a state `--bisect`."""
    from replayfmt.compare.bisected import bisect_plan
    from replayfmt.compare.distances import parse_tolerance
    from replayfmt.compare.isolated import OtherWay, isolate_plan

    with flags.plan(a) as plan:
        way = OtherWay(plan, against, settings)
        if bisect is not None:
            judge, state = bisect
            return bisect_plan(
                plan, way, judge, parse_tolerance(tolerance), state, lambda text: emit(f"bisect: {text}", err=True)
            )
        with record_bar("replaying", plan.reader.record_count) as on_progress:
            return isolate_plan(plan, way, parse_tolerance(tolerance), on_progress)


main = console_script(cli)

if __name__ == "__main__":
    main()
