"""The flags that choose what a replay runs on and what it accepts: the same for opreplay-run and opreplay-benchmark.

Imports torch only once a plan is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from replayfmt.replay.plan import Plan

_MODES = ("auto", "bitwise", "close", "none")


def replay_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags; the function gets what they said as its parameter `flags`, a ReplayFlags."""

    @wraps(function)
    def bundled(*args: Any, **kwargs: Any) -> Any:
        flags = ReplayFlags(**{field.name: kwargs.pop(field.name) for field in fields(ReplayFlags)})
        return function(*args, flags=flags, **kwargs)

    for option in (
        click.option("--allow-incomplete", is_flag=True,
                     help="Replay what there is of a capture that was never closed."),
        click.option("--replay-file-remap", multiple=True, metavar="CAPTURED=REPLAY",
                     help="External files whose captured path begins with CAPTURED are below REPLAY now. Whole path "
                          "components, the longest match wins. Repeatable."),
        click.option("--verify", type=click.Choice(_MODES), default="auto", show_default=True,
                     help="Compare results with the captured digests: bit for bit, by tolerances, as the machine "
                          "allows, or not at all."),
        click.option("--device", multiple=True, metavar="DEVICE",
                     help="Replay on this device; repeat it for each captured accelerator, in the order of their "
                          "indices. Default: the captured ones."),
    ):
        bundled = option(bundled)
    return bundled


@dataclass(frozen=True)
class ReplayFlags:
    """What the flags of `replay_options` said."""

    device: tuple[str, ...]
    verify: Literal["auto", "bitwise", "close", "none"]
    replay_file_remap: tuple[str, ...]
    allow_incomplete: bool

    def plan(self, path: str, *, keep_going: bool = False) -> Plan:
        """The plan for a capture. Raises what opening and planning raise, before anything runs."""
        from replayfmt.replay.plan import Plan

        with _file_progress() as on_file_bytes:
            return Plan(path, list(self.device), self.allow_incomplete, keep_going=keep_going,
                        file_remaps=self.replay_file_remap, on_file_bytes=on_file_bytes)


@contextmanager
def _file_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr while digests of external files are computed, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("digesting external files"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
