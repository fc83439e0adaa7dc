"""The flags that choose what a replay runs on and what it accepts: the same for opreplay-run and opreplay-benchmark.

Imports torch only once a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import click

if TYPE_CHECKING:
    from replayfmt.replay.plan import Plan

_MODES = ("auto", "bitwise", "close", "none")


def replay_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --device, --verify and --allow-incomplete, as parameters device, verify and allow_incomplete."""
    for option in (
        click.option("--allow-incomplete", is_flag=True,
                     help="Replay what there is of a capture that was never closed."),
        click.option("--verify", type=click.Choice(_MODES), default="auto", show_default=True,
                     help="Compare results with the captured digests: bit for bit, by tolerances, as the machine "
                          "allows, or not at all."),
        click.option("--device", multiple=True, metavar="DEVICE",
                     help="Replay on this device; repeat it for each captured accelerator, in the order of their "
                          "indices. Default: the captured ones."),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class ReplayFlags:
    """What the flags of `replay_options` said."""

    device: tuple[str, ...]
    verify: Literal["auto", "bitwise", "close", "none"]
    allow_incomplete: bool

    @staticmethod
    def of(device: tuple[str, ...], verify: str, allow_incomplete: bool) -> ReplayFlags:
        """From the command's parameters."""
        return ReplayFlags(device, cast(Any, verify), allow_incomplete)

    def plan(self, path: str, *, keep_going: bool = False) -> Plan:
        """The plan for a capture. Raises what opening and planning raise, before anything runs."""
        from replayfmt.replay.plan import Plan

        return Plan(path, list(self.device), self.allow_incomplete, keep_going=keep_going)
