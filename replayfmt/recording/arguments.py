"""One operator call while it is being recorded: its values, turned into a signature key and slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import OpStatus, RecordKind, ValueKind
from replayfmt.format.model import Node, Signature
from replayfmt.native.hook import UnknownValue
from replayfmt.pytorch.tensors.composites import is_composite, is_packed, take_apart
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, LAYOUT_CODE, MEMORY_FORMAT_CODE, call_undispatched

from .kernels import CapturedKernel
from .special_values import LEAST_ADDRESS, Unpacked
from .storages.trackers import Beside, Tracker
from .stream.records import Unrepresentable


class Token(NamedTuple):
    """One node of a key: its kind, its constant, and the number of children that follow."""

    kind: ValueKind
    constant: int | str | None = None
    children: int = 0


class TensorUse(NamedTuple):
    """A plain tensor that is an argument or a result of a call. `argument` is its index in the schema (or among the
    results)."""

    argument: int
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    tracker: Tracker
    number: int  # tensor id
    meta: int


class KnownTensor(NamedTuple):
    """A tensor of the capture, whether or not the program still has it."""

    number: int  # tensor id


class CallValues:
    """The values of one call, while they are collected."""

    __slots__ = ("argument", "count", "floats", "ints", "key", "scalars", "tensors", "uses")

    def __init__(self, *, scalars: bool = True) -> None:
        """Without `scalars`, those and strings, which may reveal content, become None; but not those inside a
        composite, which describe its shape."""
        self.scalars = scalars
        self.key: list[Token] = []
        self.tensors: list[int] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.uses: list[TensorUse] = []
        self.argument = 0
        self.count = 0  # of results


class OpCall:
    __slots__ = (
        "__weakref__",
        "args",
        "beside",
        "contents",
        "generators",
        "kernel",
        "kwargs",
        "places",
        "ran",
        "values",
    )

    def __init__(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], *, ran: bool = False
    ) -> None:
        """`ran`: it has run before anything of it was looked at."""
        self.kernel = kernel
        self.ran = ran
        self.args = args
        self.kwargs = kwargs
        self.values = CallValues()
        self.generators: list[torch.Generator] = []
        self.places: Any = None  # where it writes, if that is a part of partly unwritten memory (calls.py)
        self.beside: dict[int, Beside] = {}  # by storage: what lay beside what it writes, if others may write there
        self.contents: list[tuple[TensorUse, int | None]] = []  # the content of its assumed arguments before it ran


_INT64 = range(-(1 << 63), 1 << 63)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SCALARS = (bool, int, float, complex, str, *_SYMBOLIC)


_NONE = Token(ValueKind.none)
_FALSE, _TRUE = Token(ValueKind.bool, 0), Token(ValueKind.bool, 1)
_INT, _FLOAT, _COMPLEX = Token(ValueKind.int), Token(ValueKind.float), Token(ValueKind.complex)
_TENSOR, _STORAGE, _GENERATOR = Token(ValueKind.tensor), Token(ValueKind.storage), Token(ValueKind.generator)


@functools.lru_cache(1024)
def _string(value: str) -> Token:
    return Token(ValueKind.string, value)


_PACKED_BY_MKL = (
    "a tensor in MKL's own layout, which cannot be read: Inductor packed it when it froze the model (freezing); "
    "torch._inductor.config.cpp.weight_prepack=False keeps it plain, from before the first model is frozen"
)


class Encoder:
    """Encodes the values of calls. `tensor` resolves a plain tensor to its use; `storage` and `generator` return
    ids."""

    def __init__(
        self,
        tensor: Callable[[OpCall, torch.Tensor, int], TensorUse],
        storage: Callable[[OpCall, torch.UntypedStorage, int], int],
        generator: Callable[[torch.Generator], int],
        device: Callable[[torch.device], int],
        large_integer: Callable[[OpCall, int], int | torch.Tensor | None],
        unpacked: Unpacked,
    ) -> None:
        """`large_integer` returns what is recorded for an integer that may be an address: the integer itself, the
        tensor that represents it, or None."""
        self._tensor = tensor
        self._storage = storage
        self._generator = generator
        self._device = device
        self._large_integer = large_integer
        self._unpacked = unpacked

    def arguments(self, call: OpCall) -> None:
        """Add the arguments of a call to its values. Raises Unrepresentable."""
        values = call.values
        for index, value in enumerate(call.args):
            values.argument = index
            self.add(value, values, call)
        for name, value in call.kwargs.items():
            values.argument = call.kernel.indices[name]
            self.add(value, values, call)

    def results(self, call: OpCall, returned: Any, *, scalars: bool = True) -> CallValues:
        """The values of what a call returned. Raises Unrepresentable."""
        values, results = CallValues(scalars=scalars), call.kernel.results
        for index, value in enumerate((returned,) if results == 1 else returned if results else ()):
            values.argument, values.count = index, index + 1
            self.add(value, values, call)
        return values

    def add(self, value: Any, values: CallValues, call: OpCall) -> None:
        """Append one argument or result of `call`. Raises Unrepresentable."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._add_tensor(value, values, call)
        elif value is None:
            values.key.append(_NONE)
        elif not values.scalars and isinstance(value, _SCALARS):
            recorded = self._large_integer(call, value) if type(value) is int and value >= LEAST_ADDRESS else None
            self.add(recorded if isinstance(recorded, torch.Tensor) else None, values, call)
        elif kind is bool:
            values.key.append(_TRUE if value else _FALSE)
        elif kind is int:
            self._add_int(value, values, call)
        elif kind is float:
            values.key.append(_FLOAT)
            values.floats.append(value)
        elif kind is str:
            values.key.append(_string(value))
        elif kind is KnownTensor:
            values.key.append(_TENSOR)
            values.tensors.append(value.number)
        elif isinstance(value, (list, tuple)):
            values.key.append(Token(ValueKind.tuple if isinstance(value, tuple) else ValueKind.list, None, len(value)))
            for item in value:
                self.add(item, values, call)
        else:
            self._add_constant(value, values, call)

    def _add_int(self, value: int, values: CallValues, call: OpCall) -> None:
        if value not in _INT64:
            raise Unrepresentable("opaque_argument", f"the integer {value} does not fit 64 bits")
        if value >= LEAST_ADDRESS:
            recorded = self._large_integer(call, value)
            if recorded is not value:
                self.add(recorded, values, call)
                return
        values.key.append(_INT)
        values.ints.append(value)

    def _add_constant(self, value: Any, values: CallValues, call: OpCall) -> None:
        key = values.key
        if isinstance(value, str):
            key.append(_string(value))
        elif isinstance(value, torch.dtype):
            if value not in DTYPE_CODE:
                raise Unrepresentable("opaque_argument", f"the format has no code for {value}")
            key.append(Token(ValueKind.dtype, int(DTYPE_CODE[value])))
        elif isinstance(value, torch.device):
            key.append(Token(ValueKind.device, self._device(value)))
        elif isinstance(value, torch.memory_format):
            key.append(Token(ValueKind.memory_format, int(MEMORY_FORMAT_CODE[value])))
        elif isinstance(value, torch.layout):
            key.append(Token(ValueKind.layout, int(LAYOUT_CODE[value])))
        elif isinstance(value, complex):
            key.append(_COMPLEX)
            values.floats += (value.real, value.imag)
        elif isinstance(value, torch.Generator):
            key.append(_GENERATOR)
            values.ints.append(self._generator(value))
        elif isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            key.append(_STORAGE)
            storage = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
            values.ints.append(self._storage(call, storage, values.argument))
        elif isinstance(value, torch.ScriptObject):
            self._add_composite(value, values, call)
        elif isinstance(value, _SYMBOLIC):
            self.add(_concrete(value), values, call)
        elif isinstance(value, (bool, int, float)):  # subclasses
            self.add(int(value) if isinstance(value, int) else float(value), values, call)
        elif isinstance(value, UnknownValue):
            raise Unrepresentable("opaque_argument", f"a value of the type {value.type}, which Python cannot have")
        else:
            raise Unrepresentable(
                "opaque_argument", f"a value of type {type(value).__module__}.{type(value).__qualname__}"
            )

    def _add_tensor(self, tensor: torch.Tensor, values: CallValues, call: OpCall) -> None:
        if is_composite(tensor):
            self._add_composite(tensor, values, call)
            return
        use = self._tensor(call, tensor, values.argument)
        values.key.append(_TENSOR)
        values.tensors.append(use.number)
        values.uses.append(use)

    def _add_composite(self, value: torch.Tensor | torch.ScriptObject, values: CallValues, call: OpCall) -> None:
        packed = is_packed(value)
        if packed and call.kernel.namespace == "mkl" and isinstance(value, torch.Tensor):
            raise Unrepresentable("mkldnn_layout", _PACKED_BY_MKL)
        try:
            form, parts = self._unpacked.parts(value) if packed else call_undispatched(take_apart, value)
        except TypeError as error:
            raise Unrepresentable("opaque_argument", str(error)) from error
        values.key.append(Token(ValueKind.composite, form, len(parts)))
        scalars, values.scalars = values.scalars, True
        for part in parts:
            self.add(part, values, call)
        values.scalars = scalars


def _concrete(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool:
    node = value.node
    for convert in ("maybe_as_int", "maybe_as_float", "maybe_as_bool"):
        known = getattr(node, convert, lambda: None)()
        if known is not None:
            return known
    raise Unrepresentable("symbolic_argument", "a symbolic number without a concrete value")


def op_signature(call: OpCall, results: CallValues, kernel: int, status: OpStatus) -> Signature:
    """The signature of a call. `kernel`: its id in the capture."""
    names = [each.name for each in call.kernel.arguments[: len(call.args)]] + list(call.kwargs)
    args, returned = build_nodes(call.values.key, names), build_nodes(results.key, [""] * results.count)
    return Signature(RecordKind.op, args, returned, kernel, status)


def build_nodes(tokens: Sequence[Token], names: Sequence[str]) -> tuple[Node, ...]:
    """The nodes of a flat key: one top-level node per name."""
    remaining = iter(tokens)
    return tuple(_build_node(remaining, name) for name in names)


def _build_node(remaining: Iterator[Token], name: str) -> Node:
    token = next(remaining)
    return Node(token.kind, name, token.constant, tuple(_build_node(remaining, "") for _ in range(token.children)))
