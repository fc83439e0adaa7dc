"""Builds and registers the simulated accelerator: devices `sim:0` and `sim:1` (simulated.cpp says what they do).

A process that has it keeps it, and PyTorch then knows an accelerator: import this in processes of their own only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._utils import CallbackRegistry

from replayfmt.benchmark import measure
from replayfmt.native.building import compile_library, own_cache
from replayfmt.pytorch import accelerators

_NAME = "simulated_accelerator"


def _built() -> Any:
    """The extension module: from this user's cache, where it was built from the same source for the same PyTorch."""
    source = Path(__file__).with_name("simulated.cpp")
    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + source.read_bytes()).hexdigest()
    path = own_cache("tests") / f"{_NAME}_{key[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            compile_library(source, made, "-O0", with_python=True)
            made.replace(path)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trace() -> ModuleType:
    """What PyTorch tells of streams and events, as `torch.cuda._gpu_trace` has it."""
    trace: Any = ModuleType("torch.sim._gpu_trace")
    for what in (
        "EventCreation",
        "EventDeletion",
        "EventRecord",
        "EventWait",
        "MemoryAllocation",
        "MemoryDeallocation",
        "StreamCreation",
        "DeviceSynchronization",
        "StreamSynchronization",
        "EventSynchronization",
    ):
        setattr(trace, f"{what}Callbacks", CallbackRegistry(f"sim {what}"))
    return trace  # type: ignore[no-any-return]


@functools.cache
def register() -> Any:
    """The module `torch.sim`, built once for a process. Raises NotAvailable where it cannot be built."""
    simulated = _built()
    torch.utils.rename_privateuse1_backend("sim")
    simulated.register_graphs()
    module: Any = ModuleType("torch.sim")
    for name, value in vars(simulated).items():
        if not name.startswith("_"):
            setattr(module, name, value)

    module._gpu_trace = _trace()

    def stream(of: torch.Stream) -> AbstractContextManager[Any]:
        return of

    module.memory_allocated = lambda device: simulated.memory_allocated(torch.device(device).index)
    module.max_memory_allocated = lambda device: simulated.max_memory_allocated(torch.device(device).index)
    module.reset_peak_memory_stats = lambda device: simulated.reset_peak_memory_stats(torch.device(device).index)
    module.get_device_properties = lambda device: SimpleNamespace(L2_cache_size=1 << 12)
    module.is_available = lambda: True
    module.is_initialized = lambda: simulated.uses() > 0
    module.init = module._lazy_init = lambda: None  # without `_lazy_init` 2.11 never waits for the device
    module._is_in_bad_fork = lambda: False
    module.is_bf16_supported = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = torch.accelerator.synchronize
    module.stream = stream
    module.default_generators = tuple(map(simulated.default_generator, range(simulated.device_count())))
    module.get_rng_state = lambda device="sim:0": module.default_generators[torch.device(device).index or 0].get_state()
    module.set_rng_state = lambda state, device="sim:0": module.default_generators[
        torch.device(device).index or 0
    ].set_state(state)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in module.default_generators]
    torch._register_device_module("sim", module)
    # What keeps a device busy and what flushes caches are rewritten by fallbacks, which take long even for little.
    accelerators._REWRITTEN_BYTES, accelerators._REWRITING_NS = 1 << 12, 200_000
    measure.largest_cache = lambda root: 1 << 12
    torch.utils.generate_methods_for_privateuse1_backend()
    return module


@pytest.fixture(autouse=True, params=["python", "native"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the recorders in turn."""
    monkeypatch.setenv("OPREPLAY_RECORDER", request.param)
    return str(request.param)


# Of a test that takes long and is about what comes after the recording.
native_alone = pytest.mark.parametrize("recorder", ["native"], indirect=True)


@pytest.fixture(autouse=True)
def devices_as_they_were() -> Iterator[None]:
    sim = register()
    sim.set_device(0)
    sim.forget_launches()
    sim.forget_races()
    yield
    torch.accelerator.synchronize()
