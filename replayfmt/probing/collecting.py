"""A probe run on the launches of a captured kernel, each in a replay that has come to it.

For each launch, from the same memory each time: the captured kernel as the replay runs it, which says what is expected;
its PTX without the probe, timed; for probes that save each time, the one that counts; its PTX with the probe. What the
latter two write is compared with what the first wrote, byte for byte. A launch whose results differ has no recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from replayfmt.errors import ReplayFailed, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Kernel
from replayfmt.probes.definitions import ProbeDefinition
from replayfmt.probes.evaluations.memory import predicted_bytes
from replayfmt.probes.evaluations.tables import Cell, ResultTable, Unmeasured
from replayfmt.probes.instrumenting import InstrumentedKernel, ProbeableKernel, instrumented, write_instrumented
from replayfmt.probes.ptx.assembling import assemble
from replayfmt.probes.recordings.logs import BenchmarkTimes
from replayfmt.probes.recordings.results import WARP_SIZE, LaunchShape, Level
from replayfmt.replay.code.triton_kernels import TritonKernel
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.isolated import IsolatedOp

from .device import ProbeDevice
from .launches import LaunchableKernel, PlannedLaunch, Value
from .run_folder import RunFolder

DEFAULT_MOST_BYTES = 1 << 30
_ORIGINAL_RUNS = 5
_COUNT = np.dtype("<u8")

Outcome = Literal["bitwise", "differs", "not deterministic"]


@dataclass(frozen=True)
class ProbedLaunch:
    """What came of one launch. `recording` is None where results differ, and `why` says how."""

    ordinal: int
    shape: LaunchShape
    outcome: Outcome
    why: str
    records: int
    nbytes: int
    times: BenchmarkTimes
    recording: Path | None


@dataclass(frozen=True)
class ProbePlan:
    """A probe, a kernel and its launches, before anything ran."""

    kernel: LaunchableKernel
    made: InstrumentedKernel
    launches: tuple[PlannedLaunch, ...]
    most_bytes: int

    @property
    def table(self) -> ResultTable:
        """A row for each launch: its records and their bytes."""
        rows: list[tuple[Cell, ...]] = []
        for launch in self.launches:
            rows.append(
                (
                    launch.ordinal,
                    " ".join(map(str, launch.shape.grid)),
                    " ".join(map(str, launch.shape.block)),
                    self._rows(launch.shape) if not self.made.probe.each_site else Unmeasured("counted first"),
                    self.bytes_of(launch.shape),
                )
            )
        return ResultTable("launches", ("ordinal", "grid", "block", "records", "needed_bytes"), rows)

    def _rows(self, shape: LaunchShape) -> int:
        return shape.blocks * shape.rows(WARP_SIZE if self.made.probe.level == "warp" else 1)

    def bytes_of(self, shape: LaunchShape) -> int | Unmeasured:
        """How many bytes the records of a launch need, as far as that is known before it."""
        if self.made.probe.each_site:
            return Unmeasured("records are counted first")
        return predicted_bytes(shape, self.made.probe.record_bytes, self.made.probe.level)


def plan_probe(
    plan: Plan,
    selector: str | None,
    probe: ProbeDefinition,
    *,
    at_most: int | None = None,
    most_bytes: int = DEFAULT_MOST_BYTES,
) -> ProbePlan:
    """Put a probe into the PTX of a captured kernel and look at its launches, the first `at_most` of them.

    `selector`: the kernel's name, with or without its variant; None for the only one that has PTX. Raises UsageError,
    PtxError, and ReplayRefused for kernels that cannot be launched from here and records of more than `most_bytes`.
    """
    reader = plan.reader
    kernels = [each for each in reader.kernels if each is not None]
    found = [each for each in kernels if selector in (each.qualified_name, each.qualified_name.rpartition(".")[0])]
    if selector is None:
        found = [each for each in kernels if any(reader.attachments[a].role == "ptx" for a in each.attachments)]
    if len(found) != 1:
        names = ", ".join(each.qualified_name for each in (found or kernels)[:8]) or "none"
        wanted = "--kernel=NAME of one kernel" if selector is None or found else f"a kernel {selector}"
        raise UsageError(f"{reader.path}: expected {wanted}; there are: {names}")
    resolved = plan.kernels[reader.kernels.index(found[0])]
    if isinstance(resolved, str):
        raise ReplayRefused(f"{reader.path}: {resolved}")
    launched = None
    if isinstance(resolved, TritonKernel) and not resolved.is_interpreted:
        launched = _launched(plan, found[0], resolved)
    kernel = LaunchableKernel(reader, found[0], launched)
    made = instrumented(ProbeableKernel(kernel.name, kernel.entry.name, kernel.module), probe)
    planned = ProbePlan(kernel, made, tuple(kernel.launches(reader, at_most)), most_bytes)
    for launch in planned.launches:
        # Of probes that save each time, as far as it is known: the counters, one for each thread.
        one: tuple[int, Level] = (_COUNT.itemsize, "thread") if probe.each_site else (probe.record_bytes, probe.level)
        needed = predicted_bytes(launch.shape, *one)
        _check_bytes(kernel.name, launch.ordinal, probe, needed, most_bytes)
    return planned


def _launched(plan: Plan, kernel: Kernel, resolved: TritonKernel) -> Any:
    """Triton's object of what the replay launches of a kernel on this device: compiled here, or the stored binary. Runs
    the first launch. Raises ReplayRefused, ReplayFailed."""
    for record in plan.reader.records():
        if record.kind is RecordKind.op and plan.reader.kernels[record.signature.kernel] is kernel:
            break
    else:
        raise ReplayRefused(f"{plan.reader.path} has no launch of {kernel.qualified_name}")

    def launch(op: IsolatedOp) -> None:
        if op.ordinal == record.ordinal:
            op.calls(1)

    verdicts = plan.examine(launch, plan.slice({record.ordinal}))
    found = resolved.launched_here()
    if len(found) != 1:
        said = next((each.reason for each in verdicts if each.ordinal == record.ordinal and each.reason), "")
        why = f"{len(found)} of it are on this device" if found else f"it could not be launched here: {said}"
        raise ReplayRefused(f"{kernel.qualified_name} cannot be probed: {why}")
    return found[0]


def _check_bytes(kernel: str, ordinal: int, probe: ProbeDefinition, needed: int, most: int) -> None:
    if needed > most:
        raise ReplayRefused(
            f"{kernel}: ordinal {ordinal}: probe {probe.name} needs {needed:,} bytes; --max-bytes allows {most:,}"
        )


def collect(
    plan: Plan,
    planned: ProbePlan,
    device: ProbeDevice,
    folder: str | PathLike[str],
    *,
    force: bool = False,
    on_launch: Callable[[ProbedLaunch], None] | None = None,
) -> list[ProbedLaunch]:
    """Run a probe on every planned launch and write the folder of the run.

    `plan` is made with keep_going, so that only what the launches need is replayed; what of it can be is verified
    first. `on_launch` is called after each. Raises ReplayMismatch if the replay differs from the capture, ReplayRefused
    and ReplayFailed if a launch cannot be made, OutputExists, CaptureFailed.
    """
    only = plan.slice({launch.ordinal for launch in planned.launches})
    result = plan.execute(verify="auto", keep_going=True, only=only)
    if result.divergence is not None:
        raise ReplayMismatch(f"{plan.reader.path}: the replay differs from the capture: {result.divergence}")
    run = _ProbeRun(planned, device, folder, force, on_launch)
    try:
        verdicts = plan.examine(run.op, only)
    finally:
        run.folder.finish()
    asked = {launch.ordinal for launch in planned.launches} - {each.ordinal for each in run.done}
    for verdict in verdicts:
        if verdict.ordinal in asked:
            raise ReplayFailed(f"ordinal {verdict.ordinal} ({verdict.op}): {verdict.verdict}: {verdict.reason}")
    if asked:
        raise ReplayFailed(f"launches of the kernel that could not be reached: ordinals {sorted(asked)[:8]}")
    return run.done


class _ProbeRun:
    """One run: what is loaded, and what came of each launch."""

    def __init__(
        self,
        planned: ProbePlan,
        device: ProbeDevice,
        folder: str | PathLike[str],
        force: bool,
        on_launch: Callable[[ProbedLaunch], None] | None,
    ) -> None:
        made, entry = planned.made, planned.kernel.entry
        self._planned, self._device, self._on_launch = planned, device, on_launch
        self._began_ns = time.monotonic_ns()
        self._shapes = {launch.ordinal: launch.shape for launch in planned.launches}
        self._original = device.load(made.before, made.original.text, entry.name)
        self._probed = device.load(made.after, made.probed.text, entry.name)
        self._counting = None
        if made.counting is not None:
            self._counting = device.load(assemble(made.counting.text), made.counting.text, entry.name)
        place = write_instrumented(made, folder, force=force)
        self.folder = RunFolder(folder, entry.name, place.name, len(entry.parameters), force)
        self.done: list[ProbedLaunch] = []

    def op(self, op: IsolatedOp) -> None:
        """Probe an op that the replay has reached, if it is one of the launches."""
        if op.ordinal in self._shapes:
            self.done.append(self._launch(op, self._shapes[op.ordinal]))
            if self._on_launch is not None:
                self._on_launch(self.done[-1])

    def _launch(self, op: IsolatedOp, shape: LaunchShape) -> ProbedLaunch:
        kernel, probe = self._planned.kernel, self._planned.made.probe
        op.restore()
        called = op.called()
        parameters, tensors = kernel.parameters(called), kernel.tensors(called)
        expected = _bytes_of(tensors)

        def run(loaded: Any, *more: Value) -> float:
            op.restore()
            return self._device.timed_ms(lambda: self._device.launch(loaded, shape, [*parameters, *more]))

        originals = [run(self._original) for _ in range(_ORIGINAL_RUNS)]
        outcome, why = self._compared(run, tensors, expected, "without the probe")
        began = time.perf_counter()
        rows = shape.blocks * shape.rows(WARP_SIZE if probe.level == "warp" else 1)
        in_row = 1
        if outcome == "bitwise" and self._counting is not None:
            counts = self._memory(rows * _COUNT.itemsize)
            run(self._counting, np.uint64(counts.data_ptr()))
            in_row = max(1, int(counts.cpu().numpy().view(_COUNT).max()))
            outcome, why = self._compared(run, tensors, expected, "with the probe that counts")
        needed = rows * in_row * probe.record_bytes
        _check_bytes(kernel.name, op.ordinal, probe, needed, self._planned.most_bytes)
        records = self._memory(needed)
        more: list[Value] = [np.uint64(records.data_ptr()), *([np.uint32(in_row)] if probe.each_site else [])]
        prologue_ms = (time.perf_counter() - began) * 1e3
        kernel_ms = run(self._probed, *more) if outcome == "bitwise" else float("nan")
        if outcome == "bitwise":
            outcome, why = self._compared(run, tensors, expected, "with the probe")
        began = time.perf_counter()
        content = records.cpu().numpy().view(probe.layout.dtype).reshape(shape.blocks, -1, in_row)
        times = BenchmarkTimes(prologue_ms, kernel_ms, (time.perf_counter() - began) * 1e3, median(originals))
        recording = None
        if outcome == "bitwise":
            at_ns = time.monotonic_ns() - self._began_ns
            recording = self.folder.launch(at_ns, shape, content, times, tensors)
        return ProbedLaunch(op.ordinal, shape, outcome, why, content.size, content.nbytes, times, recording)

    def _compared(
        self, run: Callable[..., float], tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
    ) -> tuple[Outcome, str]:
        """What the launch before this wrote, against what the captured kernel wrote."""
        different = _different(tensors, expected)
        if not different:
            return "bitwise", ""
        run(self._original)
        first = _bytes_of(tensors)
        run(self._original)
        if _different(tensors, first):
            return "not deterministic", f"two runs without the probe differ: {different}"
        return "differs", f"{what}: {different}"

    def _memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device.device)
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise ReplayFailed(
                f"{nbytes:,} bytes for the records cannot be had on {self._device.device}: {said}"
            ) from None


def _bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the storages of tensors, as bytes."""
    return {name: _raw(tensor).clone() for name, tensor in tensors.items()}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _different(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Where storages first differ from copies made before, or ""."""
    for name, tensor in tensors.items():
        unequal = (_raw(tensor) != expected[name]).nonzero()
        if len(unequal):
            return f"argument {name}: {len(unequal):,} bytes differ, the first is byte {int(unequal[0])} of its storage"
    return ""
