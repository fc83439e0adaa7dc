"""Common parts of every tool's command line: errors as one line and an exit code, help in groups, progress, completion.

Exit codes: 0 done, and verified as asked; 1 refused, failed or did not match; 2 wrong usage; 3 the capture is missing,
unreadable or not valid. Imports no torch.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import click

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.validation import printable

INTERRUPTED = 130  # exit code, as shells say: ended by SIGINT

# fmt: off
GROUPS: dict[str, tuple[str, ...]] = {
    "Output": (
        "--output", "--force", "--format", "--jq", "--raw-output", "--slurp", "--verbose", "--report",
        "--benchmark-format", "--benchmark-out", "--plots", "--no-picture",
    ),
    "Selection": (
        "--ops", "--scope", "--kernel", "--signature", "--unique", "--partial", "--summary", "--findings",
        "--signatures", "--values", "--kernel-skeleton", "--language", "--attachment", "--start-op", "--stop-op",
        "--start-scope", "--stop-scope", "--step", "--steps", "--time", "--op-limit", "--op-instances", "--group-by",
        "--top", "--rank", "--section", "--tensors", "--predict", "--tool", "--launch", "--launches", "--records",
        "--max-bytes",
        "--target", "--reads-unwritten", "--children", "--device-kernels", "--table", "--replayed", "--power-log",
    ),
    "Scopes": ("--mark", "--module-scopes"),
    "Content": (
        "--payload", "--redact", "--no-sources", "--file", "--file-policy", "--file-validation", "--replay-file-remap",
        "--replay-initializer", "--list-initializers", "--moe-routing", "--script", "--script-data", "--vectors",
        "--recover", "--add-digests", "--size-limit",
    ),
    "Operators and kernels": (
        "--replay-kernel-substitution", "--substitution-rtol", "--substitution-atol", "--op-library", "--inside",
        "--whole", "--compiled", "--collective-results", "--collective-timeout", "--collectives", "--native",
        "--recorder", "--from", "--level", "--rewrite", "--op-alias",
        "--string-default", "--number-default", "--graph-capture", "--inductor-cache",
    ),
    "Devices": ("--device", "--streams", "--graphs", "--autotune", "--threads", "--replay-options"),
    "Verification": (
        "--verify", "--run", "--digests", "--audit", "--opaque-result", "--capture", "--keep-going", "--record",
        "--repeat",
        "--compare-kernels", "--tolerance", "--replay", "--against", "--set",
        "--bisect", "--judge", "--state", "--times", "--variants", "--guard", "--allow-reason",
    ),
    "Measurement": (
        "--min-samples", "--measure",
        "--benchmark-min-time", "--benchmark-precision", "--benchmark-max-time", "--inputs", "--benchmark-warmup",
        "--benchmark-repetitions", "--processes", "--warm", "--compare", "--benchmark", "--probes", "--baseline",
        "--fail-above", "--noise-floor",
        "--energy", "--energy-source", "--energy-out", "--power-log-out", "--energy-windows",
        "--power-interval", "--power-averaging", "--zone", "--gpu", "--clock-offset", "--reconcile", "--program",
        "--candidates", "--candidate-timeout", "--candidate-memory", "--end-to-end",
        "--program-runs", "--memory", "--per-op", "--cuda-graph", "--roofline", "--peak-flops",
        "--peak-bandwidth", "--stop-on-error", "--device-profiling-mode", "--device-profiling-output",
    ),
    "Permissions": ("--allow-operator", "--allow-import", "--allow-code", "--allow-incomplete", "--isolate"),
    "Help": ("--help", "--version", "--agents-md"),
}
# fmt: on
_FIRST, _OTHERS = "First", "Options"


def groups(parameters: Iterable[click.Parameter], first: tuple[str, ...]) -> list[tuple[str, list[click.Parameter]]]:
    """The options among a command's parameters, under their headings; those that people need first before all."""
    headings = {name: heading for heading, names in GROUPS.items() for name in names} | dict.fromkeys(first, _FIRST)
    found: dict[str, list[click.Parameter]] = {_FIRST: [], _OTHERS: [], **{heading: [] for heading in GROUPS}}
    for parameter in parameters:
        if isinstance(parameter, click.Option):
            found[headings.get(max(parameter.opts, key=len), _OTHERS)].append(parameter)
    found[_FIRST].sort(key=lambda parameter: first.index(max(parameter.opts, key=len)))
    return [(heading, options) for heading, options in found.items() if options]


_LONG = 20_000  # records; work on fewer shows no progress


@contextmanager
def progress_bar(*columns: str, wanted: bool = True, **options: Any) -> Iterator[Any]:
    """A progress bar of rich on stderr, if that is a terminal, else None. `columns` are names of rich's, or texts."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    made = [getattr(progress, each)() if each.endswith("Column") else progress.TextColumn(each) for each in columns]
    with progress.Progress(*made, console=Console(stderr=True), transient=True, **options) as bar:
        yield bar


@contextmanager
def record_bar(what: str, records: int) -> Iterator[Callable[..., None] | None]:
    """On stderr, if that is a terminal and `records` is large: `show(done)`, or `show(done, total)` if the total turns
    out to differ from `records`. None otherwise."""
    columns = (what, "BarColumn", "MofNCompleteColumn", "TimeElapsedColumn")
    with progress_bar(*columns, wanted=records >= _LONG) as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task(what, total=records)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


_LONGEST_DIAGNOSTIC = 4000  # characters


# The guides of docs/ that --agents-md=NAME prints, as in the first page's list.
# fmt: off
TOPICS = [
    "failures", "content", "recording", "running-processes", "compiled", "distributed", "triton", "devices", "graphs",
    "compatibility", "queries", "signatures", "substitution", "kernel-tasks", "measuring", "comparing",
    "comparing-captures", "comparing-replays", "power", "reporting", "tables", "vectors", "importing",
    "execution-traces", "operator-libraries", "initializers", "probing", "probe-files",
]
# fmt: on
_PAGES = Path(__file__).parent / "playbook"
# In a wheel the guides are beside this file, in a clone where people look for them.
_GUIDES = (Path(__file__).parent / "docs", Path(__file__).resolve().parents[1] / "docs")


def playbook_text(name: str) -> str:
    """What --agents-md=NAME prints: the page of a tool (`run`), of all tools (`opreplay`), or a topic."""
    if name in TOPICS:
        return (next(each for each in _GUIDES if each.is_dir()) / f"{name}.md").read_text(encoding="utf-8")
    tools = sorted(page.stem for page in _PAGES.glob("*.md"))
    if name not in tools:
        raise UsageError(f"--agents-md={name}: expected a tool ({', '.join(tools)}) or a topic ({', '.join(TOPICS)})")
    return (_PAGES / f"{name}.md").read_text(encoding="utf-8")


def agents_md_option(tool: str) -> Callable[[Any], Any]:
    """`--agents-md`: print the tool's page for agents and exit; `--agents-md=NAME`: another tool's, or a topic.
    opreplay-run, which agents try first, prints the page of all tools."""
    own = "opreplay" if tool == "opreplay-run" else tool.removeprefix("opreplay-")

    def show(context: click.Context, _parameter: click.Parameter, name: str | None) -> None:
        if name is not None and not context.resilient_parsing:
            click.echo(playbook_text(name or own), nl=False)
            context.exit(0)

    return click.option(
        "--agents-md",
        is_flag=False,
        flag_value="",
        metavar="[NAME]",
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print this tool's page for agents, or that of the tool or topic NAME, and exit.",
    )


def option(
    names: str, help: str, *, name: str = "", many: str = "", type: Any = None, default: Any = None, **more: Any
) -> Callable[[Any], Any]:
    """An option, by its names and a word for its value: `-o --output FILE`. Without such a word and a type it is a
    switch. A default is shown; a list as `type` holds the choices; `name` is the parameter's, if not the option's, and
    `many` that of one that may be repeated."""
    words = names.split()
    options = [word for word in words if word.startswith("-")]
    if len(words) > len(options):
        more["metavar"] = words[-1]
    elif type is None:
        more["is_flag"] = True
    if isinstance(type, list | tuple):
        type = click.Choice(type)
    if default is not None:
        more = {"default": default, "show_default": True} | more
    if many:
        more["multiple"] = True
    return click.option(*options, *filter(None, [name or many]), type=type, help=help, **more)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Adds several options, in this order in the help."""

    def add(function: Any) -> Any:
        for each in reversed(options):
            function = each(function)
        return function

    return add


def is_given(context: click.Context, name: str) -> bool:
    """Whether a parameter is on the command line."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse(context: click.Context, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of these parameters that is on the command line."""
    for name in names:
        if is_given(context, name):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


class Seconds(click.FloatRange):
    """A number of seconds in a range. NaN lies in none: click lets it pass each comparison."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return seconds


# Names that options had: every tool that has the option takes them still.
_FORMER = {"--replay-scope": "--scope", "--op-filter": "--kernel"}

# Where a format is written that another tool is asked for.
FORMATS = {
    "vectors": "opreplay-trim --vectors",
    "script": "opreplay-trim --script",
    "html": "opreplay-report",
    "jsonl": "opreplay-dump --format=jsonl",
    **{
        each: f"opreplay-export --format={each}"
        for each in (
            "perfetto",
            "chakra",
            "csv",
            "parquet",
            "replay-zip",
            "kernel-task",
            "flashinfer-bench",
            "kernelbench",
        )
    },
}


def _elsewhere(error: click.ClickException) -> str:
    """The command that writes the format asked for in vain, as an addition to the error; "" if there is none."""
    if not isinstance(error, click.BadParameter) or error.param is None or "--format" not in error.param.opts:
        return ""
    asked = error.message.partition("'")[2].partition("'")[0]
    return f" {FORMATS[asked]} writes it." if asked in FORMATS else ""


def _meant(name: str, known: Collection[str]) -> list[str]:
    """The options that have a wrong name as one of their words; without any, the one that it is most like."""
    from difflib import get_close_matches  # a mistake may take longer than a start

    word = name.strip("-")
    return sorted(each for each in known if word in each.strip("-").split("-")) or get_close_matches(name, known, 1)


class ToolCommand(click.Command):
    """A command whose help groups its options and ends with examples, that takes options by the names they have in
    other tools, and that refuses a single-valued option given several times: click would use the last. `examples` are
    command lines with their purposes; `first` are the options that people need first, where there are very many."""

    examples: tuple[tuple[str, str], ...] = ()
    first: tuple[str, ...] = ()
    own_streams = True  # stdout and stderr are the tool's, not those of a program that it runs

    def invoke(self, context: click.Context) -> Any:
        if not self.own_streams:
            return super().invoke(context)
        with printing_on(sys.stdout), redirect_stdout(sys.stderr):
            return super().invoke(context)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, parameters in groups(self.get_params(context), self.first):
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

        known = {name for parameter in self.get_params(context) for name in parameter.opts}

        def own_name(arg: str) -> str:
            name, equals, value = arg.partition("=")
            other = _FORMER.get(name, name)
            return f"{other}{equals}{value}" if other in known else arg

        def parse_once(args: list[str]) -> Any:
            try:
                values, rest, given = parse([own_name(arg) for arg in args])
            except click.NoSuchOption as error:
                error.possibilities = _meant(error.option_name, known)
                raise
            for parameter in given:
                times = given.count(parameter)
                if times > 1 and _takes_one_value(parameter):
                    raise UsageError(f"{max(parameter.opts, key=len)} is given {times} times; it takes one value")
            return values, rest, given

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser


def version_option(name: str) -> Callable[[Any], Any]:
    """`--version`: print the tool's name and the package's version, and exit."""

    def show(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
        if wanted:
            from replayfmt.version import own_version

            click.echo(f"{name}, version {own_version()}")
            context.exit()

    return option("--version", "Show the version and exit.", expose_value=False, is_eager=True, callback=show)


def _takes_one_value(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not (parameter.is_flag or parameter.multiple or parameter.count)


def tool(
    name: str, *examples: tuple[str, str], first: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function into a click command called `name`, with the options that every tool has. `examples` and `first`
    for its help: pairs of a command line and its purpose, and the options that people need first."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, ToolCommand, context_settings={"help_option_names": ["-h", "--help"]})(function)
        command.examples, command.first = examples, first
        command = agents_md_option(name)(command)
        return version_option(name)(command)

    return decorate


def report(error: OpReplayError) -> None:
    """Print an error: `STATUS: message` on stderr, then its findings, one per line."""
    with said_if_possible():
        say(f"{error.status}: {error}", err=True)
        for finding in error.findings:
            say(f"  {finding}", err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print a line for people, escaped, because messages quote text from captures, traces and paths. A diagnostic that
    quotes very long text is cut in its middle: its end says what to do."""
    if err and len(text) > _LONGEST_DIAGNOSTIC:
        text = f"{text[: _LONGEST_DIAGNOSTIC // 2]} … {text[-_LONGEST_DIAGNOSTIC // 2 :]}"
    emit(printable(text), err=err)


def emit(text: str, *, end: str = "\n", err: bool = False) -> None:
    """Print text as it is."""
    click.echo(text + end, sys.stderr if err else stdout(), nl=False)


def show(form: str, rows: Iterable[Any], lines: Iterable[str], encode: Callable[[Any], str] = json.dumps) -> None:
    """Print a result: its rows, one on a line, with --format=jsonl, else its lines for people."""
    if form == "jsonl":
        for row in rows:
            emit(encode(row))
    else:
        for line in lines:
            say(line)


_stdout: TextIO | None = None


def stdout() -> TextIO:
    """Where the tool itself prints. While it works, sys.stdout is stderr: there kernels, libraries and initializers
    print what no reader of the tool's output expects."""
    return sys.stdout if _stdout is None else _stdout


@contextmanager
def printing_on(stream: TextIO) -> Iterator[None]:
    """Inside, the tool prints on this stream."""
    global _stdout
    before, _stdout = _stdout, stream
    try:
        yield
    finally:
        _stdout = before


class TorchMissing(OpReplayError):
    """The request needs PyTorch."""


class OutputFailed(OpReplayError):
    """Stdout cannot be written, for instance because the disk is full."""


class ReaderLeft(Exception):
    """The reader of stdout is gone (`| head`). Not an OSError, for which click would exit with 1."""


class _Output(FileIO):
    """The raw stream of stdout. An OSError alone would not show that it concerns the output."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderLeft from error
        except OSError as error:
            raise OutputFailed(f"the output could not be written: {error.strerror}") from error


def _own_streams() -> None:
    """Install streams whose failures can be distinguished, and replace one that the process was started without
    (`>&-`). What libraries print past Python goes to stderr: other programs read what the tool prints."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # no file of the tool's may get the number of a stream that is missing: C++ code may write to it
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process
    if sys.stdout is sys.__stdout__:
        before = sys.stdout
        before.flush()  # what was printed until now is no library's
        # Characters that the encoding lacks are escaped: names come from anywhere.
        errors = "backslashreplace" if before.errors == "strict" else before.errors
        sys.stdout = TextIOWrapper(
            BufferedWriter(_Output(os.dup(before.fileno()), "w", closefd=False)),
            before.encoding,
            errors,
            line_buffering=before.line_buffering,
        )
        os.dup2(sys.stderr.fileno(), before.fileno())


def _leave_stdout() -> None:
    """What libraries print at exit goes to stderr, too."""
    if sys.stdout is not sys.__stdout__:
        with suppress(OutputFailed, ReaderLeft):
            sys.stdout.flush()
        sys.stdout = sys.stderr


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Wraps the printing of a finished result: if its reader is gone (`| head`), the rest is discarded and the tool
    continues. Its exit code and the files it writes do not depend on the reader."""
    try:
        yield
    except ReaderLeft:
        _discard(stdout())


def _discard(stream: TextIO) -> None:
    """Discard buffered output: it cannot be written, and Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def said_if_possible() -> Iterator[None]:
    """Wraps messages on stderr. If it cannot be written, only the exit code is left to report the error."""
    try:
        yield
    except OSError:
        _discard(sys.stderr)


def console_script(command: click.Command) -> Callable[[], None]:
    """The function that a console script calls."""
    return partial(run_tool, command)


def run_tool(command: click.Command) -> None:
    """Run a tool and exit the process with its exit code. The commands return their exit code, None for 0."""
    own_streams = getattr(command, "own_streams", True)
    if own_streams:
        _own_streams()
    try:
        code = command.main(prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        report(UsageError(f"{message}{_elsewhere(error)} ({command.name} --help)"))
        code = UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
        if own_streams:
            with said_if_possible():
                say("interrupted", err=True)
    except ReaderLeft:  # ends the tool, but is not an error of our own
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
                f"{command.name} needs PyTorch for this, which is not installed: pip install torch; opreplay-dump "
                f"and opreplay-check work without it"
            )
        )
        code = TorchMissing.exit_code
    if own_streams:
        atexit.register(_leave_stdout)  # before what libraries registered
    sys.exit(code or 0)
