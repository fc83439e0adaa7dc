"""Compiled regions under a capture.

A region is a function of a Python module that Inductor generated. When one is first called, its text is read
(inductor_text.py), and in the module's globals its C++ kernels and the functions that allocate are replaced by
functions that record them; the operators that it calls are seen like any others. What was replaced is put back when the
capture ends. A region of which anything is not known is left as it is, and recorded as unsupported.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from types import FrameType, FunctionType, MethodType
from typing import Any, Protocol

import torch

from ..dispatch.kernels import CapturedKernel
from ..frames import leave_no_frames
from ..interrupts import is_interrupt
from .cudagraph_trees import GraphsSwitchedOff, without_graph
from .inductor_kernels import Allocation, Function, InductorCode, find_kernel
from .inductor_text import Unknown, read_module

# Functions around a generated one, and the variable in which each has it.
_AROUND = {
    "align_inputs_from_check_idxs.<locals>.run": "model",  # copies arguments whose memory is not aligned, by operators
    "CompiledFxGraph.post_compile.<locals>.wrapped_callable": "original_callable",  # makes it an operator for modes
}


class RecorderForCode(Protocol):
    """What is needed from a recorder to record the calls of code kernels."""

    @property
    def native(self) -> Any:
        """What records without Python, if anything does."""
        ...

    def issue(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a kernel, and record that, if this thread is being recorded. Returns its result."""
        ...


class Regions:
    """The compiled regions of one capture."""

    def __init__(self, recorder: RecorderForCode) -> None:
        self._recorder = recorder
        self._modules: dict[int, tuple[dict[str, Any], str]] = {}  # by identity: its globals, and what is unknown
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._kernels: dict[tuple[str, str], InductorCode] = {}
        self._graphs = GraphsSwitchedOff()
        # By a region's identity: the region, and what it called when it was last opened.
        self._opened: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def opened(self, region: Any) -> bool:
        """Whether all that a region calls is recorded, as `open` found before."""
        found = self._opened.get(id(region))
        return found is not None and found[1] is region.current_callable and found[0]() is region

    def open(self, region: Any) -> str:
        """Have the calls of a region recorded. Returns why they cannot be, or ""."""
        try:
            function = _function(region)
        except Unknown as problem:
            return str(problem)
        namespace = function.__globals__
        known = self._modules.get(id(namespace))
        if known is None:
            unknown, replaced = "", len(self._replaced)
            try:
                self._replace(region, namespace, function)
            except BaseException as error:
                interrupt = next((each for each in (error, error.__cause__) if is_interrupt(each)), None)
                if interrupt is not None:
                    self._put_back(replaced)  # the next call finds the module as this one did
                    raise interrupt  # noqa: B904 - it is the program's
                # Of another PyTorch, say: then it is recorded as if nothing were known of it.
                unknown = (
                    str(error)
                    if isinstance(error, Unknown)
                    else f"its text could not be read: {type(error).__name__}: {error}"
                )
            known = self._modules[id(namespace)] = namespace, unknown
        if not known[1]:
            self._graphs.switch_off(region)
            number = id(region)
            forget = weakref.ref(region, lambda _: self._opened.pop(number, None))
            self._opened[number] = forget, region.current_callable
        return known[1]

    def close(self) -> None:
        """Put everything back. What others have replaced since then is left alone."""
        self._graphs.put_back()
        self._put_back(0)
        self._modules.clear()
        self._opened.clear()

    def _put_back(self, kept: int) -> None:
        """What was replaced after the first `kept` replacements."""
        while len(self._replaced) > kept:
            namespace, name, original, replacement = self._replaced.pop()
            if namespace.get(name) is replacement:
                namespace[name] = original

    def _replace(self, region: Any, namespace: dict[str, Any], function: FunctionType) -> None:
        text = read_module(region.source_code, namespace, function.__code__)
        new: dict[str, Function] = {}
        for declared in text.kernels:
            kernel = find_kernel(declared, namespace.get(declared.name))
            known = self._kernels.setdefault((kernel.name, kernel.overload), kernel)
            new[declared.name] = self._recording(kernel.call, known)
        for name in text.allocators:
            new[name] = self._allocating(namespace[name])
        for name, replacement in new.items():
            self._replaced.append((namespace, name, namespace[name], replacement))
            namespace[name] = replacement

    def _recording(self, original: Function, kernel: InductorCode) -> Function:
        @functools.wraps(original)
        def call(*args: Any) -> Any:
            try:
                return self._recorder.issue(kernel, args, {})
            except BaseException as error:
                leave_no_frames(error)
                raise

        native = self._recorder.native
        if native is None:
            return call
        kernel.use_native(native)
        caller: Function = kernel.native.caller(kernel, original, call)
        return caller

    def _allocating(self, original: Function) -> Function:
        kernel = Allocation(original)
        kind = _DEVICES.get(original.__name__, "cpu")
        pinned = original.__name__.endswith("_pinned")

        @functools.wraps(original)
        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            device = (
                torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
            )
            given = {"dtype": dtype, "device": device, "pin_memory": pinned}
            try:
                result: torch.Tensor = self._recorder.issue(kernel, (list(size), list(stride)), given)
            except BaseException as error:
                leave_no_frames(error)
                raise
            return result

        native = self._recorder.native
        return (None if native is None else native.allocator(kernel, original, allocate, kind, pinned)) or allocate


_DEVICES = {"_empty_strided_cuda": "cuda", "_empty_strided_xpu": "xpu"}


def running_regions() -> list[Any]:
    """The regions that some thread is in the middle of."""
    graph = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
    code = None if graph is None else inspect.unwrap(graph.__call__).__code__
    found = []
    for innermost in sys._current_frames().values() if code is not None else ():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is code:
                found.append(frame.f_locals["self"])
            frame = frame.f_back
    return found


def _function(region: Any) -> FunctionType:
    """The function that a region runs. Raises Unknown."""
    called = without_graph(getattr(region, "current_callable", None))
    while getattr(called, "__qualname__", "") in _AROUND:
        called = called.__closure__[called.__code__.co_freevars.index(_AROUND[called.__qualname__])].cell_contents
    runner: Any = getattr(region, "compiled_fn_runner", None)
    if runner is not None and called != runner.call:
        raise Unknown(f"it is called through {getattr(called, '__qualname__', type(called).__name__)}, not by itself")
    for part in getattr(runner, "partitions", None) or ():
        if not isinstance(without_graph(part), FunctionType | MethodType):
            raise Unknown(f"a part of it is {type(part).__name__}, which is not known")
        if without_graph(part).__globals__ is not runner.call.__globals__:
            raise Unknown(f"a part of it is called through {part.__qualname__}, not by itself")
    function = called.__func__ if isinstance(called, MethodType) else called
    if not isinstance(function, FunctionType):
        raise Unknown(f"it is {type(function).__name__}, which runs beneath Python")
    return function
