"""A device that Triton compiles for and that is not there: what it launches is noted, and done on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


class FakeDriver:
    """Triton's driver. `does` has, by a kernel's name, what a launch of it does; `launches` what was launched."""

    def __init__(self, arch: int, does: dict[str, Callable[..., None]]) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.does = does
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self.loaded: list[bytes] = []
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
            self.launches.append((metadata.name, (x, y, z), metadata.num_warps))
            self.does[metadata.name](*rest[3:])

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install(arch: int, does: dict[str, Callable[..., None]]) -> FakeDriver:
    driver = FakeDriver(arch, does)
    triton.runtime.driver.set_active(driver)
    return driver
