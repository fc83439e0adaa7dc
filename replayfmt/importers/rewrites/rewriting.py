"""Composes calls that replace another call: the toolkit of portable.py and of the engine_*.py.

A composition is written as an ordinary program of tensors: `(a + b).reshape([-1])` makes two calls. The results that
the trace recorded are produced last: their readers find them where the original would have put them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._ops import OpOverload

from replayfmt.format.codes import DType
from replayfmt.format.model import Kernel
from replayfmt.pytorch.overloads import find_overload, printed_schema
from replayfmt.pytorch.traced_names import Iteration

from ..common.arguments import TensorSpec
from ..common.results import Trials, realize
from ..common.synthesis import Tensor, plain_tensor

Arguments = Sequence[tuple[str, Any]]
Given = dict[str, Any]  # the arguments of a call by name
Recorded = list[Any] | None  # the results that a trace has of it
Call = tuple[Kernel, list[tuple[str, Any]], list[Any] | None]


@dataclass(frozen=True)
class Rewritten:
    """The replacement of an operator. `note` is for the record, `sentence` for the report, `what` names it."""

    calls: list[Call]
    what: str
    note: str

    @property
    def sentence(self) -> str:
        return f"rewritten: {self.note}"


class CannotRewrite(Exception):
    """Why an operator is not replaced."""


def _operator(name: str, overload: str) -> OpOverload:
    found = find_overload(name, overload)
    if found is None:
        raise CannotRewrite(f"this PyTorch has no {name}.{overload}")
    return found


def kernel(name: str, overload: str = "default") -> Kernel:
    """An operator of this PyTorch as a capture names it."""
    return Kernel(name, overload, printed_schema(_operator(name, overload)._schema))


_BY_OPERAND = {
    "add", "sub", "mul", "div", "floor_divide", "remainder", "lt", "ge", "gt", "eq", "ne", "bitwise_and",
    "bitwise_right_shift",
}  # fmt: skip
_OVERLOADS = {
    "argsort": "stable", "fill": "Scalar", "index": "Tensor", "masked_fill": "Scalar", "mean": "dim",
    "repeat_interleave": "self_int", "scatter": "value", "searchsorted": "Tensor", "select": "int", "slice": "Tensor",
    "sort": "stable", "squeeze": "dim", "sum": "dim_IntList", "transpose": "int", "where": "self",
}  # fmt: skip


def _method(name: str) -> Callable[..., Any]:
    return lambda tensor, *others: tensor.calls.method(name, tensor, *others)


class Value:
    """A tensor of a composition. Its methods are PyTorch's operators: each makes one call, and returns its results."""

    def __init__(self, calls: RewrittenCalls, tensor: Tensor) -> None:
        self.calls, self.tensor = calls, tensor
        self.sizes, self.dtype = tensor.meta.sizes, tensor.meta.dtype

    def __getattr__(self, name: str) -> Any:
        """`amax` is `aten::amax`, of the overload that compositions use; a last `_` writes the tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self.calls.method, name, self)

    __add__, __sub__, __mul__, __truediv__ = map(_method, ("add", "sub", "mul", "div"))
    __floordiv__, __mod__, __matmul__ = map(_method, ("floor_divide", "remainder", "matmul"))
    __lt__, __ge__, __gt__, __and__ = map(_method, ("lt", "ge", "gt", "logical_and"))
    __invert__, __neg__ = map(_method, ("logical_not", "neg"))

    def part(self, dim: int, start: int, end: int, step: int = 1) -> Any:
        return self.slice(dim, start, end, step)

    def single(self) -> Any:
        return self._to_copy(dtype=DType.float32)

    def to(self, dtype: DType) -> Any:
        return self if self.dtype is dtype else self._to_copy(dtype=dtype)

    def bits(self, dtype: DType) -> Any:
        """The same bytes as another dtype."""
        return self.calls.one("aten::view.dtype", self=self, dtype=dtype)

    def like(self, other: Value) -> Any:
        """In the shape of another."""
        return self.reshape(list(other.sizes))


class RewrittenCalls:
    """Calls composed one after the other. Each returns its results, which further calls may use.

    `like` is a tensor on the device for new memory; `results` are the recorded ones, None if they are unknown; `step`
    is the serving engine's step that the call is in. `trials` has the results of calls that were tried before.
    `assumed`: what a rule had to assume.
    """

    def __init__(
        self, like: Tensor, results: Recorded = None, step: Iteration | None = None, trials: Trials | None = None
    ) -> None:
        self._like, self.results, self.step = like, results, step
        self._trials = trials or Trials()
        self.made: list[Call] = []
        self.assumed: list[str] = []

    def wrapped(self, value: Any) -> Any:
        """An argument or a result, as compositions use it."""
        if isinstance(value, Tensor):
            return Value(self, value)
        return [self.wrapped(each) for each in value] if isinstance(value, list | tuple) else value

    def call(self, name: str, arguments: Mapping[str, Any], results: Recorded = None) -> list[Any]:
        """Call `aten::mm`, or `aten::add.Tensor`. The results are those given, or new tensors of the right shape."""
        base, _separator, overload = name.partition(".")
        found = kernel(base, overload or "default")
        given = [(name, _unwrapped(value)) for name, value in arguments.items()]
        results = self._inferred(found, given) if results is None else _unwrapped(results)
        self.made.append((found, given, results))
        return list(map(self.wrapped, results or ()))

    def one(calls, name: str, /, **arguments: Any) -> Value:  # operators have arguments called self
        """A call that returns one new tensor."""
        (result,) = calls.call(name, arguments)
        assert isinstance(result, Value)
        return result

    def method(self, name: str, tensor: Value, *others: Any, **named: Any) -> Any:
        """Call an operator by its first name, its arguments by their places. Its result, or a list of several."""
        base = name.removesuffix("_")
        overload = _OVERLOADS.get(base, "default")
        if base in _BY_OPERAND:
            overload = "Tensor" if isinstance(others[0], Value) else "Scalar"
        names = (each.name for each in _operator(f"aten::{name}", overload)._schema.arguments)
        given = dict(zip(names, (tensor, *others), strict=False)) | named
        made = self.call(f"aten::{name}.{overload}", given, [tensor] if name.endswith("_") else None)
        return made[0] if len(made) == 1 else made

    def cat(self, parts: Sequence[Value], dim: int) -> Value:
        return self.one("aten::cat", tensors=list(parts), dim=dim)

    def filled(self, count: int, value: int = 1) -> Value:
        """A number, as many times as that."""
        return self.one("aten::new_full", self=self._like, size=[count], fill_value=value, dtype=DType.int64)

    def count(self, end: int) -> Any:
        """0, 1, 2 and so on, where the call's tensors are."""
        return self.filled(end).cumsum(0) - 1

    def memory(self, sizes: tuple[int, ...], dtype: DType) -> Any:
        """Memory from before the call, which the call had and its arguments do not show."""
        return Value(self, plain_tensor(dtype, sizes, None, self._like.meta.device))

    def _inferred(self, found: Kernel, given: Arguments) -> list[Any]:
        tensors = [each for _name, value in given for each in tensors_in(value)]
        specs = [(name, _specs(value)) for name, value in given]
        inferred = self._trials.of(_operator(found.name, found.overload)._schema, specs)
        results = realize(inferred, tensors, self._like.meta.device)
        if results is None:
            raise CannotRewrite(f"{found.qualified_name} cannot be tried without data: {inferred.unknown}")
        return results

    def fill(self, recorded: Any, content: Value) -> None:
        """Produce a recorded result from a computed tensor: new memory with the recorded strides, and a copy."""
        if isinstance(recorded, Tensor):
            self.allocate(recorded)
            Value(self, recorded).copy_(content)

    def deliver(self, *contents: Value) -> None:
        """Produce the recorded results, which may be one list of tensors."""
        found: Sequence[Any] = self.results or []
        found = found[0] if len(found) == 1 and isinstance(found[0], list | tuple) else found
        for recorded, content in zip(found, contents, strict=False):
            self.fill(recorded, content)

    def allocate(self, recorded: Any, *, zeros: bool = False) -> None:
        """Produce a recorded result whose content is never read; zeros if that must be defined."""
        if isinstance(recorded, Tensor):
            meta = recorded.meta
            self.call(
                "aten::new_empty_strided",
                {"self": self._like, "size": list(meta.sizes), "stride": list(meta.strides), "dtype": meta.dtype},
                [recorded],
            )
            if zeros:
                Value(self, recorded).zero_()


def plain(what: str, given: Mapping[str, Any], **unset: Any) -> None:
    """Refuse what the compositions do not have, by argument and the values that mean nothing."""
    odd = [name for name, values in unset.items() if given.get(name) not in values]
    if odd:
        raise CannotRewrite(f"{what} with {', '.join(odd)}")


def renamed(rule: Any, names: Mapping[str, str] | None = None, **more: Any) -> Any:
    """A rule, by the names that another library has for its arguments, and arguments that are not given."""
    names = names or {}

    def renamed(calls: RewrittenCalls, given: Given) -> None:
        rule(calls, {names.get(name, name): value for name, value in given.items()} | more)

    return renamed


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in tensors_in(item)] if isinstance(value, list | tuple) else []


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Value):
        return value.tensor
    return [_unwrapped(each) for each in value] if isinstance(value, list | tuple) else value


def _specs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec(value.meta.dtype, value.meta.sizes, value.meta.strides, None, value.offset)
    return [_specs(each) for each in value] if isinstance(value, list | tuple) else value
