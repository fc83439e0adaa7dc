"""Packed parameters of quantized modules, objects that hold weights as a kernel wants them: taken apart, and packed.

An object is known by its class, from the fixed list here, and packed by PyTorch's own operators: nothing of a capture
names code. The forms are `packed_KIND_SCHEME`, with these parts in order:

    scheme  float           weight
            per_tensor      integers, dtype, scale, zero point
            per_channel     integers, dtype, scales, zero points, axis
    kind    linear          the weight's, bias
            conv2d, conv3d  the weight's, bias, stride, padding, output padding, dilation, groups, transposed
            embedding       the weight's
            cell            the parts of the linear kind for the input, and for the hidden state; but for floats, which
                            are what a float16 cell holds: the bias of each, and whether the range is reduced

`integers` is as in composites.py. Whether a weight is packed for this or that library is the replay's quantization
engine's matter, as it was the program's. Call inside `undispatched()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Parts = tuple[Any, ...]
TakeWeight = Callable[[torch.Tensor], tuple[str, Parts]]
PutWeight = Callable[[str, Sequence[Any]], torch.Tensor]

_CLASSES = {
    "__torch__.torch.classes.quantized.LinearPackedParamsBase": "linear",
    "__torch__.torch.classes.quantized.Conv2dPackedParamsBase": "conv2d",
    "__torch__.torch.classes.quantized.Conv3dPackedParamsBase": "conv3d",
    "__torch__.torch.classes.quantized.EmbeddingPackedParamsBase": "embedding",
    "__torch__.torch.classes.rnn.CellParamsBase": "cell",
}
_WEIGHT_PARTS = {"float": 1, "per_tensor": 4, "per_channel": 5}
_SCHEMES = {
    "linear": ("float", "per_tensor", "per_channel"),
    "conv2d": ("per_tensor", "per_channel"),
    "conv3d": ("per_tensor", "per_channel"),
    "embedding": ("per_channel",),
    "cell": ("float", "per_tensor", "per_channel"),
}
_GEOMETRY = ("stride", "padding", "output_padding", "dilation", "groups", "transpose")
_OTHER_PARTS = {"linear": 1, "conv2d": 7, "conv3d": 7, "embedding": 0}
_MOST = 1 << 16  # of a convolution's stride, padding, dilation

FORMS = tuple(f"packed_{kind}_{scheme}" for kind, schemes in _SCHEMES.items() for scheme in schemes)


def take_apart(packed: torch.ScriptObject, take_weight: TakeWeight) -> tuple[str, Parts]:
    """(form, parts) of packed parameters; `take_weight` takes quantized tensors apart. Raises TypeError for objects of
    other classes and weights without a form."""
    name = packed._type().qualified_name()
    kind = _CLASSES.get(name)
    if kind is None:
        raise TypeError(f"an object of class {name.removeprefix('__torch__.')}")
    if kind == "cell":
        return _take_cell(packed, take_weight)
    ops = torch.ops.quantized
    if kind == "embedding":
        weight, other = ops.embedding_bag_unpack(packed), ()
    else:
        weight, bias = getattr(ops, f"{kind}_unpack")(packed)
        geometry = _GEOMETRY if kind != "linear" else ()
        other = (bias, *(getattr(ops, f"{kind}_{each}")(packed) for each in geometry))
    if weight.is_quantized:
        form, parts = take_weight(weight)
        scheme = form.removeprefix("quantized_")
    else:
        scheme, parts = "float", (weight,)
    return f"packed_{kind}_{scheme}", tuple(map(_own, (*parts, *other)))


def _take_cell(packed: torch.ScriptObject, take_weight: TakeWeight) -> tuple[str, Parts]:
    """The weights of a cell of a recurrent network, which are packed linear parameters."""
    state: Any = packed.__getstate__()  # with the name of its class
    kind, biases, _floats, numbers, packed_weights = state[0]
    if kind not in ("quantized_dynamic", "quantized_fp16"):
        raise TypeError(f"an object of class rnn.CellParamsBase that is {kind}")
    (input_form, of_input), (hidden_form, of_hidden) = (take_apart(each, take_weight) for each in packed_weights)
    scheme = input_form.removeprefix("packed_linear_")
    if input_form != hidden_form or (scheme == "float") is not (kind == "quantized_fp16"):
        raise TypeError(f"an object of class rnn.CellParamsBase, {kind}, with {input_form} and {hidden_form}")
    other = () if scheme == "float" else (*biases, bool(numbers[0]))
    return f"packed_cell_{scheme}", (*of_input, *of_hidden, *other)


def _own(part: Any) -> Any:
    """A part on memory that outlives the object: some are windows on its own."""
    if isinstance(part, torch.Tensor) and not part.untyped_storage().resizable():
        return part.clone()
    return part


def put_together(form: str, parts: Sequence[Any], put_weight: PutWeight) -> torch.ScriptObject:
    """The packed parameters that `take_apart` took apart. Raises ValueError for parts that make none."""
    _packed, kind, scheme = form.split("_", 2)
    if kind == "cell":
        return _put_cell(form, scheme, parts, put_weight)
    count = _WEIGHT_PARTS[scheme]
    if len(parts) != count + _OTHER_PARTS[kind]:
        raise ValueError(f"{form} has {len(parts)} parts, expected {count + _OTHER_PARTS[kind]}")
    weight = parts[0] if scheme == "float" else put_weight(f"quantized_{scheme}", parts[:count])
    _check_weight(form, weight, {"linear": 2, "conv2d": 4, "conv3d": 5, "embedding": 2}[kind])
    ops = torch.ops.quantized
    if kind == "embedding":
        return ops.embedding_bag_prepack(weight)
    bias = parts[count]
    if kind == "linear":
        _check_bias(form, bias, weight.shape[0])
        return ops.linear_prepack_fp16(weight, bias) if scheme == "float" else ops.linear_prepack(weight, bias)
    stride, padding, output_padding, dilation, groups, transposed = parts[count + 1 :]
    lists = (stride, padding, output_padding, dilation)
    if not all(_are_sizes(each, weight.dim() - 2, least) for each, least in zip(lists, (1, 0, 0, 1), strict=True)):
        raise ValueError(f"{form}: stride, padding, output padding and dilation are {lists}")
    groups, transposed = _number(form, groups), _number(form, transposed)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if groups < 1 or transposed not in (0, 1) or weight.shape[0] % groups:
        raise ValueError(f"{form}: {groups} groups of a weight {list(weight.shape)}")
    _check_bias(form, bias, channels)
    if transposed:
        return getattr(ops, f"conv_transpose{kind[4:]}_prepack")(
            weight, bias, stride, padding, output_padding, dilation, groups
        )
    return getattr(ops, f"{kind}_prepack")(weight, bias, stride, padding, dilation, groups)


def _put_cell(form: str, scheme: str, parts: Sequence[Any], put_weight: PutWeight) -> torch.ScriptObject:
    linear = _WEIGHT_PARTS[scheme] + _OTHER_PARTS["linear"]
    expected = 2 * linear + (0 if scheme == "float" else 3)
    if len(parts) != expected:
        raise ValueError(f"{form} has {len(parts)} parts, expected {expected}")
    of_input, of_hidden = (
        put_together(f"packed_linear_{scheme}", each, put_weight)
        for each in (parts[:linear], parts[linear : 2 * linear])
    )
    rows, hidden_rows = parts[0].shape[0], parts[linear].shape[0]
    if rows != hidden_rows:
        raise ValueError(f"{form}: the weights have {rows} and {hidden_rows} rows")
    ops = torch.ops.quantized
    if scheme == "float":
        return ops.make_quantized_cell_params_fp16(of_input, of_hidden)
    biases, reduce_range = parts[2 * linear : -1], parts[-1]
    for bias in biases:
        if bias is None:
            raise ValueError(f"{form} has no bias")
        _check_bias(form, bias, rows)
    if type(reduce_range) is not bool:
        raise ValueError(f"{form}: whether the range is reduced is {type(reduce_range).__name__}")
    return ops.make_quantized_cell_params_dynamic(of_input, of_hidden, *biases, reduce_range)


def _check_weight(form: str, weight: Any, dimensions: int) -> None:
    """The kernels that pack read what these say without asking again."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != dimensions or not weight.numel():
        shape = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"{form}: the weight is {shape}, expected a tensor of {dimensions} dimensions with elements")
    dtypes = {
        "packed_linear_float": (torch.float32,),
        "packed_embedding_per_channel": (torch.quint8, torch.quint4x2),
    }.get(form, (torch.qint8,))
    if weight.dtype not in dtypes or weight.device.type != "cpu":
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{form}: the weight is {weight.dtype} on {weight.device}, expected {expected} on cpu")
    if weight.is_quantized and weight.qscheme() is not torch.per_tensor_affine:
        floats = weight.qscheme() is torch.per_channel_affine_float_qparams
        axis = weight.q_per_channel_axis()
        if floats != form.startswith("packed_embedding") or axis not in ((0, 1) if dimensions > 2 else (0,)):
            raise ValueError(f"{form}: the weight is quantized as {weight.qscheme()} along dimension {axis}")
        for each in (weight.q_per_channel_scales(), weight.q_per_channel_zero_points()):
            if tuple(each.shape) != (weight.shape[axis],):
                raise ValueError(f"{form}: {list(each.shape)} scales or zero points for {weight.shape[axis]} channels")


def _check_bias(form: str, bias: Any, channels: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.dtype is not torch.float32 or tuple(bias.shape) != (channels,):
        raise ValueError(f"{form}: the bias does not have {channels} elements of float32")


def _are_sizes(values: Any, count: int, least: int) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == count
        and all(type(value) is int and least <= value <= _MOST for value in values)
    )


def _number(form: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{form}: a number is {type(value).__name__}")
    return int(value)
