"""opreplay-export: write a capture in a form that other tools read: calls to replay, or tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader, open_capture

from .command import run_tool, say, tool
from .progress import record_bar

if TYPE_CHECKING:
    from replayfmt.export.replay_zip import Exported
    from replayfmt.trim.selection import Wanted

_TABLE_FORMATS = ("csv", "parquet")
# Flags that only some formats take.
_ONLY_FOR = {"unique": ("replay-zip",), "partial": ("replay-zip",), "table": _TABLE_FORMATS}


@tool(
    "opreplay-export",
    ("opreplay-export step.opreplay step.zip", "TraceLens EventReplay IR and a script that replays it:"),
    ("opreplay-export --format=csv --table=kernels step.opreplay kernels.csv", "A row for each kernel:"),
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["replay-zip", *_TABLE_FORMATS]),
    default="replay-zip",
    show_default=True,
    help="replay-zip: TraceLens EventReplay IR, a script that replays it with only PyTorch, a README. csv, parquet: a "
    "table.",
)
@click.option(
    "--table",
    type=click.Choice(["ops", "signatures", "kernels"]),
    default="ops",
    show_default=True,
    help="With --format=csv or parquet: a row for each op, for each distinct signature, or for each kernel.",
)
@click.option(
    "--ops", metavar="A:B", help="Only records with ordinals from A up to, not including, B. Either may be missing."
)
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="NAME",
    help="Only what is inside the scopes of this name or full path. Repeatable: in any of them.",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="PATTERN",
    help="Only operators that match, such as 'aten::mm' or 'aten::*norm*'. Repeatable: any of them.",
)
@click.option(
    "--signature",
    "signatures",
    multiple=True,
    metavar="TEXT",
    help="Only ops of this signature, as opreplay-dump --signatures prints it. Repeatable: of any of them.",
)
@click.option("--unique", is_flag=True, help="One entry, with its count, for calls that have the same arguments.")
@click.option(
    "--partial", is_flag=True, help="Leave out calls that the format cannot say, instead of refusing; they are listed."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.argument("capture", metavar="CAPTURE", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str,
    out: str,
    form: str,
    table: Any,
    ops: str | None,
    scopes: tuple[str, ...],
    kernels: tuple[str, ...],
    signatures: tuple[str, ...],
    unique: bool,
    partial: bool,
    force: bool,
) -> None:
    """Write CAPTURE to OUT for other tools.

    What replay-zip cannot say (collectives, sparse tensors, what the capture itself has not) is refused, all of it
    listed. Exits with 0 if OUT was written, 1 if it was refused or could not be written, 2 for wrong usage, 3 if
    CAPTURE is missing, unreadable or not valid.
    """
    for name, formats in _ONLY_FOR.items():
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and form not in formats:
            raise UsageError(f"--{name} is for --format={' and '.join(formats)}")
    from replayfmt.trim.selection import Wanted

    wanted = Wanted(ops, scopes or None, kernels or None, signatures or None)
    with open_capture(capture) as reader:
        if form in _TABLE_FORMATS:
            _table(reader, out, table, form, wanted, force)
            return
        from replayfmt.export.replay_zip import export_replay_zip

        with record_bar("exporting", reader.record_count) as on_record:
            exported = export_replay_zip(
                reader, out, wanted, unique=unique, partial=partial, force=force, on_record=on_record
            )
    _report(out, exported)


def _table(reader: CaptureReader, out: str, table: Any, form: Any, wanted: Wanted, force: bool) -> None:
    from replayfmt.export.tables import export_table
    from replayfmt.trim.selection import resolve

    ordinals = None if wanted.everything else resolve(reader, wanted).ordinals
    rows = export_table(reader, out, table, form, ordinals, force=force)
    say(f"{out}: {rows:,} rows of {table}")


def _report(out: str, exported: Exported) -> None:
    from replayfmt.export.replay_zip import without_integers

    for reason, count in exported.left_out.most_common():
        say(f"left out  {reason}: {count} calls")
    if exported.without_integers:
        say(f"note      {without_integers(exported)}")
    calls = exported.calls - sum(exported.left_out.values())
    say(f"{out}: {exported.entries:,} entries for {calls:,} calls")


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
