"""Infers results that the trace does not record, by running the operator on tensors without memory.

Meta tensors have sizes, strides and dtypes but no bytes, so the operator computes only the shapes of its results. If
that fails (the shape depends on the content, or the operator has no such kernel) the results stay unknown. A trial
takes half a millisecond; for many operators, one answers for all calls whose sizes have the same pattern (`Trials`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch._refs.special
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload

from replayfmt.format.codes import ITEM_BYTES, DType, Layout, MemoryFormat, StorageOrigin
from replayfmt.pytorch.operators import acts_outside, operator_named
from replayfmt.pytorch.overloads import find_overload
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT, mark_view
from replayfmt.pytorch.traced_names import Guess

from .arguments import DefaultGenerator, DeviceName, ReturnedStorage, TensorSpec
from .synthesis import Tensor, TracedStorage, bytes_needed, contiguous, strided_meta

_MOST_RESULTS = 100_000


@dataclass(frozen=True)
class AliasedArgument:
    """A result that is one of the arguments; `argument` is its index among the tensor arguments."""

    argument: int


@dataclass(frozen=True)
class ResultShape:
    """A tensor result. `shares` is the tensor argument whose storage it is on; if None, it is on new storage number
    `fresh`."""

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    shares: int | None
    fresh: int


@dataclass(frozen=True)
class Results:
    """What a call returns: Same, Shape, None, and lists of these; or why that is unknown. `refused`: because the
    operator does not take these arguments."""

    values: tuple[Any, ...] | None
    unknown: str = ""
    refused: bool = False


# Operators that take any sizes of the same pattern, besides the pointwise ones: which sizes are equal, or 0 or 1.
# fmt: off
_TAKE_PATTERNS = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "linear", "matmul", "t", "transpose", "unsqueeze", "detach",
    "alias", "clone", "contiguous", "copy_", "fill_", "zero_", "empty_like", "zeros_like", "ones_like", "sum", "mean",
    "amax", "amin", "_softmax", "_log_softmax", "_to_copy", "native_batch_norm", "native_batch_norm_backward",
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "miopen_batch_norm", "miopen_batch_norm_backward",
})
# fmt: on
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_MOST_ELEMENTS = 1 << 60  # calls with more are tried as they are: their bytes may not be countable


class Trials:
    """Results of operators for given arguments, each found once.

    Operators that take patterns are tried with a prime number in place of each size. The sizes and strides of the
    results are products of these, and so tell those of every call of the pattern.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Results] = {}
        self._patterns: dict[Any, Results] = {}

    def of(self, schema: torch.FunctionSchema, arguments: Sequence[tuple[str, Any]]) -> Results:
        """The results of a call with these bound arguments."""
        key = schema.name, schema.overload_name, _key(arguments)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._by_pattern(schema, arguments) or infer(schema, arguments)
        return known

    def _by_pattern(self, schema: torch.FunctionSchema, arguments: Sequence[tuple[str, Any]]) -> Results | None:
        """The results, None if the pattern of sizes does not tell them."""
        if not _takes_patterns(schema.name, schema.overload_name):
            return None
        primes = {0: 0, 1: 1}  # by size
        try:
            pattern = [(name, _with_primes(value, primes)) for name, value in arguments]
            key = schema.name, schema.overload_name, _key(pattern)
            if key not in self._patterns:
                self._patterns[key] = infer(schema, pattern)
            values = self._patterns[key].values
            if values is None or any(each.shares is not None for each in shapes(values)) and _has_offset(arguments):
                return None
            sizes = {prime: size for size, prime in primes.items()}
            return Results(tuple(_with_sizes(each, sizes) for each in values))
        except LookupError:
            return None


@lru_cache(maxsize=4096)
def _takes_patterns(name: str, overload: str) -> bool:
    found = None if acts_outside(name) else find_overload(name, overload or "default")
    namespace, _separator, base = name.partition("::")
    return found is not None and ((namespace == "aten" and base in _TAKE_PATTERNS) or torch.Tag.pointwise in found.tags)


def _with_primes(value: Any, primes: dict[int, int]) -> Any:
    """An argument with a prime in place of each size. Raises LookupError for what has no pattern."""
    if isinstance(value, list):
        return [_with_primes(each, primes) for each in value]
    if isinstance(value, MemoryFormat):
        raise LookupError
    if not isinstance(value, TensorSpec):
        return value
    sizes = value.sizes
    if sizes is None or value.dtype is None or value.flags or math.prod(sizes) >= _MOST_ELEMENTS:
        raise LookupError
    turned = len(sizes) == 2 and value.strides == (1, sizes[0])
    if not turned and value.strides not in (None, contiguous(sizes)):
        raise LookupError
    for size in sizes:
        if size not in primes:
            primes[size] = _PRIMES[len(primes) - 2]
    sizes = tuple(primes[size] for size in sizes)
    return TensorSpec(value.dtype, sizes, (1, sizes[0]) if turned else None)


def _has_offset(value: Any) -> bool:
    """Whether a tensor among arguments begins inside its storage, as views of it then do, too."""
    if isinstance(value, list | tuple):
        return any(map(_has_offset, value))
    return isinstance(value, TensorSpec) and value.offset != 0


def _with_sizes(value: Any, sizes: dict[int, int]) -> Any:
    """A result with the sizes in place of the primes. Raises LookupError if it cannot be known that way."""
    if isinstance(value, list):
        return [_with_sizes(each, sizes) for each in value]
    if not isinstance(value, ResultShape):
        return value

    def number(product: int) -> int:
        found = sizes.get(product)
        if found is not None:
            return found
        found = 1
        for prime, size in sizes.items():
            while prime > 1 and product % prime == 0:
                product, found = product // prime, found * size
        if product != 1:
            raise LookupError
        return found

    shape, strides = (tuple(number(each) for each in part) for part in (value.sizes, value.strides))
    if math.prod(shape) >= _MOST_ELEMENTS:
        raise LookupError
    return replace(value, sizes=shape, strides=strides)


def _key(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.dtype, value.sizes, value.strides, value.offset, value.flags
    if type(value) in (list, tuple):
        return tuple([_key(each) for each in value])
    kind = type(value)
    return value if kind is str or value is None else (kind, repr(value) if kind is float else value)


def infer(schema: torch.FunctionSchema, arguments: Sequence[tuple[str, Any]]) -> Results:
    """The results of a call with these bound arguments."""
    if not schema.returns:
        return Results(())
    name = schema.overload_name or "default"
    does = acts_outside(schema.name)
    if does is not None:
        return Results(None, f"{schema.name} {does}, and is not tried out")
    overload = find_overload(schema.name, name)
    if overload is None:
        return Results(None, f"torch.ops has no {schema.name}.{name}")
    named, lists = _signature(overload)
    if lists and _is_endless(arguments):
        return Results(None, f"it may return more than {_MOST_RESULTS} tensors")
    tensors: list[torch.Tensor] = []
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the operator's warnings are meant for its callers
            positional, keywords = _arguments(named, arguments, tensors)
            returned = overload(*positional, **keywords)
    except Exception as error:  # any operator may fail in any way without content
        told = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return Results(None, told, _blames_arguments(error))
    storages: dict[int, int] = {}
    values = (returned,) if len(schema.returns) == 1 else tuple(returned)
    try:
        return Results(tuple(_described(value, tensors, storages) for value in values))
    except TypeError as error:
        return Results(None, str(error))


@contextmanager
def dynamo_unneeded() -> Iterator[None]:
    """Inside, trials do not import torch._dynamo, which takes longer than a trace of some MB and keeps an exception
    with the frames of all that called it. PyTorch's Python kernels import it at their first call, to be left alone by
    it when they are compiled: here, they are not."""
    kernels = [each for each in _python_kernels() if not hasattr(each, _LEFT_ALONE)]
    try:
        for each in kernels:
            setattr(each, _LEFT_ALONE, each)
        yield
    finally:
        for each in kernels:
            delattr(each, _LEFT_ALONE)


@cache
def _python_kernels() -> list[Any]:
    """PyTorch's Python kernels that import torch._dynamo."""
    modules = (vars(module).values() for module in (torch._refs, torch._refs.special))
    kernels: dict[int, Any] = {}
    for each in chain(*modules, *(table.values() for table in global_decomposition_table.values())):
        while isinstance(each, FunctionType):
            cells = dict(zip(each.__code__.co_freevars, each.__closure__ or (), strict=True))
            within = cells["fn"].cell_contents if "fn" in cells else None
            if each.__globals__ is vars(torch._compile):
                kernels[id(within)] = within
            each = within
    return list(kernels.values())


_LEFT_ALONE = "__dynamo_disable"


# What operators say that need content, a device, or another state of autograd to be tried.
_NEEDS_MEMORY = re.compile(
    r"\b(meta|cpu|cuda|hip|xpu|mps|device|backend|pin(ned|ning)?)\b|fake|data.dependent|not implemented"
    r"|views in-place|requires.grad|leaf variable|inference tensor",
    re.IGNORECASE,
)


def _blames_arguments(error: Exception) -> bool:
    """Whether an operator failed because of its arguments, not because they have no content here."""
    if isinstance(error, NotImplementedError | TypeError):  # an argument that only stands for a value
        return False
    return not _NEEDS_MEMORY.search(f"{type(error).__name__} {error}")


def refusal(schema: torch.FunctionSchema, results: Results) -> tuple[str, str]:
    """What a call's trial without data says against it, as (why it is incomplete, what is doubtful about it): PyTorch's
    own operators take the same arguments without data as with it, of others this is not certain."""
    if not results.refused:
        return "", ""
    if operator_named(schema.name).own:
        return f"the operator does not take these arguments: {results.unknown}", ""
    return "", Guess(f"tried without data, the operator does not take these arguments: {results.unknown}")


def _is_endless(arguments: Sequence[tuple[str, Any]]) -> bool:
    """Whether an operator that returns a list may return too many tensors: a trace may contain any size."""
    return any(
        isinstance(value, TensorSpec) and max(value.sizes or (0,), default=0) > _MOST_RESULTS
        for _name, value in arguments
    )


@lru_cache(maxsize=4096)
def _signature(overload: OpOverload) -> tuple[list[tuple[str, bool]], bool]:
    """The arguments of an operator, with whether they go by name alone, and whether it returns lists."""
    schema = overload._schema
    lists = any(isinstance(each.type, torch._C.ListType) for each in schema.returns)
    return [(each.name, each.kwarg_only) for each in schema.arguments], lists


def _arguments(
    named: Sequence[tuple[str, bool]], arguments: Sequence[tuple[str, Any]], tensors: list[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    given = dict(arguments)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    gap = False
    for name, by_name in named:
        if name not in given:
            gap = True
            continue
        value = _on_meta(given[name], tensors)
        if gap or by_name:
            keywords[name] = value
        else:
            positional.append(value)
    if not tensors and any(name == "device" for name, _by_name in named):
        keywords["device"] = torch.device("meta")
    if keywords.get("pin_memory"):
        keywords["pin_memory"] = False
    return positional, keywords


def _on_meta(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, TensorSpec):
        assert value.sizes is not None and value.dtype is not None
        strides = contiguous(value.sizes) if value.strides is None else value.strides
        dtype = TORCH_DTYPE[value.dtype]
        length = bytes_needed(value.dtype, value.sizes, strides, value.offset) // ITEM_BYTES[value.dtype]
        if value.offset and length:
            base = torch.empty(length, dtype=dtype, device="meta")
            tensor = base.as_strided(value.sizes, strides, value.offset)
        else:
            tensor = torch.empty_strided(value.sizes, strides, dtype=dtype, device="meta")
        mark_view(tensor, value.flags)
        tensors.append(tensor)
        return tensor
    if isinstance(value, list):
        return [_on_meta(each, tensors) for each in value]
    if isinstance(value, DType):
        return TORCH_DTYPE[value]
    if isinstance(value, Layout):
        return TORCH_LAYOUT[value]
    if isinstance(value, MemoryFormat):
        return TORCH_MEMORY_FORMAT[value]
    if isinstance(value, DeviceName):
        return torch.device("meta")
    if isinstance(value, ReturnedStorage):
        raise TypeError("its storage is not known before it returns")
    return None if isinstance(value, DefaultGenerator) else value


def _described(value: Any, tensors: list[torch.Tensor], storages: dict[int, int]) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_described(each, tensors, storages) for each in value]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"it returns a {type(value).__name__}, whose value is in no trace")
    if value.layout is not torch.strided or value.device.type != "meta" or value.dtype not in DTYPE_CODE:
        raise TypeError(f"it returns a {value.layout} tensor of {value.dtype} on {value.device}")
    for index, tensor in enumerate(tensors):
        if value is tensor:
            return AliasedArgument(index)
    memory = value.untyped_storage()._cdata
    shared = next((i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == memory), None)
    fresh = -1 if shared is not None else storages.setdefault(memory, len(storages))
    return ResultShape(
        DTYPE_CODE[value.dtype], tuple(value.shape), tuple(value.stride()), int(value.storage_offset()), shared, fresh
    )


def realize(results: Results, arguments: Sequence[Tensor], device: int) -> list[Any] | None:
    """The values of results for one call. `arguments` are its tensors in order, `device` is that of new storages."""
    if results.values is None:
        return None
    lengths: dict[int, int] = {}
    for shape in shapes(results.values):
        if shape.shares is None:
            length = bytes_needed(shape.dtype, shape.sizes, shape.strides, shape.offset)
            lengths[shape.fresh] = max(length, lengths.get(shape.fresh, 0))
    storages = {fresh: TracedStorage(length, device, StorageOrigin.op) for fresh, length in lengths.items()}

    def value(each: Any) -> Any:
        if isinstance(each, AliasedArgument):
            return arguments[each.argument]
        if isinstance(each, list):
            return [value(child) for child in each]
        if not isinstance(each, ResultShape):
            return None
        storage = storages[each.fresh] if each.shares is None else arguments[each.shares].storage
        where = device if each.shares is None else arguments[each.shares].meta.device
        return Tensor(storage, strided_meta(each.dtype, where, each.sizes, each.strides), each.offset)

    return [value(each) for each in results.values]


def shapes(values: Sequence[Any]) -> list[ResultShape]:
    """The tensors among results that are not arguments themselves."""
    found: list[ResultShape] = []
    for each in values:
        if isinstance(each, ResultShape):
            found.append(each)
        elif isinstance(each, list):
            found += shapes(each)
    return found
