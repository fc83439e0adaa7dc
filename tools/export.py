"""opreplay-export: write a capture's operator calls in a form that other tools read."""

from __future__ import annotations

import click

from replayfmt.export.replay_zip import Exported, export_replay_zip, without_integers
from replayfmt.format.reader import open_capture
from replayfmt.trim.selection import Wanted

from .command import run_tool, say, tool
from .progress import record_bar


@tool(
    "opreplay-export",
    ("opreplay-export step.opreplay step.zip", "TraceLens EventReplay IR and a script that replays it:"),
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["replay-zip"]),
    default="replay-zip",
    show_default=True,
    help="replay-zip: TraceLens EventReplay IR, a script that replays it with only PyTorch, and a README.",
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
def cli(
    capture: str,
    out: str,
    form: str,
    ops: str | None,
    scopes: tuple[str, ...],
    kernels: tuple[str, ...],
    signatures: tuple[str, ...],
    unique: bool,
    partial: bool,
    force: bool,
) -> None:
    """Write the calls of CAPTURE to OUT for other tools.

    What the format cannot say (collectives, sparse tensors, what the capture itself has not) is refused, all of it
    listed. Exits with 0 if OUT was written, 1 if it was refused or could not be written, 2 for wrong usage, 3 if
    CAPTURE is missing, unreadable or not valid.
    """
    wanted = Wanted(ops, scopes or None, kernels or None, signatures or None)
    with open_capture(capture) as reader, record_bar("exporting", reader.record_count) as on_record:
        exported = export_replay_zip(
            reader, out, wanted, unique=unique, partial=partial, force=force, on_record=on_record
        )
    _report(out, exported)


def _report(out: str, exported: Exported) -> None:
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
