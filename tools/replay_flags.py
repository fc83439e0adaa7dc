"""The flags that choose what a replay runs on and what it accepts: the same for opreplay-run and opreplay-benchmark.

Imports torch only once a plan is made.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click

from replayfmt.errors import SubstitutionRejected, UsageError

from .command import say
from .isolate import isolate_option

if TYPE_CHECKING:
    from replayfmt.initializers import Initializer, Registry
    from replayfmt.replay.plan import Plan

_MODES = ("auto", "bitwise", "close", "none")


def replay_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags; the function receives their values as its parameter `flags`, a ReplayFlags."""

    @wraps(function)
    def bundled(*args: Any, **kwargs: Any) -> Any:
        flags = ReplayFlags(**{field.name: kwargs.pop(field.name) for field in fields(ReplayFlags)})
        return function(*args, flags=flags, **kwargs)

    for option in (
        isolate_option,
        click.option(
            "--allow-code",
            is_flag=True,
            help="Run the code that is in the capture: Triton kernels, generated C++ and other kernels that are not "
            "operators. It has your rights, and nothing confines it: only for captures that you trust.",
        ),
        click.option(
            "--allow-incomplete", is_flag=True, help="Replay what there is of a capture that was never closed."
        ),
        click.option(
            "--allow-import",
            "allow_imports",
            multiple=True,
            metavar="NAME",
            help="Import the module NAME for the custom operators that it registers, or allow importing the "
            "known library of the operator namespace NAME. NAMESPACE=MODULE also lets the capture call "
            "functions of MODULE under operator names of NAMESPACE. A capture alone never causes an import. "
            "Repeatable.",
        ),
        click.option(
            "--allow-operator",
            "allow_operators",
            multiple=True,
            metavar="NAMESPACE::OPERATOR",
            help="Run this operator although it does more than compute on tensors: opens files, prints, "
            "accesses devices or other processes. Repeatable.",
        ),
        click.option(
            "--op-library",
            "op_libraries",
            multiple=True,
            metavar="NAMESPACE=MODULE",
            help="Import MODULE if an operator of NAMESPACE is needed, also for plain functions that a trace "
            "shows as operators. Repeatable.",
        ),
        click.option(
            "--replay-file-remap",
            multiple=True,
            metavar="CAPTURED=REPLAY",
            help="External files whose captured path begins with CAPTURED are now under REPLAY. Whole path "
            "components match, and the longest match wins. Repeatable.",
        ),
        click.option(
            "--substitution-atol",
            type=float,
            metavar="A",
            help="Allow a replacement's values to be off by A + R times the expected value, instead of R times "
            "the larger of it and the tensor's root mean square.",
        ),
        click.option(
            "--substitution-rtol",
            type=float,
            metavar="R",
            help="Replace the relative tolerance R of every dtype when replacements are checked.",
        ),
        click.option(
            "--replay-kernel-substitution",
            multiple=True,
            metavar="SELECTOR[@FORMAT]=PATH[:NAME]",
            help="Run the function NAME of the Python file PATH, or an operator that a torch library "
            "registers, instead of the selected kernels, after checking it against them. SELECTOR: "
            "a kernel id, an operator (aten::mm, aten::mm.default), a signature, or all. Repeatable.",
        ),
        click.option(
            "--replay-initializer",
            multiple=True,
            metavar="FILE.py",
            help="Run FILE.py, and let the initializers it registers fill content that was not captured, before "
            "the built-in ones; the first match wins. Repeatable.",
        ),
        click.option(
            "--moe-routing",
            metavar="uniform|zipf[:EXPONENT]",
            help="How initializers draw experts that were not captured: uniformly (the default) or by Zipf's "
            "law, by default with exponent 1.2.",
        ),
        click.option(
            "--opaque-result",
            "opaque_results",
            multiple=True,
            metavar="OPERATOR[:INDEX]",
            help="Results of this operator, or the one with that index, hold bytes that cannot be reproduced "
            "(addresses, unwritten memory): neither compare nor embed them. Repeatable.",
        ),
        click.option(
            "--streams",
            type=click.Choice(("captured", "serial")),
            default="captured",
            show_default=True,
            help="Replay a device's work on as many streams as were captured, ordered by the captured events and "
            "waits, or all of it on the default stream, in capture order.",
        ),
        click.option(
            "--graphs",
            type=click.Choice(("captured", "issued")),
            default="captured",
            show_default=True,
            help="Capture device graphs (CUDA graphs) again where the device can, and replay them; or issue their ops "
            "one by one at each replay.",
        ),
        click.option(
            "--verify",
            type=click.Choice(_MODES),
            default="auto",
            show_default=True,
            help="Compare results with the captured digests: as closely as the machine allows, bit for bit, "
            "within tolerances, or not at all.",
        ),
        click.option(
            "--device",
            multiple=True,
            metavar="DEVICE",
            help="Replay on this device; repeat it for each captured accelerator, in the order of their "
            "indices. Default: the captured ones.",
        ),
    ):
        bundled = option(bundled)
    return bundled


_PLURALS = {
    "allow_imports": "allow-import",
    "allow_operators": "allow-operator",
    "op_libraries": "op-library",
    "opaque_results": "opaque-result",
}


def flag_of(name: str) -> str:
    """The flag that a field of ReplayFlags is the value of."""
    return f"--{_PLURALS.get(name) or name.replace('_', '-')}"


@dataclass(frozen=True)
class ReplayFlags:
    """The values of the flags of `replay_options`."""

    device: tuple[str, ...]
    streams: Literal["captured", "serial"]
    graphs: Literal["captured", "issued"]
    verify: Literal["auto", "bitwise", "close", "none"]
    replay_initializer: tuple[str, ...]
    moe_routing: str | None
    replay_file_remap: tuple[str, ...]
    replay_kernel_substitution: tuple[str, ...]
    substitution_rtol: float | None
    substitution_atol: float | None
    allow_incomplete: bool
    allow_imports: tuple[str, ...]
    allow_operators: tuple[str, ...]
    allow_code: bool
    op_libraries: tuple[str, ...]
    opaque_results: tuple[str, ...]

    def arguments(self) -> list[str]:
        """The flags as command-line arguments."""
        found: list[str] = []
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
            found += [flag_of(name) if each is True else f"{flag_of(name)}={each}" for each in values]
        return found

    def plan(self, path: str, *, keep_going: bool = False) -> Plan:
        """The plan for a capture. Raises what opening and planning raise, before anything runs."""
        self._refuse_odd_tolerances()
        from replayfmt.pytorch.op_libraries import parse_op_library, register_op_library
        from replayfmt.replay.plan import Plan
        from replayfmt.replay.substitution.distance import Tolerance

        for library in self.op_libraries:
            register_op_library(*parse_op_library(library))
        with _file_progress() as on_file_bytes:
            return Plan(
                path,
                list(self.device),
                self.allow_incomplete,
                keep_going=keep_going,
                initializers=self._initializers(),
                file_remaps=self.replay_file_remap,
                on_file_bytes=on_file_bytes,
                initializer_options={} if self.moe_routing is None else {"moe-routing": self.moe_routing},
                allow_imports=self.allow_imports,
                allow_operators=self.allow_operators,
                streams=self.streams,
                graphs=self.graphs,
                allow_code=self.allow_code,
                opaque_results=self.opaque_results,
                substitutions=self.replay_kernel_substitution,
                substitution_tolerance=Tolerance(self.substitution_rtol, self.substitution_atol),
            )

    def registry(self) -> Registry:
        """The initializers that plans made with these flags use. Raises UsageError if a file is wrong."""
        from replayfmt.initializers import Registry

        return Registry(self._initializers())

    def _initializers(self) -> list[Initializer]:
        from replayfmt.initializers import load_initializers

        return [each for file in self.replay_initializer for each in load_initializers(file)]

    def _refuse_odd_tolerances(self) -> None:
        for flag, value in (
            ("--substitution-rtol", self.substitution_rtol),
            ("--substitution-atol", self.substitution_atol),
        ):
            if value is not None and not (self.replay_kernel_substitution and 0 <= value < math.inf):
                raise UsageError(
                    f"{flag}={value:g}: expected a number from 0"
                    + (
                        ""
                        if self.replay_kernel_substitution
                        else ", and --replay-kernel-substitution with what to judge by it"
                    )
                )


@contextmanager
def rows_if_rejected() -> Iterator[None]:
    """If replacements are rejected, print the findings as JSON rows and re-raise the error, which has the same for
    people."""
    try:
        yield
    except SubstitutionRejected as error:
        for row in error.report.as_rows():
            say(json.dumps(row))
        raise


@contextmanager
def _file_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr, if that is a terminal, while digests of external files are computed."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("digesting external files"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
