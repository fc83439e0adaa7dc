"""`autotune="again"`: of the configurations that a program's autotuner had for a launch, the one that is fastest here.

A captured launch has the configuration that was fastest where it was captured. Here each is timed at the first call of
each distinct launch, on its own inputs, in the pass in which substituted kernels are checked; what comes of the fastest
is judged against the captured configuration like any other kernel's in its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.errors import OpReplayError, ReplayRefused, first_line
from replayfmt.format.attachments import configuration_rows
from replayfmt.format.model import TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor
from replayfmt.pytorch.triton.kernels import launch_text

from ..planning.records import python_values
from ..resolution.code_kernels import TritonKernel
from ..run.content import Clones

FLAG = "--autotune=again"
FASTEST = "the configuration that is fastest here"
_ROUNDS = 7
_ENOUGH_NS = 200_000_000  # for all configurations of a launch together
_UNKNOWN = "it was captured by an older version, or the launch is one of too many"


@dataclass(frozen=True)
class ConfigurationChoice:
    """What was chosen for one distinct launch. `times_ns`: the shortest time of each configuration that ran, `failed`:
    why others did not."""

    kernel: str
    launch: str
    captured: str
    chosen: str
    times_ns: Mapping[str, int]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        what = f"{self.kernel}({self.launch})"
        if self.chosen == self.captured:
            found = f"the captured one, {self._timed(self.captured)}"
        else:
            found = f"{self._timed(self.chosen)}; captured: {self._timed(self.captured)}"
        tried = f"of {counted(len(self.times_ns) + len(self.failed), 'configuration')}"
        return f"{what}: {tried}: {found}" + "".join(f"; {each} failed: {why}" for each, why in self.failed.items())

    def _timed(self, configuration: str) -> str:
        spent = self.times_ns.get(configuration)
        return f"[{configuration}]" + (f" in {spent / 1e3:,.1f} us" if spent is not None else "")

    @property
    def row(self) -> dict[str, Any]:
        return {
            "kind": "configuration",
            **{name: getattr(self, name) for name in ("kernel", "launch", "captured", "chosen")},
            "as_captured": self.chosen == self.captured,
            "times_ns": dict(self.times_ns),
            "failed": dict(self.failed),
        }


class Retuned:
    """Launches a kernel in the fastest configuration. `rows`: those of its launches, by their texts."""

    def __init__(self, kernel: TritonKernel, named: str, rows: Mapping[str, dict[str, Any]]) -> None:
        """Raises ValueError if it cannot be compiled."""
        self._kernel, self._named, self._rows = kernel.from_source(), named, rows
        self._names = [argument.name for argument in kernel.schema.arguments]
        self._written = [each.name for each in kernel.schema.arguments if each.alias_info and each.alias_info.is_write]
        self._chosen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        self.choices: list[ConfigurationChoice] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        # By all that is no tensor: most of a launch's text, and faster to compare.
        given = (*args, *kwargs.values())
        key = tuple(tuple(each) if type(each) is list else each for each in given if not isinstance(each, torch.Tensor))
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._choose({**dict(zip(self._names, args, strict=False)), **kwargs})
        self._kernel.call(*args, **{**kwargs, **chosen})

    def _choose(self, values: dict[str, Any]) -> Mapping[str, Any]:
        launch = launch_text((name, values[name]) for name in self._names if name in values)
        row = self._rows[launch]
        configurations: dict[str, dict[str, Any]] = row["configurations"]
        written = {name: values[name] for name in self._written}
        before = Clones()
        before.of(written)
        times: dict[str, int] = {}
        failed: dict[str, str] = {}
        flush = _flusher(values)

        def restore() -> None:
            for address, storage in before.originals.items():
                byte_tensor(storage).copy_(byte_tensor(before.copies[address]))

        spent = 0
        for number in range(_ROUNDS):
            for name, changed in configurations.items():
                if name in failed:
                    continue
                restore()
                try:
                    took = _time(lambda given=values | changed: self._kernel.launch(**given), flush)
                except Exception as error:  # of the compiler, or for want of memory
                    failed[name] = f"{type(error).__name__}: {first_line(error)}"
                    times.pop(name, None)
                    continue
                spent += took
                if number:  # the first one compiles
                    times[name] = min(times.get(name, took), took)
            if number and spent > _ENOUGH_NS:
                break
        restore()
        captured = row["chosen"]
        # What was captured stays where nothing is faster.
        order = sorted(times, key=lambda name: (times[name], name != captured))
        if not order:
            raise OpReplayError(
                f"{FLAG}: {self._named}: no configuration can be launched here: "
                + "; ".join(f"{name}: {why}" for name, why in failed.items())
            )
        scalars = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        self.choices.append(
            ConfigurationChoice(self._named, launch_text(scalars.items()), captured, order[0], times, failed)
        )
        return configurations[order[0]]


def _flusher(values: Mapping[str, Any]) -> torch.Tensor | None:
    """Memory larger than a device's caches; None on the CPU."""
    device = next((each.device for each in values.values() if isinstance(each, torch.Tensor)), torch.device("cpu"))
    return None if device.type == "cpu" else torch.empty(256 << 20, dtype=torch.uint8, device=device)


def _time(launch: Any, flush: torch.Tensor | None) -> int:
    """How long a launch takes, in nanoseconds; on a device by events, behind work that hides what the host does."""
    if flush is None:
        started = time.perf_counter_ns()
        launch()
        return time.perf_counter_ns() - started
    module: Any = torch.get_device_module(flush.device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return int(begin.elapsed_time(end) * 1e6)


def retuned(reader: CaptureReader, kernels: Sequence[Any], called: Mapping[int, Sequence[int]]) -> dict[int, Retuned]:
    """What launches each autotuned kernel, by number. `called` has the ordinals of each kernel's calls. Raises
    ReplayRefused with every launch for which the capture lacks what that needs."""
    tables: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in configuration_rows(reader):
        tables.setdefault((row["source_sha256"], row["function"]), {})[row["launch"]] = row
    found: dict[int, Retuned] = {}
    problems: dict[str, None] = {}
    for number, ordinals in sorted(called.items()):
        kernel = kernels[number]
        if not isinstance(kernel, TritonKernel):
            continue
        named = reader.kernels[number].qualified_name
        rows = tables.get(kernel.identity, {})
        if not rows and not kernel.configuration:
            continue  # no autotuner launched it
        try:
            found[number] = Retuned(kernel, named, rows)
        except ValueError as error:
            problems[f"{named}: {error}"] = None
            continue
        names = [argument.name for argument in kernel.schema.arguments]
        for ordinal in ordinals:
            record = reader.record(ordinal)
            values = python_values(reader, record.signature.args, record.args, _stand_in, "")
            launch = launch_text(zip(names, values, strict=True))
            known = rows.get(launch)
            if known is None or "reason" in known:
                why = _UNKNOWN if known is None else str(known["reason"])
                problems.setdefault(f"{named}: the capture has no configurations of the launch ({launch}): {why}")
    if not problems and not found:
        problems[f"{FLAG}: no autotuner chose a launch in this capture of which it has the configurations"] = None
    if problems:
        raise ReplayRefused(f"{reader.path}: {FLAG} cannot choose configurations", tuple(problems))
    return found


def _stand_in(value: TensorValue, _name: str) -> torch.Tensor:
    return torch.empty(0, dtype=TORCH_DTYPE[value.meta.dtype])
