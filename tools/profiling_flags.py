"""--device-profiling-mode and --device-profiling-output, for the tools that replay: run and benchmark.

Includes `--force`. Everything that can be checked before a capture is opened is checked then. Imports torch only if the
flags are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import click

from replayfmt.errors import ReplayFailed, ReplayMismatch, UsageError


def profiling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags, as parameters device_profiling_mode, device_profiling_output and force."""
    for option in (
        click.option("--force", is_flag=True, help="Overwrite output files that exist."),
        click.option(
            "--device-profiling-output",
            metavar="FILE",
            help="Write a torch.profiler trace of one additional, untimed replay to FILE (Chrome JSON, "
            "compressed if it ends in .gz), with the capture's scopes as annotations.",
        ),
        click.option(
            "--device-profiling-mode",
            metavar="LIST",
            help="Contents of the trace, comma-separated: host-ops, device-kernels, memory, shapes, stacks.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class ProfilingRequest:
    """A trace requested on the command line."""

    families: tuple[str, ...]
    output: str
    force: bool

    def check(self, plan: Any) -> None:
        """Raises UsageError if the plan's devices or this torch cannot provide a family."""
        from replayfmt.benchmark.meters.profiling import check_families

        check_families(self.families, plan.devices)

    def profile(self, plan: Any) -> None:
        """Replay the plan once more under the profiler and write the trace; the replay's errors propagate."""
        from replayfmt.benchmark.meters.profiling import profile_replay

        profile_replay(plan, self.families, self.output, force=self.force)


@contextmanager
def profiled(request: ProfilingRequest | None, plan: Any) -> Iterator[None]:
    """Wraps a tool's replays: checks the request before them and writes the trace after them.  This includes replays
    that failed: the trace then extends as far as the replay did, and the failure propagates."""
    if request is None:
        yield
        return
    request.check(plan)
    try:
        yield
    except (ReplayFailed, ReplayMismatch):
        with suppress(ReplayFailed):  # most likely the same failure again; the first is the one to report
            request.profile(plan)
        raise
    request.profile(plan)


def profiling_request(mode: str | None, output: str | None, force: bool, capture: str) -> ProfilingRequest | None:
    """The request from the flags, None if they are not given.  Raises UsageError for one flag without the other, for
    unknown families and an invalid output, OutputExists for an existing one."""
    if mode is None and output is None:
        return None
    if mode is None:
        raise UsageError(
            f"--device-profiling-output={output}: give --device-profiling-mode=LIST with it, for instance "
            "host-ops,shapes"
        )
    if output is None:
        raise UsageError(f"--device-profiling-mode={mode}: give --device-profiling-output=FILE with it")
    from replayfmt.benchmark.meters.profiling import OUTPUT_FLAG, parse_families
    from replayfmt.benchmark.output import output_file, refuse_input

    families = parse_families(mode)
    refuse_input(OUTPUT_FLAG, output, capture)
    with output_file(OUTPUT_FLAG, output, force):
        pass  # it can be written; it is made at the end, and nothing is there until then
    return ProfilingRequest(families, output, force)
