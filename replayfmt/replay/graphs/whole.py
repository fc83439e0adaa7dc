"""A whole replay in one graph of its device: all of its ops are launched at once, so that the device does not wait for
the host between them.

The content that ops need enters before the graph is captured, and stays at its addresses. Before a graph is used, what
it computes is compared, bit for bit, with what the same ops compute one by one on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from replayfmt.errors import ReplayFailed, ReplayRefused
from replayfmt.format.model import GeneratorValue, PayloadValue, Record
from replayfmt.pytorch.device_graphs import captured
from replayfmt.pytorch.tensors.staging import hash_storage

from ..codegen.lowering import Lowering, Shapes
from ..codegen.operations import SeedGenerator, SetGenerator
from ..codegen.windows import Window
from ..results import Verification
from ..run.execute import Machine, RunClock, Timer
from ..run.watching import lower_watched
from .admission import Admission, NotInAGraph, device_with_graphs

if TYPE_CHECKING:
    from ..plan import Plan


class WholeGraph:
    """A plan's replay in one graph. Owns the memory that it works on, besides what the plan keeps between runs.

    `compared` says what was compared with a replay op by op.
    """

    def __init__(self, plan: Plan) -> None:
        """Captures it. Raises NotInAGraph, and ReplayRefused for a plan that only keeps going."""
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
        windows = list(Lowering(context, plan.scan(checks=False), compare=False).windows(lower_watched(self._left)))
        try:
            with self._surroundings():
                self._enter(windows)
                self._alike(windows)
        except (ReplayFailed, RuntimeError, MemoryError) as error:
            why = _reason(error).removeprefix(f"{plan.reader.path}: ")
            raise NotInAGraph(f"{self._device.type} could not capture it: {why}") from error

    def _setting(self, record: Record) -> Callable[[], None] | None:
        """What sets a generator as a record says; None if nothing draws from it here."""
        number, payload = record.argument("generator"), record.argument("payload")
        assert isinstance(number, GeneratorValue)
        generator = self._plan.generators[number.id]
        if generator is None:
            return None
        if not isinstance(payload, PayloadValue):
            return SeedGenerator(generator, record.ordinal)
        return SetGenerator(generator, bytes(self._plan.reader.payload(payload.id)))

    def _enter(self, windows: list[Window]) -> None:
        """Put in place what the windows need from outside."""
        self._content.begin(verified=False)
        staged = [each for window in windows for each in window.staged]
        self._memory = {each.storage: self._content.stage(each) for each in staged}
        scan = self._plan.scan(checks=False)
        self._written = [each for each in staged if scan.is_written(each.storage)]

    def _alike(self, windows: list[Window]) -> None:
        """Capture the graph. Raises NotInAGraph if it does not compute what the ops do one by one."""
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
            raise NotInAGraph(
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
        """Run all ops, one by one."""
        plan = self._plan
        plan.judge.reset(Verification("none", "none"), bitwise=False, stop_at_first=False)
        Machine(
            plan.reader,
            self._content,
            RunClock(),
            plan.judge,
            plan.describe,
            stage=lambda staged: self._memory[staged.storage],
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
        """The state that a replay begins with."""
        for staged in self._written:
            self._content.restore(staged, self._memory[staged.storage])
        for set_generator in self._set_generators:
            set_generator()

    def replay(self, timer: Timer) -> None:
        """Launch the graph once, from fresh state. `timer` runs from before the launch until the device is done."""
        clock = RunClock()
        with self._surroundings():
            self._plan.files.check()
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
    return str(found or error).strip().partition("\n")[0]
