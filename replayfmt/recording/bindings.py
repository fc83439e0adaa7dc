"""A quicker way to call an operator than its overload object: PyTorch's own Python binding of it.

A binding parses its arguments with generated code, an overload object by its schema, at some 0.4 µs more. Whether a
binding comes down to a given call of a given overload is not guessed but seen: the first call through it is watched by
a dispatch mode, which lets only the expected operator pass, with the very arguments it was to have. The parser decides
by the kinds and constants of arguments, so what held once holds for every call of the same site.

Bindings look at `TorchFunctionMode`s, which overload objects do not: while one is active they must not be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from .interrupts import is_interrupt
from .kernels import KernelFacts

_SPECIAL = ("detach", "alias", "lift_fresh", "set_")   # their bindings do more than the operator, or there is none


class _OtherCall(Exception):
    """The binding came down to something else."""


class _Watch(TorchDispatchMode):
    """Lets one expected call pass."""

    def __init__(self, facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._facts = facts
        self._args = args
        self._kwargs = kwargs
        self.passed = False
        self.result: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.passed or func is not self._facts.func or not (
            _same(args, self._args) and _same(tuple((kwargs or {}).items()), tuple(self._kwargs.items()))
        ):
            raise _OtherCall
        self.passed = True
        self.result = self._facts.call(*args, **(kwargs or {}))
        return self.result


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def binding_of(facts: KernelFacts) -> Callable[..., Any] | None:
    """The binding that may come down to calls of this overload, if there is one."""
    schema = facts.func._schema
    base = schema.name.partition("::")[2]
    # Where an operator returns nothing or a list, a binding gives something else.
    if facts.namespace != "aten" or base in _SPECIAL or {str(r.type) for r in schema.returns} != {"Tensor"}:
        return None
    if schema.arguments and schema.arguments[0].name == "self" and str(schema.arguments[0].type) == "Tensor":
        method = getattr(torch._C.TensorBase, base, None)
        if method is not None and callable(method):
            return method
    for namespace in (torch._C._VariableFunctions, torch._C._nn):
        function = getattr(namespace, base, None)
        if function is not None:
            return function
    return None


def call_watched(
    binding: Callable[..., Any], facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Run the operator once, through its binding where that is the same call. (result, whether it was.)

    Raises what the operator raises.
    """
    watch, depth = _Watch(facts, args, kwargs), _len_torch_dispatch_stack()
    try:
        _push_on_torch_dispatch_stack(watch)
        result = binding(*args, **kwargs)
    except Exception as error:
        if (watch.passed and watch.result is None) or is_interrupt(error):
            raise               # the operator's own, or the program's
        watched = False
    else:
        watched = watch.passed
    finally:
        # A signal handler may raise after any call, the one that puts the mode there or takes it off among them.
        try:
            if _len_torch_dispatch_stack() > depth:
                _pop_torch_dispatch_stack(None)
        except BaseException:
            if _len_torch_dispatch_stack() > depth:
                _pop_torch_dispatch_stack(None)
            raise
    if watched:
        return result, True
    if watch.passed:
        return watch.result, False
    return facts.call(*args, **kwargs), False
