"""Composite operators under the recorder: which are composites, and how each is run as in the program.

Inside a dispatch mode PyTorch masks autocast and autograd, and everything else above the mode. What the recorder calls
below is therefore given back the autocast and autograd state that the program has. `CompositePolicy` says which
operators of other packages are recorded as the operators inside them, by the user's choice or by observation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey, _ExcludeDispatchKeyGuard, _ForceDispatchKeyGuard, _RestorePythonTLSSnapshot  # type: ignore[attr-defined]

from replayfmt.pytorch.accelerators import AUTOCAST_KEYS
from replayfmt.pytorch.environment import autocast_devices, autocast_dtype

from .frames import is_recorders

# By name, so that one that is missing is found when a capture starts, not in the middle of the program.


_BELOW_AUTOGRAD = (
    torch._C.DispatchKeySet(DispatchKey.AutogradFunctionality)
    .add(DispatchKey.AutogradOther)
    .add(DispatchKey.AutogradNestedTensor)
)

# Backends whose tensors have an autograd key of their own, and the key of all others.
BACKENDS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "Meta", "PrivateUse1")
AUTOGRAD_KEYS = tuple(f"Autograd{backend}" for backend in (*BACKENDS, "Other"))
handed_on: set[str] = set()  # operators whose kernels for these keys are the recorder's own (whole_composites.py)

INEXACT = (
    "a dispatch mode recorded: casts under CPU autocast, composites in inference mode, products of several matrices "
    "with a batch of one and a few gradients (prod, cumprod, min, max, median) may differ from those of a run without "
    "a capture, see docs/exactness.md"
)


def autocast_of_program() -> dict[str, str]:
    """The autocast settings that the current op was called with, by setting name: a dtype's name, or "" for off. Call
    it inside a dispatch mode's handler."""
    with _RestorePythonTLSSnapshot():
        return read_autocast()


def autocast_below_mode(own: bool) -> dict[str, str]:
    """The autocast settings for an operator that a dispatch mode's handler calls. `own`: it is PyTorch's, and the mode
    masks autocast; others get the program's settings (`AsInProgram`)."""
    return {f"autocast.{device}": "" for device in autocast_devices()} if own else autocast_of_program()


def read_autocast() -> dict[str, str]:
    """The autocast settings when nothing masks them."""
    return {f"autocast.{device}": autocast_dtype(device) for device in autocast_devices()}


def _casts_and_views(name: str) -> torch._C.DispatchKeySet:
    """The keys of an operator's own kernels above the mode that cast its arguments, or make views of them."""
    found = torch._C.DispatchKeySet(DispatchKey.Undefined)
    for key in (*AUTOCAST_KEYS, DispatchKey.ADInplaceOrView):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name):
            found = found.add(key)
    return found


class _BelowOwnKernels:
    """Knows which of an operator's own kernels above the mode (for autocast, autograd and views) have already run and
    called what the mode's handler now handles."""

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._excluded = _casts_and_views(func.name())
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if func.name() not in handed_on and any(has(func.name(), key) for key in ("Autograd", *AUTOGRAD_KEYS)):
            self._excluded = self._excluded | _BELOW_AUTOGRAD


_BACKEND_OF = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU", "meta": "Meta"}
# Keys of kernels that serve every device, in the dispatcher's order of preference.
_EVERYWHERE = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class AsInProgram(_BelowOwnKernels):
    """Calls a custom operator from inside a dispatch mode's handler as its program would have called it."""

    def __init__(self, func: torch._ops.OpOverload, call: Callable[..., Any]) -> None:
        super().__init__(func)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _below_another_handler():
            return self._call(*args, **kwargs)
        with _RestorePythonTLSSnapshot():
            included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        # The mode is not active for what is called here.
        included = included.remove(DispatchKey.Python).remove(DispatchKey.PythonTLSSnapshot)
        with _ForceDispatchKeyGuard(included, excluded | self._excluded):
            return self._call(*args, **kwargs)


class Body(_BelowOwnKernels):
    """Runs the kernel of a custom operator from inside a dispatch mode's handler as its program would have run it, with
    a mode on the stack that sees the operators that it calls."""

    def __init__(self, func: torch._ops.OpOverload, is_python: Callable[[str, str], bool]) -> None:
        """`is_python(operator, key)`: whether the kernel for a dispatch key is a Python function of the program's."""
        super().__init__(func)
        self._func = func
        self._keys: dict[str, DispatchKey | None] = {}
        self._is_python = is_python

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchKey | None:
        """The dispatch key of the operator's kernel for some arguments; None if it has no kernel of its own for
        them."""
        device = _device_of((*args, *kwargs.values()))
        if device not in self._keys:
            has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, self._func.name())
            found = next(filter(has, (_BACKEND_OF.get(device, "PrivateUse1"), *_EVERYWHERE)), None)
            self._keys[device] = None if found is None else getattr(DispatchKey, found)
        return self._keys[device]

    def is_python(self, key: DispatchKey) -> bool:
        """Whether the kernel for a key is a Python function now: the program may take back what it registered."""
        return self._is_python(self._func.name(), key.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _below_another_handler():
            return self.unmasked(*args, **kwargs)
        outside = _RestorePythonTLSSnapshot()
        with outside, _ExcludeDispatchKeyGuard(self._excluded):
            return self.unmasked(*args, **kwargs)

    def unmasked(self, *args: Any, **kwargs: Any) -> Any:
        """The same when nothing is masked."""
        key = self.key(args, kwargs)
        assert key is not None
        return self._func._op_dk(key, *args, **kwargs)


def _device_of(values: Iterable[Any]) -> str:
    """The device type that determines which kernel the dispatcher chooses."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.device.type != "cpu":
                return item.device.type
    return "cpu"


class CompositeDecomposition:
    """Runs a composite in parts from inside a dispatch mode's handler, as the dispatcher does without a mode.

    (`OpOverload.decompose` prefers decompositions written in Python, whose results differ.)
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._func = func
        # What the composite's own kernels have called is not cast, or made a view, a second time.
        self._excluded = _casts_and_views(func.name())

    @staticmethod
    def unmasks() -> bool:
        """Whether to restore for the parts what the mode masks. Call it inside the mode's handler."""
        # Outside inference mode, composites are split into parts before they reach the mode.
        return torch.is_inference_mode_enabled() and not _below_another_handler()

    def __call__(self, unmasked: bool, *args: Any, **kwargs: Any) -> Any:
        """`unmasked`: as `unmasks` says."""
        run = functools.partial(self._func._op_dk, DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if not unmasked:
            return run()
        # Composites check whether views of parameters require gradients: everything that the mode masks is restored.
        outside = _RestorePythonTLSSnapshot()
        with outside, _ExcludeDispatchKeyGuard(self._excluded):
            return run()


def _below_another_handler() -> bool:
    """Whether a mode or a tensor of the program is handling an operator: PyTorch masks the same state for what that
    calls, with or without a capture."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and not is_recorders(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _is_key(name: str) -> bool:
    """Whether the dispatcher knows a key by this name: it does not parse all that its enumeration has."""
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", name)
    except RuntimeError:
        return False
    return name in torch._C.DispatchKey.__members__


# Keys that may have their own kernel for a composite; the dispatcher then prefers it to the parts.
_KEYS = tuple(
    key
    for layout in ("", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
    for key in (f"{layout}{backend}" for backend in BACKENDS)
    if _is_key(key)
)


def is_composite_operator(name: str) -> bool:
    """Whether an overload (`aten::add.Tensor`) has a kernel that stands for its parts, gradients included."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def own_backends(name: str) -> tuple[str, ...]:
    """The dispatch keys for which a composite has a kernel of its own besides its parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    nested = has(name, "CompositeImplicitAutogradNestedTensor")
    return tuple(key for key in _KEYS if has(name, key) or (nested and key.startswith("Nested")))


class RecordingGranularity(Enum):
    """How a call is recorded."""

    whole = 1  # as one op
    inside = 2  # as the operators that are called inside
    observed = 3  # as one op, unless it is observed to hide state


class CompositePolicy:
    """The decision for each operator, by name (`vllm::unified_attention`)."""

    def __init__(self, inside: Iterable[str], whole: Iterable[str]) -> None:
        """Both are patterns of operator names."""
        asked = [(pattern, RecordingGranularity.whole) for pattern in whole] + [
            (pattern, RecordingGranularity.inside) for pattern in inside
        ]
        self._asked = dict(asked)
        self._unmatched = dict(asked)
        self._decided: dict[str, RecordingGranularity] = {}

    def manner(self, name: str, python: bool, own: bool) -> RecordingGranularity:
        """How a call of an operator is recorded. `python`: its kernel is a Python function of the program's. `own`: the
        operator is PyTorch's, which would run its own kernel in a replay."""
        if own:
            return RecordingGranularity.inside if python else RecordingGranularity.whole
        decided = self._decided.get(name)
        if decided is None:
            default = RecordingGranularity.observed if python else RecordingGranularity.whole
            matching = [pattern for pattern in self._asked if fnmatchcase(name, pattern)]
            for pattern in matching:
                self._unmatched.pop(pattern, None)
            decided = self._decided[name] = self._asked[matching[0]] if matching else default
        return decided

    def unmatched(self) -> list[str]:
        """A message for every pattern that has matched no operator so far."""
        problem = "no operator of that name was called while recording"
        return [f"--{manner.name}={pattern}: {problem}" for pattern, manner in self._unmatched.items()]

    def hides_state(self, name: str) -> None:
        """An observed operator hides state: from now on the operators inside it are recorded."""
        self._decided[name] = RecordingGranularity.inside
