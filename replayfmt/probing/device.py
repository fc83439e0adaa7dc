"""Machine code loaded and launched on a device. For CUDA by cuda-core, on PyTorch's current stream and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from replayfmt.errors import LibraryMissing, ReplayFailed
from replayfmt.probes.ptx.assembling import AssembledPtx
from replayfmt.probes.recordings.results import LaunchShape

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
    """A CUDA device of PyTorch's."""

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
            said = str(error).strip().partition("\n")[0]
            raise ReplayFailed(f"{self.device}: {what} failed: {type(error).__name__}: {said}") from error


class _Stream:
    """A stream of PyTorch's, as cuda-core takes those of others."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
