"""opreplay-dump: what is in a capture, as text or as JSON lines. Needs no PyTorch."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from replayfmt.dump import MOST_VALUES, SHOWN_VALUES
from replayfmt.errors import UsageError
from replayfmt.format.validation import printable

from .command import console_script, option, stdout, tool

if TYPE_CHECKING:
    from replayfmt.dump.selection import Selection

Chunks = Callable[[], Iterable[str]]  # makes chunks of whole lines


@tool(
    "opreplay-dump",
    ("opreplay-dump --summary step.opreplay", "What is in it:"),
    ("opreplay-dump --scope=execute --kernel='aten::addmm*' step.opreplay", "One kernel in one scope:"),
    ("opreplay-dump --attachment=3 -o kernel.py step.opreplay", "The source of a kernel:"),
    ("opreplay-dump --jq 'select(.kind == \"op\") | .op' step.opreplay", "Rows for scripts:"),
)
@click.argument("capture", type=click.Path())
@option(
    "--format",
    "text for people (the default), or one JSON object a line; with --device-kernels also csv.",
    name="form",
    type=["text", "jsonl", "csv"],
)
@option(
    "--jq FILTER",
    "Apply a jq filter to each row and print its results, as `jq -c` does. Implies --format=jsonl.",
    name="query",
)
@option("-r --raw-output", "With --jq: print strings as they are, without quotes, as `jq -r` does.", name="raw")
@option("-s --slurp", "With --jq: pass the filter all rows at once, as one array, as `jq -s` does.")
@option(
    "--ops A:B",
    "Only records with ordinals from A up to, not including, B. Either may be omitted. Reads only the frames that "
    "hold them.",
)
@option(
    "--scope NAME",
    "Only records inside the scopes of this name or full path. Repeatable: in any of them.",
    many="scopes",
)
@option(
    "--kernel PATTERN",
    "Only ops whose operator matches, such as 'aten::mm', 'aten::mm.default' or 'aten::*norm*'. Repeatable: any of "
    "them.",
    many="kernels",
)
@option(
    "--values N",
    "Show the values of integer and bool arguments of at most N elements, if the capture holds them and no op has "
    "overwritten them; 0 shows none.",
    type=click.IntRange(0, MOST_VALUES),
    default=SHOWN_VALUES,
)
@option("--summary", "Only the file and its summary.")
@option(
    "--findings",
    "What stands out, in at most five sentences, each with the command that goes on: the most expensive kernel, time "
    "in no op, what holds the memory at its peak, repeated work, small copies, waits for the device.",
)
@option(
    "--signatures",
    "Only the distinct signatures of ops (docs/signatures.md), with their numbers of calls; limited by --ops and "
    "--kernel if given.",
)
@option(
    "--device-kernels",
    "Only the distinct kernels, copies and fills that ran on devices, with their counts and times, and the streams: "
    "of captures imported from profiler traces.",
)
@option(
    "--kernel-skeleton ID|OPERATOR",
    "Print a Python file to start a replacement kernel from, for --replay-kernel-substitution of other tools, which "
    "passes as it is. The kernel is given by id or name (aten::mm, aten::mm.default).",
)
@option(
    "--language",
    "With --kernel-skeleton of an operator: python (the default) calls the original; triton and cpp also launch a "
    "kernel that writes what the original computed.",
    type=["python", "triton", "cpp"],
)
@option(
    "--allow-code",
    "With --kernel-skeleton of a Triton or C++ kernel: print its source from the capture, which runs with the file.",
)
@option(
    "--attachment ID", "Write the attachment of a kernel with this id, unchanged: its source, a binary, or other data."
)
@option("-o --output FILE", "With --attachment: write it to FILE instead of stdout.")
@option("--force", "With --output: replace an existing FILE.")
def cli(
    capture: str,
    form: str | None,
    query: str | None,
    raw: bool,
    slurp: bool,
    ops: str | None,
    scopes: tuple[str, ...],
    kernels: tuple[str, ...],
    values: int,
    summary: bool,
    findings: bool,
    signatures: bool,
    device_kernels: bool,
    kernel_skeleton: str | None,
    language: str | None,
    allow_code: bool,
    attachment: str | None,
    output: str | None,
    force: bool,
) -> None:
    """Show what is in CAPTURE, a file or the folder of all ranks.

    An incomplete capture is shown as far as it goes, and says so.
    """
    if query is not None and form in ("text", "csv"):
        raise UsageError("--jq works on rows: omit --format, or give --format=jsonl")
    if form == "csv" and not device_kernels:
        raise UsageError("--format=csv is for --device-kernels; opreplay-export --format=csv writes tables of ops")
    if device_kernels and (summary or signatures or scopes or kernels or ops is not None):
        raise UsageError("--device-kernels is about the whole trace; it goes with --format and --jq alone")
    if query is None and (raw or slurp):
        raise UsageError(f"{'--raw-output' if raw else '--slurp'} is for --jq")
    selects = (
        summary or findings or signatures or device_kernels or scopes or kernels or (form, query, ops) != (None,) * 3
    )
    if kernel_skeleton is not None and (selects or attachment is not None):
        raise UsageError(f"--kernel-skeleton={kernel_skeleton} prints a Python file; it goes with no other flag")
    if kernel_skeleton is None and (language is not None or allow_code):
        raise UsageError(f"{'--allow-code' if allow_code else '--language'} is for --kernel-skeleton")
    if attachment is not None and selects:
        raise UsageError(f"--attachment={attachment} writes one attachment as it is; it goes with --output alone")
    if output is not None and attachment is None:
        raise UsageError("--output is for --attachment")
    if force and output is None:
        raise UsageError("--force is for --output")
    if findings and (summary or signatures or device_kernels or scopes or kernels or ops is not None):
        raise UsageError("--findings is about the whole capture; it goes with --format and --jq alone")
    if summary and signatures:
        raise UsageError("--summary and --signatures print different things; give one of them")
    if summary and (ops is not None or scopes or kernels):
        raise UsageError("--summary is about the whole capture: omit --ops, --scope and --kernel")
    _hasten()
    # Imported here, as below: imports are a large part of the cost of a short dump.
    from replayfmt.dump.selection import Selection, parse_range
    from replayfmt.dump.stream import Query, jsonl_chunks, jsonl_lines, text_lines
    from replayfmt.format.reader import open_capture

    gc.enable()
    program = None if query is None else Query(query, raw=raw, slurp=slurp)
    start, stop = (0, None) if ops is None else parse_range(ops)
    selection = Selection(start, stop, scopes or None, kernels or None)
    if os.path.isdir(capture):
        if kernel_skeleton is not None or attachment is not None or signatures or findings or device_kernels:
            raise UsageError(f"{capture}: of a folder only records and --summary are shown; name the file of one rank")
        rows = _rows_of_ranks(capture, selection, summary, values, program is not None or form == "jsonl")
        write(rows if program is None else program.apply(rows))
        return

    def show(rows: Chunks, text: Chunks, csv: Chunks | None = None) -> None:
        """Print rows, what the filter makes of them, or text."""
        if program is not None:
            write(program.apply(rows()))
        else:
            write(({"jsonl": rows, "csv": csv}.get(form or "") or text)())

    reader = open_capture(capture)
    try:
        if kernel_skeleton is not None:
            from replayfmt.dump.kernel_skeleton import kernel_skeleton as skeleton

            write([skeleton(reader, kernel_skeleton, language, allow_code)])
        elif attachment is not None:
            from replayfmt.dump.contents import attachment_content

            write_bytes(attachment_content(reader, attachment), capture, output, force)
        elif signatures:
            from replayfmt.dump.listings import signature_lines, signature_text_lines

            show(partial(signature_lines, reader, selection), partial(signature_text_lines, reader, selection))
        elif findings:
            from replayfmt.dump.listings import lines
            from replayfmt.report.findings import capture_findings

            found = capture_findings(reader)
            texts = [f"{printable(each.text)}\n    {each.command}\n" for each in found] or ["nothing stands out\n"]
            show(lambda: lines(each.row() for each in found), lambda: texts)
        elif device_kernels:
            from replayfmt.dump import listings

            forms = (listings.device_kernel_lines, listings.device_kernel_text, listings.device_kernel_csv)
            show(*(partial(each, reader) for each in forms))
        elif program is not None:
            write(program.apply(jsonl_chunks(reader, selection, summary, values)))
        elif form == "jsonl":
            write_lines(jsonl_lines(reader, selection, summary, values))
        else:
            write_lines(text_lines(reader, selection, summary, values))
    finally:
        reader.close()


def _hasten() -> None:
    """A short dump is the start and the end of the process: NumPy's BLAS starts threads that nothing uses here, what
    imports make is no garbage, and the last collection would look at every object there is."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()
    atexit.register(gc.freeze)


def _rows_of_ranks(folder: str, selection: Selection, summary: bool, values: int, as_json: bool) -> Iterator[str]:
    """The files of all ranks, one after the other; each JSON row with its `rank`."""
    from replayfmt.dump.stream import jsonl_chunks, text_chunks
    from replayfmt.format.rank_files import rank_file, world_size  # 50 ms that one file need not wait for
    from replayfmt.format.reader import open_capture

    for rank in range(world_size(folder)):
        with open_capture(rank_file(folder, rank)) as reader:
            if not as_json:
                yield f"rank {rank}\n"
                yield from text_chunks(reader, selection, summary, values)
            else:
                for chunk in jsonl_chunks(reader, selection, summary, values):
                    yield re.sub(r"^\{", f'{{"rank":{rank},', chunk, flags=re.MULTILINE)


def write(chunks: Iterable[str]) -> None:
    """Print chunks of whole lines, in UTF-8 whatever the locale."""
    write_lines(chunk.encode("utf-8", "backslashreplace") for chunk in chunks)


def write_lines(chunks: Iterable[bytes]) -> None:
    output = stdout().buffer
    for chunk in chunks:
        output.write(chunk)
        output.flush()


def write_bytes(content: bytes | memoryview, capture: str, output: str | None, force: bool) -> None:
    """Write bytes as they are, to a file or to stdout, where a terminal would act on them."""
    if output is None:
        if stdout().isatty():
            raise UsageError(
                "--attachment writes bytes as they are, and a terminal acts on them; use --output or a pipe"
            )
        stdout().buffer.write(content)
        stdout().buffer.flush()
        return
    from replayfmt.format.output import Output, same_file

    if same_file(capture, output):
        raise UsageError(f"{output}: is the capture itself; name another file")
    with Output(output, force, doing="extracting") as target:
        target.write([content])


main = console_script(cli)

if __name__ == "__main__":
    main()
