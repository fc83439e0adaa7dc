"""The bodies of a capture's graphs: opened, checked as a capture is, and made into kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property

import torch

from replayfmt.errors import InvalidCapture, OpReplayError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind, StorageOrigin
from replayfmt.format.graphs import open_body, parse_body_metadata, storage_of_argument
from replayfmt.format.model import Device, Kernel
from replayfmt.format.reader import CaptureReader
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.schemas import parse_schema

from ..code.allowed import AllowedCode
from ..codegen.streams import StreamsMode
from ..op_values import tensors_of
from ..planning.allowed_imports import AllowedImports
from ..planning.devices import DeviceMap
from ..planning.effects import Effects, effects_of_missing
from ..planning.findings import Findings
from ..planning.kernels import ResolvedKernel
from ..planning.resolve import resolve
from ..planning.scan import Scan
from ..planning.window_cuts import WindowSize
from .kernel import GraphsMode, ReplayedGraph
from .steps import BodySteps
from .streams import BodyStreams


class PreparedGraphs:
    """The graphs of one capture. Owns the opened bodies until `close`."""

    def __init__(
        self,
        reader: CaptureReader,
        devices: DeviceMap,
        imports: AllowedImports,
        *,
        allow_code: bool,
        mode: GraphsMode,
        streams: StreamsMode,
        window: WindowSize,
    ) -> None:
        """Opens them. What is wrong with one is said when it is resolved."""
        self._reader, self._devices, self._imports, self._mode, self._window = reader, devices, imports, mode, window
        self._streams: StreamsMode = streams
        self._bodies: dict[Kernel, _OpenBody | str] = {}
        self._opened = ExitStack()
        self._types = frozenset(device.type for device in devices.in_use())
        self._allow_code = allow_code
        for kernel in reader.kernels:
            if kernel is not None and kernel.kind is KernelKind.graph:
                self._bodies[kernel] = self._open(kernel)

    def _open(self, kernel: Kernel) -> _OpenBody | str:
        named = f"{kernel.qualified_name} is a graph"
        if not kernel.attachments:
            return f"{named}, and its body is not in the capture"
        try:
            contents = contents_of(self._reader, kernel)
            body = self._opened.enter_context(open_body(contents))
            metadata = parse_body_metadata(contents)
        except (InvalidCapture, ValueError) as error:
            return f"{named} that cannot be replayed: {error}"
        code = AllowedCode(body, self._allow_code, self._types)
        code.prepare()
        return _OpenBody(body, code, int(metadata["streams"]), metadata["unchecked"])

    def close(self) -> None:
        """Close the bodies."""
        self._opened.close()

    @cached_property
    def calls_inside(self) -> dict[str, list[str]]:
        """The names, with and without overload, of the kernels that bodies call, each with the graphs that do."""
        found: dict[str, list[str]] = {}
        for graph, body in self._bodies.items():
            for each in body.reader.kernels if isinstance(body, _OpenBody) else ():
                for name in () if each is None else {each.name, each.qualified_name}:
                    found.setdefault(name, []).append(graph.name)
        return found

    @property
    def advice(self) -> str:
        """What to do about code in bodies that was refused for want of leave; "" if none was."""
        opened = (body for body in self._bodies.values() if isinstance(body, _OpenBody))
        return next((body.code.advice for body in opened if body.code.advice), "")

    def resolve(self, kernel: Kernel) -> ResolvedKernel | str:
        """The kernel, or a sentence that says why there is none."""
        body = self._bodies[kernel]
        if isinstance(body, str):
            return body
        try:
            return self._kernel(kernel, body)
        except (OpReplayError, RuntimeError, ValueError) as error:
            return f"{kernel.qualified_name} is a graph that cannot be replayed: {str(error).partition(chr(10))[0]}"

    def _kernel(self, kernel: Kernel, body: _OpenBody) -> ResolvedKernel:
        reader = body.reader
        devices = DeviceMap(tuple(reader.devices), tuple(map(self._target, reader.devices)))
        if missing := [
            str(each) for each, to in zip(devices.captured, devices.targets, strict=True) if each and not to
        ]:
            raise ValueError(f"nothing here stands for {', '.join(missing)}")
        kernels = tuple(
            None if each is None else resolve(each, reader.session.torch_version, self._imports, body.code)
            for each in reader.kernels
        )
        effects = _effects_of(reader, kernels)
        findings = Findings(reader, devices, kernels, Scan(reader, effects, checks=False, window=self._window))
        findings.collect()
        if findings.sentences:
            raise ValueError("; ".join(findings.sentences))
        schema = parse_schema(kernel.schema)
        if others := [each.name for each in schema.arguments if str(each.type) != "Tensor"]:
            raise ValueError(f"its schema has arguments that are not tensors ({', '.join(others)})")
        given = {storage_of_argument(argument.name): False for argument in schema.arguments}
        for argument in schema.arguments:
            given[storage_of_argument(argument.name)] |= argument.alias_info is not None
        unsure, works_on = _compared(reader, effects, given, devices)
        usable = [each for each in kernels if isinstance(each, ResolvedKernel)]
        differs = reader.session.settings != self._reader.session.settings or bool(
            self._reader.summary.records.get(RecordKind.global_state)
        )
        streams = BodyStreams(reader, devices, self._streams)
        return ReplayedGraph(
            schema,
            BodySteps(reader, kernels, devices, set(given), streams),
            works_on,
            self._mode,
            draws=any(each.draws for each in usable),
            unsure=unsure,
            settings=reader.session.settings if differs else {},
            streams=_on_streams(body.streams, streams),
            unchecked=body.unchecked,
        )

    def _target(self, device: Device | None) -> torch.device | None:
        """What stands for a device of a body."""
        if device is None:
            return None
        for known, target in zip(self._devices.captured, self._devices.targets, strict=True):
            if known is not None and (known.kind, max(known.index, 0)) == (device.kind, max(device.index, 0)):
                return target
        return torch.device(device.kind) if device.kind in ("cpu", "meta") else None


def _on_streams(captured: int, streams: BodyStreams) -> str:
    """On how many streams a body runs that was captured on a number of them; "" for one."""
    if captured < 2:
        return ""
    if streams.several:
        return f"on {captured} streams"
    return f"on one stream instead of {captured}" + (f" ({streams.problem})" if streams.problem else "")


class _OpenBody:
    """An opened body."""

    def __init__(self, reader: CaptureReader, code: AllowedCode, streams: int, unchecked: str) -> None:
        self.reader, self.code, self.streams, self.unchecked = reader, code, streams, unchecked


def _effects_of(
    reader: CaptureReader, kernels: tuple[ResolvedKernel | str | None, ...]
) -> Callable[[int, SlotLayout], Effects]:
    """What ops of a body do to their arguments, by signature."""

    def effects(_signature: int, layout: SlotLayout) -> Effects:
        resolved, captured = kernels[layout.signature.kernel], reader.kernels[layout.signature.kernel]
        assert captured is not None
        if isinstance(resolved, ResolvedKernel):
            return resolved.effects(layout)
        return effects_of_missing(layout, captured.schema)

    return effects


def _compared(
    reader: CaptureReader, effects: Callable[[int, SlotLayout], Effects], given: dict[int, bool], devices: DeviceMap
) -> tuple[frozenset[int], frozenset[torch.device]]:
    """The storages that ops may write without saying so, and the accelerators (or the host) that do the work.

    `given`: for each storage that the graph has as an argument, whether its schema says that it is written. Raises
    ValueError if the body uses or writes others from outside.
    """
    unsure: set[int] = set()
    works_on: set[torch.device] = set()
    for record in reader.records():
        if record.kind is not RecordKind.op:
            continue
        layout = reader.layouts[record.signature_id]
        tensors = list(tensors_of((*record.args, *record.results)))
        does = effects(record.signature_id, layout)
        works_on.update(devices.target(tensor.meta.device) for tensor in tensors)
        for tensor in tensors:
            outside = tensor.storage and reader.storage(tensor.storage).origin is StorageOrigin.absent
            if outside and tensor.storage not in given:
                raise ValueError(f"storage {tensor.storage} of its body is none of its arguments")
        for slot in does.writes:
            storage = tensors[slot].storage
            if not given.get(storage, True):
                raise ValueError(f"its body writes storage {storage}, and its schema does not say so")
        unsure.update(tensors[slot].storage for slot in does.unsure)
    accelerators = {device for device in works_on if is_accelerator(device)}
    return frozenset(unsure & set(given)), frozenset(accelerators or works_on)
