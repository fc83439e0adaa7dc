"""opreplay-capture: run a Python program and record the work it gives its devices."""

from __future__ import annotations

import os
import sys
from typing import Any

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

from .command import console_script, option, tool

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
@option(
    "-o --output FILE|FOLDER/",
    "Where to write the capture. {rank}, {pid} and {host} are replaced by this process's. Under torchrun, a folder "
    "gets one file of each rank, rank{rank}.opreplay.",
    required=True,
)
@option("-m", "PROGRAM is a module's name, as in python -m.", name="is_module")
@option("--force", "Replace FILE if it exists.")
@option(
    "--payload",
    "Content that no captured op produced: embed it (full); embed integers, and record how to synthesize the rest; or "
    "record only metadata, redacted (none).",
    type=PAYLOADS,
    default="full",
)
@option(
    "--file PATH",
    "A file whose content may have been copied to storages: safetensors, torch.save, raw, a directory of checkpoints "
    "or an index of shards. Mapped files are found without it. Repeatable.",
    many="files",
)
@option(
    "--file-policy",
    "Storages whose bytes are in a known file: reference it, embed the parts that are used, embed all of it, or end "
    "the capture.  [default: reference; with --payload=integers none, unless a --file option is given]",
    type=FILE_POLICIES,
)
@option(
    "--file-validation",
    "How a replay recognizes a file: by device, inode and time, or by a digest of its content (reads it once).  "
    "[default: identity]",
    type=FILE_VALIDATIONS,
)
@option("--redact", "Leave out host name, user, command line, and the directories of files.")
@option(
    "--no-sources",
    "Leave out the source of kernels that are not operators, intermediate code that names files, and the paths in "
    "their metadata: a replay needs binaries that fit its machine.",
)
@option(
    "--digests",
    "What a replay can compare: tensors alive at the end of scopes, every result, or nothing.",
    type=DIGESTS,
    default="live",
)
@option("--audit", "Hash the inputs of every op, and import again whatever was written from outside. Slow.")
@option(
    "--compiled",
    "torch.compile: record what the generated code of compiled regions calls (a replay needs --allow-code), record "
    "their calls as unsupported, or run their operators instead.",
    type=COMPILED,
    default="kernels",
)
@option(
    "--opaque-result OPERATOR[:INDEX]",
    "Results of this operator, or the one with that index, hold bytes that cannot be reproduced (addresses, unwritten "
    "memory): never compare them. Repeatable.",
    many="opaque_results",
)
@option(
    "--inside OPERATOR",
    "Record the operators inside this operator of another package instead of it (NAMESPACE::NAME, * for any). "
    "Repeatable.  [default: operators written in Python that hide state]",
    multiple=True,
)
@option(
    "--whole OPERATOR",
    "Record this operator of another package as one op, whatever happens inside. Repeatable.",
    multiple=True,
)
@option(
    "--reads-unwritten SCOPE",
    "In scopes of this name the program may read memory that it never wrote, as a warm-up does: its bytes are "
    "recorded as they are. Elsewhere such a read is unsupported. Repeatable.",
    multiple=True,
)
@option(
    "--native",
    "Count operators in threads that never enter Python, so that the capture can report them; this needs a library "
    "that is built once, with the C++ compiler.  [default: OPREPLAY_NATIVE, or auto]",
    type=NATIVE,
)
@option(
    "--recorder",
    "native records operators below autograd, with a library that is built once with the C++ compiler, and changes "
    "nothing in the program; python is a dispatch mode, which costs more and changes the last bits of some results "
    "(docs/recorders.md); auto is native if the library can be built.  [default: OPREPLAY_RECORDER, or auto]",
    type=RECORDERS,
)
@option(
    "--collective-results",
    "Keep what collectives wrote, so that the file of one rank replays alone, or leave it out: then only all ranks "
    "together replay.",
    type=COLLECTIVE_RESULTS,
    default="full",
)
@option(
    "--children",
    "Child processes: say in the capture which of them worked, or also capture what multiprocessing runs in them, "
    "each into a file beside FILE, NAME.PID.opreplay (record).",
    type=CHILDREN,
    default="note",
)
@option("--mark MODULE:CALLABLE=SCOPE", "Make every call of a callable a scope. Repeatable.", many="marks")
@option("--module-scopes", "Make every call of an nn.Module a scope named after its path.")
@option("--start-op N", "Start recording at the Nth op, counted from 0.", type=_COUNT)
@option("--stop-op N", "Stop recording before the Nth op.", type=_COUNT)
@option("--start-scope NAME[#N]", "Start recording at the first entry of this scope, or at the Nth, counted from 0.")
@option("--stop-scope NAME[#N]", "Stop recording when this scope is left; with N, its Nth instance.")
@option(
    "--steps A:B",
    "Record steps A up to, not including, B of a training loop, counted from 0; either may be omitted. A step ends "
    "when the step() of an optimizer returns.",
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def cli(
    output: str,
    program: str,
    arguments: tuple[str, ...],
    is_module: bool,
    marks: tuple[str, ...],
    module_scopes: bool,
    no_sources: bool,
    **options: Any,
) -> None:
    """Run PROGRAM with its ARGUMENTS and record its work into FILE.

    PROGRAM is a script, or with -m a module.

    The program behaves as under python, and its exit code is passed on; it is 1 if only the capture failed. Flags after
    PROGRAM belong to the program.
    """
    captured = CapturedProgram(
        Program(program, arguments, is_module),
        output_path(output, dict(os.environ), os.getpid()),
        CaptureOptions(sources=not no_sources, **options),
        [parse_mark(mark) for mark in marks],
        module_scopes,
    )
    sys.exit(captured.run())


cli.allow_interspersed_args = False  # what follows the program is the program's
cli.own_streams = False  # type: ignore[attr-defined]


main = console_script(cli)

if __name__ == "__main__":
    main()
