"""Tools that work on the folder of all ranks, one process each: what torchrun starts."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import click

from replayfmt.errors import OpReplayError, ReplayRefused, UsageError

from .command import option, printing_on, report, say, together

if TYPE_CHECKING:
    from replayfmt.replay.ranks import Ranks

Met = TypeVar("Met", bound="Ranks")


collective_options = together(
    option(
        "--collectives",
        "recorded: what they brought is in the file (the default for one file); real: they are done, by all ranks "
        "together (the default for a folder); none: left out, for timing alone: nothing is verified.",
        type=["recorded", "real", "none"],
    ),
    option(
        "--collective-timeout SECONDS",
        "For the folder of all ranks: how long to wait for other ranks.",
        type=click.FloatRange(min=0, min_open=True),
        default=300,
    ),
)


def choose_collectives(context: click.Context, mode: str | None, capture: str) -> None:
    """What --collectives asks for, while the command runs. Raises UsageError if the capture is none for it."""
    if mode == "none":
        from replayfmt.pytorch.collectives import LeftOut, played_by

        context.with_resource(played_by(LeftOut()))
    elif mode is not None and (mode == "real") != os.path.isdir(capture):
        takes = "the folder of all ranks, under torchrun" if mode == "real" else "the file of one rank"
        raise UsageError(f"--collectives={mode} takes {takes}; {capture} is not that")


def on_all_ranks(meet: Callable[[], Met], work: Callable[[Met], int]) -> int:
    """Do this rank's part while the other ranks do theirs. Rank 0 prints, and so does whoever fails. Returns the exit
    code of all."""
    try:
        ranks = meet()
    except ReplayRefused:
        if int(os.environ["RANK"]):
            return ReplayRefused.exit_code  # rank 0 prints the findings of all
        raise
    printed = io.StringIO()
    with nullcontext() if ranks.rank == 0 else printing_on(printed):
        try:
            with ranks.playing():
                code = work(ranks)
                ranks.finish()
            if code:
                ranks.fail()
        except OpReplayError as error:
            report(error)
            code = error.exit_code
            ranks.fail()
    if code and printed.getvalue():
        sys.stderr.write(printed.getvalue())
    of_all = ranks.end(code)
    if of_all and not code and ranks.rank == 0:
        say("failed: another rank did not match, was refused or failed")
    return of_all
