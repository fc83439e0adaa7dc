"""Probes run in a replay, on the launches of a captured kernel.

For each launch, from the same memory each time, run: the captured kernel as the replay runs it, which says what is
expected; its PTX without the probe, timed; for probes that save each time, the one that counts; its PTX with the probe.
What the last writes must be what the first wrote. `LaunchableKernel` lays out a captured Triton kernel's launches as
its PTX takes them: a pointer for each tensor, a number for each scalar, nothing for what is a constant of the code,
then the scratch memory that Triton adds. `CudaDevice` loads and launches machine code by cuda-core, on PyTorch's
current stream and memory. `RunFolder` writes the recordings and `event.log` in the published artifact's format, and the
captured tensors' places in memory as `tensor.trace`: what `replayfmt.probes` evaluates.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from replayfmt.errors import LibraryMissing, ReplayFailed, ReplayMismatch, ReplayRefused, UsageError, first_line
from replayfmt.format.attachments import METADATA, contents_of, parse_metadata
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Kernel
from replayfmt.format.output import check_place, new_file
from replayfmt.format.reader import CaptureReader
from replayfmt.probes.costs import predicted_bytes
from replayfmt.probes.definitions import ProbeDefinition
from replayfmt.probes.instrumenting import NO_PTX, InstrumentedKernel, ProbeableKernel, instrumented, write_instrumented
from replayfmt.probes.ptx import AssembledPtx, PtxEntry, PtxError, PtxModule, assemble, parse_ptx
from replayfmt.probes.recordings import (
    MOST_THREADS,
    WARP_SIZE,
    BenchmarkTimes,
    LaunchShape,
    Level,
    Structured,
    write_recording,
)
from replayfmt.probes.tables import Cell, ResultTable, Unmeasured
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.triton.compiled import attached_stages, compiled_metadata
from replayfmt.pytorch.triton.kernels import StoredKernel
from replayfmt.replay.plan import Plan
from replayfmt.replay.resolution.code_kernels import TritonKernel
from replayfmt.replay.run.steps import IsolatedCall, IsolatedOp

EVENTS, TENSORS, RESULTS = "event.log", "tensor.trace", "result"


class RunFolder:
    """What one run writes beside the kernel's own folder: a recording for each launch, when it was made; the logs when
    it ends."""

    def __init__(
        self, path: str | os.PathLike[str], kernel: str, kernel_folder: str, parameters: int, force: bool
    ) -> None:
        """`kernel_folder`: its name under `kernel/`. Raises OutputExists, also where there are recordings already."""
        self.path = Path(path)
        self._force = force
        for name in (EVENTS, TENSORS):
            check_place(self.path / name, force)
        for recording in sorted((self.path / RESULTS).glob("*.bin")):  # of another run: must not look like ours
            check_place(recording, force)
            recording.unlink()
        handle = "0x1"
        self._handle = handle
        self._events = [
            f"[pid] {os.getpid()}",
            f"[probe] rename {kernel} {kernel_folder}",
            f"[probe] finish {handle} name {kernel} n_param {parameters}",
        ]
        self._tensors: list[str] = []
        self._latest = -1

    def launch(
        self,
        at_ns: int,
        shape: LaunchShape,
        records: Structured,
        times: BenchmarkTimes,
        tensors: Mapping[str, torch.Tensor],
    ) -> Path:
        """Write the recording of a launch; `at_ns`: since the run began. Returns its path. Raises CaptureFailed."""
        # The name is the time, and tells launches apart.
        self._latest = microseconds = max(at_ns // 1000, self._latest + 1)
        path = self.path / RESULTS / f"{microseconds // 10**6}.{microseconds % 10**6:06}.bin"
        path.parent.mkdir(exist_ok=True)
        write_recording(path, shape, [records], force=self._force)
        sizes = " ".join(map(str, (*shape.grid, "block", *shape.block)))
        ratio = times.kernel_ms / times.original_ms if times.original_ms else float("nan")
        self._events += [
            f"[exec] funcmap-find {self._handle} success",
            f"[exec] grid {sizes} shared {shape.shared_bytes}",
            f"[exec] probe-mem {records.nbytes} (bytes)",
            f"[benchmark] prologue {times.prologue_ms:f} kernel {times.kernel_ms:f} epilogue {times.epilogue_ms:f} "
            f"original {times.original_ms:f} impact {ratio:f} 0",
        ]
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            shown = f"torch.Size({list(tensor.shape)})"
            self._tensors.append(
                f"[call]  {at_ns}  {shown}  {storage.nbytes()}  {storage.data_ptr()}  {name}  replay  launch"
            )
        return path

    def finish(self) -> None:
        """Write the logs, if there is a recording. Raises CaptureFailed."""
        if self._latest < 0:
            return
        for name, lines in ((EVENTS, self._events), (TENSORS, self._tensors)):
            with new_file(self.path / name, self._force) as file:
                file.write("".join(f"{line}\n" for line in lines).encode())


Value = np.generic
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}
_NUMBERS: dict[str, type[np.generic]] = {
    "i1": np.int8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u1": np.uint8, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "f32": np.float32, "fp64": np.float64,
}  # fmt: skip
# The parameters that Triton adds after the kernel's own, each the address of memory of so many bytes.
_SCRATCH = ("global_scratch_size", "profile_scratch_size")
_REQUIRED_BLOCK = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch before it is made: its op in the capture, and its shape."""

    ordinal: int
    shape: LaunchShape


class LaunchableKernel:
    """A Triton kernel of a capture, with its PTX: that in the capture, or that of what a replay launched here."""

    def __init__(self, reader: CaptureReader, kernel: Kernel, launched: Any = None) -> None:
        """`launched`: Triton's object of what a replay launched of it. Raises PtxError without PTX, ReplayRefused for a
        kernel that cannot be launched from here, with the reason, and InvalidCapture for damage."""
        self.name = kernel.qualified_name
        self._kernel = kernel
        contents = contents_of(reader, kernel)
        if launched is not None:
            made, metadata = (dict(attached_stages(launched)), compiled_metadata(launched, lambda _function: None))
        else:
            made, metadata = contents, parse_metadata(contents.get(METADATA, b"{}"), f"{reader.path}: {self.name}")
        if kernel.kind is not KernelKind.triton or "ptx" not in made:
            raise PtxError(f"{reader.path}: {self.name}: {NO_PTX}")
        try:
            self._stored = StoredKernel.read(contents)
            self.module: PtxModule = parse_ptx(made["ptx"].decode())
        except (ValueError, PtxError) as error:
            raise PtxError(f"{reader.path}: {self.name}: {error}") from None
        compiled = self._object(metadata, "compiled")
        self._names = [argument.name for argument in parse_schema(kernel.schema).arguments]
        self.entry: PtxEntry = self.module.entry(compiled.get("name"))
        self._signature = self._object(self._object(metadata, "specialization"), "signature")
        self._warps = self._number(compiled, "num_warps", at_least=1)
        self._shared_bytes = self._number(compiled, "shared")
        if self._number(compiled, "num_ctas", default=1) != 1:
            raise self._refused("its blocks are launched in clusters")
        if any(self._number(compiled, name, default=0) for name in _SCRATCH):
            raise self._refused("it needs scratch memory beside its arguments")
        for flag in ("launch_cooperative_grid", "launch_pdl"):
            if compiled.get(flag):
                raise self._refused(f"it is launched in a way of its own ({flag})")
        self._block = (self._warps * 32, 1, 1)
        head = self.module.text[: self.entry.body_begin]
        found = _REQUIRED_BLOCK.search(head, self.entry.parameters_end)
        if found is not None:
            wanted = tuple(int(size or 1) for size in found.groups())
            if wanted != self._block:
                raise self._refused(f"its PTX is for blocks of {wanted} threads, its metadata say {self._block}")
        if self._block[0] > MOST_THREADS:
            raise self._refused(f"its metadata say blocks of {self._block[0]:,} threads")

    def launches(self, reader: CaptureReader, at_most: int | None) -> list[PlannedLaunch]:
        """The launches of the kernel in the capture, the first `at_most` of them. Raises ReplayRefused if there is
        none, or one with a grid that no device takes."""
        found: list[PlannedLaunch] = []
        for record in reader.records():
            if record.kind is RecordKind.op and reader.kernels[record.signature.kernel] is self._kernel:
                found.append(PlannedLaunch(record.ordinal, self.shape(record.argument(self._stored.grid))))
                if len(found) == at_most:
                    break
        if not found:
            raise self._refused(f"{reader.path} has no launch of it")
        return found

    def shape(self, grid: Any) -> LaunchShape:
        """The shape of a launch with a grid of one to three sizes. Raises ReplayRefused."""
        sizes = tuple(grid) if isinstance(grid, list | tuple) else ()
        if not 1 <= len(sizes) <= 3 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
            raise self._refused(f"expected a grid of one to three sizes from 1 on, got {str(grid)[:60]}")
        x, y, z = (*sizes, 1, 1)[:3]
        return LaunchShape((x, y, z), self._block, self._shared_bytes)

    def parameters(self, call: IsolatedCall) -> list[Value]:
        """The parameters of one launch, each as wide as the PTX has it. Raises ReplayRefused for arguments that the
        kernel was not compiled for."""
        values = self._values(call)
        packed: list[Value] = []
        for parameter, kind in self._signature.items():
            kinds = list(_leaves(kind))
            if all(each == "constexpr" for each in kinds):
                continue
            given = list(self._given(self._stored.parameters.get(parameter), values))
            if len(given) != len(kinds):
                raise self._refused(f"its parameter {parameter} was compiled for {len(kinds)} values, not {len(given)}")
            packed += [
                self._packed(parameter, each, value)
                for each, value in zip(kinds, given, strict=True)
                if each != "constexpr"
            ]
        added = len(self.entry.parameters) - len(packed)
        if not 0 <= added <= len(_SCRATCH):
            raise self._refused(
                f"its PTX takes {len(self.entry.parameters)} parameters, its metadata say {len(packed)}"
            )
        packed += [np.uint64(0)] * added  # it needs no bytes of them
        for parameter_of_ptx, value in zip(self.entry.parameters, packed, strict=True):
            width = _WIDTHS.get(re.sub(r"\D", "", parameter_of_ptx.kind.split()[0]), 0)
            if width != value.nbytes:
                raise self._refused(
                    f"its PTX takes {parameter_of_ptx.kind} as {parameter_of_ptx.name}, "
                    f"its metadata say {value.nbytes} bytes"
                )
        return packed

    def tensors(self, call: IsolatedCall) -> dict[str, torch.Tensor]:
        """The tensors among the arguments of a launch, by the name of the argument."""
        return {name: value for name, value in self._values(call).items() if isinstance(value, torch.Tensor)}

    def _values(self, call: IsolatedCall) -> dict[str, Any]:
        return {**dict(zip(self._names, call.arguments, strict=False)), **call.named}

    def _given(self, form: Any, values: Mapping[str, Any]) -> Iterator[Any]:
        """The values of a parameter, from its form (`replayfmt.pytorch.triton.kernels`)."""
        match form:
            case str(name):
                yield values[name]
            case {"reinterpret": str(name)}:
                yield values[name]
            case {"tuple": list(parts)} | {"list": list(parts)}:
                for part in parts:
                    yield from self._given(part, values)
            case {"constexpr": _} | {"dtype": _} | {"function": _}:
                yield None
            case _:
                raise self._refused("it takes tensor descriptors, which are not addresses")

    def _packed(self, parameter: str, kind: str, value: Any) -> Value:
        if kind.startswith("*"):
            if not isinstance(value, torch.Tensor):
                raise self._refused(f"it takes an address as {parameter}, not {type(value).__name__}")
            return np.uint64(value.data_ptr())
        if kind == "bf16":
            return np.uint16(torch.tensor(value, dtype=torch.bfloat16).view(torch.uint16).item())
        number = _NUMBERS.get(kind)
        takes = (int, float) if kind in ("fp16", "fp32", "f32", "fp64") else int
        if number is None or not isinstance(value, takes):
            raise self._refused(f"its parameter {parameter} is of the type {kind}, and is given {type(value).__name__}")
        try:
            with np.errstate(over="ignore"):
                return number(value)
        except OverflowError:
            raise self._refused(f"its parameter {parameter} is of the type {kind}, and is given {value}") from None

    def _refused(self, why: str) -> ReplayRefused:
        return ReplayRefused(f"{self.name} cannot be probed: {why}")

    def _object(self, table: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = table.get(name)
        if not isinstance(value, dict):
            raise self._refused(f"its metadata have no {name}")
        return value

    def _number(self, table: Mapping[str, Any], name: str, *, at_least: int = 0, default: int | None = None) -> int:
        value = table.get(name, default)
        if type(value) is not int or not at_least <= value < 1 << 31:
            raise self._refused(f"its metadata have no {name}, or one that cannot be ({str(value)[:20]})")
        return value


def _leaves(kind: Any) -> Iterator[str]:
    if isinstance(kind, list | tuple):
        for each in kind:
            yield from _leaves(each)
    else:
        yield str(kind)


_T = TypeVar("_T")
_DEFAULT_SHARED_BYTES = 48 << 10  # what a kernel may use without having asked for more


class ProbeDevice(Protocol):
    """What runs a kernel and its probe."""

    @property
    def device(self) -> torch.device:
        """Where the memory of the records is."""

    def load(self, code: AssembledPtx, text: str, entry: str) -> Any:
        """The entry function of machine code (and of the PTX that it is made of), for `launch`."""

    def launch(self, kernel: Any, shape: LaunchShape, parameters: Sequence[np.generic]) -> None:
        """Launch it. Need not wait for its end. Raises ReplayFailed."""

    def timed_ms(self, work: Callable[[], None]) -> float:
        """Do some work of this device and wait for its end; how long it took, in milliseconds. Raises ReplayFailed."""


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        """Raises LibraryMissing without cuda-core, ReplayFailed if the device cannot be used."""
        try:
            from cuda.bindings import driver
            from cuda.core import Device
        except ImportError as error:
            raise LibraryMissing(f"running a probe needs cuda-core ({error}); pip install 'opreplay[probe]'") from None
        self.device = device
        self._driver = driver
        torch.cuda.init()
        self._device = Device(device.index or 0)
        self._device.set_current()

    def load(self, code: AssembledPtx, text: str, entry: str) -> Any:
        from cuda.core import ObjectCode

        return self._tried(f"loading {entry}", lambda: ObjectCode.from_cubin(code.cubin).get_kernel(entry))

    def launch(self, kernel: Any, shape: LaunchShape, parameters: Sequence[np.generic]) -> None:
        from cuda.core import LaunchConfig, launch

        if shape.shared_bytes > _DEFAULT_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = self._device.device_id
            (code,) = self._driver.cuKernelSetAttribute(attribute, shape.shared_bytes, kernel.handle, handle)
            if code:
                raise ReplayFailed(
                    f"{self.device} gives a block no {shape.shared_bytes:,} bytes of memory: {code.name}"
                )
        config = LaunchConfig(grid=shape.grid, block=shape.block, shmem_size=shape.shared_bytes)
        stream = _Stream(torch.cuda.current_stream(self.device).cuda_stream)
        self._tried("the launch", lambda: launch(stream, config, kernel, *parameters))

    def timed_ms(self, work: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timed() -> float:
            begin.record(torch.cuda.current_stream(self.device))
            work()
            end.record(torch.cuda.current_stream(self.device))
            end.synchronize()
            return float(begin.elapsed_time(end))

        return self._tried("waiting for a kernel", timed)

    def _tried(self, what: str, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except ReplayFailed:
            raise
        except Exception as error:
            raise ReplayFailed(f"{self.device}: {what} failed: {type(error).__name__}: {first_line(error)}") from error


class _Stream:
    """A stream of PyTorch's, as cuda-core takes those of others."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


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
        rows: list[tuple[Cell, ...]] = [
            (
                launch.ordinal,
                " ".join(map(str, launch.shape.grid)),
                " ".join(map(str, launch.shape.block)),
                self._rows(launch.shape) if not self.made.probe.each_site else Unmeasured("counted first"),
                self.bytes_of(launch.shape),
            )
            for launch in self.launches
        ]
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

    verdicts = plan.examine(launch, plan.preparation.slice({record.ordinal}))
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
    only = plan.preparation.slice({launch.ordinal for launch in planned.launches})
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
            raise ReplayFailed(
                f"{nbytes:,} bytes for the records cannot be had on {self._device.device}: {first_line(error)}"
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
