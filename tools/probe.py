"""opreplay-probe: what happens inside a kernel: the probes there are, and reports of their recordings."""

from __future__ import annotations

import json
import os

import click

from replayfmt.errors import UsageError
from replayfmt.probes.definitions import find_probe, probe_row, shipped_probes
from replayfmt.probes.evaluations.block_times import unwatched
from replayfmt.probes.evaluations.memory import PredictedLaunch
from replayfmt.probes.evaluations.tables import as_json, as_text
from replayfmt.probes.reporting import KINDS, NamedFile, ReportOptions, evaluate, write_report

from .command import reader_may_leave, run_tool, say, tool
from .progress import record_bar


@tool(
    "opreplay-probe",
    ("opreplay-probe report schedule run/result/0.731200.bin -o reports", "How were the blocks of a launch scheduled?"),
    ("opreplay-probe report overhead dmat=run1 block_sched=run2", "What did two probes cost?"),
    ("opreplay-probe list", "Which probes are there?"),
    ("opreplay-probe report memory --predict=fill:32768,1,1:128,1,1:16:warp", "How much memory will a probe need?"),
)
@click.argument("action", type=click.Choice(["report", "list"]))
@click.argument("words", metavar="[KIND FILES… | PROBES…]", nargs=-1)
@click.option(
    "-o", "--output", metavar="DIR", type=click.Path(), help="Write KIND.txt, .json, .svg and .png to this folder."
)
@click.option("--no-picture", "no_picture", is_flag=True, help="Leave out the picture, which needs matplotlib.")
@click.option(
    "--section",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Whose records to evaluate, where a recording holds those of several probes.",
)
@click.option(
    "--tensors",
    metavar="FILE",
    type=click.Path(),
    help="report dmat: which memory is which tensor's, a tensor.trace. Without it, that of the recording's run.",
)
@click.option(
    "--predict",
    "predicted",
    metavar="NAME:GX,GY,GZ:BX,BY,BZ:BYTES[:warp]",
    multiple=True,
    help="report memory: predict what a probe needs that saves BYTES for each thread, or each warp, of a launch. "
    "Repeatable; needs no FILES.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="What is printed."
)
@click.option("--force", is_flag=True, help="Replace files of DIR.")
def cli(
    action: str,
    words: tuple[str, ...],
    output: str | None,
    no_picture: bool,
    section: int,
    tensors: str | None,
    predicted: tuple[str, ...],
    form: str,
    force: bool,
) -> None:
    """Evaluate recordings of probes (`report KIND FILES…`), or show what probes there are (`list`, and `list
    FILE.toml` for your own).

    Exits with 0 once the report is printed and written, with 1 if it could not be written, with 3 if a recording is
    missing or not valid.
    """
    if action == "list":
        _list(words, form, bool(output or no_picture or section or tensors or predicted or force))
        return
    if not words:
        raise UsageError(f"report: expected a KIND, one of {', '.join(KINDS)}, and its FILES")
    files = [NamedFile.parse(word) for word in words[1:]]
    records = sum(os.path.getsize(file.path) // 16 for file in files if os.path.isfile(file.path))
    with record_bar(f"evaluating {words[0]}", records) as show:
        options = ReportOptions(section, tensors, tuple(map(PredictedLaunch.parse, predicted)))
        result = evaluate(words[0], files, options, show or unwatched)
    written = write_report(result, output, picture=not no_picture, force=force) if output is not None else []
    with reader_may_leave():
        if form == "json":
            click.echo(json.dumps(as_json(result), allow_nan=False))
        else:
            for line in as_text(result):
                say(line)
        for path in written:
            say(f"written: {path}", err=True)


def _list(names: tuple[str, ...], form: str, others: bool) -> None:
    if others:
        raise UsageError("list: takes names or files of probes, and --format; other options are those of report")
    probes = [find_probe(name) for name in names] or shipped_probes()
    for probe in probes:
        if form == "json":
            click.echo(json.dumps(probe_row(probe)))
            continue
        say(f"{probe.name}: {probe.about}")
        for name, text in list(probe_row(probe).items())[2:]:
            say(f"  {name:13} {', '.join(text) if isinstance(text, list) else text}")


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
