"""A device that Triton compiles for and that is not there: what it launches is noted, and done on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import _allocation

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.replay.planning.kernels import ResolvedKernel
from replayfmt.replay.resolution import kernel_lookup
from replayfmt.replay.resolution.code_kernels import TritonKernel, resolve_triton


class FakeDriver:
    """Triton's driver. `does` has, by a kernel's name, what a launch of it does; `launches` what was launched."""

    def __init__(self, arch: int, does: dict[str, Callable[..., None]]) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.does = does
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self.loaded: list[bytes] = []
        self.given: list[int] = []  # bytes, to launches that need memory of their own
        self.launcher_cls = self._launcher
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        self.loaded.append(binary)
        return object(), object(), 32, 0, 1024

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
            said, enter, leave, *arguments = rest
            if enter is not None:
                enter(said)
            if metadata.global_scratch_size:  # as Triton's own launcher asks for memory
                length = x * y * z * metadata.num_ctas * metadata.global_scratch_size
                memory = _allocation._allocator.get()(length, metadata.global_scratch_align, stream)
                self.given.append(memory.nbytes)
            self.launches.append((metadata.name, (x, y, z), metadata.num_warps))
            self.does[metadata.name](*arguments)
            if leave is not None:
                leave(said)

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install(arch: int, does: dict[str, Callable[..., None]]) -> FakeDriver:
    driver = FakeDriver(arch, does)
    torch.accelerator.current_accelerator = lambda check_available=False: None  # its memory is the host's
    triton.runtime.driver.set_active(driver)
    return driver


def replay_as_on_a_device() -> None:
    """From now on, replays in this process launch Triton kernels on the CPU's memory as they do on a device's."""

    def resolve(
        kernel: Kernel, contents: Callable[[], Mapping[str, bytes]], _types: frozenset[str]
    ) -> ResolvedKernel | str:
        return resolve_triton(kernel, contents, frozenset({"cuda"}))

    kernel_lookup.RESOLVERS[KernelKind.triton] = resolve
    kernel_lookup.prepare_triton = lambda _types: None
    TritonKernel.runs_on = lambda _self, _type: True  # type: ignore[method-assign]
