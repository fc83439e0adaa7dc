"""Composes calls that replace another call: the toolkit of portable.py and attention.py.

Every call's results are tensors that later calls may use, so a rewriting is written as an ordinary program. The results
that the trace recorded are produced last: their readers find them where the original would have put them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


class RewrittenCalls:
    """Calls composed one after the other. Each returns its results, which further calls may use.

    `like` is a tensor on the device for new memory; `step` is the serving engine's step that the call is in.
    `trials` has the results of calls that were tried before. `assumed`: what a rule had to assume.
    """

    def __init__(self, like: Tensor, step: Iteration | None = None, trials: Trials | None = None) -> None:
        self._like, self.step = like, step
        self._trials = trials or Trials()
        self.made: list[Call] = []
        self.assumed: list[str] = []

    def call(self, name: str, arguments: Mapping[str, Any], results: list[Any] | None = None) -> list[Any]:
        """Call `aten::mm`, or `aten::add.Tensor`. The results are those given, or new tensors of the right shape."""
        base, _separator, overload = name.partition(".")
        found = kernel(base, overload or "default")
        given = list(arguments.items())
        if results is None:
            results = self._inferred(found, given)
        self.made.append((found, given, results))
        return results

    def one(calls, name: str, /, **arguments: Any) -> Tensor:  # operators have arguments called self
        """A call that returns one new tensor."""
        (result,) = calls.call(name, arguments)
        assert isinstance(result, Tensor)
        return result

    def filled(self, count: int, value: int = 1) -> Tensor:
        """A number, as many times as that."""
        return self.one("aten::new_full", self=self._like, size=[count], fill_value=value, dtype=DType.int64)

    def memory(self, sizes: tuple[int, ...], dtype: DType) -> Tensor:
        """Memory from before the call, which the call had and its arguments do not show."""
        return plain_tensor(dtype, sizes, None, self._like.meta.device)

    def write(self, target: Tensor, content: Tensor) -> None:
        """Copy to memory that the call was given."""
        self.call("aten::copy_", {"self": target, "src": content}, [target])

    def single(self, tensor: Tensor) -> Tensor:
        return self.one("aten::_to_copy", self=tensor, dtype=DType.float32)

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        return tensor if tensor.meta.dtype is dtype else self.one("aten::_to_copy", self=tensor, dtype=dtype)

    def count(self, end: int) -> Tensor:
        """0, 1, 2 and so on, where the call's tensors are."""
        return self.one("aten::sub.Scalar", self=self.one("aten::cumsum", self=self.filled(end), dim=0), other=1)

    def slice(self, tensor: Tensor, dim: int, start: int, end: int, step: int = 1) -> Tensor:
        return self.one("aten::slice.Tensor", self=tensor, dim=dim, start=start, end=end, step=step)

    def times(self, one: Tensor, other: Tensor) -> Tensor:
        return self.one("aten::mul.Tensor", self=one, other=other)

    def _inferred(self, found: Kernel, given: Arguments) -> list[Any]:
        tensors = [each for _name, value in given for each in tensors_in(value)]
        specs = [(name, _specs(value)) for name, value in given]
        inferred = self._trials.of(_operator(found.name, found.overload)._schema, specs)
        results = realize(inferred, tensors, self._like.meta.device)
        if results is None:
            raise CannotRewrite(f"{found.qualified_name} cannot be tried without data: {inferred.unknown}")
        return results

    def fill(self, recorded: Any, content: Tensor) -> None:
        """Produce a recorded result from a computed tensor: new memory with the recorded strides, and a copy."""
        if isinstance(recorded, Tensor):
            self.allocate(recorded)
            self.call("aten::copy_", {"self": recorded, "src": content}, [recorded])

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
                self.call("aten::zero_", {"self": recorded}, [recorded])


def plain(what: str, given: Mapping[str, Any], **unset: Any) -> None:
    """Refuse what the compositions do not have, by argument and the values that mean nothing."""
    odd = [name for name, values in unset.items() if given.get(name) not in values]
    if odd:
        raise CannotRewrite(f"{what} with {', '.join(odd)}")


def renamed(rule: Any, names: Mapping[str, str] | None = None, **more: Any) -> Any:
    """A rule, by the names that another library has for its arguments, and arguments that are not given."""
    names = names or {}

    def renamed(calls: RewrittenCalls, given: Mapping[str, Any], results: list[Any] | None) -> None:
        rule(calls, {names.get(name, name): value for name, value in given.items()} | more, results)

    return renamed


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in tensors_in(item)] if isinstance(value, list | tuple) else []


def _specs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec(value.meta.dtype, value.meta.sizes, value.meta.strides, None, value.offset)
    return [_specs(each) for each in value] if isinstance(value, list | tuple) else value
