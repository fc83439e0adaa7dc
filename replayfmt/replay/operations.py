"""The calls in generated code that are no kernels: views, composites, state changes, content imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from replayfmt.format.codes import TensorFlag
from replayfmt.format.model import spanned
from replayfmt.pytorch.environment import apply_settings, autocast_as_captured
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


class Unattached:
    """Makes a tensor without elements for an operator that attaches it to other memory; `base` names its device."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, base: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
        return torch.empty((0,), dtype=self.dtype, device=base.device)


class Zeros:
    """Makes a tensor without bytes that reads as zeros, as used by forward-mode autograd."""

    __slots__ = ("device", "dtype", "sizes")

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], device: torch.device) -> None:
        self.dtype, self.sizes, self.device = dtype, sizes, device

    def __call__(self) -> torch.Tensor:
        return torch._efficientzerotensor(self.sizes, dtype=self.dtype, device=self.device)


def storage_of(tensor: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    """The storage of a tensor; a storage is returned as it is."""
    return tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()


class PackComposite:
    """Makes a composite tensor from its components."""

    def __init__(self, form: str) -> None:
        self._form = form

    def __call__(self, parts: tuple[Any, ...]) -> Any:
        return put_together(self._form, list(parts))


class UnpackComposite:
    """Returns the components of a composite result; raises if its form is not the captured one."""

    def __init__(self, form: str, parts: int) -> None:
        self._form, self._parts = form, parts

    def __call__(self, tensor: Any) -> tuple[Any, ...]:
        if not isinstance(tensor, torch.Tensor | torch.ScriptObject):
            raise UnexpectedBehaviour(f"a result is {type(tensor).__name__}, captured was a {self._form} tensor")
        form, parts = take_apart(tensor)
        if form != self._form or len(parts) != self._parts:
            raise UnexpectedBehaviour(
                f"a result is a {form} tensor of {len(parts)} parts, captured was {self._form} of {self._parts}"
            )
        return tuple(parts)


class CheckedView:
    """Wraps an operator that makes views without checking that they lie inside their memory; checks it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return require_inside(self._call(*args, **kwargs))


class CheckedNested:
    """Wraps an operator that makes a nested tensor of a buffer, sizes, strides and offsets without checking that its
    parts lie inside the buffer; checks it before the call, which reads the sizes already."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_nested(*args)
        return self._call(*args, **kwargs)


class ForGradients:
    """Wraps an operator that computes one of its results only if an input requires gradients, by calling it with such
    an input."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(self._requiring_gradients, (args, kwargs))
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return self._call(*args, **kwargs)

    @staticmethod
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


class CustomOperator:
    """A custom operator: its own code may depend on state that the replay leaves out.

    This is autocast as it was captured, and all of PyTorch's handling of tensor subclasses.
    """

    def __init__(self, call: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._call, self._settings = call, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with (
            torch._C._EnableTorchFunction(),
            torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Python, False),
            torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PythonTLSSnapshot, False),
            autocast_as_captured(self._settings),
        ):
            return self._call(*args, **kwargs)


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


class ApplySettings:
    """Changes global settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __call__(self) -> None:
        apply_settings(self._settings)


class SetGenerator:
    """Sets a random generator to a captured state."""

    def __init__(self, generator: torch.Generator, state: bytes) -> None:
        self._generator = generator
        # frombuffer refuses empty buffers. The generator itself reports what is wrong with such a state.
        self._state = torch.frombuffer(bytearray(state + b"\0"), dtype=torch.uint8)[: len(state)].clone()

    def __call__(self) -> None:
        self._generator.set_state(self._state)


class SeedGenerator:
    """Seeds a random generator whose captured state is unknown, identically in every replay."""

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator, self._seed = generator, seed

    def __call__(self) -> None:
        self._generator.manual_seed(self._seed)


class LoadContent:
    """Imports the bytes that the program wrote to a storage from outside, untimed. `load` puts them in place."""

    def __init__(self, load: Callable[[torch.UntypedStorage], None], clock: Pausable) -> None:
        self._load, self._clock = load, clock

    def __call__(self, base: torch.Tensor | torch.UntypedStorage) -> None:
        self._clock.pause()
        self._load(storage_of(base))
        self._clock.resume()


class ResizeStorage:
    """Changes the length of a storage, as the program did without an op."""

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes

    def __call__(self, base: torch.Tensor | torch.UntypedStorage) -> None:
        storage_of(base).resize_(self._length_bytes)


class Synchronize:
    """Waits for a device, as the program did."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
