"""What keeps a replay from being one graph of a device, found in its records before anything is captured.

Work of the host would be done while the graph is captured and be missing from each launch, without an error; so would
waiting, and content that enters on the way. What a device cannot capture besides, it refuses itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record, StorageValue
from replayfmt.format.records.record_frames import RecordFrame
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.device_graphs import NoGraphs, new_graph

from ..planning.kernels import ResolvedKernel
from ..planning.scan import enters
from .kernel import ReplayedGraph

if TYPE_CHECKING:
    from ..plan import Plan

_OF_RECORD = {
    RecordKind.storage_resize: "changes how long a storage is",
    RecordKind.synchronize: "lets the host wait for the device",
    RecordKind.stream_synchronize: "lets the host wait for a stream",
    RecordKind.event_synchronize: "lets the host wait for an event",
    RecordKind.unsupported: "is work that no replay does",
}


class NotInAGraph(Exception):
    """A replay that cannot be put into a graph; the message says why, and where."""


def device_with_graphs(devices: list[torch.device]) -> torch.device:
    """The accelerator among a plan's devices. Raises NotInAGraph if it has no graphs, or is not the only one."""
    found = [device for device in devices if is_accelerator(device)]
    if len(found) != 1:
        works_on = ", ".join(map(str, found or devices)) or "no device"
        raise NotInAGraph(f"a graph is of one accelerator, and the replay works on {works_on}")
    try:
        new_graph(found[0])
    except NoGraphs as problem:
        raise NotInAGraph(str(problem)) from problem
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
        """Raises NotInAGraph for the first record that cannot be in a graph."""
        plan = self._plan
        if plan.context.stand_in is not None:
            raise NotInAGraph("kernels are substituted, and what a replacement does on the host is not known")
        if plan.context.streams is not None and plan.context.streams.captured:
            raise NotInAGraph("its work is on several streams; --streams=serial gives it to one")
        reader = plan.reader
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            for row, signature in enumerate(frame.signature.tolist()):
                reason = self._why_not(frame, row, signature)
                if reason:
                    ordinal = frame.first_ordinal + row
                    raise NotInAGraph(f"ordinal {ordinal} ({plan.describe(ordinal)[0]}) {reason}")

    def _why_not(self, frame: RecordFrame, row: int, signature: int) -> str:
        """Why a record cannot be in a graph; "" if it can."""
        described = self._plan.reader.signatures[signature]
        assert described is not None
        kind = described.kind
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
        slots = frame.tensor_slots[frame.tensor_first[row] : frame.tensor_first[row + 1]]
        there = self._there[frame.tensor_meta[slots]]
        if not len(there) or not there.any() or not there[layout.arg_tensors :].all():
            return "works on the host"
        written = plan.writes(signature)
        if not there[list(written)].all():
            return "writes memory of the host"
        ordinal = frame.first_ordinal + row
        last = plan.scan(checks=False).storage_last_uses(frame.tensor_storage[slots].astype(np.int64)) == ordinal
        if found := [slot for slot in (*written, *range(layout.arg_tensors, len(slots))) if last[slot]]:
            self.last_written[ordinal] = found
        return ""
