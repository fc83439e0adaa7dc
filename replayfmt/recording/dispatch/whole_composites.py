"""Makes the composite operators of other packages reach the recorder whole, as kernels.

PyTorch treats an operator registered without a dispatch key (`m.def(schema, function)`) as a composite: where gradients
may be needed, its function runs above dispatch modes. They see the operators that it calls, but not what it does to
memory itself. During a capture, such operators have kernels for the autograd keys. These pass the call to the recorder
if the recorder is the first to see it. Otherwise (in other threads, under modes and transforms of the program, for
tensors with their own dispatch) they run the function as usual. Calls from C++ behave the same.

A few composites of PyTorch's own fill what they return through addresses, beside their parts. They run in parts as
usual; afterwards their results enter the capture as they are.

Libraries may be loaded during the capture. New operators are looked for after an extension is loaded, after a kernel is
registered from Python, and when an operator is first looked up in `torch.ops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd import forward_ad

from replayfmt.format.operator_schema import name_problem
from replayfmt.pytorch.operators import is_pytorchs, operator_named
from replayfmt.pytorch.overloads import find_overload

from ..composite_operators import AUTOGRAD_KEYS, BACKENDS, handed_on, own_backends
from ..frames import leave_no_frames, leave_no_own_frame
from ..kernels import forget_libraries, tensors_in
from ..patches import HookHost, Patch, Patched, PatchSet, around
from ..special_values import dispatches_itself

_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class WholeComposites(Patched):
    """The kernels of one capture."""

    def __init__(self, recorder: HookHost, look_again: Callable[[], Any]) -> None:
        """`look_again` is called after the program registered kernels, or took some back."""
        self._recorder = recorder
        self._look_again = look_again
        self._libraries: dict[str, Any] = {}  # by namespace; their registrations end with them
        self._seen: set[str] = set()
        self._active = False
        loading, registering = (
            around(functools.partial(self._after_registering, forget), leave_no_own_frame)
            for forget in (forget_libraries, lambda: None)
        )
        self._patches = PatchSet(
            [
                Patch("importlib.machinery", "ExtensionFileLoader.create_module", loading),
                Patch("torch._ops", "_Ops.load_library", loading),
                Patch("torch.library", "Library.impl", registering),
                Patch("torch.library", "Library._destroy", registering),
                Patch("torch._ops", "_OpNamespace.__getattr__", around(self._after_lookup, leave_no_own_frame)),
            ]
        )

    def install(self) -> None:
        self._active = True
        forget_libraries()
        self.look()
        self._patches.install()

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._active = False
        self._patches.remove()
        while self._libraries:
            self._libraries.popitem()[1].reset()
        handed_on.clear()

    def look(self) -> None:
        """Register kernels for the composites added since the last call."""
        if self._active:
            self._recorder.attempt(self._look)

    def _look(self) -> None:
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(_COMPOSITE.name):
            if name not in self._seen:
                self._seen.add(name)
                operator = operator_named(name.partition(".")[0])
                if not operator.in_parts or operator.fills_results:
                    self._register(name)

    def _register(self, name: str) -> None:
        namespace, _, base = name.partition("::")
        operator, _, overload = name.partition(".")
        if name_problem(operator, overload or "default"):
            return  # PyTorch itself cannot be asked about it
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if any(has(name, key) for key in AUTOGRAD_KEYS):
            return  # it handles gradients itself, and what it calls reaches dispatch modes
        if namespace not in self._libraries:
            self._libraries[namespace] = torch._C._dispatch_library("IMPL", namespace, "")
        handed_on.add(name)
        # For a backend with its own kernel, the operator arrives whole anyway.
        own = own_backends(name)
        kernel = self._kernel(name)
        for backend in (*BACKENDS, *(() if own else ("Other",))):
            if backend not in own:
                self._libraries[namespace].impl(base, f"Autograd{backend}", kernel, True)

    def _kernel(self, name: str) -> Callable[..., Any]:
        recorder = self._recorder
        known = operator_named(name.partition(".")[0])
        depends = known.in_parts_for_gradients

        @functools.cache
        def registered() -> torch._ops.OpOverload:
            operator, _, overload = name.partition(".")
            found = find_overload(operator, overload or "default")
            assert found is not None, "it is being called"
            return found

        def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            operator = registered()
            try:
                if known.fills_results:
                    result = operator._op_dk(_COMPOSITE, *args, **kwargs)
                    if recorder.sees_first():
                        recorder.tell(lambda core: core.outside.filled(result))
                    return result
                if (
                    recorder.sees_first()
                    and torch._C._functorch.peek_interpreter_stack() is None
                    and not any(dispatches_itself(type(tensor)) for tensor in tensors_in((*args, *kwargs.values())))
                    and not (depends and _is_in_parts(tensors_in((*args, *kwargs.values()))))
                ):
                    return operator.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
                return operator._op_dk(_COMPOSITE, *args, **kwargs)
            except BaseException as error:
                leave_no_frames(error)
                raise

        return kernel

    # ------------------------------------------------------------------------------------------------------- libraries

    def _after_registering(
        self, forget: Callable[[], None], original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The function, followed by a look for what it may have registered."""
        try:
            result = original(*args, **kwargs)
            self.look()
            return result
        finally:
            forget()
            if self._active:
                self._look_again()

    def _after_lookup(self, original: Callable[..., Any], namespace: Any, operator: str) -> Any:
        found = original(namespace, operator)
        if not is_pytorchs(namespace.name):
            self.look()
        return found


def _is_in_parts(tensors: list[torch.Tensor]) -> bool:
    """Whether a composite that is split into parts where gradients are needed is split for these tensors."""
    for_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return for_backward or forward_ad._current_level >= 0 or any(tensor.device.type != "cpu" for tensor in tensors)
