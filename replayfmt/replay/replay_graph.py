"""A whole replay as one graph of its device, to measure it without the gaps in which the device waits for the host.

`Admission` finds in the records, before anything is captured, what keeps a replay from being one graph. `WholeGraph`
captures all windows of a plan into a graph and launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replayfmt.errors import ReplayFailed, ReplayRefused, first_line
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import GeneratorValue, PayloadValue, Record, StorageValue
from replayfmt.format.record_frames import RecordFrame
from replayfmt.pytorch.accelerators import NoGraphs, captured, is_accelerator, new_graph
from replayfmt.pytorch.tensors.memory import hash_storage

from .codegen.lowering import Lowering, Shapes
from .codegen.op_lowering import lower_watched
from .codegen.windows import Window
from .operations import state_setter
from .planning.kernels import ResolvedKernel
from .planning.records import describe
from .planning.scan import enters
from .resolution.graph_kernels import ReplayedGraph
from .results import Verification
from .run.execute import Machine, RunClock, Timer

if TYPE_CHECKING:
    from .plan import Plan


_OF_RECORD = {
    RecordKind.storage_resize: "changes how long a storage is",
    RecordKind.synchronize: "lets the host wait for the device",
    RecordKind.stream_synchronize: "lets the host wait for a stream",
    RecordKind.event_synchronize: "lets the host wait for an event",
    RecordKind.unsupported: "is work that no replay does",
}


class NotGraphCapturable(Exception):
    """A replay that cannot be put into a graph; the message says why, and where."""


def device_with_graphs(devices: list[torch.device]) -> torch.device:
    """The accelerator among a plan's devices. Raises NotGraphCapturable if it has no graphs, or is not the only one."""
    found = [device for device in devices if is_accelerator(device)]
    if len(found) != 1:
        works_on = ", ".join(map(str, found or devices)) or "no device"
        raise NotGraphCapturable(f"a graph is of one accelerator, and the replay works on {works_on}")
    try:
        new_graph(found[0])
    except NoGraphs as problem:
        raise NotGraphCapturable(str(problem)) from problem
    return found[0]


class Admission:
    """Goes through the records of a plan. `generator_states` are the states that are set before anything is drawn;
    `last_written` has, by ordinal, the tensor slots of memory that the op there writes and that nothing uses later."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        reader = plan.reader
        accelerated = [
            meta is not None and is_accelerator(plan.device_map.target(meta.device)) for meta in reader.metas
        ]
        self._there = np.array(accelerated, dtype=bool)
        self._of_signature: dict[int, str] = {}
        self._drawn = False
        self.generator_states: list[Record] = []
        self.last_written: dict[int, list[int]] = {}

    def check(self) -> None:
        """Raises NotGraphCapturable for the first record that cannot be in a graph."""
        plan = self._plan
        if plan.context.stand_in is not None:
            raise NotGraphCapturable("kernels are substituted, and what a replacement does on the host is not known")
        if plan.context.streams is not None and plan.context.streams.captured:
            raise NotGraphCapturable("its work is on several streams; --streams=serial gives it to one")
        reader = plan.reader
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            for row, signature in enumerate(frame.signature.tolist()):
                reason = self._why_not(frame, row, signature)
                if reason:
                    ordinal = frame.first_ordinal + row
                    raise NotGraphCapturable(f"ordinal {ordinal} ({describe(plan.reader, ordinal)[0]}) {reason}")

    def _why_not(self, frame: RecordFrame, row: int, signature: int) -> str:
        """Why a record cannot be in a graph; "" if it can."""
        kind = self._plan.reader.signatures[signature].kind
        if kind is RecordKind.op:
            if signature not in self._of_signature:
                self._of_signature[signature] = self._kernel_forbids(signature)
            return self._of_signature[signature] or self._op_forbids(frame, row, signature)
        if kind is RecordKind.generator_state:
            if self._drawn:
                return "sets a generator after ops have drawn from one"
            self.generator_states.append(self._plan.reader.record(frame.first_ordinal + row))
        if kind is RecordKind.storage_import:
            record = self._plan.reader.record(frame.first_ordinal + row)
            storage, version = record.argument("storage"), record.argument("version")
            assert isinstance(storage, StorageValue) and isinstance(version, int)
            if not enters(version, self._plan.reader.storage(storage.id)):
                return "gives a storage new content from outside"
        return _OF_RECORD.get(kind, "")

    def _kernel_forbids(self, signature: int) -> str:
        layout = self._plan.reader.layouts[signature]
        kernel = self._plan.kernels[layout.signature.kernel]
        if not isinstance(kernel, ResolvedKernel):
            return "has no kernel here"
        if not kernel.own:
            return "is no operator of PyTorch's own, and what it does on the host is not known"
        if isinstance(kernel, ReplayedGraph) and not kernel.is_issued:
            return "is a graph itself; --graphs=issued issues its ops"
        if kernel.content_decides_sizes:
            return "lets the host wait for the sizes of its results"
        if layout.results and not any(each.tensors for each in layout.results):
            return "reads from the device on the host"
        if kernel.draws and self._plan.context.draws_on is not None:
            return "draws its random numbers on the host"
        return ""

    def _op_forbids(self, frame: RecordFrame, row: int, signature: int) -> str:
        plan = self._plan
        layout = plan.reader.layouts[signature]
        kernel = plan.kernels[layout.signature.kernel]
        self._drawn |= isinstance(kernel, ResolvedKernel) and kernel.draws
        slots = frame.slots_of(row)
        there = self._there[frame.tensor_meta[slots]]
        if not len(there) or not there.any() or not there[layout.arg_tensors :].all():
            return "works on the host"
        written = plan.preparation.writes(signature)
        if not there[list(written)].all():
            return "writes memory of the host"
        ordinal = frame.first_ordinal + row
        last = (
            plan.preparation.scan(checks=False).storage_last_uses(frame.tensor_storage[slots].astype(np.int64))
            == ordinal
        )
        if found := [slot for slot in (*written, *range(layout.arg_tensors, len(slots))) if last[slot]]:
            self.last_written[ordinal] = found
        return ""


class WholeGraph:
    """A plan's replay in one graph. Owns the memory that it works on, besides what the plan keeps between runs.

    `compared` says what was compared with a replay op by op.
    """

    def __init__(self, plan: Plan) -> None:
        """Captures it. Raises NotGraphCapturable, and ReplayRefused for a plan that only keeps going."""
        if plan.findings:
            raise ReplayRefused(f"{plan.reader.path}: this plan only keeps going", plan.findings)
        self._device = device_with_graphs(plan.devices)
        admission = Admission(plan)
        admission.check()
        self._plan, self._content, self._surroundings = plan, plan._content, plan._surroundings
        self._set_generators = [found for each in admission.generator_states if (found := self._setting(each))]
        # Generators are set before a launch: no graph may do that.
        context = replace(plan.context, shapes=Shapes.unchecked, generators=(None,) * len(plan.generators))
        self._left = _Left(admission.last_written)
        windows = list(
            Lowering(context, plan.preparation.scan(checks=False), compare=False).windows(lower_watched(self._left))
        )
        try:
            with self._surroundings():
                self._enter(windows)
                self._alike(windows)
        except (ReplayFailed, RuntimeError, MemoryError) as error:
            why = _reason(error).removeprefix(f"{plan.reader.path}: ")
            raise NotGraphCapturable(f"{self._device.type} could not capture it: {why}") from error

    def _setting(self, record: Record) -> Callable[[], Any] | None:
        """What sets a generator as a record says; None if nothing draws from it here."""
        number, payload = record.argument("generator"), record.argument("payload")
        assert isinstance(number, GeneratorValue)
        generator = self._plan.generators[number.id]
        if generator is None:
            return None
        if not isinstance(payload, PayloadValue):
            return partial(generator.manual_seed, record.ordinal)
        return state_setter(generator, bytes(self._plan.reader.payload(payload.id)))

    def _enter(self, windows: list[Window]) -> None:
        """Put in place what the windows need from outside."""
        self._content.begin(verified=False)
        staged = [each for window in windows for each in window.staged]
        self._memory = {each.storage: self._content.stage(each) for each in staged}
        scan = self._plan.preparation.scan(checks=False)
        self._written = [each for each in staged if scan.is_written(each.storage)]

    def _alike(self, windows: list[Window]) -> None:
        """Capture the graph. Raises NotGraphCapturable if it does not compute what the ops do one by one."""
        issue = partial(self._issue, windows)
        first = self._outcome(issue)  # also what libraries set up at a first use, which is no part of a graph
        second = self._outcome(issue)
        self._prepare()
        torch.accelerator.synchronize(self._device)
        self._graph = captured(self._device, issue)
        third = self._outcome(self._graph.replay)
        steady = [key for key, digest in first.items() if second[key] == digest]
        wrong = [key for key in steady if third[key] != first[key]]
        if wrong:
            raise NotGraphCapturable(
                f"a launch of its graph gave other bytes than its ops one by one, in {len(wrong)} of {len(steady)} "
                "results that are left at the end"
            )
        unsteady = len(first) - len(steady)
        self.compared = (
            f"{len(steady)} results that are left at the end, bit for bit, with those of its ops one by one"
            + (f"; {unsteady} more differ from run to run" if unsteady else "")
            if steady
            else "nothing: no result is left at the end" + (" that is the same in each run" if unsteady else "")
        )

    def _issue(self, windows: list[Window]) -> None:
        plan = self._plan
        plan.judge.reset(Verification("none", "none"), bitwise=False, stop_at_first=False)
        Machine(
            plan.reader, self._content, RunClock(), plan.judge, stage=lambda staged: self._memory[staged.storage]
        ).issue(windows)

    def _outcome(self, run: Callable[[], None]) -> dict[Any, int]:
        """Digests of the memory that a run wrote and that nothing uses later."""
        self._prepare()
        run()
        torch.accelerator.synchronize(self._device)
        found: dict[Any, int] = {each.storage: hash_storage(self._memory[each.storage]) for each in self._written}
        entered = {storage._cdata for storage in self._memory.values()}
        for place, tensor in self._left.tensors.items():
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in entered:
                found[place] = hash_storage(tensor.contiguous().untyped_storage())
        return found

    def _prepare(self) -> None:
        for staged in self._written:
            self._content.restore(staged, self._memory[staged.storage])
        for set_generator in self._set_generators:
            set_generator()

    def replay(self, timer: Timer) -> None:
        """Launch the graph once, from fresh state. `timer` runs from before the launch until the device is done."""
        clock = RunClock()
        with self._surroundings():
            self._plan.preparation.files.check()
            self._prepare()
            clock.reset([self._device], timer)
            clock.resume()
            try:
                self._graph.replay()
            finally:
                clock.stop()


class _Left:
    """A watcher that keeps what is left when all ops have run, by the ordinal and slot of what wrote it last."""

    def __init__(self, slots: dict[int, list[int]]) -> None:
        self._slots = slots
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}

    def watches(self, ordinal: int) -> bool:
        return ordinal in self._slots

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        pass

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        there = {**args, **results}
        self.tensors |= {(ordinal, slot): there[slot] for slot in self._slots[ordinal] if slot in there}


def _reason(error: BaseException) -> str:
    """The first line of what failed: ending a capture that has failed fails, too."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ReplayFailed):
        found = found.__context__
    return first_line(found or error)
