"""Putting operators that every device has in the place of those that only the traced device has: `--rewrite=portable`.

Each rewriting computes the same results, those that only a backward pass reads included (saved means, logarithms of
sums), to the accuracy of another implementation; every one is reported and noted in the capture. What has no equal
replacement (dropout inside of an attention kernel) stays as it is, with the reason. attention_rewrites.py has those of
fused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.format.codes import DType, StorageOrigin
from replayfmt.format.model import Kernel

from .arguments import DeviceName, TensorSpec
from .results import infer, realize
from .values import Tensor, plain_tensor

REWRITES = ("portable",)

Arguments = Sequence[tuple[str, Any]]
Call = tuple[Kernel, list[tuple[str, Any]], list[Any] | None]


@dataclass(frozen=True)
class Rewritten:
    """What takes an operator's place. `note` is for the record, `sentence` for the report, `what` names the rewriting."""

    calls: list[Call]
    what: str
    note: str

    @property
    def sentence(self) -> str:
        return f"rewritten: {self.note}"


class CannotRewrite(Exception):
    """Why an operator keeps its place."""


def kernel(name: str, overload: str = "default") -> Kernel:
    """An operator of this PyTorch as a capture names it."""
    namespace, _separator, base = name.partition("::")
    found = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return Kernel(name, overload, str(found._schema))


class Calls:
    """Calls that are put together one after the other. Each returns its results, which further calls may take."""

    def __init__(self) -> None:
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

    def one(self, name: str, arguments: Mapping[str, Any]) -> Tensor:
        """A call that returns one new tensor."""
        (result,) = self.call(name, arguments)
        assert isinstance(result, Tensor)
        return result

    def _inferred(self, found: Kernel, given: Arguments) -> list[Any]:
        tensors = [each for _name, value in given for each in _tensors(value)]
        schema = torch._C.parse_schema(found.schema)
        inferred = infer(schema, [(name, _specs(value)) for name, value in given])
        device = tensors[0].meta.device if tensors else 0
        results = realize(inferred, tensors, device)
        if results is None:
            raise CannotRewrite(f"{found.qualified_name} cannot be tried without data: {inferred.unknown}")
        return results

    def fill(self, recorded: Any, content: Tensor) -> None:
        """Make a recorded result of a computed tensor: a new tensor with the recorded strides, and a copy."""
        if isinstance(recorded, Tensor):
            self.allocate(recorded)
            self.call("aten::copy_", {"self": recorded, "src": content}, [recorded])

    def allocate(self, recorded: Any, name: str = "empty") -> None:
        """A recorded result of which only the shape matters. `name`: `empty`, or `zeros` for defined content."""
        if isinstance(recorded, Tensor):
            meta = recorded.meta
            like = {"size": list(meta.sizes), "stride": list(meta.strides), "dtype": meta.dtype}
            self.call("aten::empty_strided", like | {"device": _On(meta.device)}, [recorded])
            if name == "zeros":
                self.call("aten::zero_", {"self": recorded}, [recorded])


class _On(DeviceName):
    """A device argument given by its id in the capture: the device that a tensor is on."""

    def __init__(self, device: int) -> None:
        super().__init__(None)
        object.__setattr__(self, "device", device)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in _tensors(item)] if isinstance(value, list | tuple) else []


def _specs(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec(value.meta.dtype, value.meta.sizes, value.meta.strides, None, value.offset)
    return [_specs(each) for each in value] if isinstance(value, list | tuple) else value
