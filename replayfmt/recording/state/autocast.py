"""Autocast and autograd as the program has them: inside a dispatch mode PyTorch masks both, and everything else above
the mode.

Operators of PyTorch's own have been cast when they reach the mode, and their gradients are taken care of. The code of a
custom operator runs below it and may depend on either, so it gets what it would get without a capture, and the stream
states what autocast was. A composite that comes whole is run in parts with all that it would have without the mode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey

from replayfmt.pytorch.settings import AUTOCAST_DEVICES

from ..frames import is_recorders

_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_BELOW_AUTOGRAD = (
    torch._C.DispatchKeySet(DispatchKey.AutogradFunctionality)
    .add(DispatchKey.AutogradOther)
    .add(DispatchKey.AutogradNestedTensor)
)

# Backends whose tensors have an autograd key of their own, and the key of all others.
BACKENDS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "Meta", "PrivateUse1")
AUTOGRAD_KEYS = tuple(f"Autograd{backend}" for backend in (*BACKENDS, "Other"))
handed_on: set[str] = set()  # operators whose kernels for these keys are the recorder's (whole_composites.py)


def autocast_of_program() -> dict[str, str]:
    """The autocast settings that the op under way was called with, under their setting's names: a dtype's name, or ""
    for off. Call it inside a dispatch mode's handler."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return read_autocast()


def autocast_below_mode(own: bool) -> dict[str, str]:
    """What an operator runs under that a dispatch mode's handler calls. `own`: it is PyTorch's, and the mode masks
    autocast; others get that of the program (`AsInProgram`)."""
    return {f"autocast.{device}": "" for device in AUTOCAST_DEVICES} if own else autocast_of_program()


def read_autocast() -> dict[str, str]:
    """The same where nothing masks it."""
    return {f"autocast.{device}": _read(device) for device in AUTOCAST_DEVICES}


def _read(device: str) -> str:
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


class _BelowOwnKernels:
    """Knows which kernels of an operator's own for what comes before the mode have run, and called what is called in
    the mode's handler: those for autocast, autograd and views."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._excluded = torch._C.DispatchKeySet(DispatchKey.Undefined)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for key in (*_KEYS.values(), DispatchKey.ADInplaceOrView):
            if has(func.name(), key.name):
                self._excluded = self._excluded.add(key)
        if func.name() not in handed_on and any(has(func.name(), key) for key in ("Autograd", *AUTOGRAD_KEYS)):
            self._excluded = self._excluded | _BELOW_AUTOGRAD


_BACKEND_OF = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU", "meta": "Meta"}
# Keys of kernels that serve every device, in the order in which the dispatcher takes them.
_EVERYWHERE = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class AsInProgram(_BelowOwnKernels):
    """Calls a custom operator from inside a dispatch mode's handler as its program would have called it."""

    def __init__(self, func: torch._ops.OpOverload, call: Callable[..., Any]) -> None:
        """`call` calls the overload."""
        super().__init__(func)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _below_another_handler():
            return self._call(*args, **kwargs)
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        # The mode is not there for what is called here.
        included = included.remove(DispatchKey.Python).remove(DispatchKey.PythonTLSSnapshot)
        with torch._C._ForceDispatchKeyGuard(included, excluded | self._excluded):
            return self._call(*args, **kwargs)


class Body(_BelowOwnKernels):
    """Runs the kernel of a custom operator from inside a dispatch mode's handler as its program would have run it, with
    a mode on the stack that sees what it calls."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        super().__init__(func)
        self._func = func
        self._keys: dict[str, DispatchKey | None] = {}

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchKey | None:
        """The key that the operator's kernel for some arguments is registered for; None if it has none of its own
        for them."""
        device = _device_of((*args, *kwargs.values()))
        if device not in self._keys:
            has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, self._func.name())
            found = next(filter(has, (_BACKEND_OF.get(device, "PrivateUse1"), *_EVERYWHERE)), None)
            self._keys[device] = None if found is None else getattr(DispatchKey, found)
        return self._keys[device]

    def is_python(self, key: DispatchKey) -> bool:
        """Whether the kernel for a key is a Python function."""
        operator = self._func.name().replace("::", "/")
        names = (key.name, "") if key is DispatchKey.CompositeImplicitAutograd else (key.name,)
        return any(f"{operator}/{name}" in torch.library._impls for name in names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _below_another_handler():
            return self.unmasked(*args, **kwargs)
        outside = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
        with outside, torch._C._ExcludeDispatchKeyGuard(self._excluded):
            return self.unmasked(*args, **kwargs)

    def unmasked(self, *args: Any, **kwargs: Any) -> Any:
        """The same where nothing is masked."""
        key = self.key(args, kwargs)
        assert key is not None
        return self._func._op_dk(key, *args, **kwargs)


def _device_of(values: Iterable[Any]) -> str:
    """The kind of device that decides which kernel the dispatcher takes."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.device.type != "cpu":
                return item.device.type
    return "cpu"


class InParts:
    """Runs a composite from inside a dispatch mode's handler in parts, as the dispatcher does where there is no mode.

    (`OpOverload.decompose` prefers decompositions written in Python, whose results are others.)
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._func = func
        # What kernels of the composite's own have called is not cast, or made a view, a second time.
        self._excluded = torch._C.DispatchKeySet(DispatchKey.Undefined)
        for key in (*_KEYS.values(), DispatchKey.ADInplaceOrView):
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name):
                self._excluded = self._excluded.add(key)

    @staticmethod
    def unmasks() -> bool:
        """Whether the parts are to have back what the mode masks. Call it inside the mode's handler."""
        # Elsewhere than in inference mode, composites are taken apart before they come to the mode.
        return torch.is_inference_mode_enabled() and not _below_another_handler()

    def __call__(self, unmasked: bool, *args: Any, **kwargs: Any) -> Any:
        """`unmasked`: as `unmasks` says."""
        if not unmasked:
            return self._run(args, kwargs)
        # Composites look at whether views of parameters require gradients: all of what the mode masks is restored.
        outside = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
        with outside, torch._C._ExcludeDispatchKeyGuard(self._excluded):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _below_another_handler() -> bool:
    """Whether a mode or a tensor of the program's is handling an operator: PyTorch masks the same for what that calls,
    with a capture or without."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and not is_recorders(frame.f_code):
            return True
        frame = frame.f_back
    return False
