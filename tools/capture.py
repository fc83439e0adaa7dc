"""opreplay-capture: run a Python program and record the work it gives its devices."""

from __future__ import annotations

import os
import sys

import click

from replayfmt.recording.options import (
    CHILDREN,
    COLLECTIVE_RESULTS,
    COMPILED,
    DIGESTS,
    FILE_POLICIES,
    FILE_VALIDATIONS,
    NATIVE,
    PAYLOADS,
    RECORDERS,
    CaptureOptions,
)
from replayfmt.recording.program.marks import parse_mark
from replayfmt.recording.program.running import Program
from replayfmt.recording.supervisor import CapturedProgram, output_path

from .command import run_tool, tool

_COUNT = click.IntRange(min=0)


@tool(
    "opreplay-capture",
    ("opreplay-capture -o step.opreplay train.py --steps 1", "A script with its own flags:"),
    (
        "opreplay-capture -o gen.opreplay --mark=my_model:Net.forward=forward -m my_package.generate",
        "A module, with every call of one function as a scope:",
    ),
    ("opreplay-capture -o shape.opreplay --payload=none infer.py", "Without content, safe to share:"),
)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE|FOLDER/",
    help="Where to write the capture. {rank} and {pid} are replaced by this process's. Under torchrun, a folder gets "
    "one file of each rank, rank{rank}.opreplay.",
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module's name, as in python -m.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--payload",
    type=click.Choice(PAYLOADS),
    default="full",
    show_default=True,
    help="Content that no captured op produced: embed it (full); embed integers, and record how to synthesize "
    "the rest; or record only metadata, redacted (none).",
)
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="PATH",
    help="A file whose content may have been copied to storages: safetensors, torch.save, raw, a directory of "
    "checkpoints or an index of shards. Mapped files are found without it. Repeatable.",
)
@click.option(
    "--file-policy",
    type=click.Choice(FILE_POLICIES),
    help="Storages whose bytes are in a known file: reference it, embed the parts that are used, embed all of "
    "it, or end the capture.  [default: reference; with --payload=integers none, unless a --file option is "
    "given]",
)
@click.option(
    "--file-validation",
    type=click.Choice(FILE_VALIDATIONS),
    help="How a replay recognizes a file: by device, inode and time, or by a digest of its content (reads it "
    "once).  [default: identity]",
)
@click.option("--redact", is_flag=True, help="Leave out host name, user, command line, and the directories of files.")
@click.option(
    "--no-sources",
    is_flag=True,
    help="Leave out the source of kernels that are not operators, intermediate code that names files, and the paths in "
    "their metadata: a replay needs binaries that fit its machine.",
)
@click.option(
    "--digests",
    type=click.Choice(DIGESTS),
    default="live",
    show_default=True,
    help="What a replay can compare: tensors alive at the end of scopes, every result, or nothing.",
)
@click.option(
    "--audit",
    is_flag=True,
    help="Hash the inputs of every op, and import again whatever was written from outside. Slow.",
)
@click.option(
    "--compiled",
    type=click.Choice(COMPILED),
    default="kernels",
    show_default=True,
    help="torch.compile: record what the generated code of compiled regions calls (a replay needs --allow-code), "
    "record their calls as unsupported, or run their operators instead.",
)
@click.option(
    "--opaque-result",
    "opaque_results",
    multiple=True,
    metavar="OPERATOR[:INDEX]",
    help="Results of this operator, or the one with that index, hold bytes that cannot be reproduced "
    "(addresses, unwritten memory): never compare them. Repeatable.",
)
@click.option(
    "--inside",
    multiple=True,
    metavar="OPERATOR",
    help="Record the operators inside this operator of another package instead of it (NAMESPACE::NAME, * for "
    "any). Repeatable.  [default: operators written in Python that hide state]",
)
@click.option(
    "--whole",
    multiple=True,
    metavar="OPERATOR",
    help="Record this operator of another package as one op, whatever happens inside. Repeatable.",
)
@click.option(
    "--reads-unwritten",
    multiple=True,
    metavar="SCOPE",
    help="In scopes of this name the program may read memory that it never wrote, as a warm-up does: its bytes are "
    "recorded as they are. Elsewhere such a read is unsupported. Repeatable.",
)
@click.option(
    "--native",
    type=click.Choice(NATIVE),
    help="Count operators in threads that never enter Python, so that the capture can report them; this needs a "
    "library that is built once, with the C++ compiler.  [default: OPREPLAY_NATIVE, or auto]",
)
@click.option(
    "--recorder",
    type=click.Choice(RECORDERS),
    help="native records operators below autograd, with a library that is built once with the C++ compiler, and "
    "changes nothing in the program; python is a dispatch mode, which costs more and changes the last bits of some "
    "results (docs/recorders.md); auto is native if the library can be built.  [default: OPREPLAY_RECORDER, or auto]",
)
@click.option(
    "--collective-results",
    type=click.Choice(COLLECTIVE_RESULTS),
    default="full",
    show_default=True,
    help="Keep what collectives wrote, so that the file of one rank replays alone, or leave it out: then only all "
    "ranks together replay.",
)
@click.option(
    "--children",
    type=click.Choice(CHILDREN),
    default="note",
    show_default=True,
    help="Child processes: say in the capture which of them worked, or also capture what multiprocessing runs in them, "
    "each into a file beside FILE, NAME.PID.opreplay (record).",
)
@click.option(
    "--mark",
    "marks",
    multiple=True,
    metavar="MODULE:CALLABLE=SCOPE",
    help="Make every call of a callable a scope. Repeatable.",
)
@click.option("--module-scopes", is_flag=True, help="Make every call of an nn.Module a scope named after its path.")
@click.option("--start-op", type=_COUNT, metavar="N", help="Start recording at the Nth op, counted from 0.")
@click.option("--stop-op", type=_COUNT, metavar="N", help="Stop recording before the Nth op.")
@click.option(
    "--start-scope",
    metavar="NAME[#N]",
    help="Start recording at the first entry of this scope, or at the Nth, counted from 0.",
)
@click.option(
    "--stop-scope", metavar="NAME[#N]", help="Stop recording when this scope is left; with N, its Nth instance."
)
@click.option(
    "--steps",
    metavar="A:B",
    help="Record steps A up to, not including, B of a training loop, counted from 0; either may be omitted. A "
    "step ends when the step() of an optimizer returns.",
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def cli(
    output: str,
    is_module: bool,
    force: bool,
    payload: str,
    files: tuple[str, ...],
    file_policy: str | None,
    file_validation: str | None,
    redact: bool,
    no_sources: bool,
    digests: str,
    audit: bool,
    compiled: str,
    opaque_results: tuple[str, ...],
    inside: tuple[str, ...],
    whole: tuple[str, ...],
    reads_unwritten: tuple[str, ...],
    native: str | None,
    recorder: str | None,
    collective_results: str,
    children: str,
    marks: tuple[str, ...],
    module_scopes: bool,
    start_op: int | None,
    stop_op: int | None,
    start_scope: str | None,
    stop_scope: str | None,
    steps: str | None,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run PROGRAM with its ARGUMENTS and record its work into FILE.

    PROGRAM is a script, or with -m a module.

    The program behaves as under python, and its exit code is passed on; it is 1 if only the capture failed. Flags after
    PROGRAM belong to the program.
    """
    options = CaptureOptions(
        payload=payload,
        files=files,
        file_policy=file_policy,
        file_validation=file_validation,
        redact=redact,
        sources=not no_sources,
        digests=digests,
        audit=audit,
        compiled=compiled,
        opaque_results=opaque_results,
        inside=inside,
        whole=whole,
        reads_unwritten=reads_unwritten,
        native=native,
        recorder=recorder,
        collective_results=collective_results,
        children=children,
        force=force,
        start_op=start_op,
        stop_op=stop_op,
        start_scope=start_scope,
        stop_scope=stop_scope,
        steps=steps,
    )
    captured = CapturedProgram(
        Program(program, arguments, is_module),
        output_path(output, dict(os.environ), os.getpid()),
        options,
        [parse_mark(mark) for mark in marks],
        module_scopes,
    )
    sys.exit(captured.run())


cli.allow_interspersed_args = False  # what follows the program is the program's


def main() -> None:
    run_tool(cli, own_streams=False)  # those of the program


if __name__ == "__main__":
    main()
