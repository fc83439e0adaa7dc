"""`opreplay-benchmark --reconcile`: isolated ops against the whole replay, the capture and the program itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import say

if TYPE_CHECKING:
    from replayfmt.benchmark.measure import Options, Progress
    from replayfmt.replay.plan import Plan

# Flags of other measurements.
_NOT_WITH_RECONCILE = (
    "benchmark_repetitions",
    "inputs",
    "cuda_graph",
    "per_op",
    "compare",
    "baseline",
    "fail_above",
    "noise_floor",
    "device_profiling_mode",
    "device_profiling_output",
)


def reconcile_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --reconcile, --program and --program-runs."""
    for option in (
        click.option(
            "--program-runs",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            metavar="N",
            help="With --program: how often the program runs.",
        ),
        click.option(
            "--program",
            metavar="COMMAND",
            help="With --reconcile, --energy or --energy-windows: the captured program, 'script.py args…' as after "
            "python. It is run without a recorder, and its own time (with --replay-scope that of its scope of that "
            "name), or the energy of the whole script again and again, stands beside the replay's.",
        ),
        click.option(
            "--reconcile",
            is_flag=True,
            help="Measure each op on its own, with hot and with cold inputs, and the whole replay (or one "
            "--replay-scope); print the sums, the replay's time and the captured time side by side, and what explains "
            "the difference.",
        ),
    ):
        function = option(function)
    return function


def check_reconcile(context: click.Context, scopes: tuple[str, ...]) -> None:
    """Raises UsageError for flags that do not go with --reconcile, or that need it."""

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    if not context.params["reconcile"]:
        if given("program_runs"):
            raise UsageError("--program-runs needs --reconcile")
        if given("program") and not context.params["energy"] and context.params["energy_windows"] is None:
            raise UsageError("--program needs --reconcile, --energy or --energy-windows")
        return
    if given("program_runs") and not given("program"):
        raise UsageError("--program-runs needs --program")
    for name in _NOT_WITH_RECONCILE:
        if given(name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --reconcile")
    if len(scopes) > 1:
        raise UsageError("--reconcile takes one --replay-scope, or none for the whole replay")


def run_reconcile(
    make_plan: Callable[[bool], Plan],
    options: Options,
    form: str,
    progress: Progress | None,
    write: Callable[[str], None] | None,
    program: str | None,
    program_runs: int,
) -> None:
    """Measure and print. `make_plan` opens the capture, to keep going after ops that fail if its argument is true."""
    import json

    from replayfmt.benchmark.measure import measure
    from replayfmt.benchmark.per_op.measuring import measure_ops
    from replayfmt.benchmark.per_op.results import OpOptions, PerOpRun
    from replayfmt.benchmark.program import time_program
    from replayfmt.benchmark.reconciliation import Reconciliation
    from replayfmt.benchmark.reports.rows import make_report

    own = None if program is None else time_program(program, next(iter(options.scopes), None), program_runs)
    with make_plan(False) as plan:
        run = measure(plan, options, progress=progress)
        report = make_report(run, plan)
    ops: list[PerOpRun] = []
    asked = OpOptions(verify="none", scopes=options.scopes)
    with make_plan(True) as plan:
        for inputs in ("hot", "cold"):
            ops.append(measure_ops(plan, replace(asked, inputs=inputs), progress=progress or _unseen))
    found = Reconciliation.of(run, *ops, own)
    report.sections["reconciliation"] = found.as_json()
    if write is not None:
        write(report.json())
    if form == "console":
        for line in found.lines():
            say(line)
    else:
        click.echo(json.dumps(report.document(), indent=2) if form == "json" else report.csv())
    for warning in report.warnings():
        say(f"WARNING: {warning}", err=form != "console")


def _unseen(_what: str, _done: int, _of: int | None) -> None:
    """Progress that is not shown."""
