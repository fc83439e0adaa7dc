"""opreplay-probe: what happens inside a kernel: the probes there are, and reports of their recordings."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from replayfmt.errors import UsageError
from replayfmt.probes.costs import PredictedLaunch
from replayfmt.probes.definitions import find_probe, probe_row, shipped_probes
from replayfmt.probes.instrumenting import (
    DEFAULT_TARGET,
    FILES_OF_KERNELS,
    NO_PTX,
    ProbeableKernel,
    chosen_kernel,
    instrumented,
    kernels_of,
    parse_launch,
    write_instrumented,
)
from replayfmt.probes.reporting import KINDS, NamedFile, ReportOptions, evaluate, write_report
from replayfmt.probes.schedule import no_progress
from replayfmt.probes.tables import as_json, as_text, plain, shown

from .command import console_script, emit, is_given, option, reader_may_leave, record_bar, say, tool
from .probe_run import run_probe


@tool(
    "opreplay-probe",
    ("opreplay-probe report schedule run/result/0.731200.bin -o reports", "How were the blocks of a launch scheduled?"),
    ("opreplay-probe report overhead dmat=run1 block_sched=run2", "What did two probes cost?"),
    ("opreplay-probe list", "Which probes are there?"),
    ("opreplay-probe instrument kernel.ptx --tool=block_sched -o probed", "Put a probe into a kernel:"),
    (
        "opreplay-probe run --allow-code --tool=block_sched --kernel=triton::softmax_kernel step.opreplay -o run",
        "Run a captured kernel with a probe:",
    ),
    ("opreplay-probe report memory --predict=fill:32768,1,1:128,1,1:16:warp", "How much memory will a probe need?"),
)
@click.argument("action", type=click.Choice(["report", "list", "instrument", "run"]))
@click.argument("words", metavar="[KIND FILES… | PROBES… | FILE | CAPTURE]", nargs=-1)
@option("-o --output DIR", "Write KIND.txt, .json, .svg and .png to this folder.", type=click.Path())
@option("--no-picture", "Leave out the picture, which needs matplotlib.", name="no_picture")
@option(
    "--section",
    "Whose records to evaluate, where a recording holds those of several probes.",
    type=click.IntRange(min=0),
    default=0,
)
@option(
    "--tensors FILE",
    "report dmat: which memory is which tensor's, a tensor.trace. Without it, that of the recording's run.",
    type=click.Path(),
)
@option(
    "--predict NAME:GX,GY,GZ:BX,BY,BZ:BYTES[:warp]",
    "report memory: predict what a probe needs that saves BYTES for each thread, or each warp, of a launch. "
    "Repeatable; needs no FILES.",
    many="predicted",
)
@option("--tool PROBE", "instrument, run: a probe of `list` by name, or a .toml file.", name="probe")
@option("--kernel NAME", "instrument, run: which kernel, where there are several.")
@option(
    "--launch GX,GY,GZ:BX,BY,BZ",
    "instrument: the grid and block of the launch, to tell how many bytes its records need.",
)
@option(
    "--records N",
    "instrument: records of a row, for a probe that saves each time it is reached.",
    type=click.IntRange(min=1),
)
@option(
    "--max-bytes N",
    "instrument, run: refuse if the records need more; run: by default a gibibyte.",
    name="most_bytes",
    type=click.IntRange(min=0),
)
@option("--launches N", "run: the first N launches, by default all.", type=click.IntRange(min=1))
@option("--device DEVICE", "run: replay on this device, as in opreplay-run. Repeatable.", multiple=True)
@option("--allow-code", "run: run the code that is in the capture: only if you trust it.")
@option("--replay-file-remap CAPTURED=REPLAY", "run: as in opreplay-run. Repeatable.", many="remaps")
@option("--target SM", "instrument, list: what nvcc compiles a .cu file for, by default sm_80.")
@option("--format", "What is printed.", name="form", type=["text", "json"], default="text")
@option("--force", "Replace files of DIR.")
def cli(action: str, words: tuple[str, ...], form: str, output: str | None, force: bool, **flags: Any) -> None:
    """Insert probes into GPU kernels and evaluate recordings.

    `report KIND FILES…` evaluates recordings. `list` shows the available probes, `list FILE.toml` one of your own,
    `list FILE` which kernels can be probed. `instrument FILE --tool=PROBE -o DIR` inserts a probe into a kernel.
    `run CAPTURE --tool=PROBE -o DIR` replays a Triton kernel's launches with a probe, and writes recordings.

    FILE is a capture, a .ptx or a .cu file. Only `run` launches anything; it needs a CUDA device.

    Exits with 0 once all is printed and written, with 1 if it could not be written, the kernel cannot be probed or a
    probe changed its results, with 3 if a recording or a capture is missing or not valid.
    """
    _check_flags(action)
    if action == "list":
        _list(words, form, flags["target"])
    elif action == "instrument":
        _instrument(words, form, output, force, **{name: flags[name] for name in _OF_INSTRUMENT})
    elif action == "run":
        run_probe(words, form, output, force, **{name: flags[name] for name in _OF_RUN})
    else:
        _report(words, form, output, force, **{name: flags[name] for name in _OF_REPORT})


_OF_REPORT = ("no_picture", "section", "tensors", "predicted")
_OF_INSTRUMENT = ("probe", "kernel", "launch", "records", "most_bytes", "target")
_OF_RUN = ("probe", "kernel", "launches", "most_bytes", "device", "allow_code", "remaps")
_FLAGS = {
    "report": {"form", "output", "force", *_OF_REPORT},
    "list": {"form", "target"},
    "instrument": {"form", "output", "force", *_OF_INSTRUMENT},
    "run": {"form", "output", "force", *_OF_RUN},
}


def _check_flags(action: str) -> None:
    """Refuse flags of another action: they would do nothing."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if is_given(context, name) and isinstance(parameter, click.Option) and name not in _FLAGS[action]:
            others = ", ".join(each for each, flags in _FLAGS.items() if name in flags)
            raise UsageError(f"{max(parameter.opts, key=len)} is an option of {others}; {action} does not use it")


def _report(
    words: tuple[str, ...],
    form: str,
    output: str | None,
    force: bool,
    no_picture: bool,
    section: int,
    tensors: str | None,
    predicted: tuple[str, ...],
) -> None:
    if not words:
        raise UsageError(f"report: expected a KIND, one of {', '.join(KINDS)}, and its FILES")
    files = [NamedFile.parse(word) for word in words[1:]]
    size = sum(os.path.getsize(file.path) // 16 for file in files if os.path.isfile(file.path))
    with record_bar(f"evaluating {words[0]}", size) as show:
        options = ReportOptions(section, tensors, tuple(map(PredictedLaunch.parse, predicted)))
        result = evaluate(words[0], files, options, show or no_progress)
    written = write_report(result, output, picture=not no_picture, force=force) if output is not None else []
    with reader_may_leave():
        if form == "json":
            emit(json.dumps(as_json(result), allow_nan=False))
        else:
            for line in as_text(result):
                say(line)
        for path in written:
            say(f"written: {path}", err=True)


def _list(names: tuple[str, ...], form: str, target: str | None) -> None:
    """Probes, or the kernels of files."""
    rows = [probe_row(each) for each in shipped_probes()] if not names else []
    for name in names:
        if name.endswith(FILES_OF_KERNELS):
            rows += map(_kernel_row, kernels_of(name, target or DEFAULT_TARGET))
        else:
            rows.append(probe_row(find_probe(name)))
    for row in rows:
        if form == "json":
            emit(json.dumps(row))
            continue
        say(f"{row['name']}: {row['about']}")
        for name, text in list(row.items())[2:]:
            say(f"  {name:13} {', '.join(text) if isinstance(text, list) else text}")


def _kernel_row(kernel: ProbeableKernel) -> dict[str, Any]:
    if kernel.module is None:
        return {"name": kernel.name, "about": NO_PTX}
    places = [f"{count} {name}" for name, count in kernel.sites.items()]
    return {"name": kernel.name, "about": "probeable", "target": kernel.module.target, "positions": places}


def _instrument(
    words: tuple[str, ...],
    form: str,
    output: str | None,
    force: bool,
    probe: str | None,
    kernel: str | None,
    launch: str | None,
    records: int | None,
    most_bytes: int | None,
    target: str | None,
) -> None:
    if len(words) != 1 or probe is None:
        raise UsageError("instrument: expected FILE, a capture, a .ptx or a .cu file, and --tool=PROBE")
    chosen = chosen_kernel(words[0], kernels_of(words[0], target or DEFAULT_TARGET), kernel)
    shape = parse_launch(launch) if launch is not None else None
    made = instrumented(chosen, find_probe(probe), launch=shape, records=records, most_bytes=most_bytes)
    place = write_instrumented(made, output, force=force) if output is not None else None
    with reader_may_leave():
        row = dict(zip(made.table.columns, made.table.rows[0], strict=True))
        if form == "json":
            emit(json.dumps({name: plain(cell) for name, cell in row.items()}))
        else:
            for name, cell in row.items():
                say(f"{name:26} {shown(cell)}")
        if place is not None:
            say(f"written: {place}", err=True)


main = console_script(cli)

if __name__ == "__main__":
    main()
