"""What a replay and a capture ask of devices other than the host, by the modules that PyTorch has for them.

Streams: PyTorch calls back where a stream or an event is used, also by C++ code of its own (backward passes), once its
trace is active: `_gpu_trace` of the device's module has the callbacks. Devices whose module has none, or that give no
handles of streams, cannot be followed.

Graphs: what is issued while one is captured does not run, and runs at each replay. `frontier` gives the nodes that what
a stream is given next comes after. It says what the graph holds beneath PyTorch: work that a library launched on its
own is a node, too. CUDA tells through cuda-bindings, which PyTorch uses for the same (`torch.cuda._graph_annotations`);
of another device its module is asked, for `capture_frontier()`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replayfmt.errors import first_line

HOST = "cpu"
# What casts, of every kind of device.
AUTOCAST_KEYS = tuple(
    key
    for name, key in torch._C.DispatchKey.__members__.items()
    if name.startswith("Autocast") and name != "AutocastFunctionality"
)
NOTHING = "meta"  # devices of this kind hold no data
# Clocks of accelerators are slower: what should take a time takes at least that.
_CYCLES_PER_NS = 2.0
# What takes the place of a sleep: each rewriting of a small buffer takes about so long.
_REWRITTEN_BYTES = 1 << 20
_REWRITING_NS = 5_000


def is_accelerator(device: torch.device) -> bool:
    """Whether a device computes, and is not the host."""
    return device.type not in (HOST, NOTHING)


def device_module(kind: str) -> Any:
    """The module of a kind of device; None if this PyTorch has none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


def index_of(device: torch.device) -> int:
    """The index of a device; without one, that of the current device of its kind."""
    return int(device_module(device.type).current_device()) if device.index is None else device.index


def count(kind: str) -> int:
    """How many devices of a kind this machine has."""
    if kind == HOST:
        return 1
    return torch.accelerator.device_count() if kind == kind_here() else 0


def available() -> list[torch.device]:
    """The accelerators of this machine."""
    kind = kind_here()
    return [torch.device(kind, index) for index in range(count(kind))] if kind else []


def kind_here() -> str:
    """The kind of accelerator of this PyTorch, whether or not one is there; "" if it has none."""
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else accelerator.type


@cache
def pins_memory(kind: str) -> bool:
    """Whether the host has memory from which copies to devices of a kind need not wait."""
    try:
        return kind == kind_here() and torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False  # an out-of-tree backend need not have any


def used() -> list[torch.device]:
    """The accelerators of this machine, if this process has begun to use their kind."""
    return available() if in_use(kind_here()) else []


def synchronize() -> None:
    """Wait for all work of the accelerators in use."""
    for device in used():
        if _has_work(device):
            torch.accelerator.synchronize(device)


def _has_work(device: torch.device) -> bool:
    """Whether this process has given a device work. To wait for one that has none would give it a context."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None) if device.type == "cuda" else None
    return has_context is None or bool(has_context(device.index))


def in_use(kind: str) -> bool:
    """Whether this process has begun to use devices of a kind. Does not begin to."""
    module = device_module(kind) if kind else None
    return module is not None and bool(getattr(module, "is_initialized", lambda: True)())


def make_ready(kind: str) -> None:
    """Begin to use devices of a kind."""
    getattr(device_module(kind), "init", lambda: None)()


def spinning(device: torch.device) -> Callable[[float], None]:
    """A function that gives a device's current stream work for about so many nanoseconds, which uses little memory."""
    sleep = getattr(device_module(device.type), "_sleep", None)
    if sleep is None:
        buffer = torch.zeros(_REWRITTEN_BYTES, dtype=torch.uint8, device=device)

        def rewrite(ns: float) -> None:
            for _ in range(max(1, round(ns / _REWRITING_NS))):
                buffer.add_(1)

        return rewrite

    def spin(ns: float) -> None:
        with torch.accelerator.device_index(index_of(device)):
            sleep(int(ns * _CYCLES_PER_NS))

    return spin


def default_generator(device: torch.device) -> torch.Generator | None:
    """The device's default random generator; None if its module does not show it, or is not in use."""
    if device.type == HOST:
        return torch.default_generator
    if not in_use(device.type) or not hasattr(device_module(device.type), "default_generators"):
        return None
    found: torch.Generator = device_module(device.type).default_generators[index_of(device)]
    return found


def default_generators() -> list[torch.Generator]:
    """The default generators of the host and of the accelerators in use."""
    found = [default_generator(device) for device in (torch.device(HOST), *used())]
    return [generator for generator in found if generator is not None]


class Current:
    """Where this thread puts its work: the current accelerator, and the current stream of each that is in use."""

    def __init__(self) -> None:
        devices = used()
        self._index = torch.accelerator.current_device_index() if devices else -1
        self._streams = [torch.accelerator.current_stream(device) for device in devices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Current) and (self._index, self._streams) == (other._index, other._streams)

    def restore(self) -> None:
        """Have it so again."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        if self._streams:
            torch.accelerator.set_device_index(self._index)


def name_of(device: torch.device) -> str:
    """The marketing name of an accelerator; "" if it is not known."""
    name = getattr(device_module(device.type), "get_device_name", None)
    return str(name(device)) if name is not None else ""


def properties_of(device: torch.device) -> Any:
    """What the module of an accelerator says of it; None if it says nothing."""
    properties = getattr(device_module(device.type), "get_device_properties", None)
    return None if properties is None else properties(index_of(device))


def reset_peak_memory(device: torch.device) -> int | None:
    """Forget the peak of an accelerator's allocator. What is allocated now, in bytes; None if it is not known."""
    module = device_module(device.type)
    if not hasattr(module, "reset_peak_memory_stats") or not hasattr(module, "memory_allocated"):
        return None
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def peak_memory(device: torch.device) -> int | None:
    """The peak of an accelerator's allocator in bytes, since it was reset; None if it is not known."""
    peak = getattr(device_module(device.type), "max_memory_allocated", None)
    return None if peak is None else int(peak(device))


def free_memory(device: torch.device) -> int | None:
    """What an accelerator has left, in bytes; None if it is not known."""
    info = getattr(device_module(device.type), "mem_get_info", None)
    return None if info is None else int(info(device)[0])


_ACTIVE = "_ZN3c104impl8GPUTrace9haveStateE"  # c10::impl::GPUTrace::haveState


class Callbacks(NamedTuple):
    """What to call, by the names that `_gpu_trace` has. Handles are integers; the device is the current one."""

    EventRecord: Callable[[int, int], None]
    EventWait: Callable[[int, int], None]
    EventDeletion: Callable[[int], None]
    EventSynchronization: Callable[[int], None]
    StreamSynchronization: Callable[[int], None]
    DeviceSynchronization: Callable[[], None]


def followed_kind() -> str:
    """The kind of accelerator of this PyTorch whose streams can be followed, be one there or not; "" without."""
    kind = kind_here()
    return "" if not kind or _trace(kind) is None else kind


def tells_of_memory(kind: str) -> bool:
    """Whether PyTorch's trace also calls back for each allocation of a kind of device, which costs microseconds."""
    return kind in ("cuda", "xpu")


def current_streams(indices: list[int]) -> list[torch.Stream]:
    """The current streams of accelerators by index, of those whose current stream is not their default one."""
    current = torch._C._accelerator_getStream  # what torch.accelerator.current_stream calls, at half its cost
    streams = [current(index) for index in indices]
    return [stream for stream in streams if stream.stream_id]


def has_streams(index: int) -> bool:
    """Whether an accelerator is there: an operator that raised may have named any."""
    try:
        torch._C._accelerator_getStream(index)
    except RuntimeError:
        return False
    return True


def handle_of(stream: torch.Stream) -> int:
    """The handle by which the trace names a stream."""
    return int(stream.native_handle)  # type: ignore[attr-defined]


def _trace(kind: str) -> Any:
    module = device_module(kind)
    if kind in ("cuda", "xpu"):
        importlib.import_module(f"torch.{kind}._gpu_trace")
    return getattr(module, "_gpu_trace", None)


class GpuTrace:
    """PyTorch's trace, active between `install` and `remove`."""

    def __init__(self, kind: str, callbacks: Callbacks) -> None:
        trace = _trace(kind)
        self._lists = [getattr(trace, f"{name}Callbacks").callback_list for name in Callbacks._fields]
        self._callbacks = callbacks
        self._was_active: bool | None = None

    @property
    def active(self) -> bool:
        """Whether the callbacks are called."""
        return self._was_active is not None

    def install(self) -> None:
        """Have the callbacks called. Idempotent."""
        if self.active:
            return
        flag = _flag()
        self._was_active = flag.value
        for registered, callback in zip(self._lists, self._callbacks, strict=True):
            registered.append(callback)
        torch._C._activate_gpu_trace()
        flag.value = True  # PyTorch activates it once in a process

    def remove(self) -> None:
        """Have them called no more; without others the trace is off as before, and costs nothing. Idempotent."""
        if self._was_active is None:
            return
        for registered, callback in zip(self._lists, self._callbacks, strict=True):
            if callback in registered:
                registered.remove(callback)
        _flag().value = self._was_active
        self._was_active = None


def _flag() -> ctypes.c_bool:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ctypes.c_bool.in_dll(library, _ACTIVE)


def keeps_memory_for_streams(kind: str) -> bool:
    """Whether tensors of a kind of device can say that another stream uses their memory (`record_stream`)."""
    key = {"cuda": "CUDA", "xpu": "XPU"}.get(kind, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key))


class SetStreams:
    """Sets the current streams of some accelerators. What a replay calls where the captured program had others."""

    def __init__(self, streams: list[torch.Stream]) -> None:
        self._streams = streams

    def __call__(self) -> None:
        index = torch.accelerator.current_device_index()
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)  # setting a stream makes its device current


def default_stream(device: torch.device) -> torch.Stream:
    kind = torch.accelerator.current_stream(device.index).device_type
    return torch.Stream(stream_id=0, device_index=device.index, device_type=kind)


class NoGraphs(Exception):
    """A device has no graphs; the message says so."""


def new_graph(device: torch.device) -> Any:
    """An empty graph of a device. Raises NoGraphs."""
    if not is_accelerator(device):
        raise NoGraphs(f"{device.type} has no graphs")
    if device.type == "cuda":
        return torch.cuda.CUDAGraph()
    if device.type == "xpu":
        return torch.xpu.XPUGraph()
    try:
        return torch.accelerator.Graph(capture_error_mode="thread_local")  # since PyTorch 2.12
    except (AttributeError, RuntimeError) as error:
        raise NoGraphs(f"{device.type} has no graphs ({first_line(error)})") from None


def is_being_captured(kind: str) -> bool:
    """Whether the current stream of accelerators of a kind is being captured into a graph, as far as PyTorch's module
    for them tells. Where the program has not begun to use them, none is."""
    if not in_use(kind):
        return False
    stream = torch._C._accelerator_getStream(torch._C._accelerator_getDeviceIndex())
    if not stream.stream_id:  # no default stream can be
        return False
    tells = getattr(device_module(kind), "is_current_stream_capturing", None)
    return tells is not None and bool(tells())


def captured(device: torch.device, issue: Callable[[], None]) -> Any:
    """A graph of what `issue` gives to the current stream of a device. Raises what `issue` and the device raise, and
    leaves streams and devices as they were.

    Other threads may use the device meanwhile: only what this one does can spoil the graph.
    """
    graph = new_graph(device)
    before, index = torch.accelerator.current_stream(device), torch.accelerator.current_device_index()
    try:
        if device.type == "cuda":
            pool = torch.cuda.graph_pool_handle()
            with torch.cuda.device(device):
                try:
                    with _capturing_on_cuda(graph, pool):
                        issue()
                except BaseException:
                    torch.accelerator.set_stream(before)
                    _end_spoilt(graph, pool)
                    raise
        elif device.type == "xpu":
            with torch.xpu.device(device), torch.xpu.graph(graph):
                issue()
        else:
            torch.accelerator.set_device_index(device.index or 0)
            with torch.Stream(device), graph:
                issue()
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)
    return graph


_spoilt: list[Any] = []  # graphs to which PyTorch still has pointers


def _capturing_on_cuda(graph: Any, pool: Any) -> AbstractContextManager[None]:
    """Captures what the current device is given. On a stream of its own: torch.cuda.graph keeps one for all captures,
    on the device of the first."""
    stream = torch.cuda.Stream()
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _end_spoilt(graph: Any, pool: Any) -> None:
    """End a capture on the current device that failed. PyTorch ends none that CUDA found to be spoilt: its allocator
    goes on with the pool, and the device's generator refuses to draw until another capture has ended."""
    with suppress(RuntimeError):  # it was ended, as only what was issued had failed; or the device does nothing more
        index = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        _spoilt.append(graph)
        with _capturing_on_cuda(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
            torch.cuda._sleep(1)


@contextmanager
def undrawn(generators: Iterable[torch.Generator | None]) -> Iterator[None]:
    """These generators are afterwards in the states that they were in."""
    states = {generator: generator.get_state() for generator in generators if generator is not None}
    try:
        yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)


EMPTY = "empty"  # the kind of a node that does nothing but order others
_TOLD_BY_MODULES = "capture_frontier"


class GraphNode(NamedTuple):
    """A node: its handle, and its kind in words (`kernel`, `host`, `memcpy`, …)."""

    handle: int
    kind: str


class UnknownFrontier(Exception):
    """A device does not tell; the message says why."""


def frontier(kind: str) -> list[GraphNode]:
    """The nodes of a capture that the current streams of all devices of a kind have come to, nodes that do nothing left
    out in favour of what they come after. Raises UnknownFrontier."""
    if kind == "cuda":
        return list(_of_cuda())
    tell = getattr(device_module(kind), _TOLD_BY_MODULES, None)
    if tell is None:
        raise UnknownFrontier(f"PyTorch's module for {kind} has no {_TOLD_BY_MODULES}")
    try:
        return [GraphNode(int(handle), str(what)) for handle, what in tell()]
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnknownFrontier(f"{_TOLD_BY_MODULES} of PyTorch's module for {kind} failed: {error}") from None


def _of_cuda() -> Iterator[GraphNode]:
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError, RuntimeError) as error:
        raise UnknownFrontier(f"cuda-bindings cannot be imported: {error}") from None
    seen: set[int] = set()
    for index in range(torch.cuda.device_count()):
        stream = torch.cuda.current_stream(index).cuda_stream
        if not stream:
            continue  # a default stream cannot be captured
        told = _checked(runtime, "cudaStreamGetCaptureInfo", stream)
        if len(told) < 4:
            raise UnknownFrontier("cuda-bindings is older than version 13, whose functions are used")
        status, _number, _graph, nodes = told[:4]
        if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
            continue
        waiting = list(nodes or ())
        while waiting:
            node = waiting.pop()
            if int(node) in seen:
                continue
            seen.add(int(node))
            kind = _checked(runtime, "cudaGraphNodeGetType", node)[0].name.removeprefix("cudaGraphNodeType").lower()
            if kind != EMPTY:
                yield GraphNode(int(node), kind)
                continue
            count = _checked(runtime, "cudaGraphNodeGetDependencies", node)[-1]
            waiting += _checked(runtime, "cudaGraphNodeGetDependencies", node, count)[0] if count else ()


def _checked(runtime: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """What a function of the runtime tells, without its status."""
    try:
        status, *told = getattr(runtime, name)(*args)
    except (AttributeError, RuntimeError, TypeError) as error:  # RuntimeError: a driver without it
        raise UnknownFrontier(f"cuda-bindings has no {name} that can be used: {error}") from None
    if status != runtime.cudaError_t.cudaSuccess:
        raise UnknownFrontier(f"{name} failed: {status.name}")
    return tuple(told)
