"""The fastest Python function that reaches an operator.

Calling an overload object goes through PyTorch's boxed calling convention; `torch.add` and its like do not, and take
half a microsecond less. Which overload such a function dispatches to is decided by its arguments' Python types, so it
is tried out: with stand-ins for the tensors and the record's own values, under a dispatch mode that stops it there. It
is used only where exactly the captured overload arrived, with exactly the arguments that were passed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_HOLDERS = tuple(
    holder
    for holder in (
        torch._C._VariableFunctions,
        torch._C.TensorBase,
        torch._C._nn,
        getattr(torch._C, "_linalg", None),
        getattr(torch._C, "_fft", None),
        getattr(torch._C, "_special", None),
    )
    if holder is not None
)
_NATIVE = (type(len), type(str.join))  # functions and methods implemented in C
_ABSENT = object()
# The argument parser takes a tensor without dimensions for a number too, an integer one also for a size or an index.
# None is kept: a program that lists its tensors would find it.
_STAND_INS = (
    partial(torch.zeros, (1,), dtype=torch.float32, device="cpu"),
    partial(torch.zeros, (), dtype=torch.float32, device="cpu"),
    partial(torch.zeros, (), dtype=torch.int64, device="cpu"),
)


class _Arrived(Exception):
    """Stops a call once it reached the dispatcher."""


class _Catch(TorchDispatchMode):
    """Keeps what arrives first, and ends the call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports all of torch._dynamo, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.func: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.func, self.args, self.kwargs = func, args, kwargs or {}
        raise _Arrived


def takes_numbers(func: OpOverload) -> bool:
    """Whether numbers may stand for tensors among its arguments, which only some ways to call it allow."""
    return bool(torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]))


def direct_function(
    overload: OpOverload, text: str, values: Sequence[Any], tensors: Sequence[int]
) -> Callable[..., Any]:
    """A function to call as `text` says: one that reaches `overload` directly, or else the overload itself.

    `text` has a `%s` for the function and one for each of `values`; those at the positions `tensors` are tensors,
    and stand-ins take their place here.
    """
    for candidate in _candidates(overload):
        if all(_arrives(candidate, overload, text, values, tensors, stand_in) for stand_in in _STAND_INS):
            return candidate
    call: Callable[..., Any] = overload._op
    return call


def _candidates(overload: OpOverload) -> Iterator[Callable[..., Any]]:
    namespace, _, base = overload._schema.name.partition("::")
    if namespace != "aten":
        return
    for holder in _HOLDERS:
        for name in (base, base.removeprefix("linalg_"), base.removeprefix("fft_"), base.removeprefix("special_")):
            found = getattr(holder, name, None)
            if isinstance(found, _NATIVE):
                yield found


def _arrives(
    candidate: Callable[..., Any],
    overload: OpOverload,
    text: str,
    values: Sequence[Any],
    tensors: Sequence[int],
    stand_in: Callable[[], torch.Tensor],
) -> bool:
    """Whether a call of `candidate` arrives at the dispatcher as the call of the overload would."""
    stood_for = set(tensors)
    names = {f"x{index}": stand_in() if index in stood_for else value for index, value in enumerate(values)}
    call = compile(text % ("f", *names), "<opreplay probe>", "eval")
    wanted = eval(call, {"f": lambda *args, **kwargs: (args, kwargs), **names})  # the plan's text, not the file's
    catch = _Catch()
    # The dispatcher has to consult Python here, even if the surrounding replay has disabled that.
    keys = torch._C.DispatchKey
    with (
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._SetExcludeDispatchKeyGuard(keys.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.PythonTLSSnapshot, False),
        warnings.catch_warnings(),
        catch,
    ):
        warnings.simplefilter("ignore")  # of a form of call that is tried here and may not be used
        try:
            eval(call, {"f": candidate, **names})
        except _Arrived:
            pass
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
    if catch.func is not overload:
        return False
    return _same(_bound(overload, *wanted), _bound(overload, catch.args, catch.kwargs))


def _bound(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The value of every argument of the schema, defaults included."""
    bound = []
    for position, argument in enumerate(overload._schema.arguments):
        if position < len(args):
            bound.append(args[position])
        else:
            bound.append(kwargs.get(argument.name, argument.default_value if argument.has_default_value() else _ABSENT))
    return bound


def _same(one: Any, other: Any) -> bool:
    """Whether two argument values are the same for the dispatcher; tensors and generators by identity."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor | torch.Generator) or isinstance(other, torch.Tensor | torch.Generator):
        return one is other
    return type(one) is type(other) and (one == other or (one != one and other != other))
