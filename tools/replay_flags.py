"""The flags of every tool that replays: what a replay runs on and accepts, profiling, and `--isolate`.

`--isolate` runs the tool in a child process, whose death is a finding: native kernels can kill a process, and a capture
chooses their arguments. The child records in a file which window of ops it is in.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from replayfmt.errors import OpReplayError, ReplayFailed, ReplayMismatch, SubstitutionRejected, UsageError
from replayfmt.format.reader import open_capture

from .command import option, progress_bar, record_bar, report, say, stdout, together

if TYPE_CHECKING:
    from replayfmt.initializers import Initializer, Registry
    from replayfmt.replay.codegen.windows import Window
    from replayfmt.replay.plan import Plan
    from replayfmt.replay.preparation import PlanOptions


_NOTES = "OPREPLAY_ISOLATED"  # in the environment of the worker process: the folder of its notes
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line of a child process that runs a tool. It finds the same modules as this process, because
    --allow-import names them, and does not outlive it."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import end_with; end_with({os.getpid()}); "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, however that happens: the kernels of a capture may keep it busy
    forever, and nobody else knows of it. Only Linux can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def threads_option(function: Any) -> Any:
    """Add `--threads` to a tool."""

    def fix(context: click.Context, _parameter: click.Parameter, count: int | None) -> None:
        if count is not None and not context.resilient_parsing:
            from replayfmt.pytorch.environment import settings_fixed

            context.with_resource(settings_fixed({"num_threads": count}))

    return option(
        "--threads N",
        "Run operators on N threads of the CPU instead of as many as during capture. Results may then differ "
        "in rounding, which is allowed for.",
        type=click.IntRange(1, 4096),
        expose_value=False,
        callback=fix,
    )(function)


guard_option = option(
    "--guard",
    "First call every kernel also between unreadable pages (in a replay on other devices than the CPU: between "
    "canaries, which show writes), and name the kernel, argument and side of each access beside an argument. For a "
    "kernel task: each candidate.",
)


def guarded(plan: Plan, *, err: bool) -> None:
    """Call every kernel of a plan between guards, and say that nothing was found."""
    from replayfmt.replay.substitution.session import guard

    with record_bar("guarding", plan.reader.record_count) as on_progress:
        say(guard(plan, on_progress).text, err=err)


def settings_option(function: Any) -> Any:
    """Add `--set` to a tool: settings of its replays."""

    def fix(context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> None:
        if texts and not context.resilient_parsing:
            from replayfmt.pytorch.environment import parse_setting, settings_fixed

            context.with_resource(settings_fixed(dict(map(parse_setting, texts))))

    return option(
        "--set NAME=VALUE",
        "Replay under this setting instead of the captured one: mkldnn=off, deterministic=on, "
        "matmul_precision=medium, tf32=off, or any that a capture's session names. Repeatable.",
        multiple=True,
        expose_value=False,
        callback=fix,
    )(function)


def _isolate(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    folder = os.environ.get(_NOTES)
    if not wanted or context.resilient_parsing:
        return
    if folder is not None:
        _take_notes(Path(folder))
        return
    assert context.command.callback is not None
    command = worker_command(context.command.callback.__module__, *sys.argv[1:])
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="opreplay-") as notes:
        environment = {**os.environ, _NOTES: notes}
        # Kills it if an exception ends the wait.
        code = subprocess.call(command, stdout=_stdout(), env=environment)
        if code < 0:
            report(ReplayFailed(_obituary(-code, Path(notes))))
            code = 1
    context.exit(code)


isolate_option = option(
    "--isolate",
    "Work in a child process: if a kernel kills it, that is a failure with the op's name and exit code 1.",
    is_eager=True,
    expose_value=False,
    callback=_isolate,
)


def _stdout() -> int | None:
    """Where the tool prints, which need not be descriptor 1; None for that, if stdout() is no file."""
    try:
        return stdout().fileno()
    except OSError:
        return None


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, a signal that would end this process at once is an exception, so that it leaves nothing behind."""

    def leave(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_notes(folder: Path) -> None:
    """Record each window before it runs, and the line Python was at when the process dies."""
    del os.environ[_NOTES]  # not for the processes that this one starts
    faulthandler.enable((folder / "fault").open("w"), all_threads=False)
    notes = (folder / "window").open("w")

    def note(path: str, window: Window) -> None:
        notes.seek(0)
        notes.truncate()
        json.dump(
            {
                "capture": path,
                "first": window.first_ordinal,
                "lines": [window.ordinal_of_line(line) for line in window.lines],
            },
            notes,
        )
        notes.flush()

    from replayfmt.replay.run import execute

    execute.before_window = note


def _obituary(number: int, folder: Path) -> str:
    name = signal.Signals(number).name
    why = ", as the system does where there is no memory left" if number == signal.SIGKILL else ""
    text = (folder / "window").read_text() if (folder / "window").exists() else ""
    said = f"the worker process was killed by {name}{why}"
    try:
        noted = json.loads(text)
    except ValueError:
        return f"{said}, before the first op"
    line = re.search(r'File "<opreplay window>", line (\d+)', (folder / "fault").read_text())
    if line is None:
        return f"{noted['capture']}: {said}, at ordinal {noted['first']} or later"
    ordinal = noted["lines"][int(line[1])]
    return f"{noted['capture']}: {said} at ordinal {ordinal}{_described(noted['capture'], ordinal)}"


def _described(path: str, ordinal: int) -> str:
    try:
        with open_capture(path) as reader:
            record = reader.record(ordinal)
            kernel = reader.kernels[record.signature.kernel] if record.signature.kernel else None
            return f" ({kernel.qualified_name if kernel is not None else record.kind.name})"
    except (OpReplayError, IndexError):
        return ""


_MODES = ("auto", "bitwise", "close", "none")


def replay_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags; the function receives their values as its parameter `flags`, a ReplayFlags."""
    verify = option(
        "--verify",
        "Compare results with the captured digests: as closely as the machine allows, bit for bit, within "
        "tolerances, or not at all.",
        type=_MODES,
        default="auto",
    )
    return isolate_option(verify(options_of_plans(function)))


_PLAN_OPTIONS = together(
    option(
        "--device DEVICE",
        "Replay on this device; repeat it for each captured accelerator, in the order of their indices. Default: "
        "the captured ones.",
        multiple=True,
    ),
    option(
        "--graphs",
        "Capture device graphs (CUDA graphs) again where the device can, and replay them; or issue their ops one "
        "by one at each replay.",
        type=("captured", "issued"),
        default="captured",
    ),
    option(
        "--streams",
        "Replay a device's work on as many streams as were captured, ordered by the captured events and waits, or "
        "all of it on the default stream, in capture order.",
        type=("captured", "serial"),
        default="captured",
    ),
    option(
        "--autotune",
        "Launch autotuned Triton kernels in the configuration that the program chose, or time on this device those "
        "that it chose from, and launch the fastest, checked against the captured one.",
        type=("captured", "again"),
        default="captured",
    ),
    option(
        "--opaque-result OPERATOR[:INDEX]",
        "Results of this operator, or the one with that index, hold bytes that cannot be reproduced (addresses, "
        "unwritten memory): neither compare nor embed them. Repeatable.",
        many="opaque_results",
    ),
    option(
        "--moe-routing uniform|zipf[:EXPONENT]",
        "How initializers draw experts that were not captured: uniformly (the default) or by Zipf's law, by "
        "default with exponent 1.2.",
    ),
    option(
        "--replay-initializer FILE.py",
        "Run FILE.py, and let the initializers it registers fill content that was not captured, before the "
        "built-in ones; the first match wins. Repeatable.",
        multiple=True,
    ),
    option(
        "--replay-kernel-substitution SELECTOR[@FORMAT]=PATH[:NAME]",
        "Run the function NAME of the Python file PATH, or an operator that a torch library registers, instead of "
        "the selected kernels, after checking it against them. SELECTOR: a kernel id, an operator (aten::mm, "
        "aten::mm.default), a signature, or all. Repeatable.",
        multiple=True,
    ),
    option(
        "--substitution-rtol R",
        "Replace the relative tolerance R of every dtype when replacements are checked.",
        type=float,
    ),
    option(
        "--substitution-atol A",
        "Allow a replacement's values to be off by A + R times the expected value, instead of R times the larger "
        "of it and the tensor's root mean square.",
        type=float,
    ),
    option(
        "--replay-file-remap CAPTURED=REPLAY",
        "External files whose captured path begins with CAPTURED are now under REPLAY. Whole path components "
        "match, and the longest match wins. Repeatable.",
        multiple=True,
    ),
    option(
        "--op-library NAMESPACE=MODULE",
        "Import MODULE if an operator of NAMESPACE is needed, also for plain functions that a trace shows as "
        "operators. Repeatable.",
        many="op_libraries",
    ),
    option(
        "--allow-operator NAMESPACE::OPERATOR",
        "Run this operator although it does more than compute on tensors: opens files, prints, accesses devices "
        "or other processes. Repeatable.",
        many="allow_operators",
    ),
    option(
        "--allow-import NAME",
        "Import the module NAME for the custom operators that it registers, or allow importing the known library "
        "of the operator namespace NAME. NAMESPACE=MODULE also lets the capture call functions of MODULE under "
        "operator names of NAMESPACE. A capture alone never causes an import. Repeatable.",
        many="allow_imports",
    ),
    option("--allow-incomplete", "Replay what there is of a capture that was never closed."),
    option(
        "--allow-code",
        "Run the code that is in the capture: Triton kernels, generated C++ and other kernels that are not "
        "operators. It has your rights, and nothing confines it: only for captures that you trust.",
    ),
)


def options_of_plans(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without --isolate and --verify."""

    @wraps(function)
    def bundled(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("verify", "auto")
        flags = ReplayFlags(**{field.name: kwargs.pop(field.name) for field in fields(ReplayFlags)})
        return function(*args, flags=flags, **kwargs)

    return _PLAN_OPTIONS(bundled)


_SELECTION = together(
    option("--ops A:B", "Only records with ordinals from A up to, not including, B. Either may be omitted."),
    option(
        "--scope NAME",
        "Only records inside the scopes of this name or full path, every time they are entered. Repeatable: in "
        "any of them.",
        many="scopes",
    ),
    option(
        "--kernel PATTERN",
        "Only ops whose operator matches, such as 'aten::mm', 'aten::mm.default' or 'aten::*norm*'. Repeatable: "
        "any of them.",
        many="kernels",
    ),
    option(
        "--signature TEXT",
        "Only ops of this signature, as opreplay-dump --signatures prints it. Repeatable: of any of them.",
        many="signatures",
    ),
)


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --ops, --scope, --kernel and --signature; the function receives them as `wanted`, a OpSelection."""

    @wraps(function)
    def bundled(*args: Any, **kwargs: Any) -> Any:
        from replayfmt.dump.selection import OpSelection

        given = [kwargs.pop(name) or None for name in ("ops", "scopes", "kernels", "signatures")]
        return function(*args, wanted=OpSelection(*given), **kwargs)

    return _SELECTION(bundled)


_PLURALS = {
    "allow_imports": "allow-import",
    "allow_operators": "allow-operator",
    "op_libraries": "op-library",
    "opaque_results": "opaque-result",
}


def flag_of(name: str) -> str:
    """The flag that a field of ReplayFlags is the value of."""
    return f"--{_PLURALS.get(name) or name.replace('_', '-')}"


@dataclass(frozen=True)
class ReplayFlags:
    """The values of the flags of `replay_options`."""

    device: tuple[str, ...]
    streams: Literal["captured", "serial"]
    graphs: Literal["captured", "issued"]
    autotune: Literal["captured", "again"]
    verify: Literal["auto", "bitwise", "close", "none"]
    replay_initializer: tuple[str, ...]
    moe_routing: str | None
    replay_file_remap: tuple[str, ...]
    replay_kernel_substitution: tuple[str, ...]
    substitution_rtol: float | None
    substitution_atol: float | None
    allow_incomplete: bool
    allow_imports: tuple[str, ...]
    allow_operators: tuple[str, ...]
    allow_code: bool
    op_libraries: tuple[str, ...]
    opaque_results: tuple[str, ...]

    def arguments(self) -> list[str]:
        """The flags as command-line arguments."""
        found: list[str] = []
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
            found += [flag_of(name) if each is True else f"{flag_of(name)}={each}" for each in values]
        return found

    def plan(self, path: str, *, keep_going: bool = False) -> Plan:
        """The plan for a capture. Raises what opening and planning raise, before anything runs."""
        options = self.options()
        from replayfmt.replay.plan import Plan

        with _file_progress() as on_file_bytes:
            return Plan(path, keep_going=keep_going, on_file_bytes=on_file_bytes, **options)

    def options(self) -> PlanOptions:
        """The options of a Plan that they stand for. Raises UsageError, and imports the libraries of --op-library."""
        self._refuse_odd_tolerances()
        from replayfmt.pytorch.op_libraries import parse_op_library, register_op_library
        from replayfmt.replay.substitution.distance import Tolerance

        for library in self.op_libraries:
            register_op_library(*parse_op_library(library))
        return {
            "devices": list(self.device),
            "allow_incomplete": self.allow_incomplete,
            "initializers": self._initializers(),
            "file_remaps": self.replay_file_remap,
            "initializer_options": {} if self.moe_routing is None else {"moe-routing": self.moe_routing},
            "allow_imports": self.allow_imports,
            "allow_operators": self.allow_operators,
            "streams": self.streams,
            "graphs": self.graphs,
            "autotune": self.autotune,
            "allow_code": self.allow_code,
            "opaque_results": self.opaque_results,
            "substitutions": self.replay_kernel_substitution,
            "substitution_tolerance": Tolerance(self.substitution_rtol, self.substitution_atol),
        }

    def refuse_other_kernels(self, why: str) -> None:
        """Raises UsageError where others than the captured kernels were asked for."""
        for given, flag in (
            (self.replay_kernel_substitution, "--replay-kernel-substitution"),
            (self.autotune == "again", "--autotune=again"),
        ):
            if given:
                raise UsageError(f"{flag}: {why}")

    def registry(self) -> Registry:
        """The initializers that plans made with these flags use. Raises UsageError if a file is wrong."""
        from replayfmt.initializers import Registry

        return Registry(self._initializers())

    def _initializers(self) -> list[Initializer]:
        from replayfmt.initializers import load_initializers

        return [each for file in self.replay_initializer for each in load_initializers(file)]

    def _refuse_odd_tolerances(self) -> None:
        for flag, value in (
            ("--substitution-rtol", self.substitution_rtol),
            ("--substitution-atol", self.substitution_atol),
        ):
            if value is not None and not (self.replay_kernel_substitution and 0 <= value < math.inf):
                also = ", and --replay-kernel-substitution with what to judge by it"
                more = "" if self.replay_kernel_substitution else also
                raise UsageError(f"{flag}={value:g}: expected a number from 0{more}")


@contextmanager
def rows_if_rejected() -> Iterator[None]:
    """If replacements are rejected, print the findings as JSON rows and re-raise the error, which has the same for
    people."""
    try:
        yield
    except SubstitutionRejected as error:
        for row in error.report.as_rows():
            say(json.dumps(row))
        raise


@contextmanager
def _file_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr, if that is a terminal, while digests of external files are computed."""
    columns = ("digesting external files", "BarColumn", "DownloadColumn", "TransferSpeedColumn")
    with progress_bar(*columns) as bar:
        task = None if bar is None else bar.add_task("", visible=False)
        yield bar and (lambda done, total: bar.update(task, completed=done, total=total, visible=True))


profiling_options = together(
    option(
        "--device-profiling-mode LIST",
        "Contents of the trace, comma-separated: host-ops, device-kernels, memory, shapes, stacks.",
    ),
    option(
        "--device-profiling-output FILE",
        "Write a torch.profiler trace of one additional, untimed replay to FILE (Chrome JSON, compressed if it "
        "ends in .gz), with the capture's scopes as annotations.",
    ),
    option("--force", "Overwrite output files that exist."),
)


@dataclass(frozen=True)
class ProfilingRequest:
    """A trace requested on the command line."""

    families: tuple[str, ...]
    output: str
    force: bool


@contextmanager
def profiled(request: ProfilingRequest | None, plan: Any) -> Iterator[None]:
    """Wraps a tool's replays: checks the request before them and writes the trace after them.  This includes replays
    that failed: the trace then extends as far as the replay did, and the failure propagates."""
    if request is None:
        yield
        return
    from replayfmt.benchmark.profiling import check_families, profile_replay

    def profile() -> None:
        profile_replay(plan, request.families, request.output, force=request.force)

    check_families(request.families, plan.devices)
    try:
        yield
    except (ReplayFailed, ReplayMismatch):
        with suppress(ReplayFailed):  # most likely the same failure again; the first is the one to report
            profile()
        raise
    profile()


def profiling_request(mode: str | None, output: str | None, force: bool, capture: str) -> ProfilingRequest | None:
    """The request from the flags, None if they are not given.  Raises UsageError for one flag without the other, for
    unknown families and an invalid output, OutputExists for an existing one."""
    if mode is None and output is None:
        return None
    if mode is None:
        raise UsageError(
            f"--device-profiling-output={output}: give --device-profiling-mode=LIST with it, for instance "
            "host-ops,shapes"
        )
    if output is None:
        raise UsageError(f"--device-profiling-mode={mode}: give --device-profiling-output=FILE with it")
    from replayfmt.benchmark.profiling import OUTPUT_FLAG, parse_families
    from replayfmt.benchmark.result_files import output_file, refuse_input

    families = parse_families(mode)
    refuse_input(OUTPUT_FLAG, output, capture)
    with output_file(OUTPUT_FLAG, output, force):
        pass  # it can be written; it is made at the end, and nothing is there until then
    return ProfilingRequest(families, output, force)


@contextmanager
def plan_of_scope(capture: str, flags: ReplayFlags, name: str) -> Iterator[Plan]:
    """The plan of a capture that was cut to the scopes of a name, in a temporary file. Raises ReplayRefused for
    what cutting it out, replaying it apart and the caller raise on purpose, without the file's name."""
    from replayfmt.dump.selection import OpSelection
    from replayfmt.errors import OpReplayError, ReplayRefused
    from replayfmt.trim.trimming import checked_here, trim_capture

    with tempfile.TemporaryDirectory() as directory:
        part = os.path.join(directory, "scope.opreplay")
        try:
            with flags.plan(capture, keep_going=True) as plan:
                trim_capture(plan, part, OpSelection(scope=(name,)), checked_here(flags.plan), verify=flags.verify)
            with flags.plan(part) as alone:
                yield alone
        except OpReplayError as error:
            raise ReplayRefused(str(error).partition("\n")[0].replace(part, "the part")) from error
