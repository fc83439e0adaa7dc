"""opreplay-run: replay a capture and compare the results with the captured ones."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from replayfmt.errors import ReplayMismatch, UsageError
from replayfmt.format.output import check_place, same_file
from replayfmt.format.validation import counted, printable

from .command import console_script, emit, option, reader_may_leave, record_bar, refuse, report, say, show, tool
from .ranks import choose_collectives, collective_options, on_all_ranks
from .replay_flags import (
    ReplayFlags,
    guard_option,
    guarded,
    profiled,
    profiling_options,
    profiling_request,
    replay_options,
    rows_if_rejected,
    selection_options,
    settings_option,
    threads_option,
    worker_command,
)

if TYPE_CHECKING:
    from replayfmt.dump.selection import OpSelection
    from replayfmt.replay.results import ReplayResult


@tool(
    "opreplay-run",
    ("opreplay-run step.opreplay", "Replay and verify:"),
    ("opreplay-run --device=cuda:0 step.opreplay", "On another device:"),
    (
        "opreplay-run --replay-kernel-substitution=aten::mm=my_mm.py step.opreplay",
        "With your own kernel, checked against the original:",
    ),
)
@replay_options
@threads_option
@settings_option
@option(
    "--keep-going", "Run what can be run and report a verdict for every op: ok, refused, failed, mismatched or skipped."
)
@option(
    "--compare-kernels",
    "For an imported trace, on a CUDA device: run each op once more under the profiler, compare its device kernels "
    "and their grids with the trace's, and print MATCH or DIFFERENT. Implies --keep-going.",
)
@selection_options
@collective_options
@guard_option
@option(
    "--record FILE",
    "Replay once more, and write what that computes as a capture of its own: the same ops with the digests and "
    "scalars that they have here. opreplay-compare CAPTURE FILE says what differs.",
)
@option(
    "--digests",
    "What --record takes digests of: what the capture has digests of, or every result of every op.",
    type=["captured", "ops"],
    default="captured",
)
@option(
    "--repeat N",
    "Replay N times and compare the replays with each other, not with the capture: name the first op that differs "
    "from itself, how often and where. With more --device than the capture needs: N times on each, and name the "
    "device that disagrees with the others.",
    type=click.IntRange(2, 1_000_000),
)
@option(
    "--processes", "With --repeat: each replay in a fresh process, since some libraries choose kernels at first use."
)
@option(
    "--warm",
    "Execute everything once more, unverified, and print that time too: the first execution includes allocation and "
    "page faults.",
)
@option("--format", "How the result is printed.", name="form", type=["text", "jsonl"], default="text")
@option(
    "--list-initializers",
    "Print the initializers for content that was not captured, in the order they are tried, and exit. Needs no "
    "CAPTURE.",
)
@profiling_options
@click.argument("capture", metavar="CAPTURE", type=click.Path(), required=False)
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str | None,
    list_initializers: bool,
    flags: ReplayFlags,
    keep_going: bool,
    compare_kernels: bool,
    guard: bool,
    warm: bool,
    record: str | None,
    digests: Literal["captured", "ops"],
    repeat: int | None,
    processes: bool,
    form: str,
    device_profiling_mode: str | None,
    device_profiling_output: str | None,
    force: bool,
    collective_timeout: float,
    collectives: str | None,
    wanted: OpSelection,
) -> int:
    """Replay CAPTURE without its program and verify the results.

    CAPTURE is a file, or the folder of all ranks, which torchrun replays together.

    Exits with 0 if it ran and matched, 1 if it was refused, failed or did not match, 2 for wrong usage, 3 if CAPTURE is
    missing, unreadable or not valid.
    """
    if list_initializers:
        for line in flags.registry().lines():
            say(line)
        return 0
    if capture is None:
        raise click.MissingParameter(
            ctx=context, param=next(each for each in context.command.params if each.name == "capture")
        )
    choose_collectives(context, collectives, capture)
    if os.path.isdir(capture):
        from replayfmt.replay.ranks import Together

        def replay(ranks: Together) -> int:
            return context.invoke(cli, **(context.params | {"capture": ranks.path, "collectives": None})) or 0

        return on_all_ranks(lambda: Together(capture, collective_timeout), replay)
    if not wanted.everything:
        refuse(
            context, ("repeat", "record", "warm"), "takes the whole capture: cut a part out first, with opreplay-trim"
        )
        keep_going = True
    if repeat is not None:
        return _repeat(capture, flags, repeat, processes, form)
    if processes:
        raise UsageError("--processes: for --repeat=N, which is missing")
    if record is not None:
        if same_file(record, capture):
            raise UsageError(f"--record={record}: is the capture; name another file")
        check_place(record, force)
    elif digests != "captured":
        raise UsageError(f"--digests={digests}: for the file of --record=FILE, which is missing")
    profiling = profiling_request(device_profiling_mode, device_profiling_output, force, capture)
    keep_going = keep_going or compare_kernels
    with flags.plan(capture, keep_going=keep_going) as plan, profiled(profiling, plan):
        from replayfmt.dump.selection import resolve_selection
        from replayfmt.replay.convenience import as_rows, as_text

        if compare_kernels:
            from replayfmt.benchmark import profiling

            profiling.check_device(plan)
            kernels = profiling.kernels_of(plan)
        if guard:
            guarded(plan, err=form == "jsonl")
        shown = rows_if_rejected() if form == "jsonl" else nullcontext()
        with record_bar("replaying", plan.reader.record_count) as on_progress, shown:
            only = (
                None
                if wanted.everything
                else plan.preparation.slice(resolve_selection(plan.reader, wanted).ordinals.tolist())
            )
            result = plan.execute(
                verify=flags.verify, keep_going=keep_going, on_progress=on_progress, scope_times=True, only=only
            )
            again = None
            if warm and result.divergence is None:
                again = plan.execute(keep_going=keep_going, on_progress=on_progress, scope_times=True)
            if record is not None:
                from replayfmt.trim.recorded import record_plan

                recorded = record_plan(plan, record, digests=digests, force=force, on_progress=on_progress)
                result.notes += (f"recorded: {record}: {counted(recorded.ops, 'op')}, {recorded.bytes:,} bytes",)
        with reader_may_leave():
            if form == "jsonl":
                for row in as_rows(plan, result, again):
                    emit(json.dumps(row))
            else:
                for line in (*as_text(plan, result, again), *(f"finding: {each}" for each in plan.findings)):
                    say(line)
            if compare_kernels:
                for verdict in profiling.compare_kernels(plan, kernels):
                    emit(json.dumps(verdict.row()) if form == "jsonl" else printable(str(verdict)))
    return _judge(capture, result, part=not wanted.everything)


def _repeat(capture: str, flags: ReplayFlags, times: int, processes: bool, form: str) -> int:
    """Print how replays of the capture differ from each other; returns the exit code."""
    from replayfmt.compare.repeated import groups_of, repeat_by, repeat_here, run_process
    from replayfmt.pytorch.collectives import are_left_out
    from replayfmt.pytorch.environment import replayed_settings

    groups = groups_of(capture, flags.device)
    if processes:
        left_out = ["--collectives=none"] if are_left_out() else []
        settings = [f"--set={name}={value}" for name, value in replayed_settings({}).items()]

        def record(group: tuple[str, ...], out: str) -> None:
            given = [*replace(flags, verify="none", device=group).arguments(), *settings, *left_out]
            run_process(
                worker_command("opreplay_tools.run", f"--record={out}", "--digests=ops", *given, "--", capture), out
            )

        found = repeat_by(capture, times, {"+".join(group): partial(record, group) for group in groups}, processes=True)
    else:
        found = repeat_here(capture, times, groups, lambda group: replace(flags, device=group).plan(capture))
    with reader_may_leave():
        show(form, found.rows, found.text.splitlines())
    return 0 if found.ok else 1


def _judge(capture: str, result: ReplayResult, *, part: bool) -> int:
    """Report a mismatch on stderr; returns the exit code. `part`: no more than that was asked for."""
    if result.divergence is not None:
        findings = [f"results differ between two runs: {text}" for text in result.nondeterministic]
        if result.divergence.written_by is not None:
            findings.append(
                "the capture has no digest of every op's results, so an earlier op may be the first that differs: "
                f"capture with --digests=ops to find it; opreplay-run --repeat=2 {capture} says which ops differ from "
                "run to run here"
            )
        said = f"{capture}: the replay differs from the capture: {result.divergence}"
        report(ReplayMismatch(said, tuple(findings)))
    if part and result.divergence is None and not result.left_out:
        return int(any(each.verdict != "ok" for each in result.verdicts or ()))
    return 0 if result.outcome == "ok" else 1


main = console_script(cli)

if __name__ == "__main__":
    main()
