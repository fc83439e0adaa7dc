"""What the recorder knows of an operator overload before it sees a call: computed once, from its schema and its name.

The lists of names here are the recorder's knowledge of PyTorch's operators: which ones only look at a tensor's shape,
which overwrite without reading, which leave memory unwritten. Everything not listed reads its inputs and writes its
results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from replayfmt.format.operator_names import name_problem
from replayfmt.pytorch.opaque_results import OpaqueResults
from replayfmt.pytorch.schemas import printed_schema

from ..custom_operators.composite_operators import (
    INTERNAL_NAMESPACES,
    PYTORCH_NAMESPACES,
    comes_whole,
    is_composite_operator,
    own_backends,
)
from ..state.autocast import AsInProgram, Body, InParts


class Action(Enum):
    """What the mode does with a call."""

    record = 1
    ignore = 2  # run it, record nothing
    decompose = 3  # a composite of PyTorch's own that reached the mode: its parts are recorded
    collective = 4  # run it, record that it cannot be reproduced
    scope_enter = 5  # torch.profiler.record_function
    scope_exit = 6


# Results are memory that nobody has written.
_EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "empty_quantized",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
}

# No bytes of any input are read, only their metadata.
_READS_NOTHING = _EMPTY | {
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "_unsafe_view",
    "is_same_size",
    "_has_same_storage_numel",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
    "size",
    "stride",
    "numel",
    "dim",
    "set_",
    "resize_",
    "resize_as_",
    "_resize_output_",
    "resize_storage_bytes_",
    "_fused_sdp_choice",
    "_assert_tensor_metadata",
    "result_type",
    "detach_",
    "as_strided_",
    "lift",
    "_nested_tensor_storage_offsets",
    "sym_is_contiguous",
    "is_contiguous",
    "is_non_overlapping_and_dense",
    "device",
    "layout",
    "zero_",
    "_foreach_zero_",
}

# In-place operators that overwrite all of their first argument without reading it.
_OVERWRITES_SELF = {
    "copy_",
    "fill_",
    "zero_",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "_foreach_copy_",
    "_foreach_zero_",
    "_no_grad_uniform_",
    "_no_grad_normal_",
    "_no_grad_fill_",
    "_no_grad_zero_",
    "_resize_output_",
    "eye_",
    "_fill_mem_eff_dropout_mask_",
    "copy_sparse_to_sparse_",
}

# In-place operators that write a part of their first argument, which part depends on data, and read none of it.
_WRITES_SOME = {
    "index_put_",
    "_index_put_impl_",
    "scatter_",
    "index_copy_",
    "index_fill_",
    "masked_fill_",
    "masked_scatter_",
    "put_",
    "fill_diagonal_",
    "_unsafe_index_put_",
    "_unsafe_masked_index_put_accumulate_",
}
_ACCUMULATES = ("accumulate", "reduce")  # with one of these arguments set, the operators above read what they write

# With beta=0 the first argument is not read.
_BETA = {
    "addmm",
    "addmm_",
    "baddbmm",
    "baddbmm_",
    "addbmm",
    "addbmm_",
    "addmv",
    "addmv_",
    "addr",
    "addr_",
    "_addmm_activation",
}

# Arguments whose bytes are not read, by operator: results without an annotation, or tensors that lend only their shape.
_UNREAD = {
    "aten::rrelu_with_noise": ("noise",),
    "aten::rrelu_with_noise_": ("noise",),
    "aten::bernoulli.p": ("self",),
}

# Operators that only use an argument, of what they write or read as the schema says, where another one is true.
_ONLY_WITH = {
    "aten::rrelu_with_noise": ("noise", "training"),
    "aten::rrelu_with_noise_": ("noise", "training"),
    "aten::rrelu_with_noise_backward": ("noise", "training"),
}

# The argument whose bytes are copied as they are, all of them, and nothing else.
_COPIES = {"copy_": 1, "clone": 0, "_to_copy": 0}
_PACKS = "_prepack"     # in the names of operators that copy a weight into packed parameters

# Arguments that are written without an annotation that says so.
_RUNNING = ("running_mean", "running_var")
_UNANNOTATED_WRITES = {
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::miopen_batch_norm": _RUNNING,
}

# They draw random numbers, or may, without the tag nondeterministic_seeded.
_UNTAGGED_RANDOM = {"_no_grad_normal_", "_no_grad_uniform_", "seed", "manual_seed", "initial_seed"}

_COLLECTIVE_NAMESPACES = (
    "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor",
)
_MAPS_FILES = ("aten::from_file",)
_KNOWN_OPAQUE = OpaqueResults()


@dataclass(frozen=True)
class Argument:
    name: str
    written: bool
    keyword_only: bool


class KernelFacts:
    """One operator overload. `id` is its kernel id in the capture, 0 until a call of it is recorded."""

    __slots__ = (
        "accumulates_at",
        "action",
        "arguments",
        "beta",
        "body",
        "call",
        "copies",
        "dropout",
        "empty",
        "func",
        "id",
        "in_place_view",
        "indices",
        "mixed_lists",
        "name",
        "namespace",
        "only_with",
        "opaque_results",
        "overwrites_self",
        "own",
        "packs",
        "own_kernels",
        "packs",
        "parts",
        "quick",
        "random",
        "reads_nothing",
        "results",
        "tensor_places",
        "unnameable",
        "unread",
        "view",
        "writes",
        "writes_some",
    )

    def __init__(self, func: torch._ops.OpOverload, opaque: OpaqueResults = _KNOWN_OPAQUE) -> None:
        schema = func._schema
        self.func = func
        self.id = 0
        self.name = schema.name
        self.namespace, _, base = schema.name.partition("::")
        self.own = self.namespace in INTERNAL_NAMESPACES
        self.unnameable = name_problem(self.name, self.overload)
        self.call = caller_of(func)
        # Where no `__torch_function__` is there to see it.
        self.quick = func._op if self.own and _takes_numbers(func) else self.call
        quiet = _UNANNOTATED_WRITES.get(schema.name, ())
        self.arguments = tuple(
            Argument(a.name, a.name in quiet or (a.alias_info is not None and a.alias_info.is_write), a.kwarg_only)
            for a in schema.arguments
        )
        # Modules pack the weights that they are made with, which nobody has written, before they are given others.
        self.packs = self.namespace == "quantized" and base.endswith("_prepack")
        self.unread = _UNREAD.get(func.name(), ())
        self.indices = {a.name: index for index, a in enumerate(self.arguments)}
        only = _ONLY_WITH.get(schema.name)
        self.only_with = None if only is None else (self.indices[only[0]], self.indices[only[1]])
        # Lists whose items may be of any type of number: [1], [1.0] and [True] compare equal, and compute other things.
        self.mixed_lists = any("List[number]" in str(a.type) for a in schema.arguments)
        # Where a number comes in a tensor's place, though a call from Python takes none there.
        self.tensor_places = () if _takes_numbers(func) else tuple(
            index for index, a in enumerate(schema.arguments) if isinstance(a.type, torch.TensorType))
        self.results = len(schema.returns)
        aten = self.namespace in ("aten", "prims", "prim", "inductor", "fsdp")
        self.view = func.is_view
        self.empty = aten and base in _EMPTY
        self.reads_nothing = self.view or (aten and base in _READS_NOTHING) or torch.Tag.inplace_view in func.tags
        self.overwrites_self = aten and base in _OVERWRITES_SELF
        self.writes_some = aten and base in _WRITES_SOME
        self.packs = self.namespace == "quantized" and _PACKS in base
        self.copies = 0 if self.packs else _COPIES.get(base, -1) if aten else -1
        self.beta = aten and base in _BETA
        self.in_place_view = torch.Tag.inplace_view in func.tags
        # Views written to nothing: an in-place view changes metadata, not memory.
        self.writes = () if self.in_place_view else tuple(i for i, a in enumerate(self.arguments) if a.written)
        self.accumulates_at = tuple(i for i, a in enumerate(self.arguments) if a.name in _ACCUMULATES)
        self.random = (
            torch.Tag.nondeterministic_seeded in func.tags
            or base in _UNTAGGED_RANDOM
            or not self.own
            or any("Generator" in str(a.type) for a in schema.arguments)
        )
        # Attention draws only with dropout.
        self.dropout = self.indices.get("dropout_p", -1) if self.namespace == "aten" else -1
        self.opaque_results = tuple(opaque.of(schema.name, self.overload, self.results))
        self.action = self._choose_action(base)
        foreign = self.action is Action.record and self.namespace not in PYTORCH_NAMESPACES and not self.unnameable
        self.body = Body(func) if foreign else None
        composite = self.action is Action.decompose
        self.parts = InParts(func) if composite else None
        own = own_backends(func.name()) if composite else ()
        self.own_kernels = tuple(getattr(torch._C.DispatchKey, backend) for backend in own)

    def _choose_action(self, base: str) -> Action:
        if self.unnameable:
            return Action.record    # PyTorch itself cannot be asked about it
        if self.namespace == "profiler":
            if base.startswith("_record_function_enter"):
                return Action.scope_enter
            return Action.scope_exit if base.startswith("_record_function_exit") else Action.ignore
        if self.namespace in _COLLECTIVE_NAMESPACES:
            return Action.collective
        if self.func.name() in _MAPS_FILES:
            return Action.ignore  # what it gives enters at its first use, as memory mapped before the capture does
        if not comes_whole(self.name) and is_composite_operator(self.func.name()):
            return Action.decompose
        return Action.record

    def has_own_kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the dispatcher runs this composite as one kernel for these arguments, not in parts."""
        if not self.own_kernels:
            return False
        keys = [torch._C._dispatch_keys(tensor) for tensor in tensors_in((*args, *kwargs.values()))]
        return any(given.has(key) for given in keys for key in self.own_kernels)

    @property
    def overload(self) -> str:
        return str(self.func._schema.overload_name or "default")

    @property
    def schema(self) -> str:
        return printed_schema(self.func._schema)

    def argument(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value a call gives for an argument; None where it leaves it to the schema's default."""
        if index < len(args):
            return args[index]
        return kwargs.get(self.arguments[index].name)

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call may draw random numbers."""
        return self.random and (self.dropout < 0 or bool(self.argument(self.dropout, args, kwargs)))

    def reads(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call reads bytes of the tensors in its argument `index`."""
        if self.reads_nothing:
            return False
        argument = self.arguments[index]
        if argument.written and argument.keyword_only and self.namespace == "aten":
            return False  # an out= argument
        if argument.name in self.unread or not self._counts(index, args, kwargs):
            return False
        if argument.name == "momentum_buffer_list" and self.name == "aten::_fused_sgd_":
            return not kwargs.get("is_first_step")
        if index == 0:
            if self.overwrites_self or self.packs:
                return False
            if self.writes_some:
                return any(self.argument(i, args, kwargs) for i in self.accumulates_at)
            if self.beta:
                beta = kwargs.get("beta", 1)
                return not (isinstance(beta, (int, float)) and beta == 0)
        if self.name in ("aten::expand_as", "aten::view_as", "aten::type_as", "aten::reshape_as"):
            return index == 0
        return not self._computes_nothing(args, kwargs)

    @staticmethod
    def _computes_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is for the meta device, which knows no content."""
        device = kwargs.get("device")
        given = tensors_in((*args, *kwargs.values()))
        return (device is not None and torch.device(device).type == "meta") or any(tensor.is_meta for tensor in given)

    def writes_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The arguments that this call writes."""
        if self.only_with is None:
            return self.writes
        return tuple(index for index in self.writes if self._counts(index, args, kwargs))

    def _counts(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call uses an argument at all, beyond its shape."""
        if self.only_with is None or index != self.only_with[0]:
            return True
        return bool(self.argument(self.only_with[1], args, kwargs))

    def writes_all(self, index: int) -> bool:
        """Whether a call that writes its argument `index` writes every element of it."""
        return not (self.writes_some and index == 0)


def caller_of(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calls an overload from inside the mode's handler as the program would have called it."""
    # No `__torch_function__` sees a call that comes to the dispatch mode, so none may see it leave.
    namespace = func._schema.name.partition("::")[0]
    if namespace in INTERNAL_NAMESPACES or name_problem(func._schema.name, func._schema.overload_name or "default"):
        return unheard(func)
    return AsInProgram(func, unheard(func))


def unheard(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calls an overload past every `__torch_function__`, of modes and of its arguments' classes. (Those that are
    called inside the operator are left alone.)"""
    if not _takes_numbers(func):
        return functools.partial(torch._C._dispatch_call_boxed, func._handle)
    call = func._op

    def call_with_numbers(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = call(*args, **kwargs)
        return result

    return call_with_numbers


def _takes_numbers(func: torch._ops.OpOverload) -> bool:
    """Whether numbers may stand for tensors among its arguments, which only some ways to call it allow."""
    return bool(torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value and its lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
