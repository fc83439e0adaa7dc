"""What sees the ops that are issued while a graph is captured: none of them runs, so none is recorded as an op."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Core
from ..dispatch.call import OpCall
from ..dispatch.kernels import CapturedKernel, tensors_in
from ..dispatch.mode import RecordingMode
from ..stream.records import Unrepresentable
from .body import GraphBody
from .unrecorded import UnrecordedWork


class GraphMode(RecordingMode):
    """Writes a body. Ops of the host run at once and belong to no graph: they are recorded as ever."""

    told = False

    def __init__(self, core: Core, body: GraphBody, kind: str) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self.body = body
        self._kind = kind
        self.unrecorded = UnrecordedWork(kind)

    def record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_on_device(args, kwargs):
            return super().record(kernel, args, kwargs) if self.core.on else kernel.call(*args, **kwargs)
        self.core.attempt(self.look)
        call = self.core.attempt(self.body.before, kernel, args, kwargs)
        result = kernel.call(*args, **kwargs)
        if call is not None:
            self.core.attempt(self._issued, call, result)
        return result

    def _issued(self, call: OpCall, result: Any) -> None:
        self.body.after(call, result)
        self.unrecorded.account()

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.record(kernel, args, kwargs)

    def _is_on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self._kind:
            return True
        return any(tensor.device.type == self._kind for tensor in tensors_in((*args, *kwargs.values())))

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
        if self._is_on_device(args, kwargs):
            self.body.unkept(f"{kernel.name}: {problem.detail}")
            return kernel.call(*args, **kwargs)
        return super()._run_unsupported(kernel, args, kwargs, problem)
