"""What is known of operators besides their schemas: one table for recording, replay, imports and exports.

PyTorch's schemas leave out what a capture has to know: who only looks at a tensor's shape, who overwrites without
reading, who writes arguments that no annotation names, who opens files or talks to other processes. Everything not
listed reads its inputs, writes its results and what its schema says, and only computes. Operators of other packages
than PyTorch's are known by their schemas alone.

`tests/safety/test_host_operators.py` and `tests/project/test_operators.py` walk over all operators that PyTorch
registers and want to know each namespace, and each operator of a kind that might do more than its schema says.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replayfmt.errors import UsageError

# Those that `import torch` registers; others of PyTorch's come with modules that only the user has imported.
ALWAYS_THERE = frozenset(
    {"aten", "quantized", "_quantized", "quantization", "sparse", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"}
)
# Whose operators are what their schemas say: they read no autocast state or other state of the program below the
# dispatch level of a capture, write what they declare, draw numbers only with the tag that says so.
OWN = ALWAYS_THERE | {"prim", "prims", "rngprims", "opreplay"}
# Those that a file can call with torch alone.
WITH_TORCH_ALONE = ALWAYS_THERE | {"prims"}
# Whose operators compute on tensors, but those that `acts_outside` knows.
COMPUTING = (OWN - {"prim"}) | {"_native", "_test", "fsdp", "inductor", "inductor_prims", "quantized_decomposed"}
COMPUTING |= {"prepacked"}  # XNNPACK's, in PyTorch 2.11
COMPUTING |= {"_native_aot", "coor", "flex_gemm"}  # from PyTorch 2.15 on
COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)
# Of vLLM: they talk through memory that processes share, which other operators (`init_shm_manager`) set up before.
_AMONG_PROCESSES = ("_C::shm_", "_C::init_shm_manager", "_C::join_shm_manager", "_C_custom_ar::")
# Whose composites are what their parts are. Those of other packages are kernels: what their functions do to memory
# themselves is seen in no part.
_IN_PARTS = COMPUTING | {"prim", "static_runtime"}
# Whose operators have names that mean what they mean in aten.
_LIKE_ATEN = frozenset({"aten", "prims", "prim", "inductor", "fsdp"})

_INTERPRETER = "belongs to the TorchScript interpreter"
_ACTING_NAMESPACES = {
    **dict.fromkeys(COLLECTIVES, "talks to other processes"),
    "debug_mode_ops": "is part of PyTorch's debugging",
    "debugprims": "reads files",
    "export": "looks up attributes by name",
    "prim": _INTERPRETER,
    "profiler": "is part of the profiler",
    "static_runtime": _INTERPRETER,
}

_UNCHECKED = "makes tensors without checking that they fit their memory"
_ACTING = {
    "aten::from_file": "opens or creates files",
    "aten::_print": "prints what the capture says",
    "aten::get_gradients": "is part of distributed autograd",
    "aten::_cufft_clear_plan_cache": "changes the state of a device",
    "aten::_cufft_set_plan_cache_max_size": "changes the state of a device",
    "aten::_nested_view_from_buffer": _UNCHECKED,
    "aten::_nested_view_from_buffer_copy": _UNCHECKED,
    "inductor::_alloc_from_pool": _UNCHECKED,
    "inductor::_reinterpret_tensor": _UNCHECKED,
    "inductor::resize_storage_bytes_": "changes the length of memory under the tensors on it",
    "mkldnn::data_ptr": "returns a memory address",
}
# Operators that map a file into memory.
_MAPS_FILES = frozenset({"aten::from_file"})
# Operators that make a view without comparing it with its memory; a replay compares them.
_UNCHECKED_NESTED = frozenset({"aten::_nested_view_from_buffer", "aten::_nested_view_from_buffer_copy"})
_UNCHECKED_VIEWS = frozenset({"aten::_reshape_alias", "aten::_reshape_alias_copy"}) | _UNCHECKED_NESTED
# Composites that do work of their own, through addresses, which is seen in none of their parts.
_DO_WORK_THEMSELVES = frozenset(
    f"aten::_sobol_engine_{what}" for what in ("draw", "ff_", "scramble_", "initialize_state_")
)
# Those that do so on the host where no gradient is wanted, and consist of parts elsewhere.
_IN_PARTS_FOR_GRADIENTS = frozenset({"aten::max_pool1d"})

# Composites whose results C++ code fills through addresses, in part, beside their parts.
_FILL_RESULTS_THEMSELVES = frozenset({"aten::_pad_packed_sequence"})

# Results are memory that has not been written.
_EMPTY = frozenset(
    {
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
)
# What an operator does that only looks at metadata.
# fmt: off
_LOOKS = frozenset({
    "_assert_tensor_metadata", "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "_has_same_storage_numel",
    "_nested_tensor_storage_offsets", "_version", "can_cast", "device", "dim", "is_contiguous",
    "is_pinned", "is_same_size", "is_set_to", "layout", "numel", "output_nr", "q_per_channel_axis",
    "q_per_channel_scales", "q_per_channel_zero_points", "q_scale", "q_zero_point", "qscheme",
    "requires_grad_", "result_type", "size", "stride", "sym_is_contiguous", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride",
})
# fmt: on
# Of other packages, without arguments: what their library was built with. Importing the package asks, and no work
# depends on the answer.
_TELLS_BUILD = re.compile(r"(\w*_)?version|_?is_\w+_available|_?is_compiled_(with|against)_\w+")
# Notify the allocator which stream uses memory. FSDP's is there from PyTorch 2.15 on.
_TELLS_ALLOCATOR = frozenset({"record_stream", "fsdp::record_grad_output_stream"})
_RESIZES = frozenset({"resize_", "resize_as_", "_resize_output_"})
# Give a tensor other memory, and look at nothing of what it had.
_ATTACHES_MEMORY = frozenset({"set_"})
# Change what memory a tensor stands for, or how much.
_MOVES_MEMORY = _RESIZES | _ATTACHES_MEMORY | {"resize_storage_bytes_"}
# Make arguments that they write longer, at their first call: what they were given is gone afterwards.
_GROWS_ARGUMENTS = frozenset({"_fused_moving_avg_obs_fq_helper"})
# In place, and still no more than another view on the same memory.
_VIEWS_IN_PLACE = frozenset(
    {"as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)
# Give what they are given; `lift` copies nothing.
_LIFTS = frozenset({"lift_fresh", "lift", "lift_fresh_copy"})
# Give what they are given, unless a lazy bit is set.
_RESOLVES = frozenset({"resolve_conj", "resolve_neg"})
# Only allocate, look at metadata, or name what is there; `is_nonzero` leaves the rest to what it calls.
_IDLE = _EMPTY | _LOOKS | _MOVES_MEMORY | _VIEWS_IN_PLACE | _RESOLVES | {"lift_fresh", "lift", "is_nonzero"}
# New memory is filled with what depends on no content.
_FILLS_NEW = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "_new_zeros_with_same_feature_meta",
    }
)
_ZEROES = frozenset({"zero_", "_foreach_zero_"})
# No bytes of any input are read, only their metadata.
_READS_NOTHING = (
    _EMPTY
    | _FILLS_NEW
    | _LOOKS
    | _TELLS_ALLOCATOR
    | _MOVES_MEMORY
    | _ZEROES
    | {"_unsafe_view", "detach_", "as_strided_", "lift"}
)
# In-place operators that overwrite all of their first argument without reading it.
_OVERWRITES_SELF = _ZEROES | {
    "copy_",
    "fill_",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "_foreach_copy_",
    "_resize_output_",
    "_fill_mem_eff_dropout_mask_",
    "copy_sparse_to_sparse_",
}
# In-place operators that write a part of their first argument, which part depends on data, and read none of it.
_WRITES_A_PART_OF_SELF = frozenset(
    {
        "index_put_",
        "_index_put_impl_",
        "scatter_",
        "index_copy_",
        "index_fill_",
        "masked_fill_",
        "masked_scatter_",
        "put_",
        "fill_diagonal_",
    }
)
# Operators that do so to a copy.
_WRITES_A_PART_OF_A_COPY = frozenset(
    {
        "index_put",
        "_index_put_impl",
        "_unsafe_index_put",
        "scatter",
        "index_copy",
        "index_fill",
        "masked_fill",
        "masked_scatter",
        "put",
        "slice_scatter",
        "select_scatter",
        "diagonal_scatter",
        "as_strided_scatter",
    }
)
_WRITES_SOME = _WRITES_A_PART_OF_SELF | _WRITES_A_PART_OF_A_COPY
ACCUMULATES = ("accumulate", "reduce")  # with one of these arguments set, the operators above read what they write
# With beta=0 the first argument is not read.
_BETA = frozenset(
    {
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
)
# Whose second argument lends only its shape or type.
_LIKE_OTHER = frozenset({"expand_as", "view_as", "type_as", "reshape_as"})
# What puts elements elsewhere, repeats or chooses them, and computes nothing with them.
_MOVES_ELEMENTS = frozenset({
    "_foreach_copy_", "cat", "channel_shuffle", "column_stack", "constant_pad_nd", "contiguous", "diag_embed",
    "embedding", "fill_", "flip", "full", "full_like", "gather", "hstack", "im2col", "index", "index_copy",
    "index_copy_", "index_fill", "index_fill_", "index_put", "index_put_", "index_select", "masked_fill",
    "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "narrow_copy", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "pad", "pixel_shuffle", "pixel_unshuffle", "put", "put_",
    "reflection_pad1d", "reflection_pad2d", "repeat", "repeat_interleave", "replication_pad1d",
    "replication_pad2d", "roll", "rot90", "scatter", "scatter_", "select_scatter", "slice_scatter",
    "split_with_sizes_copy", "stack", "take", "tile", "tril", "tril_", "triu", "triu_", "unfold_copy", "vstack",
    "zero_", "zeros", "zeros_like",
})  # fmt: skip
# What reads only those elements of its first argument, or with `embedding` of its weight, that it returns; a loss, as
# their sum.
_CHOOSES = frozenset({
    "embedding", "gather", "index", "index_select", "masked_select", "nll_loss_forward", "nll_loss2d_forward", "take",
})  # fmt: skip
# What writes only as much of its first argument as this one holds; and whether it reads that before.
_PUTS = {
    **dict.fromkeys(("index_put_", "_index_put_impl_"), ("values", False)),
    **dict.fromkeys(("index_copy_", "put_"), ("source", False)),
    **dict.fromkeys(("index_add_", "index_reduce_"), ("source", True)),
    **dict.fromkeys(("scatter_add_", "scatter_reduce_"), ("src", True)),
    "scatter_": ("src", False),
}
# The argument whose bytes are copied as they are, all of them.
_COPIES = {"copy_": 1, "clone": 0, "_to_copy": 0, **dict.fromkeys(_WRITES_A_PART_OF_A_COPY, 0)}

# Whose kernels call operators that autocast casts: they compute other things under autocast, though it does not cast
# them themselves.
_CASTS_INSIDE = frozenset({"affine_grid_generator", "linalg_pinv", "_scaled_mm", "_scaled_mm_v2", "_trilinear"})

# A list argument of which a composite of PyTorch's own, in C++, makes a tensor for its other parts, without an operator
# that fills it.
_MADE_TENSORS_OF = {"aten::_ctc_loss": "target_lengths"}

# Out of place, what an operator that overwrites all of a tensor would make of it.
_OVERWRITES_A_COPY = (
    "copy",
    "fill.Scalar",
    "fill.Tensor",
    "zero",
    "uniform",
    "normal_functional",
    "random",
    "random.from",
    "random.to",
    "bernoulli.p",
    "bernoulli.Tensor",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
    "_foreach_copy",
    "_foreach_zero",
)
# Arguments whose bytes are not read, by operator with its overload: tensors that lend only their shape.
_UNREAD = {
    **{f"aten::{name}": ("self",) for name in _OVERWRITES_A_COPY},
    "aten::rrelu_with_noise": ("noise",),
    "aten::rrelu_with_noise_": ("noise",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "opreplay::collective": ("outputs",),
    "opreplay::collective_wait": ("outputs",),
}
# Tensors that lend only their shape on processors and NVIDIA's GPUs, by operator: what is measured there does not read
# them. (Kernels for other devices may, so captures keep their content.)
_LENDS_SHAPE = {
    f"aten::{name}_backward": ("self",)
    for name in (
        "nll_loss", "nll_loss2d", "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
        "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d", "avg_pool2d", "avg_pool3d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
        "replication_pad1d", "replication_pad2d", "replication_pad3d",
    )
}  # fmt: skip
# Operators that only use an argument, of what they write or read as the schema says, where another one is true.
_ONLY_WITH = {
    "aten::rrelu_with_noise": ("noise", "training"),
    "aten::rrelu_with_noise_": ("noise", "training"),
    "aten::rrelu_with_noise_backward": ("noise", "training"),
}
# Operators that do not read an argument where another one is true.
_UNREAD_WITH = {
    "aten::_fused_sgd_": ("momentum_buffer_list", "is_first_step"),
    "aten::rrelu_with_noise_functional": ("noise", "training"),  # it writes a copy of it
}
# Arguments that an operator reads only for one of its results: the argument that says which results are wanted, and the
# place of that result. (`torch.nn.grad` gives memory without content for the others.)
_READ_FOR_RESULT = {"aten::convolution_backward": {"weight": ("output_mask", 0), "input": ("output_mask", 1)}}
# Arguments that are written without an annotation that says so.
_RUNNING = ("running_mean", "running_var")
_UNANNOTATED_WRITES = {
    **{
        f"aten::{name}": _RUNNING
        for name in (
            "native_batch_norm",
            "batch_norm",
            "_batch_norm_impl_index",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "batch_norm_gather_stats",
            "batch_norm_gather_stats_with_counts",
            "batch_norm_update_stats",
            "instance_norm",
        )
    },
    # Annotated since, but not in the captures of every version of PyTorch.
    "aten::rrelu_with_noise": ("noise",),
    "aten::rrelu_with_noise_": ("noise",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
_WRITES_A_PART = ("fsdp::all_gather_copy_in",)  # of each argument that they write
# The result that a kernel computes only where an input requires gradients and they are enabled; it is empty otherwise.
# It is the one operator whose kernels for CPUs ask for the gradients of their inputs and then compute something else
# (`convolution` chooses another algorithm by it, on ARM alone). Those that ask for the grad mode alone, such as
# `mkldnn_rnn_layer`, have it as a setting. What asks in composites is seen in the operators that they call then.
_FOR_GRADIENTS = {"aten::_sparse_mm_reduce_impl": 1}
_UNWRITTEN = "the kernel leaves parts of it unwritten"
# Results that no replay reproduces, by index: why.
_OPAQUE_RESULTS: dict[str, dict[int, str]] = {
    "aten::mkldnn_rnn_layer": {3: _UNWRITTEN},
    "aten::_ctc_loss": {1: _UNWRITTEN},  # what lies beyond the end of each target
    "_C::get_scheduler_metadata": {0: "it holds addresses"},  # of vLLM's attention on CPUs
}


@dataclass(frozen=True)
class Operator:
    """What is known of one operator besides its schema.

    `own`, `in_parts`, `in_parts_for_gradients`, `fills_results`: see the namespaces above. `empty`: its results are
    unwritten memory. `idle`: it only allocates, looks at metadata, or names what is there. `attaches_memory`: it
    gives its first argument other memory. `copies`: index of the argument that it copies as it is, -1 for none.
    `unread`, `lends_shape`, `quiet_writes`: arguments that it does not read anywhere, does not read on processors and
    NVIDIA's GPUs, or writes without an annotation. `only_with`:
    (argument, the flag without which it is not used), `unread_with`: (argument, the flag with which it is not read),
    `read_for_result`: by argument, (the flags of the results that are wanted, the place of the one for which it is
    read). `writes_a_part`: of each argument that it writes, `writes_some`: of its first. `casts_inside`: what it
    computes may depend on autocast. `for_gradients`: index of the result that it computes only where an input
    requires gradients, and leaves empty otherwise; -1 for none. `makes_tensor_of`: the list argument of which
    PyTorch's composite around it makes a tensor without an operator; "" for none. `moves_elements`: it moves, repeats
    or chooses elements and computes nothing with them (as does one that `copies`); `chooses`: of its first argument
    it reads what it returns; `puts`: (argument, whether it adds to what is there), of its first it writes as much as
    this one holds.
    """

    own: bool
    in_parts: bool
    in_parts_for_gradients: bool
    fills_results: bool
    empty: bool
    idle: bool
    reads_nothing: bool
    moves_memory: bool
    attaches_memory: bool
    resizes: bool
    grows_arguments: bool
    changes_view: bool
    lifts: bool
    overwrites_self: bool
    writes_some: bool
    writes_a_part: bool
    beta: bool
    like_other: bool
    copies: int
    packs: bool
    unread: tuple[str, ...]
    lends_shape: tuple[str, ...]
    quiet_writes: tuple[str, ...]
    only_with: tuple[str, str] | None
    unread_with: tuple[str, str] | None
    read_for_result: Mapping[str, tuple[str, int]]
    collective: bool
    maps_files: bool
    unchecked_view: bool
    unchecked_nested: bool
    casts_inside: bool
    makes_tensor_of: str
    for_gradients: int
    moves_elements: bool
    chooses: bool
    puts: tuple[str, bool] | None


@functools.lru_cache(1 << 14)  # names may come from a file
def operator_named(name: str, overload: str = "default") -> Operator:
    """What is known of `aten::add`, with its overload where that matters (`Tensor`)."""
    namespace, _, base = name.partition("::")
    named = base if namespace in _LIKE_ATEN else ""
    packs = namespace == "quantized" and "_prepack" in base  # copies a weight into packed parameters
    return Operator(
        own=namespace in OWN,
        in_parts=namespace in _IN_PARTS and name not in _DO_WORK_THEMSELVES | _IN_PARTS_FOR_GRADIENTS,
        in_parts_for_gradients=name in _IN_PARTS_FOR_GRADIENTS,
        fills_results=name in _FILL_RESULTS_THEMSELVES,
        empty=named in _EMPTY,
        idle=named in _IDLE,
        reads_nothing=named in _READS_NOTHING,
        moves_memory=named in _MOVES_MEMORY,
        attaches_memory=named in _ATTACHES_MEMORY,
        resizes=named in _RESIZES,
        grows_arguments=named in _GROWS_ARGUMENTS,
        changes_view=named in _VIEWS_IN_PLACE,
        lifts=named in _LIFTS,
        overwrites_self=named in _OVERWRITES_SELF,
        writes_some=named in _WRITES_SOME,
        writes_a_part=name in _WRITES_A_PART,
        beta=named in _BETA,
        like_other=namespace == "aten" and base in _LIKE_OTHER,
        copies=0 if packs else _COPIES.get(named, -1),
        packs=packs,
        unread=_UNREAD.get(name if overload == "default" else f"{name}.{overload}", ()),
        lends_shape=_LENDS_SHAPE.get(name, ()),
        quiet_writes=_UNANNOTATED_WRITES.get(name, ()),
        only_with=_ONLY_WITH.get(name),
        unread_with=_UNREAD_WITH.get(name),
        read_for_result=_READ_FOR_RESULT.get(name, {}),
        collective=namespace in COLLECTIVES or name.startswith(_AMONG_PROCESSES),
        maps_files=name in _MAPS_FILES,
        unchecked_view=name in _UNCHECKED_VIEWS,
        unchecked_nested=name in _UNCHECKED_NESTED,
        casts_inside=namespace not in OWN or named in _CASTS_INSIDE,
        makes_tensor_of=_MADE_TENSORS_OF.get(name, ""),
        for_gradients=_FOR_GRADIENTS.get(name, -1),
        moves_elements=named in _MOVES_ELEMENTS,
        chooses=named in _CHOOSES,
        puts=_PUTS.get(named),
    )


def unannotated_writes(name: str, overload: str, tensor_arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments that an operator writes without an annotation. `tensor_arguments`: those that are tensors, or hold
    some. The schemas of collectives (`c10d::allreduce_`) do not say what they write."""
    if name.startswith("c10d::") and name != "c10d::send":
        return tuple(argument for argument in tensor_arguments if not argument.startswith("input"))
    return operator_named(name, overload).quiet_writes


def is_pytorchs(namespace: str) -> bool:
    """Whether composites of a namespace are PyTorch's own, and so are what their parts are."""
    return namespace in _IN_PARTS


def tells_allocator(name: str) -> bool:
    """Whether an operator only notifies the allocator which stream uses memory."""
    namespace, _, base = name.partition("::")
    return name in _TELLS_ALLOCATOR or (namespace in _LIKE_ATEN and base in _TELLS_ALLOCATOR)


def tells_build(name: str) -> bool:
    """Whether an operator without tensors only says what its library was built with, if it takes no arguments."""
    namespace, _, base = name.partition("::")
    return namespace not in OWN and _TELLS_BUILD.fullmatch(base) is not None


def opaque_results(name: str) -> dict[int, str]:
    """The results of an operator that no replay reproduces, by index, with the reason."""
    return _OPAQUE_RESULTS.get(name, {})


def acts_outside(name: str) -> str | None:
    """What an operator of PyTorch's (`aten::from_file`) does besides computing: a verb with its object, None if it
    only computes. Nothing runs such an operator unless the user allows it by name, except that a replay makes unchecked
    views (`unchecked_view`), and checks them. Of other libraries' operators nothing is known: the user imported
    them."""
    return _ACTING.get(name) or _ACTING_NAMESPACES.get(name.partition("::")[0])


def refused_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Namespaces and names of all operators that `acts_outside` knows of, for scripts that stand alone."""
    return tuple(sorted(_ACTING_NAMESPACES)), tuple(sorted(_ACTING))


FLAG = "--opaque-result"

_SPEC = re.compile(r"(?P<operator>\w+::\w+(?:\.\w+)?)(?::(?P<index>[0-9]{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class OpaqueSpec:
    """What a user says: all results of an operator (with or without its overload), or the one at `index`."""

    operator: str
    index: int | None = None

    @staticmethod
    def parse(text: str) -> OpaqueSpec:
        """`OPERATOR[:INDEX]`. Raises UsageError for anything else."""
        found = _SPEC.fullmatch(text)
        if found is None:
            raise UsageError(f"{FLAG}={text}: expected OPERATOR[:INDEX], such as aten::_ctc_loss:1")
        index = found["index"]
        return OpaqueSpec(found["operator"], None if index is None else int(index))

    def __str__(self) -> str:
        return self.operator if self.index is None else f"{self.operator}:{self.index}"


class OpaqueResults:
    """What is known: of all operators, of a capture's program, of one replay."""

    def __init__(self, given: Iterable[str | OpaqueSpec] = ()) -> None:
        """Raises UsageError for a text that is not of the form `OPERATOR[:INDEX]`."""
        self._given = tuple(OpaqueSpec.parse(each) if isinstance(each, str) else each for each in given)
        self._found: dict[tuple[str, str, int], str] = {}

    def of(self, name: str, overload: str, count: int) -> Mapping[int, str]:
        """The opaque ones among the `count` results of an operator, by index, with the reason."""
        found = {index: why for index, why in opaque_results(name).items() if index < count}
        for spec in self._given:
            if spec.operator in (name, f"{name}.{overload}"):
                indices = range(count) if spec.index is None else (spec.index,) if spec.index < count else ()
                found.update(dict.fromkeys(indices, f"{FLAG}={spec}"))
        found.update({index: why for (of, its, index), why in self._found.items() if (of, its) == (name, overload)})
        return found

    def found(self, name: str, overload: str, index: int, why: str) -> None:
        """A replay found one."""
        if index not in self.of(name, overload, index + 1):
            self._found[name, overload, index] = why

    def unmatched(self, operators: Iterable[tuple[str, str, int]]) -> list[str]:
        """A sentence for each that was given and is a result of none of these (name, overload, number of results)."""
        counts: dict[str, int] = {}
        for name, overload, count in operators:
            for text in (name, f"{name}.{overload}"):
                counts[text] = max(count, counts.get(text, 0))
        return [
            f"{FLAG}={spec}: "
            + (
                f"{spec.operator} has {counts[spec.operator]} results, counted from 0"
                if spec.operator in counts
                else f"no operator {spec.operator} is called"
            )
            for spec in self._given
            if counts.get(spec.operator, 0) <= (spec.index or 0)
        ]

    @property
    def text(self) -> str:
        """What was given and found, as a user would say it: a session's policy."""
        found = (f"{name}.{overload}:{index}" for name, overload, index in self._found)
        return " ".join(dict.fromkeys([*map(str, self._given), *found]))
