"""What sees the ops that are issued while a graph is captured: none of them runs, so none is recorded as an op."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Core
from ..dispatch.call import OpCall
from ..dispatch.kernels import CapturedKernel, devices_of
from ..dispatch.mode import RecordingMode
from ..stream.records import Unrepresentable
from .body import GraphBody
from .streams import GraphStreams
from .unrecorded import UnrecordedWork

REASON = "cuda_graph"
_BESIDE = (
    "while a graph was captured it was given to a stream that the capture does not have, which waits for no event of "
    "the capture's streams: it ran at once, and its memory could not be read meanwhile"
)


class GraphMode(RecordingMode):
    """Writes a body. Ops of the host run at once and belong to no graph: they are recorded as ever."""

    told = False
    captures_graph = True

    def __init__(self, core: Core, body: GraphBody, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self.body = body
        self._kind = device.type
        self.streams = GraphStreams(body, device, core.streams.knows if core.streams else None)
        self.unrecorded = UnrecordedWork(device.type)

    def record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        devices = devices_of(self._kind, args, kwargs)
        if not devices:
            return super().record(kernel, args, kwargs) if self.core.on else kernel.call(*args, **kwargs)
        if self.core.attempt(self.streams.takes, devices) is False:
            return super()._run_unsupported(kernel, args, kwargs, Unrepresentable(REASON, _BESIDE))
        self.core.attempt(self.look)
        call = self.core.attempt(self.body.before, kernel, args, kwargs)
        result = kernel.call(*args, **kwargs)
        if call is not None:
            self.core.attempt(self._issued, call, result, devices)
        return result

    def _issued(self, call: OpCall, result: Any, devices: set[torch.device]) -> None:
        wrote = self.body.after(call, result, self.streams.placement(devices))
        has_work = wrote and call.kernel.own and not call.kernel.in_place_view
        self.unrecorded.account(call.kernel.name if has_work else "")

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.record(kernel, args, kwargs)

    def look(self) -> None:
        """Whether anything else than ops was issued to the graph. To be called while it is captured."""
        if self.launched:
            self.body.unkept("a compiled region or a launch that the recorder does not see ran while it was captured")
        elif found := self.unrecorded.found():
            self.body.unkept(
                f"it holds work that no operator issued (nodes of the kind {found}): another library launched it, or "
                "the program did by hand"
            )

    def _begins(self) -> bool:
        return True

    def _ends(self) -> bool:
        return False

    def _beneath(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.body.unkept("another dispatch mode lay beneath the recorder while it was captured")
        return func(*args, **kwargs)

    def _run_unsupported(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
    ) -> Any:
        if devices_of(self._kind, args, kwargs):
            self.body.unkept(f"{kernel.name}: {problem.detail}")
            return kernel.call(*args, **kwargs)
        return super()._run_unsupported(kernel, args, kwargs, problem)
