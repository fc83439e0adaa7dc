"""Memory that the host reads or writes without an operator.

Functions of PyTorch that write memory without an operator: the new content is imported at its next use.

Values that leave the device for the host without an operator (`tolist`, `numpy`, `__array__`, DLPack,
`__cuda_array_interface__`) are recorded. Memory on which others have a window from then on is checked at each use, and
so is host memory whose address code outside of PyTorch asks for (`data_ptr`). `item()`, `bool()` and the like are
operators and need no hook. Other reads that bypass the dispatcher are not seen: `repr` and printing, pickling and
`torch.save`, a storage's own `tolist` and indexing. Programs do not branch on values read in these ways.
The original runs first, and what it returned or raised is passed on; but what DLPack's C interface raises under the
Python recorder is an error without an exception.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _has_torch_function_unary

from replayfmt.native.hook import loaded_hook
from replayfmt.pytorch.tensors.memory import layout_of, storage_of, tensors_in

from ..frames import leave_no_frames
from ..patches import HookHost, Patch, Patched, PatchSet, StandIn, around

_ELEMENTWISE = ("apply_", "map_", "map2_")
_STORAGE = ("_byteswap", "_set_from_file", "_swap_data_ptr_")
_ALLOCATION = ("resize_", "_resize_with_addr_")
_NCCL = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


class DirectWrites(Patched):
    """The patches of one capture that see direct writes."""

    def __init__(self, recorder: HookHost) -> None:
        writes = functools.partial(_Write, recorder)
        self._patches = PatchSet(
            [Patch("torch", f"Tensor.{name}", functools.partial(writes, 1)) for name in _ELEMENTWISE]
            + [Patch("torch.storage", f"UntypedStorage.{name}", functools.partial(writes, 2)) for name in _STORAGE]
            + [
                Patch("torch.storage", f"UntypedStorage.{name}", around(functools.partial(_resize, recorder)))
                for name in _ALLOCATION
            ]
            + [Patch("torch.cuda.nccl", name, functools.partial(writes, None)) for name in _NCCL]
        )


class _Write(StandIn):
    """Replaces one function that writes to tensors or storages among its first `count` arguments (None: all of
    them)."""

    def __init__(self, recorder: HookHost, count: int | None, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._recorder = recorder
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observed = self._recorder.recording()
        try:
            return self._original(*args, **kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise
        finally:  # it may have written a part before it raised
            if observed:
                written = (*args[: self._count], *(kwargs.values() if self._count is None else ()))
                self._recorder.attempt(self._tell, written)

    def _tell(self, values: tuple[Any, ...]) -> None:
        for tensor in tensors_in(values):
            self._recorder.mark_outside_write(tensor)
        for value in values:
            if isinstance(value, torch.UntypedStorage):
                self._recorder.tell(lambda core, storage: core.outside.storage_written(storage), value)


def _resize(
    recorder: HookHost, original: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **kwargs: Any
) -> Any:
    resized = original(storage, *args, **kwargs)
    if recorder.recording():
        recorder.tell(lambda core: core.outside.storage_resized(storage))
    return resized


# Tensor.__dlpack__ ends in torch._C, and torch.to_dlpack is the same function under its older name.
_METHODS = ("tolist", "numpy", "__array__", "__dlpack__")
_FUNCTIONS = (("torch", "to_dlpack"), ("torch.utils.dlpack", "to_dlpack"))
# A property, by which libraries with kernels of their own (Numba, CuPy) take the memory of a tensor on a GPU.
_INTERFACE = "__cuda_array_interface__"
_ADDRESSED = ("Tensor", "UntypedStorage", "TypedStorage")
# Packages that do not write through addresses unseen: the latter only compare them.
_USES_ADDRESSES_ITSELF = frozenset({"torch", "triton", "replayfmt", "transformers", "safetensors", "accelerate"})
# How a storage is moved to shared memory, by `share_memory_` and by multiprocessing.
_SHARES = ("UntypedStorage._share_fd_cpu_", "UntypedStorage._share_filename_cpu_")


class HostReads(Patched):
    """The patches of one capture that see host reads."""

    def __init__(self, recorder: HookHost) -> None:
        wraps = functools.partial(_Read, recorder)
        self._patches = PatchSet(
            [Patch("torch", f"Tensor.{name}", functools.partial(wraps, name)) for name in _METHODS]
            + [Patch(module, name, functools.partial(wraps, name)) for module, name in _FUNCTIONS]
            + [Patch("torch.storage", name, around(functools.partial(_sharing, recorder))) for name in _SHARES]
            + [Patch("torch", f"Tensor.{_INTERFACE}", lambda original: property(wraps(_INTERFACE, original.fget)))]
            + [Patch("torch", f"{owner}.data_ptr", functools.partial(_Address, recorder)) for owner in _ADDRESSED]
        )
        self._recorder = recorder
        self._c_interface = _CInterface(self._taken)

    def _taken(self, tensor: Any) -> None:
        if self._recorder.recording():
            self._recorder.attempt(_share, self._recorder, tensor, True)

    def install(self) -> None:
        super().install()
        self._c_interface.install()

    def remove(self) -> None:
        self._c_interface.remove()
        super().remove()


class _ExchangeApi(ctypes.Structure):
    """DLPack's C interface, version 1: `manage` and `describe` take the memory of a tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "manage", "give", "describe", "stream")),
    )


_TAKE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _CInterface:
    """Calls `taken` with each tensor that is taken by PyTorch's C interface of DLPack.

    Libraries look the interface up once and keep its address, also before a capture: so its functions are replaced in
    place.
    """

    _on_taken: Callable[[Any], None] | None = None  # of the class: who is called now

    def __init__(self, taken: Callable[[Any], None]) -> None:
        self._taken = taken
        self._api: _ExchangeApi | None = None
        self._originals = (None, None)

    def install(self) -> None:
        capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        api = None if capsule is None else _ExchangeApi.from_address(_capsule_pointer(capsule, b"dlpack_exchange_api"))
        if api is None or api.major != 1 or self._api is not None:
            return
        self._api, self._originals = api, (api.manage, api.describe)
        hook = loaded_hook()
        if hook is not None:
            telling = _ExchangeApi.from_address(hook.telling_exchange_api(ctypes.addressof(api), self._taken))
            api.manage, api.describe = telling.manage, telling.describe
        else:
            _CInterface._on_taken = self._taken
            api.manage, api.describe = (ctypes.cast(self._telling(each), ctypes.c_void_p) for each in self._originals)

    def remove(self) -> None:
        """Idempotent."""
        if self._api is None:
            return
        (self._api.manage, self._api.describe), self._api = self._originals, None
        _CInterface._on_taken = None
        hook = loaded_hook()
        if hook is not None:
            hook.forget_taken()

    @staticmethod
    @functools.cache  # kept: a library may still hold it when the capture has ended
    def _telling(original: int) -> Any:
        call = _TAKE(original)

        def take(tensor: Any, taken: int) -> int:
            try:
                said = int(call(tensor, taken))
            except BaseException:  # a callback cannot raise
                return -1
            if said == 0 and _CInterface._on_taken is not None:
                _CInterface._on_taken(tensor)
            return said

        return _TAKE(take)


_reading = threading.local()  # .tensor: what the program reads now in this thread, which goes through other reads of it


class _Read(StandIn):
    """Replaces one function that reads."""

    def __init__(self, recorder: HookHost, method: str, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._recorder = recorder
        self._method = method

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            outer = getattr(_reading, "tensor", None)
            # A __torch_function__ override or mode comes first, and may call back here.
            if outer is tensor or _has_torch_function_unary(tensor):
                return self._original(tensor, *args, **kwargs)
            _reading.tensor = tensor
            try:
                values = self._original(tensor, *args, **kwargs)
            finally:
                _reading.tensor = outer
            self._recorder.host_read(self._method, tensor)
            return values
        except BaseException as error:
            leave_no_frames(error)
            raise


class _Address(StandIn):
    """Replaces `data_ptr` of tensors and storages."""

    def __init__(self, recorder: HookHost, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._recorder = recorder

    def __call__(self, owner: Any) -> Any:
        try:
            address = self._original(owner)
            asking = sys._getframe(1).f_globals.get("__name__") or ""
            if asking.partition(".")[0] not in _USES_ADDRESSES_ITSELF and self._recorder.recording():
                self._recorder.attempt(_share, self._recorder, owner, False)
            return address
        except BaseException as error:
            leave_no_frames(error)
            raise


def _share(recorder: HookHost, owner: Any, windowed: bool) -> None:
    """Others may write to a tensor, or a storage, on the host from now on."""
    if isinstance(owner, torch.TypedStorage):
        owner = owner._untyped_storage
    if isinstance(owner, torch.UntypedStorage):
        if owner.device.type == "cpu":
            recorder.watch(owner, windowed=windowed)
    elif _has_values(owner) and owner.device.type == "cpu" and layout_of(owner) is torch.strided:
        recorder.watch(storage_of(owner), windowed=windowed)


def _sharing(
    recorder: HookHost, original: Callable[..., Any], storage: torch.UntypedStorage, *args: Any, **kwargs: Any
) -> Any:
    shared = original(storage, *args, **kwargs)
    if recorder.recording():
        recorder.attempt(recorder.watch, storage)
    return shared


def _has_values(tensor: Any) -> bool:
    """Whether this tensor itself holds the bytes that are read: it is neither a wrapper nor a compiler's tracing
    tensor."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
