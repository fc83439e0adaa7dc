"""opreplay-benchmark: replay a capture repeatedly and measure how long it takes.

With `--memory`, `--compare` and `--reconcile`, and how precisely to measure. `--per-op` and `--baseline` are in per_op,
`--energy` in energy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import (
    INTERRUPTED,
    console_script,
    emit,
    is_given,
    option,
    progress_bar,
    reader_may_leave,
    refuse,
    say,
    together,
    tool,
)
from .energy import Work, check_energy_windows, energy_options, run_energy, run_energy_windows
from .per_op import BaselineFlags, PerOpFlags, baseline_options, per_op_options, run_per_op, show_below, show_report
from .ranks import choose_collectives, collective_options, on_all_ranks
from .replay_flags import (
    ReplayFlags,
    guard_option,
    guarded,
    plan_of_scope,
    profiled,
    profiling_options,
    profiling_request,
    replay_options,
    threads_option,
    worker_command,
)

if TYPE_CHECKING:
    from replayfmt.benchmark.measure import Inputs, Options, PlanOfScope, Progress, Run
    from replayfmt.benchmark.run_report import Report
    from replayfmt.replay.plan import Plan


# Flags that some measurements have no use for.
_OTHER_MEASUREMENTS = ("per_op", "compare", "reconcile", "energy", "energy_windows")
_BASELINE_FLAGS = ("baseline", "fail_above", "noise_floor")
_PROFILING_FLAGS = ("device_profiling_mode", "device_profiling_output")
_FOR_ONE_PLAN = ("cuda_graph", *_BASELINE_FLAGS, *_PROFILING_FLAGS)


_NOT_IN_PROCESSES = (
    *("compare", "reconcile", "energy", "energy_windows", "memory", "guard", "cuda_graph", "roofline", "verbose"),
    *("benchmark_repetitions", *_PROFILING_FLAGS),
)


memory_option = option(
    "--memory",
    "Also report the capture's memory: bytes alive on each device over the records, the peak with the ops "
    "that made its storages, and what the devices' allocators report in one more replay. Storages from "
    "outside count from their first use.",
)


def check_memory(context: click.Context) -> None:
    """Raises UsageError for flags that do not go with --memory."""
    if not context.params["memory"]:
        return
    refuse(context, (*_OTHER_MEASUREMENTS, *_PROFILING_FLAGS), "does not go with --memory")
    if (form := context.params["benchmark_format"]) in ("csv", "markdown"):
        raise UsageError(f"--memory has no rows for --benchmark-format={form}; use console or json")


precision_options = together(
    option(
        "--benchmark-precision PERCENT|off",
        "Measure until the 95% confidence interval of the median is at most that far from it on either side, for "
        "each row. Default: 2%; off if --benchmark-min-time is a number of replays.",
    ),
    option(
        "--benchmark-max-time SECONDSs",
        "Stop after that many seconds even if the median is not known to --benchmark-precision; a warning says "
        "so. Default: 10 times --benchmark-min-time, with --per-op twice that (5s and 0.1s if that is a number of "
        "replays).",
    ),
    option(
        "--inputs",
        "hot: the same buffers each time. cold: the caches are flushed before each replay, or with --per-op each "
        "call, by rewriting a buffer larger than the last-level cache. Default: hot; with --per-op on "
        "accelerators, cold.",
        type=["hot", "cold"],
    ),
)


candidates_options = together(
    option(
        "--candidates DIR|FILE[:NAME]",
        "With --compare, and a kernel task in place of the capture: judge these kernels, each in a process of its "
        "own, and rank them by the whole workload. Python, C++ or CUDA sources, cubins. Repeatable.",
        multiple=True,
    ),
    option("--variants", "With --candidates: also judge them with zeros, NaN, Inf, empty and odd sizes."),
    guard_option,
    option(
        "--end-to-end CAPTURE",
        "With --candidates: also replay this capture with each accepted candidate in place, and rank by that.",
    ),
    option(
        "--candidate-timeout SECONDS",
        "With --candidates: the time for each; three times that for sources that are built.",
        type=click.FloatRange(min=0.1),
        default=120.0,
    ),
    option(
        "--candidate-memory BYTES",
        "With --candidates: the memory that each may take beyond PyTorch's own. Default: 8 GiB; 0: any.",
        type=click.IntRange(min=0),
        default=8 << 30,
        show_default=False,
    ),
    option(
        "--allow-reason REASON",
        "With --candidates: accept this behaviour, such as 'calls the original'. Repeatable.",
        multiple=True,
    ),
)


_FOR_TASKS = ("candidates", "variants", "guard", "end_to_end", "candidate_timeout", "candidate_memory", "allow_reason")
_WITH_TASKS = ("compare", "inputs", "benchmark_min_time", "benchmark_format", "benchmark_out", "force", "capture")
_WITH_TASKS += ("allow_code",)  # for --end-to-end


def run_task(context: click.Context, folder: str, flags: ReplayFlags) -> int:
    """Judge candidates for a kernel task, or check and time its reference."""
    import json

    from replayfmt.benchmark.candidates.judged import find_candidates, judge
    from replayfmt.benchmark.candidates.task_cases import Options
    from replayfmt.benchmark.candidates.task_judging import REASONS
    from replayfmt.benchmark.per_op.roofline import Peaks
    from replayfmt.benchmark.statistics import parse_min_time

    given = context.params
    refuse(
        context, [name for name in given if name not in (*_WITH_TASKS, *_FOR_TASKS)], "does not go with a kernel task"
    )
    for reason in given["allow_reason"]:
        if reason not in REASONS:
            raise UsageError(f"--allow-reason={reason}: expected one of {', '.join(REASONS)}")
    min_time = parse_min_time(given["benchmark_min_time"]) if is_given(context, "benchmark_min_time") else None
    if min_time is not None and min_time.seconds is None:
        raise UsageError(f"--benchmark-min-time={min_time}: a kernel task takes seconds, such as 0.1s")
    candidates = find_candidates(given["candidates"])
    options = Options(
        variants=given["variants"],
        guard=given["guard"],
        allow=given["allow_reason"],
        min_time_s=min_time.seconds if min_time is not None and min_time.seconds is not None else 0.05,
        timeout_s=given["candidate_timeout"],
        memory_bytes=given["candidate_memory"],
    )

    def replayed(candidate: str, task: dict[str, Any]) -> dict[str, Any]:
        return _end_to_end(given["end_to_end"], candidate, task, flags.allow_code)

    import torch

    with ExitStack() as stack:
        write = _opened(stack, _OUT, given["benchmark_out"], given["force"])
        report = judge(
            folder,
            candidates,
            options,
            lambda device: Peaks(device, torch.get_num_threads()),
            replayed if given["end_to_end"] else None,
            cold=given["inputs"] == "cold",
        )
        text = json.dumps(report.document(), indent=1) + "\n"
        if write is not None:
            write(text)
        if given["benchmark_format"] == "console":
            for line in report.lines():
                say(line)
        else:
            emit(text, end="")
    return 0 if report.all_accepted else 1


def _end_to_end(capture: str, candidate: str, task: dict[str, Any], allow_code: bool) -> dict[str, Any]:
    """The row of the whole replay of a comparison with a candidate in place, made in a process of its own."""
    import json
    import subprocess

    from replayfmt.benchmark.candidates.task_judging import split_candidate

    path, function = split_candidate(candidate)
    if not path.endswith((".py", ".cubin")):
        return {"ratio": None, "reason": "only Python files and cubins are substituted in a replay"}
    function = function or ("" if path.endswith(".cubin") else task["function"])
    several = len({each["program"] for each in task["workloads"]}) > 1
    named = f"{task['operator' if several else 'name']}={path}{':' * bool(function)}{function}"
    command = worker_command(
        "opreplay_tools.benchmark",
        "--compare",
        f"--replay-kernel-substitution={named}",
        "--benchmark-format=json",
        "--benchmark-min-time=12x",
        *["--allow-code"] * allow_code,
        "--",
        capture,
    )
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"ratio": None, "reason": said[0] if said else f"the replay ended with {done.returncode}"}
    row: dict[str, Any] = json.loads(done.stdout)["comparisons"][0]
    return row


def refuse_with_compare(context: click.Context, flags: ReplayFlags, per_op: bool) -> None:
    """Raises UsageError for flags that do not go with --compare, and if there is nothing to compare with."""
    if not flags.replay_kernel_substitution and flags.autotune == "captured":
        raise UsageError(
            "--compare needs --replay-kernel-substitution or --autotune=again: there is nothing to compare with"
        )
    if per_op:
        raise UsageError("--compare and --per-op are two ways to measure; give one of them")
    refuse(
        context,
        ("benchmark_repetitions", "benchmark_precision", "benchmark_max_time", "inputs", *_FOR_ONE_PLAN),
        "does not go with --compare, which measures in rounds",
    )


def run_compare(
    plan: Plan, options: Options, form: str, progress: Progress | None, write: Callable[[str], None] | None
) -> None:
    """Measure and print; `write` receives the JSON for --benchmark-out."""
    from replayfmt.benchmark.comparison import make_compare_report, measure_both

    report = make_compare_report(measure_both(plan, options, progress=progress), plan)
    if write is not None:
        write(report.json())
    show_report(report, form)


reconcile_options = together(
    option(
        "--reconcile",
        "Measure each op on its own, with hot and with cold inputs, and the whole replay (or one --scope); "
        "print the sums, the replay's time and the captured time side by side, and what explains the difference.",
    ),
    option(
        "--program COMMAND",
        "With --reconcile, --energy or --energy-windows: the captured program, 'script.py args…' as after python. "
        "It is run without a recorder, and its own time (with --scope that of its scope of that name), or "
        "the energy of the whole script again and again, stands beside the replay's.",
    ),
    option("--program-runs N", "With --program: how often the program runs.", type=click.IntRange(min=1), default=3),
)


def check_reconcile(context: click.Context, scopes: tuple[str, ...]) -> None:
    """Raises UsageError for flags that do not go with --reconcile, or that need it."""
    values = context.params
    if not values["reconcile"]:
        refuse(context, ["program_runs"], "needs --reconcile")
        if not values["energy"] and values["energy_windows"] is None:
            refuse(context, ["program"], "needs --reconcile, --energy or --energy-windows")
        return
    if values["program"] is None:
        refuse(context, ["program_runs"], "needs --program")
    others = ("benchmark_repetitions", "inputs", "per_op", "compare", *_FOR_ONE_PLAN)
    refuse(context, others, "does not go with --reconcile")
    if len(scopes) > 1:
        raise UsageError("--reconcile takes one --scope, or none for the whole replay")


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
    from replayfmt.benchmark.energy.running import time_program
    from replayfmt.benchmark.measure import measure, unseen
    from replayfmt.benchmark.per_op.measuring import measure_ops
    from replayfmt.benchmark.per_op.results import OpOptions, PerOpRun, Reconciliation
    from replayfmt.benchmark.run_report import make_report

    own = None if program is None else time_program(program, next(iter(options.scopes), None), program_runs)
    with make_plan(False) as plan:
        run = measure(plan, options, progress=progress)
        report = make_report(run, plan)
    ops: list[PerOpRun] = []
    asked = OpOptions(verify="none", scopes=options.scopes)
    with make_plan(True) as plan:
        for inputs in ("hot", "cold"):
            ops.append(measure_ops(plan, replace(asked, inputs=inputs), progress=progress or unseen))
    found = Reconciliation.of(run, *ops, own)
    report.sections["reconciliation"] = found.as_json()
    if write is not None:
        write(report.json())
    show_report(report, form, found.lines())


def run_ranks(
    context: click.Context,
    folder: str,
    flags: ReplayFlags,
    options: Options,
    form: str,
    out: tuple[str | None, bool],
    timeout_s: float,
) -> int:
    """Measure this rank's file of a folder while the others measure theirs; rank 0 prints. `out`: the values of
    --benchmark-out and --force."""
    others = (*_OTHER_MEASUREMENTS, "memory", "guard", "benchmark_precision", "benchmark_max_time", *_FOR_ONE_PLAN)
    refuse(
        context,
        [name for name in others if name != "fail_above"],
        "does not go with the folder of all ranks; give it one file",
    )
    from replayfmt.benchmark.ranks import TimedRanks, lines, measure_ranks

    def work(ranks: TimedRanks) -> int:
        with ExitStack() as stack:
            write = _opened(stack, _OUT, out[0] if ranks.rank == 0 else None, out[1])
            plan = stack.enter_context(flags.plan(ranks.path))
            report = measure_ranks(plan, ranks, options, stack.enter_context(_progress()) if ranks.rank == 0 else None)
            if report is not None:
                if write is not None:
                    write(report.json())
                with reader_may_leave():
                    show_report(report, form)
                    if form == "console":
                        for line in lines(report.sections["ranks"]):
                            say(line)
        return 0

    return on_all_ranks(lambda: TimedRanks(folder, timeout_s), work)


_OUT = "--benchmark-out"
_REDRAW_S = 0.2


def _opened(stack: ExitStack, flag: str, path: str | None, force: bool) -> Callable[[str], None] | None:
    """What writes a result file, which is opened now and closed with the stack; None without a path."""
    from replayfmt.benchmark.result_files import output_file

    return None if path is None else stack.enter_context(output_file(flag, path, force)).write


@tool(
    "opreplay-benchmark",
    ("opreplay-benchmark --scope=execute step.opreplay", "Time one scope:"),
    ("opreplay-benchmark --per-op --group-by=kernel --top=8 step.opreplay", "Time every op on its own:"),
    (
        "opreplay-benchmark --compare --replay-kernel-substitution=aten::mm=my_mm.py step.opreplay",
        "Is my kernel faster?",
    ),
    first=(
        *("--scope", "--per-op", "--group-by", "--top", "--threads", "--compare", "--replay-kernel-substitution"),
        *("--benchmark-out", "--baseline", "--fail-above"),
    ),
)
@replay_options
@threads_option
@option(
    "--scope NAME",
    "Report the time inside the scopes of this name or full path (execute/step 3), instead of the whole replay's; "
    "everything still runs. Passes are summed, nested ones count once. With --per-op: measure only the ops inside "
    "them. Repeatable.",
    multiple=True,
)
@option(
    "--benchmark-min-time Nx|SECONDSs",
    "Time N replays (20x), or as many as take that many seconds in total (0.5s): with seconds, or with "
    "--benchmark-precision, more of them until the median is known well enough.",
    default="0.5s",
)
@precision_options
@option(
    "--processes N",
    "Measure in N fresh processes, one after the other, and count the median of each as one time: the interval then "
    "covers what another run would give. Takes 6 or more; with 10 the verdicts of --baseline hold.",
    type=click.IntRange(1, 1000),
    default=1,
)
@option("--benchmark-warmup N", "Untimed replays before each repetition.", type=click.IntRange(min=0), default=2)
@option(
    "--benchmark-repetitions N",
    "Measure N times, and add rows with mean, median, standard deviation and variation.",
    type=click.IntRange(min=1),
    default=1,
)
@option(
    "--benchmark-format",
    "Format of stdout: a table, Google Benchmark's JSON or CSV, or JSON lines, with --per-op one for each op as soon "
    "as it is measured, so that an interrupt loses none; without it loses the unfinished repetition alone. markdown: a "
    "table for a pull request.",
    type=["console", "json", "jsonl", "csv", "markdown"],
    default="console",
)
@option("--benchmark-out FILE", "Write the results to FILE as Google Benchmark's JSON.")
@baseline_options
@option(
    "--compare",
    "With --replay-kernel-substitution: measure original and substituted kernels in alternation, and report for the "
    "whole replay, its scopes and each signature whether there is a difference.",
)
@candidates_options
@reconcile_options
@memory_option
@energy_options
@per_op_options
@profiling_options
@collective_options
@click.argument("capture", metavar="CAPTURE", type=click.Path())
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str,
    flags: ReplayFlags,
    scope: tuple[str, ...],
    inputs: Inputs | None,
    benchmark_format: str,
    benchmark_out: str | None,
    force: bool,
    **values: Any,
) -> int:
    """Replay CAPTURE repeatedly and report how long it takes.

    CAPTURE is a file, or the folder of all ranks, which torchrun measures together. Verifies before and after timing.

    With --per-op, measure each of its ops on its own instead; with --compare, substituted kernels against the
    original ones.

    Exits with 0 if it ran and matched, 1 if it was refused, failed or did not match (then there are no results), or if
    --fail-above finds something slower, 2 for wrong usage, 3 if CAPTURE is missing, unreadable or not valid, 4 if
    --fail-above cannot judge.
    """
    if os.path.isfile(os.path.join(capture, "task.json")):
        return run_task(context, capture, flags)
    why = f"needs a kernel task, which opreplay-export --format=kernel-task writes, in place of {capture}"
    refuse(context, [name for name in _FOR_TASKS if name != "guard"], why)
    choose_collectives(context, values["collectives"], capture)
    from replayfmt.benchmark.statistics import parse_min_time, whole_precision

    min_time = parse_min_time(values["benchmark_min_time"])
    profiling = profiling_request(values["device_profiling_mode"], values["device_profiling_output"], force, capture)
    if benchmark_out and profiling and os.path.realpath(benchmark_out) == os.path.realpath(profiling.output):
        raise UsageError(f"{_OUT} and --device-profiling-output are the same file: {benchmark_out}")
    check_energy_windows(context)
    check_memory(context)
    per_op = PerOpFlags.of(context, flags.verify)
    if benchmark_format in ("jsonl", "markdown") and (values["compare"] or values["reconcile"]):
        form = f"--benchmark-format={benchmark_format}"
        raise UsageError(f"{form} has no rows of --compare and --reconcile; use console, json or csv")
    if values["compare"]:
        refuse_with_compare(context, flags, per_op is not None)
    from replayfmt.benchmark.measure import Options
    from replayfmt.benchmark.result_files import refuse_input

    if per_op is None:
        precision = whole_precision(values["benchmark_precision"], values["benchmark_max_time"], min_time)
        options = Options(
            min_time,
            values["benchmark_repetitions"],
            values["benchmark_warmup"],
            flags.verify,
            scope,
            precision,
            inputs or "hot",
            values["cuda_graph"],
        )
    check_reconcile(context, scope)
    if values["processes"] > 1:
        refuse(context, _NOT_IN_PROCESSES, "does not go with --processes")
        if os.path.isdir(capture) or os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "--processes does not go with torchrun and the folder of all ranks; give it one file, alone"
            )
    against = BaselineFlags.of(values["baseline"], values["fail_above"], values["noise_floor"])
    if os.path.isdir(capture):
        if per_op is not None:
            raise UsageError("--per-op does not go with the folder of all ranks; give it one file")
        out_file = benchmark_out, force
        return run_ranks(context, capture, flags, options, benchmark_format, out_file, values["collective_timeout"])
    if benchmark_out is not None:
        refuse_input(_OUT, benchmark_out, capture)
    if per_op is not None and not values["energy"] and os.environ.get("WORLD_SIZE", "1") != "1":
        return _share_out(context, capture, flags, per_op, against)
    with ExitStack() as stack:
        write = _opened(stack, _OUT, benchmark_out, force)
        if values["energy"]:
            kept = []
            for flag, path in (("--energy-out", values["energy_out"]), ("--power-log-out", values["power_log_out"])):
                if path is not None:
                    refuse_input(flag, path, capture)
                kept.append(_opened(stack, flag, path, force))
            work = Work(capture, flags, scope, values["program"], context, stack.enter_context(_progress()))
            return run_energy(work, *kept)
        if values["energy_windows"] is not None:
            refuse_input("--energy-windows", values["energy_windows"], capture)
            write = _opened(stack, "--energy-windows", values["energy_windows"], force)
            work = Work(capture, flags, scope, values["program"], context, stack.enter_context(_progress()))
            return run_energy_windows(work, write)
        if values["reconcile"]:
            run_reconcile(
                lambda keep_going: flags.plan(capture, keep_going=keep_going),
                options,
                benchmark_format,
                stack.enter_context(_progress()),
                write,
                values["program"],
                values["program_runs"],
            )
            return 0
        if values["processes"] > 1:
            return _in_processes(context, capture, flags, against, write, stack.enter_context(_progress()))
        plan = stack.enter_context(flags.plan(capture, keep_going=per_op is not None))
        if values["guard"]:
            guarded(plan, err=benchmark_format != "console")
        if per_op is not None:
            return run_per_op(plan, per_op, benchmark_format, stack.enter_context(_progress()), write, against)
        if values["compare"]:
            run_compare(plan, options, benchmark_format, stack.enter_context(_progress()), write)
            return 0
        stack.enter_context(profiled(profiling, plan))
        from replayfmt.benchmark.run_report import make_report

        runs: list[Run] = []

        def measured() -> Report:
            if not runs or not runs[-1].interrupted:
                runs.append(_measure(plan, options, lambda name: plan_of_scope(capture, flags, name)))
            return make_report(runs[-1], plan)

        report, below, code = against.apply(measured)
        if values["memory"]:
            from replayfmt.benchmark.memory_report import MemoryReport

            found = MemoryReport.of(plan)
            report.sections["memory"] = found.as_json()
        if write is not None:
            write(report.json())
        with reader_may_leave():
            show_report(report, benchmark_format)
            if values["memory"] and benchmark_format == "console":
                for line in found.lines():
                    say(line)
            show_below(below, benchmark_format)
    return INTERRUPTED if runs[-1].interrupted else code


# What each of several processes measures by.
_OF_EACH_PROCESS = (
    *("scope", "benchmark_min_time", "benchmark_precision", "benchmark_max_time", "benchmark_warmup", "inputs"),
    *("per_op", "kernel", "op_limit", "op_instances", "group_by", "stop_on_error", "collectives"),
)


def _in_processes(
    context: click.Context,
    capture: str,
    flags: ReplayFlags,
    against: BaselineFlags,
    write: Callable[[str], None] | None,
    progress: Progress | None,
) -> int:
    """Measure in fresh processes, and report on all of them as one measurement."""
    from replayfmt.benchmark.per_op.op_report import OpReport
    from replayfmt.benchmark.processes import document_of, put_together
    from replayfmt.benchmark.run_report import Report
    from replayfmt.pytorch.environment import replayed_settings

    values = context.params
    arguments = ["--benchmark-format=json", *flags.arguments()]
    threads = replayed_settings({}).get("num_threads")
    arguments += [] if threads is None else [f"--threads={threads}"]
    for name in _OF_EACH_PROCESS:
        if is_given(context, name):
            each = values[name] if isinstance(values[name], tuple) else (values[name],)
            arguments += [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for value in each]
    command = worker_command("opreplay_tools.benchmark", *arguments, "--", capture)

    def measured() -> Report:
        documents = []
        for number in range(values["processes"]):
            if progress is not None:
                progress("measuring in processes", number, values["processes"])
            documents.append(document_of(command))
        about, rows = put_together(documents)
        if not values["per_op"]:
            return Report(about, rows)
        return OpReport(about | {"top": values["top"]}, rows)

    report, below, code = against.apply(measured)
    if write is not None:
        write(report.json())
    with reader_may_leave():
        show_report(report, values["benchmark_format"])
        show_below(below, values["benchmark_format"])
    return code if report.context.get("complete", True) else 1


def _share_out(
    context: click.Context, capture: str, flags: ReplayFlags, per_op: PerOpFlags, against: BaselineFlags
) -> int:
    """Measure the ops of one capture under torchrun, a part of them on each rank: on its own device, unless --device
    says which."""
    from replayfmt.format.reader import open_capture
    from replayfmt.replay.ranks import Ranks

    values = context.params
    path, form = values["benchmark_out"], values["benchmark_format"]

    def work(ranks: Ranks) -> int:
        own = flags
        if not flags.device:
            with open_capture(capture) as reader:
                kinds = {each.kind for each in reader.devices[1:]} - {"cpu", "meta"}
            local = os.environ.get("LOCAL_RANK", str(ranks.rank))
            own = replace(flags, device=tuple(f"{kind}:{local}" for kind in kinds)) if len(kinds) == 1 else flags
        with ExitStack() as stack:
            write = _opened(stack, _OUT, path if ranks.rank == 0 else None, values["force"])
            plan = stack.enter_context(own.plan(capture, keep_going=True))
            if values["guard"]:
                guarded(plan, err=form != "console")
            progress = stack.enter_context(_progress()) if ranks.rank == 0 else None
            return run_per_op(plan, per_op, form, progress, write, against, ranks)

    return on_all_ranks(lambda: Ranks(capture, values["collective_timeout"]), work)


def _measure(plan: Plan, options: Options, of_scope: PlanOfScope) -> Run:
    """Run the benchmark; progress goes to stderr if that is a terminal."""
    from replayfmt.benchmark.measure import measure

    with _progress() as progress:
        return measure(plan, options, progress=progress, plan_of_scope=of_scope)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A progress bar on stderr if that is a terminal, None otherwise."""
    columns = ("{task.description}", "BarColumn", "{task.completed:.0f}", "TimeElapsedColumn")
    # No redraw thread: it would wake up during timing. The bar is drawn between replays.
    with progress_bar(*columns, auto_refresh=False) as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task("")
        drawn = 0.0

        def show(what: str, done: int, of: int | None) -> None:
            nonlocal drawn
            now = bar.get_time()
            if now - drawn >= _REDRAW_S or not done:
                bar.update(task, description=what, completed=done, total=of, refresh=True)
                drawn = now

        yield show


main = console_script(cli)

if __name__ == "__main__":
    main()
