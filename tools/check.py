"""opreplay-check: verify a capture, explain one that was never closed, recover its intact part, and add digests of its
external files, so that it can be moved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from replayfmt.errors import InvalidCapture
from replayfmt.format.external_files import FileRemaps, processors
from replayfmt.format.maintenance import CheckReport, add_digests, check_capture, recover_capture
from replayfmt.format.races import judge_races
from replayfmt.format.rank_files import MANIFEST, listed, write_manifest
from replayfmt.format.reader import open_capture
from replayfmt.format.validation import counted

from .command import console_script, option, progress_bar, reader_may_leave, say, tool

_MOST_PROCESSES = 16  # that check the files of many ranks


@contextmanager
def _progress_bar(title: str, path: str, passes: int) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar on stderr over `passes` times the file's length, only where stderr is a terminal: what advances it, and
    what sets another total."""
    total = passes * os.path.getsize(path) if os.path.isfile(path) else None
    columns = ("{task.description}", "BarColumn", "DownloadColumn", "TimeRemainingColumn")
    with progress_bar(*columns) as bar:
        if bar is None:
            yield lambda _count: None, lambda _total: None
            return
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count), lambda total: bar.update(task, total=total)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _print_report(report: CheckReport) -> None:
    """What was found, as far as the check got."""
    if report.session is None:
        return
    state = "recovered" if report.recovered else "complete" if report.complete else "incomplete"
    version = ".".join(map(str, report.version))
    say(f"{report.path}: capture of format {version}, {counted(report.length, 'byte')}, {state}")
    session = report.session
    made = f"{session.producer} {session.producer_version}"
    say(
        f"  session      {session.session_id} by {made}"
        + (f" with torch {session.torch_version}" if session.torch_version else "")
    )
    say(f"  frames       {_listed(report.frames)}")
    if report.definitions:
        say(f"  definitions  {_listed(report.definitions)}")
    say(f"  records      {_listed({kind.name: count for kind, count in report.records.items()}) or 'none'}")
    if report.annotated:
        say(f"               {report.annotated:,} annotated")
    say(f"  storages     {report.storages:,}")
    say(f"  payloads     {report.payloads:,} with {counted(report.payload_bytes, 'byte')}")
    for warning in report.warnings:
        say(f"  warning      {warning}")


@tool(
    "opreplay-check",
    ("opreplay-check step.opreplay", "Is the file valid?"),
    ("opreplay-check killed.opreplay.partial --recover whole.opreplay", "Save what a killed capture wrote:"),
)
@click.argument("file", type=click.Path())
@click.argument("output", metavar="[OUT]", type=click.Path(), required=False)
@option(
    "--recover OUT",
    "Write the intact part of FILE to OUT as a valid capture, and verify that.",
    name="out",
    type=click.Path(),
)
@option(
    "--add-digests",
    "Write FILE to OUT with the digest of every external file, and verify that. Each file must still be the captured "
    "one.",
    name="adding",
)
@option(
    "--replay-file-remap CAPTURED=REPLAY",
    "With --add-digests: where external files are now. CAPTURED is a path, or leading directories of it. Repeatable; "
    "the longest match wins.",
    many="remaps",
)
@option("--force", "With --recover or --add-digests: replace OUT if it exists.")
def cli(file: str, output: str | None, out: str | None, adding: bool, remaps: tuple[str, ...], force: bool) -> None:
    """Verify everything in the capture FILE.

    That is its structure, the hashes of every frame and payload, and all references; of the folder of all ranks every
    file, and that they fit together.

    Exits with 0 if it is valid, with 3 and the first finding if it is not, or was never closed. With --recover or
    --add-digests, exits with 0 once OUT is verified.
    """
    if os.path.isdir(file):
        if adding or out is not None or output is not None:
            raise click.UsageError("--recover and --add-digests take a file, not the folder of all ranks")
        _check_folder(file)
        return
    if adding:
        if output is None or out is not None:
            raise click.UsageError("--add-digests takes two files, IN and OUT, and no --recover")
        _add_digests(file, output, remaps, force)
        return
    if output is not None or remaps:
        raise click.UsageError("OUT and --replay-file-remap go with --add-digests; --recover names its own OUT")
    if out is None:
        if force:
            raise click.UsageError("--force replaces the output of --recover and --add-digests; give one of them")
        report = CheckReport(file)
        try:
            with _progress_bar("checking", file, 1) as (advance, _expect):
                check_capture(file, report, advance)
        finally:
            with reader_may_leave():
                _print_report(report)
        with open_capture(file) as reader:
            races = judge_races(reader)
        if races.unjudged:
            say(f"  races        not all looked for: {races.unjudged}")
        for race in races.sentences:
            say(f"  race         {race}")
        say("valid")
        return
    with _progress_bar("recovering", file, 3) as (advance, _expect):
        report, left = recover_capture(file, out, force=force, progress=advance)
    _print_report(report)
    if left:
        say(f"left behind: {left}")
    say(f"valid; recovered from {file}")


def _check_folder(folder: str) -> None:
    """Check the files of all ranks, and make the manifest again."""
    manifest = write_manifest(folder, processes=min(processors(), _MOST_PROCESSES))
    for row in manifest["ranks"]:
        state = (
            f"{row['bytes']:,} bytes, {counted(row['collectives'], 'collective')}" if row["complete"] else "not valid"
        )
        say(f"{os.path.join(folder, row['file'])}: {state}")
    for group in manifest["groups"]:
        say(f"  group of ranks {listed(group['ranks'])}: {counted(group['collectives'], 'collective')}")
    if manifest["problems"]:
        raise InvalidCapture("; ".join(manifest["problems"]))
    say(f"valid; {MANIFEST} written")


def _add_digests(path: str, out: str, remaps: tuple[str, ...], force: bool) -> None:
    with _progress_bar("adding digests", path, 3) as (advance, expect):
        done = add_digests(path, out, remaps=FileRemaps.parse(remaps), force=force, started=expect, progress=advance)
    _print_report(done.report)
    say(
        f"valid; digests of {counted(done.added, 'external file')} added"
        + (f", {done.confirmed:,} had one" if done.confirmed else "")
    )


main = console_script(cli)

if __name__ == "__main__":
    main()
