"""What operators ask of the elements they read, and how elements pass from one tensor to the next: tables by operator.

The first part has the demand of each operator and argument. The second says how an op's results depend on what it
reads: copied, moved, shifted, scaled, summed up. Integers that cannot be followed further may still decide which memory
is read, so that is said too (`followed`). Floating-point numbers are let go there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch

from replayfmt.pytorch.tensors.memory import INTEGERS

from .demands import Demand, DemandStep, Role
from .initializer import Call, Request, TensorInfo, Use

T = TypeVar("T")
_MASKS = (torch.bool, torch.uint8)


def is_integral(dtype: torch.dtype) -> bool:
    """Whether elements are integers or booleans, which index, count or select."""
    return dtype in INTEGERS


def base_name(name: str) -> str:
    """`index_put` for `aten::index_put_`; the whole name for an operator that is not PyTorch's own."""
    return name.removeprefix("aten::").removesuffix("_") if name.startswith("aten::") else name


def demand_of(use: Use) -> Demand | None:
    """What a use asks of the elements that the op reads; None if that is unknown."""
    base, view = base_name(use.call.name), use.tensor
    rule = _RULES.get((base, use.argument))
    if rule is not None:
        try:
            return rule(use)
        except _Unknown:
            return None
    integral = is_integral(view.dtype) and view.elements
    if not integral or base in _COMPUTING or base.startswith("_foreach_") or use.call.elementwise:
        return Demand(Role.number, why=f"a number for {use.call.name}")
    return None


Rule = Callable[[Use], Demand]


class _Unknown(Exception):
    """What a rule needs is not in the call."""


def _known(value: T | None) -> T:
    if value is None:
        raise _Unknown
    return value


def _index(use: Use, size: int, into: str) -> Demand:
    return Demand(Role.index, 0, size - 1, why=f"an index into {into} ({size} elements) in {use.call.name}")


def _size(info: TensorInfo | None, dim: int | None) -> int:
    sizes, dim = _known(info).sizes, _known(dim)
    if not sizes:
        return 1
    return _known(sizes[dim] if -len(sizes) <= dim < len(sizes) else None)


def _into(argument: str, dim: int | str) -> Rule:
    """An index into one dimension of another argument, given as a number or by the argument that holds it."""

    def rule(use: Use) -> Demand:
        number = use.call.integer(dim) if isinstance(dim, str) else dim
        return _index(use, _size(use.call.tensor(argument), number), f"dimension {number} of {argument}")

    return rule


def _into_all(use: Use) -> Demand:
    return _from_either_end(use, _known(use.call.tensor("self")).elements, "self")


def _from_either_end(use: Use, size: int, into: str) -> Demand:
    """Negative indices count from the end."""
    return replace(_index(use, size, into), low=-size)


def _below(argument: str) -> Rule:
    """Below a number that is an argument itself."""
    return lambda use: _index(use, _known(use.call.integer(argument)), argument)


def _class(use: Use) -> Demand:
    """A class index, where targets are not floating point."""
    if not is_integral(use.tensor.dtype):
        return Demand(Role.number, why=f"a target of {use.call.name}")
    info = _known(use.call.tensor("self"))
    return _index(use, _size(info, 1 if len(info.sizes) > 1 else 0), "the classes of self")


def _advanced(use: Use) -> Demand:
    """One of the indices of self[i, j, ...]: integers along one dimension, or a mask over several."""
    indices, target = use.call.arguments.get("indices"), _known(use.call.tensor("self"))
    if not isinstance(indices, tuple):
        raise _Unknown
    dim = 0
    for before in indices[: _known(use.position)]:
        dim += len(before.sizes) if isinstance(before, TensorInfo) and before.dtype in _MASKS else 1
    if use.tensor.dtype not in _MASKS:
        return _from_either_end(use, _size(target, dim), f"dimension {dim} of self")
    if sum(isinstance(each, TensorInfo) for each in indices) != 1:
        raise _Unknown
    selected = use.call.result(0) if base_name(use.call.name) in ("index", "_unsafe_index") else None
    values = use.call.tensor("values")
    demand = Demand(Role.mask, 0, 1, why=f"a mask in {use.call.name}")
    if selected is not None:
        return replace(demand, total=_size(selected, dim))
    if values is None or values.elements == 1:
        return demand
    rest = len(target.sizes) - dim - len(use.tensor.sizes)
    return replace(demand, total=values.sizes[-1 - rest] if rest < len(values.sizes) else None)


def _unpooled(use: Use) -> Demand:
    sizes = use.call.arguments.get("output_size")
    if not isinstance(sizes, tuple) or not sizes:
        raise _Unknown
    return _index(use, prod(map(int, sizes)), "the output")


def _pooled(dims: int) -> Rule:
    return lambda use: _index(use, prod(_known(use.call.tensor("self")).sizes[-dims:]), "a plane of self")


def _counted(use: Use) -> Demand:
    """Values to count: the result has an element for each value up to the largest."""
    size = _size(use.call.result(0), 0)
    if size <= (use.call.integer("minlength", 0) or 0):
        return Demand(Role.index, 0, size - 1, why=f"counted by {use.call.name}")
    return Demand(Role.highest, 0, size - 1, why=f"counted by {use.call.name}, the largest is {size - 1}")


def _one_hot(use: Use) -> Demand:
    size, given = _size(use.call.result(0), -1), use.call.integer("num_classes", -1)
    role = Role.index if given is not None and given >= 0 else Role.highest
    return Demand(role, 0, size - 1, why=f"a class of {size} in {use.call.name}")


def _mask(prefer: bool) -> Rule:
    def rule(use: Use) -> Demand:
        bounds: tuple[Any, Any] = (0, 1) if use.tensor.dtype in _MASKS else (None, None)
        if not is_integral(use.tensor.dtype):
            return Demand(Role.number, why=f"a mask for {use.call.name}")
        return Demand(Role.mask, *bounds, prefer=prefer, why=f"a mask in {use.call.name}")

    return rule


def _selecting(use: Use) -> Demand:
    """A mask whose true elements give the length of the result."""
    if not is_integral(use.tensor.dtype):
        return Demand(Role.number, why=f"a number for {use.call.name}")
    info, count = _known(use.call.tensor("self")), _size(use.call.result(0), 0)
    if use.argument == "mask":
        repeats = prod(torch.broadcast_shapes(info.sizes, use.tensor.sizes)) // use.tensor.elements
        if count % repeats:
            raise _Unknown
        count //= repeats
    return Demand(Role.mask, 0, 1, total=count, why=f"what {use.call.name} selects {count} elements by")


def _distinct(use: Use) -> Demand:
    if not is_integral(use.tensor.dtype):
        return Demand(Role.number, why=f"a number for {use.call.name}")
    count = _size(use.call.result(0), 0)
    return Demand(Role.distinct, total=count, why=f"what {use.call.name} finds {count} different values in")


def _repeats(use: Use) -> Demand:
    total = _size(use.call.result(0), 0)
    return Demand(Role.lengths, 0, None, total=total, why=f"counts that add up to {total} in {use.call.name}")


def _segmented(use: Use) -> int:
    """The length of what segments divide."""
    if len(use.tensor.sizes) != 1:
        raise _Unknown
    return _size(use.call.tensor("data"), use.call.integer("axis", 0))


def _segments(use: Use) -> Demand:
    total = _segmented(use)
    return Demand(Role.lengths, 0, None, total=total, why=f"lengths that add up to {total} in {use.call.name}")


def _segment_offsets(use: Use) -> Demand:
    total = _segmented(use)
    return Demand(Role.offsets, 0, total, total=total, why=f"where segments of {total} begin in {use.call.name}")


def _packed(use: Use) -> Demand:
    longest, total = _known(use.call.result(1)).elements, _size(use.call.result(0), 0)
    why = f"lengths of which the first is {longest} and that add up to {total} in {use.call.name}"
    return Demand(Role.lengths, 1, longest, total=total, why=why)


def _bags(use: Use) -> Demand:
    count = _known(use.call.tensor("indices")).elements
    total = count if use.call.arguments.get("include_last_offset") else None
    return Demand(Role.offsets, 0, count, total=total, why=f"offsets into {count} indices in {use.call.name}")


def _bags_again(use: Use) -> Demand:
    """As in the forward pass before, which knows more."""
    count = _known(use.call.tensor("indices")).elements
    return Demand(Role.bounded, 0, count, why=f"offsets in {use.call.name}")


def _pivots(matrix: str) -> Rule:
    """Rows of a matrix that were exchanged, counted from 1."""

    def rule(use: Use) -> Demand:
        rows = _size(use.call.tensor(matrix), -2)
        return Demand(Role.index, 1, rows, why=f"a row of {matrix} in {use.call.name}")

    return rule


def _ctc_input_lengths(use: Use) -> Demand:
    longest = _size(use.call.tensor("log_probs"), 0)
    return Demand(Role.bounded, longest, longest, why=f"lengths of up to {longest} in {use.call.name}")


def _ctc_target_lengths(use: Use) -> Demand:
    """The longest decides the size of a result (in the backward pass, of `log_alpha`)."""
    alpha, targets = use.call.tensor("log_alpha") or use.call.result(1), _known(use.call.tensor("targets"))
    total = targets.elements if len(targets.sizes) == 1 else None
    why = f"lengths of targets in {use.call.name}"
    return Demand(Role.lengths, 0, (_size(alpha, -1) - 1) // 2, total=total, why=why)


def _quantum(use: Use) -> Demand:
    low, high = use.call.integer("quant_min"), use.call.integer("quant_max")
    return Demand(Role.bounded, low, high, why=f"{use.argument} of {use.call.name}")


def _cumulative(tokens: str, longest: str) -> Rule:
    """Where each sequence begins and ends among the tokens of a packed batch."""

    def rule(use: Use) -> Demand:
        # Packed as (tokens, heads, size), or as a batch of one such.
        sizes = _known(use.call.tensor(tokens)).sizes
        total = sizes[0] if len(sizes) == 3 else prod(sizes[:2])
        why = f"where each of the sequences in {total} tokens begins in {use.call.name}"
        return Demand(Role.offsets, 0, total, total=total, step=use.call.integer(longest), why=why)

    return rule


def _between(low: float, high: float | None) -> Rule:
    """Floating point elements within bounds."""
    return lambda use: Demand(Role.bounded, low, high, why=f"{use.argument} of {use.call.name}")


def _positive_definite(use: Use) -> Demand:
    return Demand(Role.positive_definite, why=f"positive definite, as {use.argument} of {use.call.name}")


def positive_definite_views(request: Request) -> list[TensorInfo]:
    """The tensors on the requested storage that ops factor."""
    uses = [(each.view, demand_of(each)) for each in request.uses]
    views = [view for view, demand in uses if view and demand and demand.role is Role.positive_definite]
    return [
        replace(view, sizes=tuple(size if stride else 1 for size, stride in zip(view.sizes, view.strides, strict=True)))
        for view in views
        if len(view.sizes) > 1
    ]


_POSITIVE, _SHARE = _between(0.5, None), _between(0.0, 1.0)
# fmt: off
_ALONG = (
    "index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather", "scatter", "scatter_add",
    "scatter_reduce", "take_along_dim",
)
# fmt: on
_BAGS = ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
_BAGS_BACKWARD = [f"_embedding_bag_{name}backward" for name in ("", "dense_", "sparse_")]
_SAMPLES_BACKWARD = "_embedding_bag_per_sample_weights_backward"


# fmt: off
def _sent(use: Use) -> Demand:
    """What integers are for is known where they arrive: 0 is safe for an index and for a number."""
    zero = 0 if is_integral(use.tensor.dtype) else None
    return Demand(Role.number if zero is None else Role.index, zero, zero, why="what other ranks may use as an index")


_RULES: dict[tuple[str, str], Rule] = {
    **{("opreplay::collective", name): _sent for name in ("inputs", "outputs")},
    ("opreplay::collective_wait", "outputs"): _sent,
    **{(name, "indices" if name == "take_along_dim" else "index"): _into("self", "dim") for name in _ALONG},
    ("embedding", "indices"): _into("weight", 0),
    ("embedding_dense_backward", "indices"): _below("num_weights"),
    ("embedding_sparse_backward", "indices"): _below("num_weights"),
    ("embedding_backward", "indices"): _below("num_weights"),
    ("embedding_renorm", "indices"): _into("self", 0),
    **{(name, "indices"): _into("weight", 0) for name in (*_BAGS, _SAMPLES_BACKWARD)},
    **{(name, "offsets"): _bags for name in _BAGS},
    **{(name, "indices"): _below("num_weights") for name in _BAGS_BACKWARD},
    **{(name, "offsets"): _bags_again for name in (*_BAGS_BACKWARD, _SAMPLES_BACKWARD)},
    ("take", "index"): _into_all,
    ("put", "index"): _into_all,
    **{(name, "indices"): _advanced for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put",
                                                 "_index_put_impl", "_unsafe_masked_index",
                                                 "_unsafe_masked_index_put_accumulate")},
    **{(name, "mask"): _mask(True) for name in ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate")},
    **{(name, "target"): _class for name in (
        "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
        "nll_loss2d_backward", "cross_entropy_loss", "multi_margin_loss", "multi_margin_loss_backward",
        "multilabel_margin_loss_forward", "multilabel_margin_loss_backward")},
    **{(f"torch_nn::_linear_cross_entropy_batch_chunked{rest}", "target"): _into("linear_weight", 0)
       for rest in ("", "_no_reduction")},
    **{(name, "targets"): _into("log_probs", -1) for name in ("_ctc_loss", "_ctc_loss_backward")},
    **{(name, "input_lengths"): _ctc_input_lengths for name in ("_ctc_loss", "_ctc_loss_backward")},
    **{(name, "target_lengths"): _ctc_target_lengths for name in ("_ctc_loss", "_ctc_loss_backward")},
    ("one_hot", "self"): _one_hot,
    ("bincount", "self"): _counted,
    ("max_unpool2d", "indices"): _unpooled,
    ("max_unpool3d", "indices"): _unpooled,
    **{(f"{name}_pool{dims}d{rest}_backward", "indices"): _pooled(dims)
       for name, rest in (("max", "_with_indices"), ("adaptive_max", ""), ("fractional_max", "")) for dims in (2, 3)},
    **{(name, "random_samples"): _between(0.0, 0.99) for name in ("fractional_max_pool2d", "fractional_max_pool3d")},
    ("masked_fill", "mask"): _mask(False),
    ("masked_scatter", "mask"): _mask(False),
    ("where", "condition"): _mask(True),
    **{(name, "attn_mask"): _mask(True) for name in (
        "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")},
    ("masked_select", "mask"): _selecting,
    ("nonzero", "self"): _selecting,
    ("argwhere", "self"): _selecting,
    **{(name, "self"): _distinct for name in ("_unique", "_unique2", "unique_consecutive")},
    ("repeat_interleave", "repeats"): _repeats,
    **{(name, "lengths"): _segments for name in ("segment_reduce", "_segment_reduce_backward")},
    **{(name, "offsets"): _segment_offsets for name in ("segment_reduce", "_segment_reduce_backward")},
    ("linalg_lu_solve", "pivots"): _pivots("LU"),
    ("linalg_ldl_solve", "pivots"): _pivots("LD"),
    ("lu_unpack", "LU_pivots"): _pivots("LU_data"),
    ("_pack_padded_sequence", "lengths"): _packed,
    **{(name, argument): _cumulative(*tokens)
       for name in ("_flash_attention_forward", "_flash_attention_backward")
       for argument, tokens in (("cum_seq_q", ("query", "max_q")), ("cum_seq_k", ("key", "max_k")))},
    **{(name, argument): _cumulative(*tokens)
       for name in ("_efficient_attention_forward", "_efficient_attention_backward")
       for argument, tokens in (("cu_seqlens_q", ("query", "max_seqlen_q")),
                                ("cu_seqlens_k", ("key", "max_seqlen_k")))},
    **{(name, "running_var"): _POSITIVE for name in (
        "native_batch_norm", "batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update", "_batch_norm_no_update", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm",
        "_batch_norm_impl_index", "native_batch_norm_backward", "cudnn_batch_norm_backward")},
    **{(name, argument): _POSITIVE for name in ("_fused_adam", "_fused_adamw", "_fused_adagrad")
       for argument in ("exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "state_steps")},
    **{(name, "self"): _POSITIVE for name in ("sqrt", "rsqrt", "log", "log2", "log10", "_foreach_sqrt", "_foreach_log",
                                              "_standard_gamma", "poisson")},
    ("normal", "std"): _POSITIVE,
    ("quantize_per_tensor", "scale"): _POSITIVE,
    **{(f"fake_quantize_per_{kind}", argument): rule
       for kind in ("tensor_affine_cachemask_tensor_qparams", "channel_affine_cachemask", "tensor_affine",
                    "channel_affine")
       for argument, rule in (("scale", _POSITIVE), ("zero_point", _quantum))},
    ("quantize_per_channel", "scales"): _POSITIVE,
    **{(name, "self"): _SHARE
       for name in ("bernoulli", "multinomial", "binary_cross_entropy", "binary_cross_entropy_backward")},
    **{(name, "target"): _SHARE for name in ("binary_cross_entropy", "binary_cross_entropy_backward")},
    ("bernoulli", "p"): _SHARE,
    ("binomial", "prob"): _SHARE,
    ("binomial", "count"): _POSITIVE,
    ("_sample_dirichlet", "self"): _POSITIVE,
    **{(name, "self"): _positive_definite for name in ("linalg_cholesky_ex", "cholesky", "cholesky_inverse")},
    ("cholesky_solve", "input2"): _positive_definite,
    ("_linalg_check_errors", "info"): _between(0, 0),
}
# fmt: on

# Operators that compute with integers or move them, and are safe for any value.
# fmt: off
_COMPUTING = {
    "floor_divide", "remainder", "fmod", "pow", "rsub", "neg", "_to_copy", "to", "clone", "copy", "contiguous",
    "detach", "lift_fresh", "alias", "cat", "stack", "repeat", "roll", "flip", "tile", "constant_pad_nd", "expand",
    "expand_copy", "view_copy", "permute_copy", "_reshape_copy", "reshape", "slice_scatter", "select_scatter",
    "index_select", "gather", "take", "index", "_unsafe_index", "scatter", "scatter_add", "index_add", "index_copy",
    "index_put", "index_fill", "masked_fill", "masked_scatter", "where", "tril", "triu", "diag_embed", "sum",
    "prod", "mean", "any", "all", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "cumsum", "cumprod",
    "cummax", "cummin", "sort", "argsort", "msort", "topk", "kthvalue", "median", "mode", "diff", "norm",
    "linalg_vector_norm", "count_nonzero", "isin", "searchsorted", "bucketize", "histc", "_local_scalar_dense",
    "item", "equal", "is_nonzero", "allclose", "mm", "bmm", "addmm", "matmul", "dot", "clamp", "fill", "zero",
    "isnan", "scaled_dot_product_attention", "unfold", "as_strided", "embedding_renorm", "one_hot", "_assert_async",
    "range", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "_pin_memory", "resolve_neg",
    "resolve_conj", "is_pinned", "mul", "add", "sub", "div", "dropout", "native_dropout", "nan_to_num", "lerp",
    "addcmul", "addcdiv", "_assert_tensor_metadata", "_unsafe_view", "_reshape_alias",
    "_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad",
    "native_batch_norm", "batch_norm", "_shape_as_tensor", "isfinite", "isinf", "atleast_1d", "select", "slice",
    "narrow", "set", "resize", "_index_put_impl", "_unsafe_index_put", "scatter_reduce", "index_reduce",
    "take_along_dim", "put", "nonzero_static", "cross", "outer", "tensordot", "einsum", "linspace", "logspace",
    "bincount",
}
# fmt: on


@dataclass(frozen=True)
class Propagation:
    """What becomes of an argument's elements: they are in result `result` (in the argument `written`, if that is not
    empty), after `steps`; `whole` where the result has exactly these elements in the same order. `followed` is False if
    the result depends on them in another way."""

    result: int | None
    written: str = ""
    steps: tuple[DemandStep, ...] = ()
    whole: bool = False
    followed: bool = True


# Results hold some of the elements unchanged; those of _WHOLE hold all of them, in order.
# fmt: off
_WHOLE = {
    "clone", "_to_copy", "to", "contiguous", "lift_fresh", "_pin_memory", "resolve_neg", "resolve_conj", "view_copy",
    "_reshape_copy", "reshape", "detach_copy", "alias_copy",
}
_MOVING = {
    "cat": ("tensors",), "stack": ("tensors",), "repeat": ("self",), "roll": ("self",), "flip": ("self",),
    "tile": ("self",), "constant_pad_nd": ("self",), "expand_copy": ("self",), "permute_copy": ("self",),
    "index_select": ("self",), "gather": ("self",), "take": ("self",), "index": ("self",), "_unsafe_index": ("self",),
    "masked_select": ("self",), "slice_scatter": ("self", "src"), "select_scatter": ("self", "src"),
    "scatter": ("self", "src"), "index_copy": ("self", "source"), "index_put": ("self", "values"),
    "index_fill": ("self",), "masked_fill": ("self",), "masked_scatter": ("self", "source"), "where": ("self", "other"),
    "tril": ("self",), "triu": ("self",), "clamp": ("self",), "clamp_min": ("self",), "clamp_max": ("self",),
    "maximum": ("self", "other"), "minimum": ("self", "other"), "sort": ("self",), "msort": ("self",),
    "topk": ("self",), "max": ("self", "other"), "min": ("self", "other"), "amax": ("self",), "amin": ("self",),
    "cummax": ("self",), "cummin": ("self",), "kthvalue": ("self",), "median": ("self",), "mode": ("self",),
    "_unique": ("self",), "_unique2": ("self",), "unique_consecutive": ("self",), "repeat_interleave": ("self",),
    "floor": ("self",), "ceil": ("self",), "round": ("self",), "trunc": ("self",),
    "diag_embed": ("self",), "unfold_copy": ("self",), "take_along_dim": ("self",), "copy": ("src",),
    "nan_to_num": ("self",), "embedding": ("weight",),
}
# fmt: on
# Results that depend on an argument's shape alone, are truth values, or are in range whatever is read.
# fmt: off
_SEALED = {
    "_embedding_bag", "_embedding_bag_forward_only", "_pack_padded_sequence",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_empty_strided", "_shape_as_tensor", "argmax", "argmin", "argsort",
    "nonzero", "argwhere", "searchsorted", "bucketize", "count_nonzero", "_local_scalar_dense", "item", "equal",
    "fill", "zero", "one_hot", "nonzero_static",
}
# fmt: on


def propagate(call: Call, argument: str, tensor: TensorInfo) -> Iterator[Propagation]:
    """Where the elements go that `call` reads as `argument`. This excludes views, which share the storage."""
    base = base_name(call.name)
    if base in _SEALED:
        return
    in_place = call.name.endswith("_") and not call.name.endswith("__")
    places: list[tuple[int | None, str]] = [
        (index, "")
        for index, each in enumerate(call.results)
        if isinstance(each, TensorInfo) and _carries(tensor, each)
    ]
    if in_place:
        target = call.tensor("self")
        places = [(None, "self")] if target is not None and _carries(tensor, target) else []
    if base in _WHOLE and argument == "self" or base == "copy" and argument == "src":
        for result, written in places:
            other = call.tensor(written) if result is None else call.result(result)
            yield Propagation(result, written, whole=other is not None and other.sizes == tensor.sizes)
    elif argument in _MOVING.get(base, ()):
        # Of several results the first holds the values, the others say where they were.
        yield from (Propagation(result, written) for result, written in places[:1])
    elif base in _MOVING or (base == "copy" and argument == "self"):
        return
    elif is_integral(tensor.dtype):
        step = _step(call, base, argument, tensor)
        for result, written in places:
            yield Propagation(result, written, (step,) if step is not None else (), followed=step is not None)
    elif not in_place:  # what an optimizer does to its state, step after step, leaves it what it was
        steps = _scaled(call, base, argument)
        yield from (Propagation(result, written, steps) for result, written in places if steps)


def _carries(tensor: TensorInfo, result: TensorInfo) -> bool:
    """Whether a result can hold a tensor's elements: numbers made of integers and truth values are safe anyway."""
    return result.dtype is not torch.bool and (is_integral(result.dtype) or not is_integral(tensor.dtype))


def _step(call: Call, base: str, argument: str, tensor: TensorInfo) -> DemandStep | None:
    """The step that turns an argument's elements into the result's; None if there is no single one."""
    other, alpha = call.integer("other"), call.integer("alpha", 1)
    if argument == "self" and base in ("sum", "cumsum"):
        return DemandStep("running_sum", _summed(call, tensor))
    if base in ("add", "sub", "mul", "rsub") and isinstance(other, bool):
        return None
    match base:
        case "add" if other is not None and alpha is not None:
            return DemandStep("add", other * alpha)
        case "sub" if other is not None and alpha is not None and argument == "self":
            return DemandStep("add", -other * alpha)
        case "mul" if other:
            return DemandStep("multiply", other)
        case "neg":
            return DemandStep("multiply", -1)
        case "floor_divide" | "div" | "__rshift__" if other and argument == "self":
            if base == "floor_divide" or call.arguments.get("rounding_mode") == "floor":
                return DemandStep("floor_divide", other)
        case "remainder" if other and argument == "self":
            return DemandStep("remainder", other)
    return None


def _scaled(call: Call, base: str, argument: str) -> tuple[DemandStep, ...]:
    """The steps that turn floating-point elements into the result's; none if they are not known."""
    other, alpha = call.number("other"), call.number("alpha", 1)
    if argument != "self" or alpha is None or call.arguments.get("rounding_mode") is not None:
        return ()
    match base:
        case "add" if other is not None:
            return (DemandStep("add", other * alpha),)
        case "sub" if other is not None:
            return (DemandStep("add", -other * alpha),)
        case "rsub" if other is not None and alpha:
            return (DemandStep("multiply", -alpha), DemandStep("add", other))
        case "mul" if other:
            return (DemandStep("multiply", other),)
        case "div" if other:
            return (DemandStep("multiply", 1 / other),)
        case "neg":
            return (DemandStep("multiply", -1),)
    return ()


def _summed(call: Call, tensor: TensorInfo) -> int:
    """How many elements are added up to one of the result's, at most."""
    dims = call.arguments.get("dim")
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, tuple) or not dims or not tensor.sizes:
        return max(1, tensor.elements)
    return max(1, prod(tensor.sizes[dim] for dim in dims if isinstance(dim, int)))
