"""The kernels of a device's graphs: a call of one is a replay of the graph.

A capture's graphs are opened and checked as a capture is: before anything runs, with every finding. A graph's kernel
captures its body into a graph of this device, or issues it op by op each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Literal

import torch

from replayfmt.errors import InvalidCapture, OpReplayError, first_line
from replayfmt.format.attachments import contents_of, open_body, parse_body_metadata, storage_of_argument
from replayfmt.format.codes import KernelKind, RecordKind, StorageOrigin
from replayfmt.format.model import Device, Kernel, tensors_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.pytorch.accelerators import NoGraphs, captured, default_generator, is_accelerator, new_graph, undrawn
from replayfmt.pytorch.environment import apply_settings, preserved_settings
from replayfmt.pytorch.overloads import parse_schema

from ..codegen.streams import StreamsMode
from ..planning.devices import DeviceMap
from ..planning.findings import Findings
from ..planning.kernels import Effects, ResolvedKernel, StoredCodeKernel, effects_of, effects_of_schema
from ..planning.scan import Scan, WindowSize
from .graph_bodies import BodySteps, BodyStreams, Storages
from .kernel_lookup import AllowedCode, AllowedImports, resolve

GraphsMode = Literal["captured", "issued"]
GRAPHS_MODES = ("captured", "issued")
_MOST_CAPTURES = 8  # of one graph: memory that moves from call to call is not worth a capture each time


class ReplayedGraph(StoredCodeKernel):
    """A graph that is ready to be replayed. Captured once for each set of addresses, because a graph has its memory's
    addresses in it; issued op by op where that is asked for, or cannot be done."""

    def __init__(
        self,
        schema: torch.FunctionSchema,
        steps: BodySteps,
        devices: frozenset[torch.device],
        mode: GraphsMode,
        *,
        draws: bool,
        unsure: frozenset[int],
        settings: Mapping[str, Any],
        streams: str,
        unchecked: str,
    ) -> None:
        """`devices` do its work. `unsure`: storages that ops of its body may write without saying so. `settings` are
        the numeric ones that it was captured under. `streams` says on how many it runs, if it was captured on several.
        `unchecked`: why nobody looked for work that is not in its body."""
        self.draws = draws
        self._schema = schema
        self._steps = steps
        self._unsure = unsure
        self._settings = settings
        self._streams = streams
        self._unchecked = unchecked
        self._names = [argument.name for argument in schema.arguments]
        self._written = {argument.name for argument in schema.arguments if argument.alias_info is not None}
        self._unsure_names = {
            name for name in self._names if storage_of_argument(name) in unsure and name not in self._written
        }
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._kept_for_graphs: list[torch.UntypedStorage] = []  # memory of the host that they use
        self._warm = False
        self._device = next(iter(devices)) if len(devices) == 1 else None
        self._why_issued = "--graphs=issued" if mode == "issued" else self._why_not()

    def loaded(self) -> ReplayedGraph | str:
        problem = self._steps.load()
        return f"{self._schema.name} is a graph that cannot be replayed: {problem}" if problem else self

    def _why_not(self) -> str:
        """Why it cannot be captured here; "" if it can."""
        if self._device is None:
            return "its work is on several devices"
        try:
            new_graph(self._device)
        except NoGraphs as problem:
            return str(problem)
        return ""

    @property
    def is_issued(self) -> bool:
        """Whether its ops are issued one by one at each replay."""
        return bool(self._why_issued)

    @property
    def how(self) -> str:  # type: ignore[override]
        """How it is replayed, and what is different from the program's graph."""
        streams = f", {self._streams}" if self._streams else ""
        beside = f"; not checked for work that no operator issued: {self._unchecked}" if self._unchecked else ""
        if self._why_issued:
            return f"issued op by op ({self._why_issued}){streams}{beside}"
        return f"captured into a graph of {self._device}{streams}{beside}"

    @property
    def schema(self) -> torch.FunctionSchema:
        return self._schema

    @property
    def call(self) -> Callable[..., Any]:
        return self._replay

    def effects(self, layout: SlotLayout) -> Effects:
        found = effects_of_schema(layout, self._schema, False, complete=True)
        unsure = tuple(slot for each in layout.args if each.node.name in self._unsure_names for slot in each.tensors)
        return Effects(found.writes, found.rebinds, found.reshapes, unsure)

    def runs_on(self, device_type: str) -> bool:
        return True  # its ops were asked

    def _replay(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        storages = {storage_of_argument(name): tensor.untyped_storage() for name, tensor in given.items()}
        if not self._why_issued:
            graph = self._graph(given, storages)
            if graph is not None:
                graph.replay()
                return
        self._issue(storages)

    def _issue(self, storages: Storages) -> list[torch.UntypedStorage]:
        with ExitStack() as stack:
            if self._settings:
                apply_settings(self._settings, stack.enter_context(preserved_settings()))
            return self._steps.issue(storages)

    def _graph(self, given: Mapping[str, torch.Tensor], storages: Storages) -> Any:
        """The graph for memory at these addresses; None if there is none and will be none."""
        key = tuple(storage.data_ptr() for storage in storages.values())
        known = self._graphs.get(key)
        if known is not None or len(self._graphs) >= _MOST_CAPTURES:
            return known
        device = self._device
        assert device is not None
        used: list[torch.UntypedStorage] = []  # by the device, maybe later: kept as long as the graph
        try:
            if not self._warm:  # libraries make themselves ready at their first call, which no capture permits
                with undrawn([default_generator(device)]):
                    used += self._issue(self._copies(given, storages))
                self._warm = True
            known = self._graphs[key] = captured(device, lambda: used.extend(self._issue(storages)))
            self._kept_for_graphs += used
        except RuntimeError as error:
            self._why_issued = f"{device.type} could not capture it: {first_line(error)}"
        return known

    def _copies(self, given: Mapping[str, torch.Tensor], storages: Storages) -> Storages:
        """The same memory, with copies of what is written."""
        written = {storage_of_argument(name) for name in given if name in self._written} | self._unsure
        return {number: storage.clone() if number in written else storage for number, storage in storages.items()}


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
        self._allow_code = allow_code
        self._streams: StreamsMode = streams
        self._bodies: dict[Kernel, _OpenBody | str] = {}
        self._opened = ExitStack()
        self._types = frozenset(device.type for device in devices.in_use())
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
            return f"{kernel.qualified_name} is a graph that cannot be replayed: {first_line(error)}"

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

        def effects(_signature: int, layout: SlotLayout) -> Effects:
            number = layout.signature.kernel
            return effects_of(kernels[number], layout, reader.kernels[number])

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
    def __init__(self, reader: CaptureReader, code: AllowedCode, streams: int, unchecked: str) -> None:
        self.reader, self.code, self.streams, self.unchecked = reader, code, streams, unchecked


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
