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

from ..common.arguments import TensorSpec
from ..common.results import infer, realize
from ..common.synthesis import Tensor

Arguments = Sequence[tuple[str, Any]]
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

    `like` is a tensor on the device for new memory.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self.made: list[Call] = []

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

    def filled(self, count: int) -> Tensor:
        """Ones, as many as that."""
        return self.one("aten::new_ones", self=self._like, size=[count], dtype=DType.int64)

    def _inferred(self, found: Kernel, given: Arguments) -> list[Any]:
        tensors = [each for _name, value in given for each in tensors_in(value)]
        schema = _operator(found.name, found.overload)._schema
        inferred = infer(schema, [(name, _specs(value)) for name, value in given])
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


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in tensors_in(item)] if isinstance(value, list | tuple) else []


def _specs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec(value.meta.dtype, value.meta.sizes, value.meta.strides, None, value.offset)
    return [_specs(each) for each in value] if isinstance(value, list | tuple) else value
