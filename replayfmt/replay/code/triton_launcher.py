"""Launches a decorated Triton kernel as `JITFunction.run` does, with less Python for what it has launched before.

Triton's binder still says what a launch is specialized on (types, constants, divisibility, whatever its backend asks of
a tensor). What is left out is the text that Triton makes of all options at each launch to find the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

_WRITTEN_AFTER = "3.9."  # what `run` does is Triton's own affair, and differs between its versions


def launcher_of(function: Any) -> Callable[..., Any]:
    """A function that does what `function.run(…, warmup=False)` does, and returns what that returns. For versions of
    Triton that it was not written after, it is no more than that."""
    import triton

    whole = partial(function.run, warmup=False)
    if not triton.__version__.startswith(_WRITTEN_AFTER):
        return whole
    from triton import knobs
    from triton.runtime import driver, jit

    kind = type(function)
    own = kind.run
    # Whoever has put a function of their own in its place (a recorder, a profiler) is to see every launch.
    if getattr(own, "__globals__", None) is not vars(jit):
        return whole
    runtime, compilation = knobs.runtime, knobs.compilation
    # By device and specialization: Triton's caches then, what else decided which kernel it was, and the kernel.
    launched: dict[Any, tuple[Any, Any, Any]] = {}

    def launch(*args: Any, grid: Any, **options: Any) -> Any:
        if (
            kind.run is not own
            or function.pre_run_hooks
            or function.used_global_vals  # which have to be what they were
            or runtime.add_stages_inspection_hook is not None
        ):
            return function.run(*args, grid=grid, warmup=False, **options)
        active = driver.active
        device = active.get_current_device()
        caches = function.device_caches[device]
        bound, specialization, given = caches[4](*args, **options)
        settings = (
            given,
            function.debug,
            runtime.debug,
            compilation.instrumentation_mode,
            compilation.fpsan_homomorphic_casts,
        )
        key = (device, *specialization)
        known = launched.get(key)
        if known is None or known[0] is not caches or known[1] != settings:
            kernel = whole(*args, grid=grid, **options)
            if kernel is not None:
                launched[key] = caches, settings, kernel
            return kernel
        kernel = known[2]
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        values = bound.values()
        kernel.run(
            x,
            y,
            z,
            stream,
            kernel.function,
            kernel.packed_metadata,
            kernel.launch_metadata(grid, stream, *values),
            runtime.launch_enter_hook,
            runtime.launch_exit_hook,
            *values,
        )
        return kernel

    return launch


def with_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same launches, during which Triton gets from PyTorch the memory that some kernels need beside their arguments
    (for tensor descriptors that they make), unless the caller has said where it comes from."""
    from triton.runtime import _allocation

    chosen = getattr(_allocation, "_allocator", None)
    if not isinstance(chosen, ContextVar):
        return run

    def launch(*args: Any, **kwargs: Any) -> Any:
        if type(chosen.get()) is not _allocation.NullAllocator:
            return run(*args, **kwargs)
        before = chosen.set(_allocate)
        try:
            return run(*args, **kwargs)
        finally:
            chosen.reset(before)

    return launch


def _allocate(length: int, _alignment: int, _stream: Any) -> torch.Tensor:
    """Memory on the current device, which PyTorch aligns to more than Triton asks for."""
    return torch.empty(length, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
