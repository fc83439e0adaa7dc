"""The calls in generated code that are no kernels: views, composites, state changes, content imports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from replayfmt.format.codes import TensorFlag
from replayfmt.format.model import spanned
from replayfmt.pytorch.environment import autocast_as_captured
from replayfmt.pytorch.tensors.composites import put_together, take_apart
from replayfmt.pytorch.tensors.memory import (
    check_nested,
    fill_storage,
    fix_length,
    host_view,
    make_view,
    require_inside,
)

from .planning.kernels import Addresses
from .results import UnexpectedBehaviour


class Pausable(Protocol):
    """The clock of a running replay; stopped during anything that is not captured work."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class View:
    """Makes a tensor on a storage, passed as such or as any tensor on it. Sizes, strides and offset are in elements."""

    __slots__ = ("dtype", "end_bytes", "flags", "offset", "sizes", "strides")

    def __init__(
        self, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, flags: TensorFlag
    ) -> None:
        self.dtype, self.sizes, self.strides, self.offset, self.flags = dtype, sizes, strides, offset, flags
        length = spanned(sizes, strides)
        self.end_bytes = (offset + length) * dtype.itemsize if length else 0  # that the storage needs

    def __call__(self, base: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
        storage = storage_of(base)
        if self.end_bytes > storage.nbytes():
            # PyTorch would extend the storage instead of raising.
            raise RuntimeError(f"a tensor needs {self.end_bytes} bytes of a storage that has {storage.nbytes()}")
        return make_view(storage, self.dtype, self.sizes, self.strides, self.offset, self.flags)

    def is_on(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return (
            tensor.untyped_storage()._cdata == storage._cdata
            and (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (self.dtype, self.sizes, self.strides)
            and tensor.storage_offset() == self.offset
            and tensor.is_conj() == bool(self.flags & TensorFlag.conj)
            and tensor.is_neg() == bool(self.flags & TensorFlag.neg)
        )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that a strided tensor represents, without its flags."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), TensorFlag(0))


def unattached(dtype: torch.dtype, base: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """A tensor without elements for an operator that attaches it to other memory; `base` names its device."""
    return torch.empty((0,), dtype=dtype, device=base.device)


def storage_of(tensor: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    """The storage of a tensor; a storage is returned as it is."""
    return tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()


class PackComposite:
    """Makes a composite tensor from its components. One that a call uses twice is one object: with compressed columns,
    PyTorch can add a tensor to itself only."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._newest: Callable[[], torch.Tensor | None] = lambda: None
        self._components: tuple[int, ...] = ()  # of it: the ids of the tensors

    def __call__(self, parts: tuple[Any, ...]) -> Any:
        components = tuple(id(part) for part in parts if isinstance(part, torch.Tensor))
        newest = self._newest() if components == self._components else None
        if newest is not None and all(map(_is_same, parts, take_apart(newest)[1])):
            return newest
        made = put_together(self._form, list(parts))
        if isinstance(made, torch.Tensor):
            self._newest, self._components = weakref.ref(made), components
        return made


def _is_same(value: Any, other: Any) -> bool:
    """Whether two components are the same memory, seen alike, or equal."""
    if not isinstance(value, torch.Tensor):
        return bool(value == other)
    return View.of(value).is_on(other, value.untyped_storage())


def unpack_composite(form: str, count: int, tensor: Any) -> tuple[Any, ...]:
    """The components of a composite result; raises if its form is not the captured one."""
    if not isinstance(tensor, torch.Tensor | torch.ScriptObject):
        raise UnexpectedBehaviour(f"a result is {type(tensor).__name__}, captured was a {form} tensor")
    found, parts = take_apart(tensor)
    if found != form or len(parts) != count:
        raise UnexpectedBehaviour(f"a result is a {found} tensor of {len(parts)} parts, captured was {form} of {count}")
    return tuple(parts)


def checked_view(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that makes views without checking that they lie inside their memory, and check it."""
    return require_inside(call(*args, **kwargs))


def checked_nested(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that makes a nested tensor of a buffer, sizes, strides and offsets without checking that its
    parts lie inside the buffer; check it before the call, which reads the sizes already."""
    check_nested(*args)
    return call(*args, **kwargs)


def requiring_gradients(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that computes one of its results only if an input requires gradients with such an input."""
    args, kwargs = tree_map(_requiring_gradients, (args, kwargs))
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return call(*args, **kwargs)


def _requiring_gradients(value: Any) -> Any:
    """Another tensor on the same memory that requires gradients; a value that cannot is returned as it is."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_()


class MustRaise:
    """An op that raised under capture and must raise again."""

    def __init__(self, call: Callable[..., Any], schema: torch.FunctionSchema) -> None:
        self._call = call
        self._written = {
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        given = [
            (tensor, View.of(tensor), bytes(host_view(tensor.untyped_storage())))
            for tensor in self._host_tensors(args, kwargs)
        ]
        if self._raises(args, kwargs):
            return
        grown = [each for each in given if each[0].untyped_storage().nbytes() > len(each[2])]
        for tensor, view, content in grown:
            # The program's memory was not torch's own and could not be extended. This storage behaves the same way.
            storage = tensor.untyped_storage()
            storage.resize_(len(content))
            fill_storage(storage, content)
            fix_length(storage)
            tensor.set_(storage, view.offset, view.sizes, view.strides)
        if not grown or not self._raises(args, kwargs):
            raise UnexpectedBehaviour("it raised an exception when it was captured, and now it does not")

    def _host_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors on the host that it may write."""
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in self._written]
        return [
            value
            for value in tree_leaves(written)
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"
        ]

    def _raises(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            self._call(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception:
            return True
        return False


def call_custom(call: Callable[..., Any], settings: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a custom operator: its own code may depend on state that the replay leaves out.

    This is autocast as it was captured, and all of PyTorch's handling of tensor subclasses.
    """
    with (
        torch._C._EnableTorchFunction(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False),
        autocast_as_captured(settings),
    ):
        return call(*args, **kwargs)


class PassAddresses:
    """An operator that takes or returns addresses of objects as integers: captured tensors in their place are converted
    to this process's addresses and back."""

    def __init__(self, call: Callable[..., Any], schema: torch.FunctionSchema, addresses: Addresses) -> None:
        self._call, self._addresses = call, addresses
        self._positions = {place: each.name for place, each in enumerate(schema.arguments)}
        self._single = len(schema.returns) == 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken, given = self._addresses.arguments, self._addresses.results
        returned = self._call(
            *(int(value) if self._positions[place] in taken else value for place, value in enumerate(args)),
            **{name: int(value) if name in taken else value for name, value in kwargs.items()},
        )
        if not given:
            return returned
        values = [returned] if self._single else list(returned)
        for index in given:
            values[index] = torch.tensor(values[index], dtype=torch.int64)
        return values[0] if self._single else tuple(values)


class DrawOnHost:
    """Replays a random op of a CPU capture on another device: draws on the CPU, because random streams differ, and
    copies."""

    def __init__(self, call: Callable[..., Any], schema: torch.FunctionSchema, target: torch.device) -> None:
        self._call, self._target = call, target
        self._written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies: dict[int, torch.Tensor] = {}  # id of the original → its copy on the host
        originals: dict[int, torch.Tensor] = {}  # id of the copy → the original

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = value.to("cpu", copy=True)
                originals[id(copies[id(value)])] = value
            return copies[id(value)]

        def to_target(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return originals[id(value)] if id(value) in originals else value.to(self._target)

        def copy_back(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                value.copy_(copies[id(value)])
            return value

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        results = self._call(*host_args, **host_kwargs)
        for position, name in self._written:
            tree_map(copy_back, args[position] if position < len(args) else kwargs.get(name))
        return tree_map(to_target, results)


def state_setter(generator: torch.Generator, state: bytes) -> Callable[[], Any]:
    """What sets a random generator to a captured state."""
    # frombuffer refuses empty buffers. The generator itself reports what is wrong with such a state.
    content = torch.frombuffer(bytearray(state + b"\0"), dtype=torch.uint8)[: len(state)].clone()
    return partial(generator.set_state, content)


def load_content(
    load: Callable[[torch.UntypedStorage], None], clock: Pausable, base: torch.Tensor | torch.UntypedStorage
) -> None:
    """Import the bytes that the program wrote to a storage from outside, untimed. `load` puts them in place."""
    clock.pause()
    load(storage_of(base))
    clock.resume()


def resize_storage(length_bytes: int, base: torch.Tensor | torch.UntypedStorage) -> None:
    """Change the length of a storage, as the program did without an op."""
    storage_of(base).resize_(length_bytes)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
